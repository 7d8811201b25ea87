"""Sequences of collectives on all ranks of one process, and what each rank should have, by numpy's indexing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tangram.layout import Layout, Mesh, region
from tangram.relayout.collectives.one_collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SLICE, ZERO
from tangram.relayout.collectives.run_sequence import members, pack, sizes, unpack
from tangram.relayout.collectives.sequences import CollectiveStep

NAMES = "abcd"


def part(whole: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What a rank holds of a tensor."""
    (box,) = region(layout, mesh, rank).boxes
    at = np.ix_(*[[i for a, b in some for i in range(a, b)] for some in box])
    return torch.from_numpy(whole.numpy()[at]).contiguous()


def laid(whole: Tensor, layout: Layout, mesh: Mesh, seed: int = 0) -> list[Tensor]:
    """What every rank has; of a pending sum, summands of whole numbers."""
    axes = [axis for _, axis in layout.pending]
    places = list(itertools.product(*[range(mesh.axes[axis][0]) for axis in axes]))
    made = torch.Generator().manual_seed(seed)
    some = [torch.randint(-9, 9, whole.shape, generator=made).to(whole.dtype) for _ in places[1:]]
    summands = dict(zip(places, [whole - sum(some), *some], strict=True))
    at = [mesh.coords(rank) for rank in range(mesh.size)]
    return [part(summands[tuple(own[axis] for axis in axes)], layout, mesh, rank) for rank, own in enumerate(at)]


def wrong(found: Sequence[Tensor], whole: Tensor, layout: Layout, mesh: Mesh) -> list[int]:
    """The ranks whose part of a tensor is not what the layout says; of a pending sum, the sum of the parts."""
    axes = [axis for _, axis in layout.pending]
    bad: list[int] = []
    for rank, own in enumerate(found):
        expected = part(whole, layout, mesh, rank)
        if own.shape != expected.shape:
            bad.append(rank)
            continue
        peers = mesh.peers(rank, *axes) if axes else (rank,)
        if not torch.equal(torch.stack([found[r] for r in peers]).sum(0).to(whole.dtype), expected):
            bad.append(rank)
    return bad


def played(steps: Sequence[CollectiveStep], tensors: Sequence[Tensor], mesh: Mesh) -> tuple[list[Tensor], float]:
    """Run the steps on all ranks at once; and the elements that a rank has received, on average."""
    have, total = list(tensors), 0.0
    for step in steps:
        after = list(have)
        for group in members(step, mesh):
            sent = [pack(step, i, have[rank]) for i, rank in enumerate(group)]
            got, count = collective(step, sent)
            total += count
            for i, rank in enumerate(group):
                after[rank] = unpack(step, i, got[i])
        have = after
    return have, total / mesh.size


def collective(step: CollectiveStep, sent: list[Tensor]) -> tuple[list[Tensor], float]:
    """What each of a group's members gets, and how many elements they receive together."""
    k, n = len(sent), sent[0].numel()
    if step.collective in (SLICE, ZERO):
        return sent, 0
    if step.collective == ALL_GATHER:
        return [torch.stack(sent)] * k, k * (k - 1) * n
    if step.collective == ALL_REDUCE:
        return [torch.stack(sent).sum(0)] * k, 2 * (k - 1) * n
    if step.collective == REDUCE_SCATTER:
        return list(torch.stack(sent).sum(0)), (k - 1) * n
    lengths = [sizes(step, i) for i in range(k)]
    cut = [own.split(lengths[i][0]) for i, own in enumerate(sent)]
    for i, j in itertools.product(range(k), range(k)):
        assert lengths[i][0][j] == lengths[j][1][i]
    got = [torch.cat([cut[i][j] for i in range(k)]) for j in range(k)]
    return got, sum(cut[i][j].numel() for i in range(k) for j in range(k) if i != j)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, ndim: int) -> str:
    """Any even layout: axes in any order on dims, behind factors of a dim, pending."""
    axes = draw(st.permutations(list(mesh.axes)))
    cuts: list[list[str]] = [[] for _ in range(ndim)]
    pending: list[str] = []
    for axis in axes:
        what = draw(st.sampled_from(["whole", "sum", *range(ndim), *range(ndim)]))
        if what == "sum":
            pending.append(axis)
        elif isinstance(what, int):
            cuts[what].append(axis)
    dims = []
    for own in cuts:
        first = draw(st.integers(0, len(own))) if draw(st.booleans()) else len(own)
        outer = "".join(f"/{axis}" for axis in own[:first])
        inner = "".join(f"/{axis}" for axis in own[first:])
        dims.append(f"_{outer}" if first == len(own) else f"(f={mesh.size}{outer} _{inner})")
    return " ".join([*dims, *(f"sum:{axis}" for axis in pending)])


@st.composite
def problems(draw: st.DrawFn, most: int = 4) -> tuple[tuple[int, ...], str, Mesh, str]:
    """A shape, a layout, a mesh of one to four axes, another layout."""
    n = draw(st.integers(1, most))
    ks = draw(st.lists(st.sampled_from([2, 2, 3, 1] if n < 4 else [2, 2, 1]), min_size=n, max_size=n))
    mesh = Mesh.parse(" ".join(f"{name}={k}" for name, k in zip(NAMES, ks, strict=False)))
    ndim = draw(st.integers(1, 3 if mesh.size < 4 else 2))
    # enough of each dim for all axes behind a factor that all axes cut
    shape = tuple(mesh.size**2 * draw(st.sampled_from([1, 1, 2])) for _ in range(ndim))
    return shape, draw(layouts(mesh, ndim)), mesh, draw(layouts(mesh, ndim))
