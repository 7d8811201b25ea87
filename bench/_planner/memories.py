"""Errors of peak memory by source and kind of figure, and what is said of runs that ran out of it."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bench._planner.predict import known
from bench._planner.rows import Case, number
from tangram.hardware.catalogue.devices import device
from tangram.hardware.measuring.measure import Row
from tangram.planner.cost.memory import memory
from tangram.planner.search.strategy import probability
from tangram.planner.space.setting import Setting

GIB = 2.0**30
KINDS = (
    ("reserved", ("reserved",)),
    ("device", ("smi", "used", "rounded", "not stated")),
    ("allocated", ("",)),
)
"""What a figure of memory is of, by words in `mem_kind`; the first that is met."""
LARGE = 1e9
GOALS = {"simumax_b200": 0.03, "mcore_golden": 0.03}


def kind(case: Case) -> str:
    """What the figure of a run is of."""
    said = case.row["mem_kind"].lower()
    return next(name for name, words in KINDS if any(word in said for word in words))


def predicted(case: Case) -> float:
    """Bytes, of the kind and the rank that the run tells of."""
    of = memory(case.outline, case.grid, Setting(None, case.framework, case.precision, case.node))
    if "last rank" in case.row["mem_rank"]:
        return float(of.last.allocated[0])
    if "nvidia-smi" in case.row["mem_kind"] and not case.row["mem_rank"]:  # which tells of a node's first device
        return float(of.first.allocated[0]) * (1 + of.reserve) + float(of.context[0])
    return float({"allocated": of.allocated, "reserved": of.reserved, "device": of.device}[kind(case)][0])


UNKNOWN: Mapping[str, Callable[[Mapping[str, str]], bool]] = {
    "what is recomputed is not known": lambda row: row["recompute"] in ("", "?"),
    "TP ranks differ by stage": lambda row: not row["tp"],
    "what is recomputed is of operators, by stage": lambda row: row["recompute"].startswith("per-op"),
    "what is recomputed differs by stage": lambda row: _differs(row["recompute_detail"]),
    "what is recomputed is a share of blocks, by stage": lambda row: ": [" in row["recompute"],
    "some modules' activations are offloaded": lambda row: "offload-modules" in row["extra"],
}
"""Why a row's memory is not compared: facts that decide it are not known, or no grid says them."""


def unknown(row: Mapping[str, str]) -> str:
    """Which fact a row lacks; "" where none."""
    return next((why for why, lacks in UNKNOWN.items() if lacks(row)), "")


def _differs(detail: str) -> bool:
    found = re.search(r"recomputed per stage=\[([^\]]*)\]", detail)
    return found is not None and len({one.strip() for one in found[1].split(",")}) > 1


def rows(asked: Sequence[Case], taught: Sequence[Case]) -> Iterator[Row]:
    """The card: by source, models of a billion parameters and more and the smaller ones apart."""
    del taught
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    left = Counter(unknown(one.row) for one in asked if number(one.row, "mem_gib", 0.0) > 0)
    asked = [one for one in asked if not unknown(one.row)]
    for one in asked:
        measured = number(one.row, "mem_gib", 0.0) * GIB
        if measured > 0 and one.row["oom"] != "1":
            size = "1B and more" if one.outline.numbers >= LARGE else "below 1B"
            groups[one.source, kind(one), size].append(predicted(one) / measured - 1)
    for (source, of, size), off in sorted(groups.items()):
        error = np.abs(off)
        goal = GOALS.get(source, 0.05 if size != "below 1B" else None)
        yield Row(
            f"memory, {source}, {of}, {size} ({len(off)} runs; 90th percentile {np.quantile(error, 0.9):.3f}, signed "
            f"median {np.median(off):+.3f})",
            "median error", float(np.median(error)), target=goal, better="lower",
        )  # fmt: skip
    for why, count in sorted(left.items()):
        if why:
            yield Row(f"runs of memory that are left out: {why}", "runs", count, better="lower")
    yield from _out_of_memory(asked)


def usable(case: Case) -> float:
    """Bytes of a run's device that programs may have; where it has other memory than the catalogue says (V100 with 16
    GB), of the row's the same share, which is above one: makers count in units of 2^30 bytes."""
    own = device(case.gpu)
    said = number(case.row, "gpu_mem_gb", (own.memory_bytes or math.nan) / 1e9) * 1e9
    return said * (own.usable or said) / (own.memory_bytes or said)


def _out_of_memory(asked: Sequence[Case]) -> Iterator[Row]:
    caught, out, wrong, fitting = 0, 0, 0, 0
    for one in asked:
        if not known(one.gpu):
            continue
        limit = usable(one)
        if not limit > 0:
            continue
        of = memory(one.outline, one.grid, Setting(None, one.framework, one.precision, one.node))
        unsafe = probability(float(of.device[0]), limit) < 0.9
        if one.row["oom"] == "1":
            out, caught = out + 1, caught + unsafe
        elif not math.isnan(one.step):
            fitting, wrong = fitting + 1, wrong + unsafe
    if out:
        yield Row(f"runs out of memory that are called unsafe ({out})", "share", caught / out, target=1.0,
                  better="higher")  # fmt: skip
    if fitting:
        yield Row(f"runs that fitted and are called unsafe ({fitting})", "share", wrong / fitting, target=0.05,
                  better="lower")  # fmt: skip
