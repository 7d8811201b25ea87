"""What differs between two checkpoints, whatever layouts, formats and structures they were saved in.

Of two of Tangram's own, tensors with equal digests are equal, which costs no reading. Of the others the same elements
of both are read side by side in parts, so memory does not grow with them, and every byte is proved by its block's
checksum before it is used. Of any other two, one is seen as the other's:

    A -> the mapping to B's structure, bound -> boxes of B's tensors, made of A's -> the same boxes of B

Nothing is written: a model in Hugging Face's names is compared with Megatron-core's fused tensors element by element.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.conversion.find_mapping import ChosenMapping, choose, model_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.outgoing import boxes
from tangram.checkpoint.inspect.tree import chosen, fits
from tangram.checkpoint.loading.read import batches, in_file_order, read_spans
from tangram.checkpoint.store.manifest import DTYPES, Manifest, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.models.families import megatrons_embedding
from tangram.relayout import TensorSpec, bind

CHUNK = 1 << 24
"""Bytes of each side that are compared together."""
KEEP = 128 << 20
"""Bytes that are read before what was read is let go."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True)
class TensorChange:
    """A tensor that is not the same in both."""

    name: str
    kind: str
    """a (only there), b, shape, dtype, values, or codes: of a quantised weight other codes for the same values."""
    a: str = ""
    """What it is in the first: type and shape."""
    b: str = ""
    elements: int = 0
    """That were compared, 0 where the shapes differ."""
    differing: int = 0
    """Elements whose bits differ; of two types, whose values do."""
    largest: float = 0.0
    """Difference of two elements that are both numbers."""
    relative: float = 0.0
    """The largest difference by the larger of the two."""
    nans: tuple[int, int] = (0, 0)
    """NaNs in each."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "nans": list(self.nans), "largest": _json(self.largest), "relative": _json(self.relative)}


@dataclass(frozen=True)
class ObjectChange:
    """An object that is not the same in both; `there` says in which it is."""

    name: str
    a: Any
    b: Any
    there: tuple[bool, bool]


@dataclass(frozen=True)
class CheckpointDiff:
    """All differences of two checkpoints."""

    changes: tuple[TensorChange, ...]
    objects: tuple[ObjectChange, ...]
    equal: int
    """Tensors that are the same in both."""

    @property
    def same(self) -> bool:
        return not self.changes and not self.objects

    def as_json(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "equal": self.equal,
            "tensors": [change.as_json() for change in self.changes],
            "objects": [{**vars(one), "there": list(one.there)} for one in self.objects],
        }


Side = tuple[Path, Manifest]


def to_read(a: Manifest, b: Manifest, pattern: str = "*") -> int:
    """The bytes of both that a comparison will read."""
    names = [name for name in _names(a, b, pattern) if name in a.tensors and name in b.tensors]
    pairs = [(a.tensors[name], b.tensors[name]) for name in names]
    read = [(one, two) for one, two in pairs if not _equal(one, two) and one.spec.shape == two.spec.shape]
    return sum(one.nbytes + two.nbytes for one, two in read)


def compare(a: Side, b: Side, pattern: str = "*", on_bytes: Callable[[int], None] | None = None) -> CheckpointDiff:
    """Compare two checkpoints, each given as its folder and its manifest.

    `pattern`: only tensors and objects whose names fit; `on_bytes` is called with how many more have been read. Raises
    UserError where no tensor fits, DamagedError where bytes that must be read are not those that were written.
    """
    changes: list[TensorChange] = []
    differing: list[StoredTensor] = []
    equal = 0
    for name in _names(a[1], b[1], pattern):
        one, other = a[1].tensors.get(name), b[1].tensors.get(name)
        if one is not None and other is not None and _equal(one, other):
            equal += 1
        elif (change := _unlike(name, one and one.spec, other and other.spec)) is not None:
            changes.append(change)
        elif one is not None:
            differing.append(one)
    read = _compared(a, b, differing, on_bytes or (lambda count: None))
    same = [change for change in read if change.kind == "values" and not change.differing]  # of snapshots, say
    changes, equal = [*changes, *(change for change in read if change not in same)], equal + len(same)
    changes.sort(key=lambda change: change.name)
    return CheckpointDiff(tuple(changes), _objects(a[1], b[1], pattern), equal)


def _names(a: Manifest, b: Manifest, pattern: str) -> list[str]:
    """The tensors of either that fit."""
    found = [name for name in dict.fromkeys([*a.tensors, *b.tensors]) if fits(name, pattern)]
    if not found:
        chosen(a, pattern)  # says what there is
    return found


def described(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    return one.spec == other.spec and one.digest == other.digest != ""


def _unlike(name: str, one: TensorSpec | None, other: TensorSpec | None) -> TensorChange | None:
    """What differs before any value is looked at: a tensor that one side lacks, or of another shape there."""
    if one is not None and other is not None and one.shape == other.shape:
        return None
    kind = "a" if other is None else "b" if one is None else "shape"
    a, b = ("" if spec is None else described(spec) for spec in (one, other))
    return TensorChange(name, kind, a, b)


def _compared(
    a: Side, b: Side, differing: Sequence[StoredTensor], on_bytes: Callable[[int], None]
) -> list[TensorChange]:
    """What differs in tensors that have the same shapes in both."""
    found: dict[str, TensorChange] = {}
    for one in differing:
        other = b[1].tensors[one.name]
        kind = "values" if one.spec.dtype == other.spec.dtype else "dtype"
        found[one.name] = TensorChange(one.name, kind, described(one.spec), described(other.spec))
    for batch in batches(in_file_order(differing), CHUNK):
        for part, left, right in zip(batch, read_spans(*a, batch), read_spans(*b, batch), strict=True):
            found[part.name] = compared(found[part.name], left, right)
            on_bytes(left.nbytes + right.nbytes)
    return list(found.values())


def compared(found: TensorChange, left: Tensor, right: Tensor) -> TensorChange:
    """What is known of a tensor, with some more elements of both sides."""
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    if left.dtype == right.dtype:
        differs = _bits(left).ne(_bits(right))
        differs = differs.any(1) if differs.dim() > 1 else differs
        x, y = _at(left, differs).to(wide), _at(right, differs).to(wide)
        count = int(differs.sum())
    else:
        x, y = left.to(wide), right.to(wide)
        differs = x.ne(y) & ~(x.isnan() & y.isnan())
        x, y, count = x[differs], y[differs], int(differs.sum())
    nans = (found.nans[0] + _nans(left), found.nans[1] + _nans(right))
    found = replace(found, elements=found.elements + left.numel(), differing=found.differing + count, nans=nans)
    numbers = ~(x.isnan() | y.isnan()) & x.ne(y)  # 0 and -0 differ in their bits alone
    x, y = x[numbers], y[numbers]
    if not x.numel():
        return found
    gaps = (x - y).abs()
    sizes = torch.maximum(x.abs(), y.abs())
    relative = torch.where(sizes.isinf(), torch.inf, gaps / sizes)
    return replace(
        found, largest=max(found.largest, float(gaps.max())), relative=max(found.relative, float(relative.max()))
    )


def _bits(values: Tensor) -> Tensor:
    """The bits of each element, as one whole number or two."""
    bits = values.view(_BITS[values.element_size()])
    return bits.reshape(-1, 2) if values.element_size() == 16 else bits


def _at(values: Tensor, mask: Tensor) -> Tensor:
    """The elements at the places of a mask; of any type."""
    if values.element_size() == 16 or not str(values.dtype).startswith(("torch.float8", "torch.uint")):
        return values[mask]
    return values.view(_BITS[values.element_size()])[mask].view(values.dtype)  # only bits can be indexed


def _nans(values: Tensor) -> int:
    if not (values.is_floating_point() or values.is_complex()):
        return 0
    return int((values.to(torch.float32) if values.element_size() == 1 else values).isnan().sum())


def _objects(a: Manifest, b: Manifest, pattern: str) -> tuple[ObjectChange, ...]:
    changed: list[ObjectChange] = []
    for name in sorted(name for name in {*a.objects, *b.objects} if fits(name, pattern)):
        there = (name in a.objects, name in b.objects)
        one, other = a.objects.get(name), b.objects.get(name)
        if one != other or there != (True, True):
            changed.append(ObjectChange(name, one, other, there))
    return tuple(changed)


def _json(number: float) -> float | str:
    return number if abs(number) != float("inf") else "inf"


# ---------------------------------------------------------------- of any two formats and structures


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


def to_read_across(way: ChosenMapping, other: OpenCheckpoint, pattern: str = "*") -> int:
    """The bytes that a comparison will read of both."""
    mine = {name: spec for name, spec in way.bound.target.specs.items() if name in other.specs and fits(name, pattern)}
    both = ((spec, other.specs[name]) for name, spec in mine.items())
    return sum(_nbytes(one) + _nbytes(two) for one, two in both if one.shape == two.shape)


def compare_across(
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
        if (change := _unlike(name, mine.get(name), theirs.get(name))) is not None:
            changes.append(change)
        else:
            changes += _values(name, mine[name], theirs[name], left, right, on_bytes)
    both = [name for name in names if name in mine and name in theirs]
    return CheckpointDiff(tuple(changes), (), len(both) - sum(one.kind not in ("a", "b") for one in changes))


def _values(
    name: str, mine: TensorSpec, theirs: TensorSpec, left: Filler, right: Filler, on_bytes: Callable[[int], None] | None
) -> list[TensorChange]:
    kind = "values" if mine.dtype == theirs.dtype else "dtype"
    found = TensorChange(name, kind, described(mine), described(theirs))
    size = _nbytes(mine)
    if kind == "values" and 0 < size <= CHUNK:  # of which there may be a million, nearly all of them equal
        one, two = (filler.values_of(name).reshape(-1) for filler in (left, right))
        if on_bytes:
            on_bytes(2 * size)
        if torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            return []
        return [compared(found, one, two)]
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


def _nbytes(spec: TensorSpec) -> int:
    return DTYPES[spec.dtype] * math.prod(spec.shape)
