"""Moves whole states through the engine and compares every buffer with plain numpy on the whole tensors.

Nothing here asks the engine what should come out: a rank's buffer is expected to be `whole[mask]`, elements are counted
as torch writes them, and target buffers begin as the bitwise opposite of what is expected, so that an element which is
never written can not be right by chance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tangram.layout import Layout, Mesh, Region, region
from tangram.relayout import (
    BoundMapping,
    CopyPlan,
    Piece,
    Sharding,
    Tensors,
    TensorSpec,
    bind,
    execute,
    inverse,
    plan,
    shard,
)

Array = np.ndarray[Any, Any]
State = Mapping[str, Array]
"""Whole tensors by real name."""
Buffers = dict[tuple[Hashable, str], Any]

CARRIERS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8, "float8_e8m0fnu": np.uint8}
"""The integers that carry the bits of dtypes which numpy does not have."""


def specs(state: State, dtype: str | None = None) -> dict[str, TensorSpec]:
    """What the engine is told of a state; `dtype` where the arrays only carry the bits of another."""
    return {name: TensorSpec(a.shape, dtype or str(a.dtype)) for name, a in state.items()}


def numbered(*shape: int, start: int = 1, dtype: Any = np.float32) -> Array:
    """A tensor in which no two elements are alike."""
    return np.arange(start, start + int(np.prod(shape)), dtype=dtype).reshape(shape)


def mask_of(held: Region, shape: Sequence[int]) -> Array:
    """The elements of a region, by numpy's own open mesh."""
    mask = np.zeros(shape, bool)
    for box in held.boxes:
        mask[np.ix_(*[np.concatenate([np.arange(a, b) for a, b in s]) for s in box])] = True
    return mask


def local_shape(region: Region, lead: int = 0) -> tuple[int, ...] | None:
    """The shape of a buffer of a region that is one grid, else None: then it is flat."""
    if len(region.boxes) != 1:
        return None
    return tuple(sum(b - a for a, b in s) for s in region.boxes[0][lead:])


def member_name(pattern: str, index: Sequence[int]) -> str:
    """`layers.{l+3}.w` at (2,) is `layers.5.w`."""
    left = iter(index)

    def number(found: re.Match[str]) -> str:
        offset = re.search(r"\+\s*(\d+)\s*\}$", found.group())
        return str(next(left) + (int(offset[1]) if offset else 0))

    return re.sub(r"\{[^}]*\}", number, pattern)


def locals_of(state: State, pattern: str, region: Region) -> dict[str, Array]:
    """What lies at a place that holds `region` of a family: for each member that it touches, its buffer."""
    if pattern in state:
        members: list[tuple[tuple[int, ...], str]] = [((), pattern)]
    else:
        hulls = [range(max(s[-1][1] for s in sets)) for sets in zip(*region.boxes, strict=True)] if region else []
        lead = len(re.findall(r"\{", pattern))
        members = [(i, member_name(pattern, i)) for i in itertools.product(*hulls[:lead])]
    out: dict[str, Array] = {}
    for index, name in members:
        n = len(index)
        boxes = [
            b[n:] for b in region.boxes if all(any(a <= i < z for a, z in s) for s, i in zip(b, index, strict=False))
        ]
        if not boxes:
            continue
        held = Region(tuple(boxes))
        values = state[name][mask_of(held, state[name].shape)]
        shape = local_shape(region, n)
        out[name] = values if shape is None else values.reshape(shape)
    return out


def opposite(a: Array) -> Array:
    """An array that differs from `a` in every bit (a bool in its one)."""
    if a.dtype == bool:
        return np.logical_not(a, out=np.empty_like(a))
    return (~np.ascontiguousarray(a).view(np.uint8)).view(a.dtype).reshape(a.shape)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are alike, bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@contextmanager
