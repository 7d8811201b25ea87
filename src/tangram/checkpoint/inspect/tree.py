"""What is in a checkpoint, as a tree that fits a screen: tensors that differ only in a number share a line.

    model                              1,235,814,400 B   146 tensors
      layers.{0..15}
        mlp.up_proj.weight             bfloat16  [8192 2048]  ...

Only the manifest is read; `values_of` reads one tensor, in parts.
"""

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.loading.read import read_spans, spans
from tangram.checkpoint.store.manifest import Manifest, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tangram.relayout import TensorSpec

CHUNK = 1 << 25
"""Bytes of a tensor that are looked at together."""
DEEPEST = 64
"""Levels of the tree; what is deeper stays one name."""
SHOWN = 6
"""Values that `values_of` gives from the beginning and from the end."""


@dataclass(frozen=True)
class TreeLine:
    """A line of the tree: some tensors that are alike but for the numbers in their names, or what they lie below."""

    depth: int
    label: str
    """What its name adds to the line above it; `{0..27}` stands for each of these numbers."""
    tensors: int
    nbytes: int
    pieces: int
    dtype: str = ""
    """Empty where tensors of several kinds lie below."""
    shape: tuple[int, ...] = ()
    layout: str = ""
    digest: str = ""
    """Of one tensor; empty where the line stands for several."""


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A quantised weight: its name and shape, and as dtype the name of its codec."""

    stored: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    """The tensors that it is made of, by their role (codes, scale, zero, order, ...)."""

    @property
    def nbytes(self) -> int:
        """Of all that is stored of it."""
        return sum(one.nbytes for one in self.stored.values())


def chosen(manifest: Manifest, pattern: str) -> list[StoredTensor]:
    """The tensors whose names fit a pattern (`model.*.weight`), or lie below it (`model.layers.3`).

    Raises UserError where there is none, as long as there is any tensor.
    """
    return fitting(manifest.tensors.values(), pattern)


def fitting(tensors: Collection[StoredTensor], pattern: str) -> list[StoredTensor]:
    """The same of any tensors."""
    found = [tensor for tensor in tensors if fits(tensor.name, pattern)]
    if not found and tensors:
        known = ", ".join(sorted({tensor.name.partition(".")[0] for tensor in tensors}))
        raise UserError(f"no tensor's name fits {pattern!r}: give one like 'model.*.weight'; the sections are {known}")
    return found


def fits(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern or lies below it."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def tree(tensors: Sequence[StoredTensor], fold: bool = True) -> list[TreeLine]:
    """The lines of the tree of some tensors. `fold`: tensors that differ only in numbers share a line."""
    root = _Node("")
    for path, some in _folded(tensors) if fold else ((_parts(t.name), [t]) for t in tensors):
        node = root
        for part in path:
            node = node.below.setdefault(part, _Node(part))
        node.here.append(some)
    return [line for node in root.below.values() for line in node.lines(0)]


@dataclass
class _Node:
    label: str
    below: dict[str, "_Node"] = field(default_factory=dict[str, "_Node"])
    here: list[list[StoredTensor]] = field(default_factory=list[list[StoredTensor]])

    def all(self) -> Iterator[StoredTensor]:
        yield from itertools.chain.from_iterable(self.here)
        for node in self.below.values():
            yield from node.all()

    def lines(self, depth: int) -> Iterator[TreeLine]:
        label, node = self.label, self
        while not node.here and len(node.below) == 1:  # nothing forks here
            (node,) = node.below.values()
            label += f".{node.label}"
        for some in node.here:
            first = some[0]
            yield TreeLine(
                depth,
                label,
                len(some),
                sum(t.nbytes for t in some),
                sum(len(t.pieces) for t in some),
                first.spec.dtype,
                first.spec.shape,
                first.layout,
                first.digest if len(some) == 1 else "",
            )
        if node.below:
            every = list(itertools.chain.from_iterable(inner.all() for inner in node.below.values()))
            pieces = sum(len(t.pieces) for t in every)
            yield TreeLine(depth, label, len(every), sum(t.nbytes for t in every), pieces)
        for inner in node.below.values():
            yield from inner.lines(depth + 1)


def _folded(tensors: Sequence[StoredTensor]) -> Iterator[tuple[list[str], list[StoredTensor]]]:
    """Tensors that are alike but for numbers, with the path that names them all, in the order of their first."""
    alike: dict[tuple[Any, ...], dict[tuple[int, ...], StoredTensor]] = {}
    for tensor in tensors:
        parts = _parts(tensor.name)
        key = tuple(None if _is_number(part) else part for part in parts)
        numbers = tuple(int(part) for part in parts if _is_number(part))
        alike.setdefault((key, tensor.spec, tensor.layout), {})[numbers] = tensor
    for (key, _, _), group in alike.items():
        points = Region.of(tuple(intervals.span(n, n + 1) for n in numbers) for numbers in group)
        for box in points.boxes:
            sets = iter(box)
            path = [_numbers(next(sets)) if part is None else part for part in key]
            yield path, [group[point] for point in itertools.product(*map(intervals.elements, box))]


def _parts(name: str) -> list[str]:
    return name.split(".", DEEPEST)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and (part == "0" or part[0] != "0") and len(part) < 18


def _numbers(some: intervals.IntSet) -> str:
    if intervals.size(some) == 1:
        return str(some[0][0])
    return "{" + ",".join(f"{a}..{b - 1}" if b - a > 1 else str(a) for a, b in some) + "}"


def as_json(path: Path, manifest: Manifest, tensors: Sequence[StoredTensor]) -> dict[str, Any]:
    """All that the manifest says but for the places of the pieces, of the given tensors."""
    return {
        "path": str(path),
        "id": manifest.id,
        "step": manifest.step,
        "created": manifest.created,
        "mesh": manifest.mesh,
        "tensors": {t.name: tensor_json(t) for t in tensors},
        "files": {name: file.size for name, file in manifest.files.items()},
        "objects": dict(manifest.objects),
        "bytes": manifest.nbytes,
    }


def tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    """A tensor for programs; of a quantised weight with all that is stored of it, by role."""
    fields: dict[str, Any] = {
        "dtype": tensor.spec.dtype,
        "shape": list(tensor.spec.shape),
        "layout": tensor.layout,
        "bytes": tensor.nbytes,
        "pieces": len(tensor.pieces),
        "digest": tensor.digest,
    }
    if not isinstance(tensor, QuantisedTensor):
        return fields
    stored = {role: {"name": one.name, **tensor_json(one)} for role, one in tensor.stored.items()}
    return {**fields, "dtype": tensor.stored["codes"].spec.dtype, "codec": tensor.spec.dtype, "stored": stored}


def short(value: Any, longest: int = 60) -> str:
    """An object as a line of JSON, cut where it is too long."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


