"""What four ranks do with `collectives.move`: every pair of ways to lie, gradients, recomputation, refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from tangram.relayout.collectives.one_collective import DUALS, RankPlacement, dual, move
from tangram.relayout.mapping.errors import RelayoutError

RANKS = 4
PLACES = (
    RankPlacement("same"),
    RankPlacement("several"),
    RankPlacement("sum"),
    RankPlacement("cut", 0),
    RankPlacement("cut", 1),
    RankPlacement("cut", 1, 2),
    RankPlacement("cut", 1, 3),
    RankPlacement("cut", 2, 2),
)
SHAPE = (8, 24, 16)
"""Every place above is even in it, over 1, 2 and 4 ranks."""


@dataclass
class World:
    """The groups that this rank is in, by their size."""

    rank: int
    groups: dict[int, dist.ProcessGroup]


Scene = Callable[[World], Any]


def play(rank: int, folder: str, scenes: Sequence[Scene]) -> None:
    """All scenes, one after the other; what came of each goes into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    made: dict[int, Any] = {
        k: [dist.new_group(list(range(r, r + k))) for r in range(0, RANKS, k)][rank // k] for k in (1, 2, 4)
    }
    world = World(rank, made)
    for scene in scenes:
        Path(f"{folder}/{scene.__name__}-{rank}.json").write_text(json.dumps(scene(world)))
        dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- the oracle: numpy's indexing, in one process


def lay(whole: Tensor, place: RankPlacement, k: int, seed: int = 0) -> list[Tensor]:
    """What each of k ranks has of a tensor that lies so."""
    if place.kind in ("same", "several"):
        return [whole.clone() for _ in range(k)]
    if place.kind == "sum":
        made = torch.Generator().manual_seed(seed)
        if whole.dtype == torch.bool:
            owner, others = [torch.randint(0, n, whole.shape, generator=made) for n in (k, 1 << k)]
            return [whole & ((owner == r) | (others >> r & 1).bool()) for r in range(k)]
        some = [torch.randint(-3, 4, whole.shape, generator=made).to(whole.dtype) for _ in range(k - 1)]
        return [*some, whole - sum(some)]
    n = whole.shape[place.dim]
    at = np.arange(n).reshape(place.outer, k, -1)
    return [whole.index_select(place.dim, torch.from_numpy(at[:, r].reshape(-1))) for r in range(k)]


def differs(got: Tensor, whole: Tensor, place: RankPlacement, group: dist.ProcessGroup) -> str:
    """What is wrong with this rank's part of a tensor that should lie so; "" where nothing is."""
    k, me = dist.get_world_size(group), dist.get_rank(group)
    if got.dtype != whole.dtype:
        return f"is {got.dtype}"
    if place.kind == "sum":
        every = [torch.empty(got.numel() * got.element_size(), dtype=torch.uint8) for _ in range(k)]
        dist.all_gather(every, got.contiguous().reshape(-1).view(torch.uint8), group=group)
        parts = torch.stack([one.view(got.dtype).reshape(got.shape) for one in every])
        got = parts.any(0) if got.dtype == torch.bool else parts.sum(0).to(got.dtype)
        return "" if torch.equal(got, whole) else "wrong sum"
    expected = lay(whole, place, k)[me]
    return "" if got.shape == expected.shape and torch.equal(got, expected) else f"wrong: {tuple(got.shape)}"


def whole_of(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers, which sums of any order give exactly."""
    made = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype in (torch.bool, torch.uint8, torch.uint16) else (-8, 9)
    return torch.randint(low, high, tuple(shape), generator=made).to(dtype)


# ---------------------------------------------------------------- scenes


def every_pair(world: World) -> list[str]:
    """Forward and backward, on one, two and four ranks, of tensors that are not contiguous."""
    found: list[str] = []
    for (k, group), a, b in itertools.product(world.groups.items(), PLACES, PLACES):
        me = dist.get_rank(group)
        whole, slope = whole_of(SHAPE, torch.float32, 1), whole_of(SHAPE, torch.float32, 2)
        x = lay(whole, a, k)[me].transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        out = move(x, a, b, group)
        out.backward(lay(slope, dual(b), k, seed=3)[me].transpose(0, 1).contiguous().transpose(0, 1))
        if wrong := differs(out.detach(), whole, b, group):
            found.append(f"{a} to {b} of {k}: {wrong}")
        if x.grad is None or (wrong := differs(x.grad, slope, dual(a), group)):
            found.append(f"gradient of {a} to {b} of {k}: {wrong}")
    return found


def every_dtype(world: World) -> list[str]:
    """Numbers of every width, booleans, and tensors without elements or of one."""
    found: list[str] = []
    dtypes = "float64 bfloat16 float16 int64 int32 int16 int8 uint8 uint16 bool complex64".split()  # noqa: SIM905
    empty = itertools.product(["float32", "int16"], [(0, 24, 16), (8, 24, 0)])
    for name, shape in [*((name, SHAPE) for name in dtypes), *empty]:
        dtype = getattr(torch, name)
        whole = whole_of(shape, dtype, 4)
        for a, b in itertools.product(PLACES, PLACES):
            group = world.groups[4]
            if dtype == torch.uint16 and "sum" in (a.kind, b.kind):
                continue  # torch cannot subtract it, and so the oracle not lay it as a sum
            before = lay(whole, a, 4)[dist.get_rank(group)]
            x = before.clone()
            out = move(x, a, b, group)
            if wrong := differs(out, whole, b, group):
                found.append(f"{a} to {b} of {name} {shape}: {wrong}")
            if not torch.equal(x, before):
                found.append(f"{a} to {b} of {name} changes its input")
    return found


def scalars(world: World) -> list[str]:
    """Tensors without dims, which no axis can cut."""
    group = world.groups[4]
    found: list[str] = []
    for a, b in itertools.product([p for p in PLACES if p.kind != "cut"], repeat=2):
        whole = torch.tensor(3.0)
        if wrong := differs(move(lay(whole, a, 4)[world.rank], a, b, group), whole, b, group):
            found.append(f"{a} to {b}: {wrong}")
    return found


def _layers(x: Tensor, w: Tensor, v: Tensor, group: dist.ProcessGroup, rows: bool) -> Tensor:
    """Two products with a cut between, as Megatron's; the tensors between layers cut by rows or whole."""
    between = RankPlacement("cut", 0) if rows else RankPlacement("same")
    h = move(x, between, RankPlacement("several"), group)
    h = torch.tanh(h @ w) + torch.sin(h @ w)
    y = move(h @ v, RankPlacement("sum"), between, group)
    return x + y  # x is used twice


def layers(world: World) -> list[str]:
    """A model of two layers beside itself in one process: loss and gradients, with and without recomputation."""
    found: list[str] = []
    made = torch.Generator().manual_seed(5)
    x, w, v = [torch.randn(s, generator=made, dtype=torch.float64) for s in ((8, 4), (4, 16), (16, 4))]
    whole = [t.clone().requires_grad_() for t in (x, w, v)]
    out = whole[0] + (torch.tanh(whole[0] @ whole[1]) + torch.sin(whole[0] @ whole[1])) @ whole[2]
    (out**3).sum().backward()
    for k, rows, again in itertools.product((1, 2, 4), (False, True), (False, True)):
        group = world.groups[k]
        me = dist.get_rank(group)
        cut_x, cut_w, cut_v = (
            RankPlacement("cut", 0) if rows else RankPlacement("same"),
            RankPlacement("cut", 1),
            RankPlacement("cut", 0),
        )
        own = [lay(t, p, k)[me].requires_grad_() for t, p in zip((x, w, v), (cut_x, cut_w, cut_v), strict=True)]
        model: Callable[..., Tensor] = partial(_layers, group=group, rows=rows)
        y: Any = checkpoint(model, *own, use_reentrant=False) if again else model(*own)
        (y**3).sum().backward()
        slopes = [t.grad for t in whole if t.grad is not None]
        for name, mine, slope, place in zip("xwv", own, slopes, (cut_x, cut_w, cut_v), strict=True):
            if mine.grad is None or not torch.allclose(mine.grad, lay(slope, place, k)[me], rtol=1e-12):
                found.append(f"gradient of {name} on {k}, rows {rows}, again {again}")
        with torch.no_grad():
            if model(*own).requires_grad:
                found.append("a gradient where none is wanted")
    return found


def gradients_of_gradients(world: World) -> list[str]:
    """A backward is differentiated like any other step."""
    group = world.groups[2]
    x = torch.arange(1.0, 4.0, dtype=torch.float64) + 3 * dist.get_rank(group)
    x.requires_grad_()
    y = move(x, RankPlacement("cut", 0), RankPlacement("same"), group)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad((g**2).sum(), x)
    return [] if torch.equal(g, 3 * x**2) and torch.allclose(gg, 36 * x**3) else [f"{g} {gg}"]


def without(world: World) -> list[str]:
    """No gradient is wanted: none is kept."""
    group = world.groups[2]
    found: list[str] = []
    for a, b in itertools.product(PLACES, PLACES):
        x = lay(whole_of(SHAPE, torch.float32, 6), a, 2)[dist.get_rank(group)].requires_grad_()
        if a != b and move(x, a, b, group, differentiable=False).requires_grad:
            found.append(f"{a} to {b}")
    return found


def small_parts(world: World) -> list[str]:
    """A slice keeps no whole tensor alive."""
    x = torch.zeros(SHAPE)
    parts = {d: move(x, RankPlacement("same"), RankPlacement("cut", d), world.groups[4]) for d in range(3)}
    return [f"dim {d}" for d, p in parts.items() if p.untyped_storage().nbytes() != p.numel() * 4]


def refused(world: World) -> list[str]:
    """Sentences, and nothing sent."""
    found: list[str] = []
    wrong: list[tuple[tuple[str, int, int], tuple[str, int, int]]] = [
        (RankPlacement("same"), RankPlacement("cut", 0)),
        (RankPlacement("same"), RankPlacement("cut", 1, 4)),
        (RankPlacement("same"), RankPlacement("cut")),
        (RankPlacement("cut", 5), RankPlacement("same")),
        (RankPlacement("whole"), RankPlacement("same")),
        (RankPlacement("cut", 0, 0), RankPlacement("same")),
    ]
    for a, b in wrong:
        try:
            move(torch.zeros(7, 8), a, b, world.groups[4])
        except RelayoutError as error:
            found.append(str(error))
        else:
            found.append(f"{a} to {b} is taken")
    return found


SCENES: tuple[Scene, ...] = (
    every_pair,
    every_dtype,
    scalars,
    layers,
    gradients_of_gradients,
    without,
    small_parts,
    refused,
)
assert set(DUALS) == {p.kind for p in PLACES}
