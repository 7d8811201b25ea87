"""Honest timing of small things side by side, and the row that a bench prints.

`interleaved` times several callables in turns within one process, so that whatever else the machine does (another job,
a clock that slows down, a cache that warms up) falls on all of them alike; the figure is the median of the repeats. The
trade-off: every callable shares one process and one heap, so memory figures need a process of their own.

A bench is a script `bench/NAME.py` that exports `rows(quick: bool) -> Iterable[Row]`:

    '''How fast a layout is parsed.'''   (the first line is what `tangram bench` lists)

    def rows(quick: bool) -> Iterable[Row]:
        times = interleaved({"ours": ours, "einops": theirs}, repeats=3 if quick else 9)
        yield Row("parse a layout", "us", ours=times["ours"] * 1e6, peers={"einops": times["einops"] * 1e6}, target=50)
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a bench, beside its peers, what the machine allows, and what we aim at.

    All numbers are in `unit`. `limit` is the best that the machine or the theory allows (a plain memcpy of the same
    bytes, say). The aim is either `target`, a number in `unit`, or `target_ratio`, a multiple of the yardstick (the
    limit where there is one, else the best peer): `target_ratio=1.15` with the limit of a raw copy reads "at most 1.15
    times the time of a raw copy".
    """

    figure: str
    unit: str
    ours: float
    peers: Mapping[str, float] = field(default_factory=dict[str, float])
    limit: float | None = None
    target: float | None = None
    target_ratio: float | None = None
    better: Better = "lower"

    def __post_init__(self) -> None:
        numbers = {"ours": self.ours, **self.peers, "limit": self.limit, "target": self.target}
        numbers["target_ratio"] = self.target_ratio
        for name, number in numbers.items():
            if number is not None and not math.isfinite(number):
                raise ValueError(f"row {self.figure!r}: {name} is {number}, a row holds finite numbers only")
        if self.target is not None and self.target_ratio is not None:
            raise ValueError(f"row {self.figure!r}: give target or target_ratio, not both")
        if self.target_ratio is not None and self.yardstick is None:
            raise ValueError(f"row {self.figure!r}: target_ratio needs a limit or a peer to be a multiple of")

    @property
    def yardstick(self) -> float | None:
        """What the ratio is taken to: the limit where there is one, else the best peer, else nothing."""
        if self.limit is not None:
            return self.limit
        if not self.peers:
            return None
        return min(self.peers.values()) if self.better == "lower" else max(self.peers.values())

    @property
    def ratio(self) -> float | None:
        """`ours` over the yardstick; None without a yardstick or where it is zero."""
        return self.ours / self.yardstick if self.yardstick else None

    @property
    def aim(self) -> float | None:
        """The target as a number in `unit`, however it was given."""
        if self.target_ratio is None or self.yardstick is None:
            return self.target
        return self.target_ratio * self.yardstick

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached: False where it is missed, None only where there is none."""
        if self.aim is None:
            return None
        return self.ours <= self.aim if self.better == "lower" else self.ours >= self.aim

    def as_json(self) -> dict[str, object]:
        """The row as `tangram bench --json` prints it; `target` is in `unit`."""
        return {
            "figure": self.figure,
            "unit": self.unit,
            "ours": self.ours,
            "peers": dict(self.peers),
            "limit": self.limit,
            "ratio": self.ratio,
            "target": self.aim,
            "met": self.met,
        }


def interleaved(
    calls: Mapping[str, Callable[[], object]], repeats: int = 9, warmup: int = 1, at_least: float = 0.001
) -> dict[str, float]:
    """Seconds of one call of each callable: the median over `repeats` turns, all callables in every turn.

    Each callable is first run `warmup` times (caches, compilation), then run as often within one turn as it takes to
    last `at_least` seconds, so that the clock's own grain does not show. Whoever begins a turn changes from turn to
    turn, and the garbage collector rests while the clock runs.
    """
    if not calls or repeats < 1:
        raise ValueError("interleaved needs at least one callable and one repeat")
    for call in calls.values():
        for _ in range(warmup):
            call()
    counts = {name: _count(call, at_least) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(once(calls[name], counts[name]) / counts[name])
    return {name: statistics.median(taken) for name, taken in samples.items()}


@dataclass(frozen=True, slots=True)
class Pairs:
    """What came of two things that took turns: medians in seconds, the median ratio of pairs and how sure it is."""

    ours: float
    peer: float
    ratio: float
    low: float
    high: float
    """95 of 100 medians of as many pairs, drawn anew from those measured, lie from `low` to `high`."""

    def row(self, what: str, target: float) -> Row:
        """The ratio as a row."""
        return Row(f"{what}: ratio of pairs, 95 of 100 within {self.low:.3f} and {self.high:.3f}", "ratio", self.ratio,
                   target=target)  # fmt: skip


def paired(times: Sequence[tuple[float, float]], draws: int = 1000) -> Pairs:
    """Of pairs of seconds, ours and the peer's. The interval is the percentile bootstrap's (Efron 1979)."""
    if not times:
        raise ValueError("there is no pair")
    ratios = [ours / peer for ours, peer in times]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    mine, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    low, high = medians[round(0.025 * draws)], medians[min(draws - 1, round(0.975 * draws))]
    return Pairs(mine, theirs, statistics.median(ratios), low, high)


def once(call: Callable[[], object], times: int = 1) -> float:
    """Seconds that `times` calls in a row take, with the garbage collector at rest."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def _count(call: Callable[[], object], at_least: float) -> int:
    """How many calls in a row last at least `at_least` seconds (found by doubling)."""
    times = 1
    while once(call, times) < at_least:
        times *= 2
    return times
