"""How fast the machine at hand is: products, plain operators, memory, and collectives between processes.

Everything is measured in about a second, at a few sizes each, as one rank of several would see it (its share of the
cores), and kept in the user's cache folder until the machine or torch changes. Accelerators that `devices.toml` knows
by name are taken from there, since their makers say more than a second of measuring does; those are bounds, which no
program reaches.

Trade-off: collectives run between two threads of this process, over gloo's real sockets; ranks in processes of their
own are a little slower. What else runs on the machine at that second is measured too, so the best of some turns counts,
and several threads, which wait for each other on a busy machine, count as no slower than one.
"""

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tangram.errors import UserError
from tangram.hardware.catalogue.devices import tables
from tangram.hardware.host.machine import Accelerator, accelerators, describe, usable_cores

VERSION = 2  # of what is measured; a cache of another one is not read
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_SIDES = (16, 64, 128, 256, 512, 1024)  # of the square matrices that are multiplied
_ELEMENTS = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # of the float32 tensors that are added
_POOL = 1 << 23  # elements that are gone through before one of them is met again
_MESSAGES = (1 << 10, 1 << 17, 1 << 20)  # float32 numbers that are summed between two
_TURNS = 5
_SECONDS = 0.15  # for one figure, and for the sizes of a curve of products
_PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Curve:
    """A rate by the size of one call, at a few sizes in ascending order; between them along the logarithms."""

    points: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        """The highest rate."""
        return max(rate for _, rate in self.points)

    def at(self, size: float) -> float:
        """The rate of a call of this size; beyond the ends that of the end."""
        for (low, slow), (high, fast) in zip(self.points, self.points[1:], strict=False):
            if size <= low:
                return slow
            if size < high:
                way = math.log(size / low) / math.log(high / low)
                return slow * (fast / slow) ** way
        return self.points[-1][1] if size > self.points[0][0] else self.points[0][1]

    def seconds(self, size: float) -> float:
        """How long one call of this size takes."""
        return size / self.at(size) if size else 0.0


@dataclass(frozen=True)
class Rates:
    """What one rank of `processes` on this machine can do. Sizes in bytes, rates per second."""

    device: str
    name: str
    processes: int
    products: Mapping[str, Curve]
    """By type ("float32", "bfloat16"): FLOPs of one matmul -> FLOP/s."""
    moves: Curve
    """Bytes that one elementwise operator reads and writes -> bytes/s, all ranks at it at once."""
    call_seconds: float
    """What an operator costs before it computes anything, with its part of the backward's bookkeeping."""
    latency: float
    """Seconds that a collective of two ranks takes for nothing."""
    links: Curve
    """Bytes that a rank sends in one collective -> bytes/s, the latency not counted."""
    memory: float
    """Bytes that one rank may use."""
    source: str
    """"measured", or where the figures come from."""
    crowd: float = 1.0
    """Ranks that share one core; the rates are those of one of them while all are at work."""

    def peak_flops(self, kind: str) -> float:
        """The highest rate of products in this type."""
        return self.products_in(kind).peak

    def products_in(self, kind: str) -> Curve:
        """The rate of products in this type; those of float16, which nobody has measured, go as those of bfloat16."""
        return self.products["bfloat16" if kind == "float16" else kind]


WHOLE = {"names", "bf16", "fp32", "memory_bytes", "memory_bandwidth", "link_bandwidth", "source"}


@cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """The accelerators of `devices.toml` that torch has names for and of which all figures are known."""
    return {name: table for name, table in tables().items() if set(table) >= WHOLE}


def rates(device: str = "cpu", processes: int = 1, *, anew: bool = False) -> Rates:
    """The rates of this machine, from the cache where it has them; `anew` measures in any case.

    Raises UserError for a number of processes below one and a device that is not there.
    """
    _check(device, processes)
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tangram" / "rates.json"
    # What is measured anew when it changes: another machine, share of it, kernel or torch.
    key = json.dumps([VERSION, device, processes, _name(device), usable_cores(), platform.release(), torch.__version__])
    kept = _kept(path)
    if not anew and key in kept:
        with suppress(KeyError, TypeError, ValueError):  # a cache that somebody else wrote is measured again
            return replace(_restored(kept[key]), memory=_memory(device, processes))
    measured = measure(device, processes)
    with suppress(OSError):  # without a place to keep them, rates are measured each time
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text(json.dumps({**kept, key: asdict(measured)}, indent=1))
        unfinished.replace(path)
    return measured


