"""Cuts of an operator on top of those over the axes before, even or unlike; and what passes between linked parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tangram.layout import Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.derive.collectives_between import Comm, Label
from tangram.sharding.derive.problem import states
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import Cutting, State
from tangram.sharding.propagation import neighbour_needs
from tangram.sharding.propagation.axis_choices import HALO, SCAN

Before = tuple[int, Comm]
"""The ranks of an axis before, and what an operator does over it."""


def fits(step: FoldedStep, label: Label, k: int, before: Sequence[Before]) -> bool:
    """Whether a cut can be beside those of the axes before, and stands alone where parts need each other."""
    n = step.bound.sizes[label.factor] // label.inner
    for ranks, move in before:
        own = move.label
        if own is None or own.factor != label.factor:
            continue
        if label.factor in step.bound.linked:
            return False
        if own.parts or label.parts:
            cuts = Cutting(own.inner, own.parts, ranks), Cutting(label.inner, label.parts, k)
            if not states.beside(step.bound.sizes[label.factor], *cuts):
                return False
        elif own.inner == label.inner:
            n //= ranks
        elif own.inner < label.inner:
            if label.inner % (own.inner * ranks):
                return False
        elif (own.inner // label.inner) % k:
            return False
    return bool(label.parts) or n % k == 0


def beside(shapes: Sequence[Sequence[int] | None], move: Comm, k: int, before: Sequence[Before]) -> bool:
    """Whether a move leaves no tensor, of these shapes, a dim of which the axes before leave unlike sizes to cut."""
    mine = (*move.inputs, *move.outputs)
    if not any(state is not None and state.kind == "cut" for state in mine):
        return True
    return all(
        shape is None or both(shape, theirs, ranks, own, k)
        for ranks, other in before
        for shape, own, theirs in zip(shapes, mine, (*other.inputs, *other.outputs), strict=False)
    )


def both(shape: Sequence[int], major: State | None, k: int, minor: State | None, ranks: int) -> bool:
    """Whether a tensor can lie so over two axes, of `k` and of `ranks`, of which the first stands first in the mesh."""
    if major is None or minor is None or not (major.parts or minor.parts):
        return True
    if major.kind != "cut" or minor.kind != "cut" or major.dim != minor.dim:
        return True
    cuts = Cutting(major.outer, major.parts, k), Cutting(minor.outer, minor.parts, ranks)
    return states.beside(shape[minor.dim], *cuts)


# ---------------------------------------------------------------- parts that need each other


class NeighbourBytes(NamedTuple):
    """What a rank receives inside of an operator."""

    kind: str
    """`halo`, or `scan`: the totals of other parts."""
    place: int
    """The input of which, or of whose scan."""
    nbytes: float
    """On average, forward, where no other axis cuts anything; backward as much."""


def cut_of(axis: str, label: Label) -> Cut:
    """The cut of a factor."""
    return Cut(axis, "strided", (label.inner,)) if label.inner > 1 else Cut(axis)


def passed(step: FoldedStep, label: Label | None, axis: str, k: int) -> NeighbourBytes | None:
    """What passes in an operator that an axis cuts so; None where parts need nothing of each other."""
    if label is None or label.factor not in step.bound.linked:
        return None
    mesh, trees = Mesh((((axis, k),),)), {label.factor: (cut_of(axis, label),)}
    for place, some in neighbour_needs.halos(step.call, step.bound, trees, mesh).items():
        return NeighbourBytes(HALO, place, sum(n for _, n in some))
    return NeighbourBytes(SCAN, 0, sum(n for _, n in neighbour_needs.scans(step.call, step.bound, trees, mesh)))
