"""Sequences of collectives between layouts: bytes beside DTensor's two planners, all pairs over 1 to 3 axes; planning.

The peers are torch's `DTensorRedistributePlanner`: greedy, its usual one, and the search over a graph that it takes
for other orders of axes (private methods, in one process beside a fake group). Bytes of their steps are what a rank
receives in each collective by rings; an all-to-all counts as one, though on CPU theirs is a gather. Pairs that they
refuse (a cut tensor to a pending sum) count for neither. Times are the processor's: planning waits for nothing. With
--quick one pair of 20.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tangram.hardware.measuring.measure import Row
from tangram.layout import Layout, Mesh
from tangram.relayout.collectives import digits
from tangram.relayout.collectives.sequences import Link, received, sequence

MESHES = {1: ("a=4", 3), 2: ("a=4 b=2", 3), 3: ("a=2 b=2 c=2", 2)}
"""By the number of axes: the mesh, and how many dims the tensor has."""
SIDE = 64
SLOW = (("a", Link(2e-5, 50e9)), ("b", Link(1e-5, 450e9)), ("c", Link(1e-5, 450e9)), ("d", Link(1e-5, 450e9)))
"""One axis between machines, the others inside one."""


@dataclass(frozen=True)
class Lie:
    """How a tensor lies: of each axis "R", "P" or the dim; and of each dim its axes, major first."""

    words: tuple[str | int, ...]
    order: tuple[tuple[int, ...], ...]

    def layout(self, names: Sequence[str]) -> Layout:
        """In the notation."""
        dims = ["_" + "".join(f"/{names[a]}" for a in own) for own in self.order]
        pending = [f"sum:{names[a]}" for a, word in enumerate(self.words) if word == "P"]
        return Layout.parse(" ".join([*dims, *pending])).bind((SIDE,) * len(self.order))

    @property
    def usual(self) -> bool:
        """Whether axes of a dim are in the order of the mesh."""
        return all(list(own) == sorted(own) for own in self.order)


def lies(axes: int, ndim: int) -> list[Lie]:
    """All of them."""
    found: list[Lie] = []
    for words in itertools.product(["R", "P", *range(ndim)], repeat=axes):
        own = [[a for a, word in enumerate(words) if word == d] for d in range(ndim)]
        found += [Lie(tuple(words), tuple(order)) for order in itertools.product(*map(itertools.permutations, own))]
    return found


def rows(quick: bool) -> Iterable[Row]:
    """The figures."""
    warnings.filterwarnings("ignore", category=UserWarning)
    for axes, (mesh, ndim) in MESHES.items():
        with _device_mesh(Mesh.parse(mesh)) as device_mesh:
            yield from _pairs(axes, Mesh.parse(mesh), ndim, _Theirs(device_mesh, ndim), 20 if quick and axes > 1 else 1)
    yield from _planning(60 if quick else 400)


def _pairs(axes: int, mesh: Mesh, ndim: int, theirs: _Theirs, every: int) -> Iterator[Row]:
    ours: dict[str, float] = {"greedy": 0.0, "graph": 0.0}
    others: dict[str, float] = {"greedy": 0.0, "graph": 0.0}
    counts = {"greedy": 0, "graph": 0}
    worse = {"greedy": 0, "graph": 0}
    fewer = {"greedy": 0, "graph": 0}
    names, shape, all_lies = list(mesh.axes), (SIDE,) * ndim, lies(axes, ndim)
    seconds: dict[str, list[float]] = {"ours": [], "greedy": [], "graph": []}
    pairs = [pair for pair in itertools.product(all_lies, all_lies) if pair[0] != pair[1]]
    for a, b in pairs[::every]:
        source, target = a.layout(names), b.layout(names)
        seconds["ours"].append(_uncached(shape, source, target, mesh))
        mine = received(sequence(shape, source, target, mesh, 4))
        for which in ("greedy", "graph"):
            start = time.process_time()
            nbytes = theirs.bytes(which, a, b)
            if nbytes is not None:
                seconds[which].append(time.process_time() - start)
                counts[which] += 1
                ours[which] += mine
                others[which] += nbytes
                worse[which] += mine > nbytes * (1 + 1e-9)
                fewer[which] += mine < nbytes * (1 - 1e-9)
    for which in ("greedy", "graph"):
        what = f"{axes} {'axis' if axes == 1 else 'axes'}, DTensor's {which} planner, {counts[which]} pairs"
        ratio = ours[which] / others[which]
        yield Row(f"{what}: bytes of all", "ratio", ratio, {which: 1.0}, target_ratio=1.0)
        yield Row(f"{what}: pairs in which we receive more", "pairs", worse[which], target=0)
        yield Row(f"{what}: pairs in which we receive less", "pairs", fewer[which])
    times = {name: statistics.median(some) * 1e3 for name, some in seconds.items()}
    yield Row(f"{axes} {'axis' if axes == 1 else 'axes'}: a plan, uncached, the median", "ms", times.pop("ours"), times)


def _uncached(shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh, links: Any = None) -> float:
    digits._equal.cache_clear()  # pyright: ignore[reportPrivateUsage]
    gc.disable()
    start = time.process_time()
    sequence.__wrapped__(shape, source, target, mesh, 4, links)
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def _planning(count: int) -> Iterator[Row]:
    """At four axes, random pairs of a tensor of three dims."""
    mesh, shape = Mesh.parse("a=2 b=2 c=2 d=2"), (SIDE,) * 3
    some = random.Random(0)
    for what, links in (("", None), (", one slow link", SLOW)):
        times: list[float] = []
        cached: list[float] = []
        for _ in range(count):
            a, b = _drawn(some).layout("abcd"), _drawn(some).layout("abcd")
            times.append(min(_uncached(shape, a, b, mesh, links) for _ in range(2)))
            sequence(shape, a, b, mesh, 4, links)
            start = time.process_time()
            sequence(shape, a, b, mesh, 4, links)
            cached.append(time.process_time() - start)
        times.sort()
        label = f"4 axes, {count} random pairs{what}: a plan"
        yield Row(f"{label}, uncached, the median", "ms", statistics.median(times) * 1e3, target=10)
        yield Row(f"{label}, uncached, 99 of 100", "ms", times[math.ceil(0.99 * count) - 1] * 1e3, target=10)
        yield Row(f"{label}, uncached, the slowest", "ms", times[-1] * 1e3, target=10)
        yield Row(f"{label}, cached, the median", "ms", statistics.median(cached) * 1e3, target=0.05)


def _drawn(some: random.Random) -> Lie:
    words = tuple(some.choice(["R", "P", 0, 1, 2, 0, 1, 2]) for _ in range(4))
    order = [[a for a, word in enumerate(words) if word == d] for d in range(3)]
    return Lie(words, tuple(tuple(some.sample(own, len(own))) for own in order))


class _Theirs:
    """DTensor's planners."""

    def __init__(self, mesh: Any, ndim: int) -> None:
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        self.mesh = mesh
        shape = torch.Size([SIDE] * ndim)
        self.meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)

    def bytes(self, which: str, a: Lie, b: Lie) -> float | None:
        """What a rank receives in its steps; None where it has none, or its steps cannot be carried out."""
        from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

        if which == "greedy" and not (a.usual and b.usual):
            return None
        planner: Any = DTensorRedistributePlanner(self.mesh, self.meta)
        source, target = self._spec(a), self._spec(b)
        if which == "greedy":
            steps = planner.generate_greedy_transform_infos(source, target)
        else:
            try:
                steps = planner.generate_graph_based_transform_infos(source, target, self.meta.shape)
            except AssertionError:
                return None  # no path
        return self._received(steps, a)

    def _spec(self, lie: Lie) -> Any:
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

        words = {"R": Replicate(), "P": Partial()}
        placements = tuple(words[w] if isinstance(w, str) else Shard(w) for w in lie.words)
        order = tuple(ShardOrderEntry(tensor_dim=d, mesh_dims=own) for d, own in enumerate(lie.order) if own)
        return DTensorSpec(self.mesh, placements, tensor_meta=self.meta, shard_order=order)

    def _received(self, steps: Sequence[Any], a: Lie) -> float | None:
        local = 4.0 * SIDE ** len(a.order)
        for axis, word in enumerate(a.words):
            local /= self.mesh.size(axis) if isinstance(word, int) else 1
        total = 0.0
        for step in steps:
            k = self.mesh.size(step.mesh_dim)
            before, after = step.src_dst_placements
            if before.is_shard() and after.is_partial():
                return None
            if before.is_shard() and after.is_replicate():
                total += local * (k - 1)
                local *= k
            elif before.is_shard():
                total += local * (k - 1) / k
            elif before.is_partial() and after.is_replicate():
                total += 2 * local * (k - 1) / k
            elif before.is_partial():
                total += local * (k - 1) / k
                local /= k
            elif after.is_shard():
                local /= k
        return total


@contextmanager
def _device_mesh(mesh: Mesh) -> Generator[Any]:
    """A device mesh without other processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    try:
        yield init_device_mesh("cpu", tuple(k for k, _ in mesh.axes.values()), mesh_dim_names=tuple(mesh.axes))
    finally:
        dist.destroy_process_group()