def measure(device: str = "cpu", processes: int = 1) -> Rates:
    """Measure what one rank of `processes` can do, in one to three seconds."""
    _check(device, processes)
    known = _from_catalogue(device)
    latency, links = _collectives() if known is None or processes > 1 else (0.0, Curve(((1.0, 1.0),)))
    with threads_of_one_of(processes):
        call_seconds = _call_seconds(device)
        if known is not None:
            figures, one = known
            return Rates(
                device=device,
                name=one.name,
                processes=processes,
                products={
                    "float32": Curve(((1.0, float(figures["fp32"])),)),
                    "bfloat16": Curve(((1.0, float(figures["bf16"])),)),
                },
                moves=Curve(((1.0, float(figures["memory_bandwidth"])),)),
                call_seconds=call_seconds,
                latency=latency,
                links=Curve(((1.0, float(figures["link_bandwidth"])),)),
                memory=_memory(device, processes),
                source=str(figures["source"]),
            )
    crowd = max(1.0, processes / usable_cores()) if device == "cpu" else 1.0  # ranks that share one core
    products = {name: _by_threads(partial(_products, device, kind), processes) for name, kind in TYPES.items()}
    alone = _by_threads(partial(_memory_bandwidth, device), processes)
    return Rates(
        device=device,
        name=_name(device),
        processes=processes,
        products={name: _slower(curve, crowd) for name, curve in products.items()},
        moves=_slower(alone if device != "cpu" else _shared(alone, processes), crowd),
        call_seconds=call_seconds * crowd,
        latency=latency * crowd,
        links=_slower(links, crowd),
        memory=_memory(device, processes),
        source="measured",
        crowd=crowd,
    )


def _check(device: str, processes: int) -> None:
    if processes < 1:
        raise UserError(f"{processes} processes cannot be measured: give one or more")
    if device != "cpu" and device not in {one.kind for one in accelerators()}:
        raise UserError(f'there is no device of the kind "{device}" on this machine: take cpu')


def _from_catalogue(device: str) -> tuple[Mapping[str, Any], Accelerator] | None:
    for one in accelerators() if device != "cpu" else ():
        for figures in catalogue().values():
            if any(name in one.name for name in figures["names"]):
                return figures, one
    return None


