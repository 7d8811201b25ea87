"""Measures the kernels and collectives of the machine at hand over many sizes: tables as published ones are.

    products     m x k by k x n, in every type that the planner prices; ranks at it as in training
    attention    fused, causal, forward and backward
    moved        sums of two tensors, over so many in turn that none is still in a cache
    collectives  of two, four ... ranks in processes of their own, by what the device has (gloo, NCCL)

The best of some turns counts, since whatever else the machine does only takes time. Sizes that would take longer than
`LONGEST` by the rate of those before are left out, so that a laptop and an accelerator both are done in some minutes.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tangram.errors import UserError
from tangram.hardware.host.workers import Job, run
from tangram.hardware.measuring.rates import best_seconds, threads_of_one_of

LONGEST = 0.12
"""Seconds of one call."""
SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADS = ((8, 64), (8, 128), (32, 128))
MOVED = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
POOL = 1 << 25
"""Numbers that are gone through before one of them is met again."""
MESSAGES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)
"""Numbers of four bytes."""
OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
TOGETHER = 3
"""Calls of a turn: as many on every rank."""
PATIENCE = 120.0
"""Seconds that collectives of one number of ranks may take."""


@dataclass(frozen=True)
class Point:
    """One measurement."""

    sizes: dict[str, float]
    seconds: float


def products(device: str, kind: str, processes: int) -> list[Point]:
    """Square products, and those that are short or long in one of their sides."""
    found: list[Point] = []
    rate = 0.0
    with threads_of_one_of(processes):
        for m, n, k in _shapes():
            flops = 2.0 * m * n * k
            if rate and flops / rate > LONGEST:
                continue
            left, right = (torch.ones(size, device=device, dtype=TYPES[kind]) for size in ((m, k), (k, n)))
            seconds = best_seconds(lambda left=left, right=right: left @ right, device)
            rate = max(rate, flops / seconds)
            found.append(Point({"m": m, "n": n, "k": k}, seconds))
    return found


def _shapes() -> Iterator[tuple[int, int, int]]:
    """From the smallest; every side goes with every other up to four times apart."""
    shapes = [(m, n, k) for m in SIDES for n in SIDES for k in SIDES if max(m, n, k) <= 4 * min(m, n, k)]
    yield from sorted(shapes, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))


def attention(device: str, kind: str, processes: int, *, backward: bool = False) -> list[Point]:
    """Of one sample, with as many heads of keys as of queries; with `backward`, of the backward alone."""
    found: list[Point] = []
    with threads_of_one_of(processes):
        for (heads, width), length in itertools.product(HEADS, LENGTHS):
            # Twice the length takes four times as long.
            before = next((one.seconds for one in reversed(found) if one.sizes["queries"] < length), 0.0)
            if before > LONGEST / 4:
                continue
            given = [
                torch.ones(1, heads, length, width, device=device, dtype=TYPES[kind], requires_grad=backward)
                for _ in range(3)
            ]
            sizes = {"batch": 1, "queries": length, "keys": length, "heads": heads, "width": width}
            found.append(Point(dict(sizes), _attention_seconds(given, device, backward=backward)))
    return found


def _attention_seconds(given: Sequence[torch.Tensor], device: str, *, backward: bool) -> float:
    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)

    if not backward:
        return best_seconds(forward, device)
    out = forward()
    gradient = torch.ones_like(out)
    return best_seconds(lambda: torch.autograd.grad(out, given, gradient, retain_graph=True), device)


def moved(device: str, processes: int) -> list[Point]:
    """Two tensors read, one written."""
    found: list[Point] = []
    with threads_of_one_of(processes):
        for size in MOVED:
            count = max(2, POOL // size)
            given = [torch.ones(size, device=device) for _ in range(min(count, 4096))]

            def turn(given: list[torch.Tensor] = given) -> None:
                for number, left in enumerate(given):
                    torch.add(left, given[number - 1], out=given[number - 2])

            found.append(Point({"nbytes": 12.0 * size}, best_seconds(turn, device, turns=3) / len(given)))
    return found


def collectives(device: str, most: int) -> dict[str, list[Point]]:
    """By operation, over two, four ... up to `most` ranks; nothing of one. Raises UserError where ranks cannot meet."""
    found: dict[str, list[Point]] = {name: [] for name in OPS}
    ranks = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    for world in sorted({*ranks, most} - {1}):
        for name, rows in _over(device, world).items():
            found[name] += [Point({"nbytes": nbytes, "ranks": float(world)}, seconds) for nbytes, seconds in rows]
    return found


def _over(device: str, world: int) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory(prefix="tangram-sweep-") as folder:
        jobs = [
            Job(
                "tangram.hardware.measuring.sweep:helped",
                {"store": str(Path(folder, "store")), "rank": rank, "world": world, "device": device},
            )
            for rank in range(world)
        ]  # fmt: skip
        outcomes = run(jobs, PATIENCE)
    if wrong := next((one for one in outcomes if not one.ok), None):
        raise UserError(f"collectives over {world} ranks cannot be measured: {wrong.error}")
    return cast("dict[str, list[tuple[float, float]]]", outcomes[0].value)


def helped(store: str, rank: int, world: int, device: str) -> dict[str, list[tuple[float, float]]]:
    """One of the ranks: bytes and seconds by operation."""
    here = torch.device(device, rank) if device != "cpu" else torch.device("cpu")
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(here), store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    with threads_of_one_of(world):
        found = {name: [_timed(name, size // world, world, here) for size in MESSAGES] for name in OPS}
    dist.destroy_process_group()
    return found


def _timed(name: str, each: int, world: int, here: torch.device) -> tuple[float, float]:
    """Bytes of the tensor that the ranks have together (of an all-to-all, of what each has), and seconds."""
    part, whole = torch.ones(each, device=here), torch.ones(each * world, device=here)
    other = torch.empty_like(whole)
    given = {"all-gather": (whole, part), "reduce-scatter": (part, whole), "all-reduce": (whole,)}
    call = partial(_collective(name), *given.get(name, (other, whole)))
    return 4.0 * whole.numel(), _together(call, here)


CALLED = {
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all-reduce": ("all_reduce",),
    "all-to-all": ("all_to_all_single",),
}
"""What torch calls them, and what torch before 2.13 did."""


def _collective(name: str) -> Callable[..., Any]:
    here: Any = dist
    return next(found for one in CALLED[name] if (found := getattr(here, one, None)) is not None)


def _together(call: Callable[[], Any], here: torch.device, turns: int = 7) -> float:
    """The best of some turns, which the ranks begin together; as many calls a turn on every rank."""
    best = math.inf
    for turn in range(turns + 1):
        dist.all_reduce(torch.zeros((), device=here))
        start = time.perf_counter()
        for _ in range(TOGETHER):
            call()
        if here.type != "cpu":
            torch.accelerator.synchronize()
        if turn:  # the first makes connections
            best = min(best, (time.perf_counter() - start) / TOGETHER)
    return best
