"""What differs between two checkpoints, whatever layouts they were saved from.

Tensors with equal digests are equal, which costs no reading. Of the others the same elements of both are read side by
side in parts, so memory does not grow with them, and every byte is proved by its block's checksum before it is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.inspect.tree import chosen, fits
from tangram.checkpoint.loading.read import batches, in_file_order, read_spans
from tangram.checkpoint.store.manifest import Manifest, StoredTensor

CHUNK = 1 << 24
"""Bytes of each side that are compared together."""
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
        """For programs."""
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
        """Whether nothing differs."""
        return not self.changes and not self.objects

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "same": self.same,
            "equal": self.equal,
            "tensors": [change.as_json() for change in self.changes],
            "objects": [{**vars(one), "there": list(one.there)} for one in self.objects],
        }


Side = tuple[Path, Manifest]


def to_read(a: Manifest, b: Manifest, pattern: str = "*") -> int:
    """The bytes of both that a comparison will read."""
    pairs = (
        (a.tensors[name], b.tensors[name]) for name in _names(a, b, pattern) if name in a.tensors and name in b.tensors
    )
    return sum(one.nbytes + other.nbytes for one, other in pairs if not _equal(one, other) and _alike(one, other))


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
        if other is None:
            assert one is not None
            changes.append(TensorChange(name, "a", a=_said(one)))
        elif one is None:
            changes.append(TensorChange(name, "b", b=_said(other)))
        elif _equal(one, other):
            equal += 1
        elif not _alike(one, other):
            changes.append(TensorChange(name, "shape", _said(one), _said(other)))
        else:
            differing.append(one)
    changes += _compared(a, b, differing, on_bytes or (lambda count: None))
    changes.sort(key=lambda change: change.name)
    return CheckpointDiff(tuple(changes), _objects(a[1], b[1], pattern), equal)


def _names(a: Manifest, b: Manifest, pattern: str) -> list[str]:
    """The tensors of either that fit."""
    found = [name for name in dict.fromkeys([*a.tensors, *b.tensors]) if fits(name, pattern)]
    if not found:
        chosen(a, pattern)  # says what there is
    return found


def _said(tensor: StoredTensor) -> str:
    return f"{tensor.spec.dtype} {list(tensor.spec.shape)}"


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    return one.spec == other.spec and one.digest == other.digest


def _alike(one: StoredTensor, other: StoredTensor) -> bool:
    return one.spec.shape == other.spec.shape


def _compared(
    a: Side, b: Side, differing: Sequence[StoredTensor], on_bytes: Callable[[int], None]
) -> list[TensorChange]:
    """What differs in tensors that have the same shapes in both."""
    found: dict[str, TensorChange] = {}
    for one in differing:
        other = b[1].tensors[one.name]
        kind = "values" if one.spec.dtype == other.spec.dtype else "dtype"
        found[one.name] = TensorChange(one.name, kind, _said(one), _said(other))
    for batch in batches(in_file_order(differing), CHUNK):
        for span, left, right in zip(batch, read_spans(*a, batch), read_spans(*b, batch), strict=True):
            found[span.name] = compared(found[span.name], left, right)
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