def _threads_of_one_of(processes: int) -> int:
    return max(1, int(usable_cores()) // processes)


def threads_of_one_of(processes: int) -> AbstractContextManager[None]:
    """Give this process the threads that one of so many ranks has, for a while."""
    return _threads(_threads_of_one_of(processes))


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_threads(measured: Callable[[], Curve], processes: int) -> Curve:
    """The best of one thread and of all that a rank has, at each size."""
    best: dict[float, float] = {}
    for threads in sorted({1, _threads_of_one_of(processes)}):
        with _threads(threads):
            for size, rate in measured().points:
                best[size] = max(rate, best.get(size, 0.0))
    return Curve(tuple(sorted(best.items())))


def best_seconds(call: Callable[[], object], device: str, turns: int = _TURNS) -> float:
    """Seconds of one call in the best of some turns of a millisecond or more; fewer turns where they are long."""
    call()
    times, best = 1, math.inf
    done = 0
    end = time.perf_counter() + _SECONDS
    while done < turns and (best == math.inf or time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(times):
            call()
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        best = min(best, seconds / times)
        # A turn of under a millisecond says more of the clock than of the call: the next is twice as long.
        if seconds < 1e-3:
            times *= 2
        else:
            done += 1
    return best


def _products(device: str, kind: torch.dtype) -> Curve:
    points: list[tuple[float, float]] = []
    end = time.perf_counter() + _SECONDS
    for side in _SIDES:
        if points and time.perf_counter() > end:
            break
        left, right = (torch.ones(side, side, device=device, dtype=kind) for _ in range(2))
        flops = 2.0 * side**3
        points.append((flops, flops / best_seconds(lambda left=left, right=right: left @ right, device)))
    return Curve(tuple(points))


def _memory_bandwidth(device: str, sizes: tuple[int, ...] = _ELEMENTS) -> Curve:
    """Sums of two tensors, over so many in turn that none is still in a cache from its last time, as in training."""
    points: list[tuple[float, float]] = []
    for size in sizes:
        count = max(2, _POOL // size)
        given = [torch.ones(size, device=device) for _ in range(count)]
        kept = list(given)

        def turn(given: list[torch.Tensor] = given, kept: list[torch.Tensor] = kept) -> None:
            for number, left in enumerate(given):
                kept[number - 1] = left + given[number - 1]

        moved = 12.0 * size  # two read, one written
        points.append((moved, moved * count / best_seconds(turn, device, turns=3)))
    return Curve(tuple(points))


def _shared(alone: Curve, processes: int) -> Curve:
    """All ranks share one memory: what does not fit the caches gets its share of what all cores together reach."""
    if processes == 1:
        return alone
    size, one = alone.points[-1]
    with _threads(_threads_of_one_of(1)):
        together = max(one, _memory_bandwidth("cpu", _ELEMENTS[-1:]).points[0][1])
    return Curve((*alone.points[:-1], (size, min(one, together / processes))))


def _slower(curve: Curve, times: float) -> Curve:
    return Curve(tuple((size, rate / times) for size, rate in curve.points))


def _call_seconds(device: str) -> float:
    """Half a tiny operator and its backward: what a call costs in Python, autograd and the dispatcher."""
    x = torch.ones(4, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(20):
            y = y * 1.5
        y.sum().backward()

    # 20 products and a sum, each with its backward.
    return best_seconds(chain, device) / 42


def _collectives() -> tuple[float, Curve]:
    """Latency and rate of an all-reduce between two, over gloo on this machine's own network interface."""
    # torch's stubs leave the collectives out of this class; it has those of every process group
    groups: list[Any] = [None, None]
    store = dist.HashStore()

    def join(rank: int) -> None:
        groups[rank] = cast(Any, dist.ProcessGroupGloo(store, rank, 2, _PATIENCE))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in groups:
        raise UserError("gloo cannot connect two ranks on this machine: `tangram doctor` says what is missing")

    def seconds(size: int) -> float:
        tensors = [torch.ones(size) for _ in groups]

        def both() -> None:
            for work in [group.allreduce([x]) for group, x in zip(groups, tensors, strict=True)]:
                work.wait()

        return best_seconds(both, "cpu", turns=10)

    latency = seconds(1)
    points: list[tuple[float, float]] = []
    for size in _MESSAGES:
        sent = 4.0 * size  # of two ranks each sends half the tensor twice
        points.append((sent, sent / max(seconds(size) - latency, latency / 10)))
    groups.clear()
    return latency, Curve(tuple(points))


def _name(device: str) -> str:
    return describe().cpu if device == "cpu" else next(one.name for one in accelerators() if one.kind == device)


def _memory(device: str, processes: int) -> float:
    """What one rank may use: its own accelerator's memory, or its share of what this machine has left."""
    if device != "cpu":
        return float(next(one.memory_bytes or 0 for one in accelerators() if one.kind == device))
    machine = describe()
    return float(machine.memory_available_bytes or machine.memory_bytes or 0) / processes


def _kept(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _restored(found: Any) -> Rates:
    """Rates of what `asdict` made of them. Raises KeyError, TypeError or ValueError for anything else."""

    def curve(of: Any) -> Curve:
        points = tuple((float(size), float(rate)) for size, rate in of["points"])
        if not points or not all(size > 0 and rate > 0 for size, rate in points):
            raise ValueError("a curve needs points above zero")
        return Curve(points)

    fields = cast("dict[str, Any]", dict(found))
    fields["moves"], fields["links"] = curve(found["moves"]), curve(found["links"])
    fields["products"] = {name: curve(found["products"][name]) for name in TYPES}
    return Rates(**fields)
