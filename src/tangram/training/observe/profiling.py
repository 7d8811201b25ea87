"""`--profile`: what a few steps of every rank spend their time and memory on, as files that people's viewers open.

`trace-rankN.json` is for chrome://tracing or Perfetto, `operators-rankN.txt` the operators by time, and on accelerators
`memory-rankN.pickle` torch's snapshot of the allocator (pytorch.org/memory_viz). The first steps are left out: they
are not like the others.
"""

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import (
    ProfilerActivity,
    profile,
    schedule,  # pyright: ignore[reportUnknownVariableType]  typed in part
    supported_activities,
)

SKIPPED, WARM_UP, RECORDED = 2, 1, 3  # steps
MOST_EVENTS = 100_000  # of the allocator that the snapshot keeps


@contextlib.contextmanager
def profiled(folder: Path | None, rank: int, device: torch.device) -> Generator[Callable[[], None]]:
    """A function to call after every step; without a folder it does nothing."""
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells of its stages on stderr, in the midst of ours
    snapshots: Any = None if device.type == "cpu" else getattr(torch.get_device_module(device), "memory", None)
    if snapshots is not None:
        snapshots._record_memory_history(max_entries=MOST_EVENTS)

    def ready(profiler: "profile") -> None:
        profiler.export_chrome_trace(str(folder / f"trace-rank{rank}.json"))
        averages = cast(Any, profiler.key_averages())
        table = str(averages.table(sort_by="self_cpu_time_total", row_limit=40))
        (folder / f"operators-rank{rank}.txt").write_text(table, encoding="utf-8")
        if snapshots is not None:
            snapshots._dump_snapshot(str(folder / f"memory-rank{rank}.pickle"))

    chosen = [kind for kind in supported_activities() if kind == ProfilerActivity.CPU or device.type != "cpu"]
    steps = cast(Any, schedule)(skip_first=SKIPPED, wait=0, warmup=WARM_UP, active=RECORDED, repeat=1)
    with profile(
        activities=chosen, schedule=steps, on_trace_ready=ready, profile_memory=snapshots is not None
    ) as profiler:
        yield profiler.step
    if snapshots is not None:
        snapshots._record_memory_history(enabled=None)
