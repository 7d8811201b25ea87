"""What differs between checkpoints of any two formats and structures: one is seen as the other's, and compared.

    A -> the mapping to B's structure, bound -> boxes of B's tensors, made of A's -> the same boxes of B

Nothing is written. A model in Hugging Face's names is compared with Megatron-core's fused tensors element by element,
in memory that does not grow with them; Tangram's own blocks are proved by their checksums as they are read.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.conversion.find_mapping import ChosenMapping, choose, model_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.outgoing import boxes
from tangram.checkpoint.inspect.diff import CHUNK, CheckpointDiff, TensorChange, compared
from tangram.checkpoint.inspect.tree import fits
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.models.families import megatrons_embedding
from tangram.relayout import TensorSpec, bind

KEEP = 128 << 20
"""Bytes that are read before what was read is let go."""


def seen_as(
    a: OpenCheckpoint, b: OpenCheckpoint, config: Mapping[str, Any] | None
) -> tuple[ChosenMapping, OpenCheckpoint]:
    """A with a mapping to B's structure, and B; without the optimiser's states unless both have some.

    Raises UserError where no mapping leads there.
    """
    states = bool(a.states) and bool(b.states)
    other = b if states else model_of(b)[0]
    words = megatrons_embedding(other.specs)
    core = words is not None
    to = "torch_dist" if core else "paddle" if other.format == "paddle" else "tangram"
    rows = other.specs[words].shape[0] if words is not None and other.specs[words].shape else 1
    ways = [
        choose(a, to, config, states=states, local=local, divisor=rows, made=other.specs)
        for local in ((False, True) if core else (False,))
    ]
    best = max(ways, key=lambda way: len(way.bound.target.specs.keys() & other.specs.keys()))
    return best, other


def to_read(way: ChosenMapping, other: OpenCheckpoint, pattern: str = "*") -> int:
    """The bytes that a comparison will read of both."""
    mine = way.bound.target.specs
    both = [
        name for name in mine if name in other.specs and fits(name, pattern) and _alike(mine[name], other.specs[name])
    ]
    return sum(_nbytes(mine[name]) + _nbytes(other.specs[name]) for name in both)


def compare(
    way: ChosenMapping,
    other: OpenCheckpoint,
    pattern: str = "*",
    on_bytes: Callable[[int], None] | None = None,
    among: Collection[str] | None = None,
) -> CheckpointDiff:
    """Compare what a mapping makes of a checkpoint with another. Raises UserError where no tensor fits the pattern.

    `among`: names that come into question; all unless given.
    """
    mine, theirs = way.bound.target.specs, other.specs
    every = {*mine, *theirs} if among is None else {*mine, *theirs} & set(among)
    names = sorted(name for name in every if fits(name, pattern))
    if not names:
        raise UserError(f"no tensor of either fits {pattern!r}")
    left = Filler(way.source, way.bound, mine, KEEP)
    right = Filler(other, bind(IDENTITY, theirs), theirs, KEEP)
    changes: list[TensorChange] = []
    for name in names:
        if name not in theirs:
            changes.append(TensorChange(name, "a", a=_said(mine[name])))
        elif name not in mine:
            changes.append(TensorChange(name, "b", b=_said(theirs[name])))
        elif not _alike(mine[name], theirs[name]):
            changes.append(TensorChange(name, "shape", _said(mine[name]), _said(theirs[name])))
        else:
            changes += _values(name, mine[name], theirs[name], left, right, on_bytes)
    both = [name for name in names if name in mine and name in theirs]
    return CheckpointDiff(tuple(changes), (), len(both) - sum(one.kind not in ("a", "b") for one in changes))


def _values(
    name: str, mine: TensorSpec, theirs: TensorSpec, left: Filler, right: Filler, on_bytes: Callable[[int], None] | None
) -> list[TensorChange]:
    kind = "values" if mine.dtype == theirs.dtype else "dtype"
    found = TensorChange(name, kind, _said(mine), _said(theirs))
    for box in boxes(mine.shape, CHUNK // max(DTYPES[mine.dtype], DTYPES[theirs.dtype])):
        region, shape = Region.of([tuple(span(a, b) for a, b in box)]), [b - a for a, b in box]
        one, two = (torch.empty(shape, dtype=getattr(torch, spec.dtype)) for spec in (mine, theirs))
        if one.numel():
            left.fill(name, region, one)
            right.fill(name, region, two)
            found = compared(found, one.reshape(-1), two.reshape(-1))
        if on_bytes:
            on_bytes(one.nbytes + two.nbytes)
    return [found] if found.differing or kind == "dtype" else []


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    return one.shape == other.shape


def _nbytes(spec: TensorSpec) -> int:
    return DTYPES[spec.dtype] * int(torch.Size(spec.shape).numel())


def _said(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
