"""Operators of a derivation whose parts need each other: what passes between the ranks of the axis that cuts them."""

from __future__ import annotations

from typing import NamedTuple

from tangram.layout import Mesh
from tangram.layout.syntax import Cut
from tangram.sharding.derive.collectives_between import Label
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.propagation import neighbour_needs
from tangram.sharding.propagation.axis_choices import HALO, SCAN


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