def counted(expected: int) -> Iterator[None]:
    """Inside, exactly as many elements are written in place as expected."""
    count = 0

    def counting(write: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counts(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal count
            count += self.numel()
            return write(self, *args, **kwargs)

        return counts

    with ExitStack() as stack:
        for name in ("copy_", "fill_", "zero_", "__setitem__"):
            stack.enter_context(patch.object(torch.Tensor, name, counting(getattr(torch.Tensor, name))))
        yield
    assert count == expected, f"{count} elements were written, not {expected}"


def as_torch(a: Array, dtype: str | None) -> torch.Tensor:
    """A tensor on the array's memory, read as `dtype`."""
    t = torch.from_numpy(a)
    return t if dtype is None else t.view(getattr(torch, dtype))


@dataclass(frozen=True)
class Side:
    """One end of a move: whole tensors, and the layout of each family over a mesh."""

    state: State
    layouts: Mapping[str, str | Layout]
    mesh: Mesh | str
    sizes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    dtype: str | None = None

    def sharding(self, tensors: Tensors) -> Sharding:
        return shard(self.mesh, self.layouts, tensors, **self.sizes)


def same_as_layouts(sharding: Sharding) -> None:
    """What a sharding says of its ranks is what the layout room says, which is tested by itself."""
    for rank in range(sharding.mesh.size):
        pieces = {p.tensor: p.region for p in sharding.pieces(rank)}
        for name, layout in sharding.layouts.items():
            lead = sharding.tensors.families[name].family_dims
            assert pieces.get(name, Region()) == region(layout, sharding.mesh, rank, lead)


def all_buffers(side: Side, sharding: Sharding) -> Buffers:
    """Every rank's buffers as they should be."""
    return {
        (p.place, name): a
        for rank in range(sharding.mesh.size)
        for p in sharding.pieces(rank)
        for name, a in locals_of(side.state, p.tensor, p.region).items()
    }


def by_member(pieces: Sequence[Piece], tensors: Tensors) -> list[Piece]:
    """Pieces of families as pieces of the real tensors."""
    real = tensors.specs
    out: dict[tuple[Hashable, str], list[Any]] = {}
    for p in pieces:
        lead = 0 if p.tensor in real else p.tensor.count("{")
        for box in p.region.boxes:
            for index in itertools.product(*[[i for a, b in s for i in range(a, b)] for s in box[:lead]]):
                out.setdefault((p.place, member_name(p.tensor, index)), []).append(box[lead:])
    return [Piece(place, name, Region.of(boxes)) for (place, name), boxes in out.items()]


def check_move(
    bound: BoundMapping, source: Any, have: Buffers, wanted: Sequence[Piece], to: Side, dtype: str | None
) -> None:
    """Plan and execute for some wanted pieces, and compare every buffer."""
    expected = {(p.place, name): a for p in wanted for name, a in locals_of(to.state, p.tensor, p.region).items()}
    got = {key: opposite(a) for key, a in expected.items()}
    torch_side = len(wanted) % 2 == 0 or to.dtype is not None
    targets = {k: as_torch(a, to.dtype) if torch_side else a for k, a in got.items()}
    sources = {k: as_torch(a, dtype) for k, a in have.items()} if dtype or not torch_side else have
    copies = plan(bound, source, wanted)
    size = sum(a.size for a in expected.values())
    assert copies.size == size == sum(p.region.size for p in wanted)
    with counted(size):
        execute(copies, sources, targets)
    for key, a in got.items():
        assert same_bits(a, expected[key]), f"{key}: {a} is not {expected[key]}"


def move(
    mapping: str,
    source: Side,
    target: Side,
    *,
    back: bool = True,
    lossy: bool = False,
    derive: bool = True,
    ways: Sequence[str] = ("layouts", "pieces"),
    **sizes: int,
) -> BoundMapping:
    """Relayout every rank of `target` from `source`, found by layout and as explicit pieces; then back.

    `derive`: also bind without the target's shapes, which must come out the same.
    """
    wants = specs(target.state, target.dtype)
    bound = bind(mapping, specs(source.state, source.dtype), wants, **sizes)
    assert bound.target.specs == wants
    if derive:
        assert bind(mapping, specs(source.state, source.dtype), **sizes).target.specs == wants
    s, t = source.sharding(bound.source), target.sharding(bound.target)
    same_as_layouts(s)
    same_as_layouts(t)
    have = all_buffers(source, s)
    pieces = [p for rank in range(s.mesh.size) for p in s.pieces(rank)]
    for rank in range(t.mesh.size):
        wanted = t.pieces(rank)
        if "layouts" in ways:
            check_move(bound, s, have, wanted, target, source.dtype)
        if "pieces" in ways:
            explicit = pieces if rank % 2 else by_member(pieces, bound.source)
            check_move(bound, explicit, have, wanted, target, source.dtype)
    if back:
        backwards = str(inverse(mapping, lossy=lossy))
        move(backwards, target, source, back=False, derive=False, ways=ways, **sizes)
    return bound


def chunk(x: Array, k: int, i: int, axis: int = 0) -> Array:
    """The i-th of k chunks as `torch.chunk` cuts, trailing ones possibly empty."""
    c = -(-x.shape[axis] // k)
    return x[(slice(None),) * axis + (slice(i * c, i * c + c),)]


def whole(text: str, shape: tuple[int, ...], dtype: str = "float32", **sizes: int) -> CopyPlan:
    """The plan that makes y of x, each in one piece."""
    bound = bind(text, {"x": TensorSpec(shape, dtype)}, **sizes)
    return plan(
        bound,
        [Piece(0, "x", Region.full(shape))],
        [Piece(0, name, Region.full(spec.shape)) for name, spec in bound.target.specs.items()],
    )


def run(copies: CopyPlan, x: Any, y: Any) -> Any:
    execute(copies, {(0, "x"): x}, {(0, "y"): y})
    return y