# ---------------------------------------------------------------- values


@dataclass(frozen=True)
class Values:
    """What is in a tensor, in a few numbers; None where there is no such number."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: tuple[Any, ...]
    last: tuple[Any, ...]
    smallest: float | int | None
    """Of those that are numbers."""
    largest: float | int | None
    mean: float | None
    nans: int
    infinite: int

    def as_json(self) -> Mapping[str, Any]:
        """For programs; what JSON has no number for is text."""
        return {key: _plain(value) for key, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return (
        str(value) if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)) else value
    )


def values_of(path: Path, manifest: Manifest, name: str) -> Values:
    """Look at the values of one tensor, in parts: memory does not grow with it.

    Raises UserError where it is not there, DamagedError where its bytes are not those that were written.
    """
    if name not in manifest.tensors:
        raise UserError(f'the checkpoint "{path}" has no tensor {name!r}: `tangram checkpoint inspect` lists them')
    spec = manifest.tensors[name].spec
    return values_from(spec, name, (read_spans(path, manifest, [span])[0] for span in spans(spec, name, CHUNK)))


def values_from(spec: TensorSpec, name: str, parts: Iterable[Tensor]) -> Values:
    """The same of elements that come in parts of one dim, in their order."""
    ends: list[Any] = []
    smallest: Any = None
    largest: Any = None
    total, count, nans, infinite = 0.0, 0, 0, 0
    first: tuple[Any, ...] = ()
    for part in parts:
        array = numbers(part)
        first += tuple(array[: SHOWN - len(first)].tolist())
        ends = [*ends, *array[-SHOWN:].tolist()][-SHOWN:]
        if array.dtype.kind in "fc":
            nans += int(np.isnan(array).sum())
            infinite += int(np.isinf(array).sum())
            array = array[np.isfinite(array)]
        if array.size and array.dtype.kind != "c":
            smallest = array.min().item() if smallest is None else min(smallest, array.min().item())
            largest = array.max().item() if largest is None else max(largest, array.max().item())
            total, count = total + float(array.sum(dtype=np.float64)), count + array.size
    mean = total / count if count else None
    rest = math.prod(spec.shape) - len(first)
    last = tuple(ends[-min(rest, SHOWN) :]) if rest else ()
    return Values(name, spec.dtype, spec.shape, first, last, smallest, largest, mean, nans, infinite)


def numbers(values: Tensor) -> np.ndarray[Any, Any]:
    """As an array of a type that numpy has; no value changes."""
    known = values.dtype not in (torch.bfloat16,) and not str(values.dtype).startswith("torch.float8")
    return (values if known else values.to(torch.float32)).numpy()
