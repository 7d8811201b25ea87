"""What tracing costs: a step beside the same without it, in pairs; an event; a call; bytes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench._training.job import fsdp, job
from bench._training.steps import LR, turn
from tangram.hardware.measuring.measure import Pairs, Row, paired
from tangram.schema.plan import Plan
from tangram.tracing.files.format import Phase, file_of
from tangram.tracing.files.ring import TraceFiles
from tangram.tracing.recorder import Recorder
from tangram.tracing.settings import TraceSettings
from tangram.tracing.trace import UNTRACED, Trace
from tangram.training import data
from tangram.training.mesh.world import World, make_world
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.state.build_model import build, source_of
from tangram.training.step.loop import train_step
from tangram.training.step.optimiser_step import make_adamw

WARM = 2
CALLS = 50_000


@dataclass(frozen=True)
class Task:
    """What the ranks measure."""

    plan: Plan
    turns: int


def rows(quick: bool, folder: Path, pairs: int = 0) -> Iterable[Row]:
    """The figures, a step's of so many pairs: an interval of one per cent needs some hundreds of them."""
    data.prepare(job(folder).data, data.BYTES, lambda event: None)
    trace = TraceSettings(folder / "trace", mesh="dp=2")
    task = Task(fsdp(folder, 2), pairs or (3 if quick else 300))
    measured = run_ranks(measure, task, world=2, on_event=lambda event: None, device="cpu", trace=trace)[0]
    yield Row("a step of qwen3-2m, dp=2, FSDP, traced", "ms", measured.ours * 1e3, {"not traced": measured.peer * 1e3})
    yield measured.row("a traced step beside one that is not", 1.01)
    event, step_bytes = recorded(Path(tempfile.mkdtemp(dir=folder)), CALLS // 10 if quick else CALLS)
    yield Row("an event: half of a call's begin, wait and end", "us", event * 1e6, target=1.0)
    yield Row("what a rank keeps of a step, beside its ring", "bytes", step_bytes, target=200.0)


def measure(rank: Rank, task: Task) -> Pairs:
    """The task of a rank: steps over recorded groups and over plain ones take turns."""
    group = dist.group.WORLD
    assert group is not None
    world = make_world(task.plan, rank.index, rank.device, group)
    traced = step_of(task.plan, world, rank.trace)
    plain = step_of(task.plan, plain_world(world), UNTRACED)
    times: list[tuple[float, float]] = []
    for number in range(WARM + task.turns):
        calls = (traced, plain) if number % 2 else (plain, traced)
        taken = {id(call): turn(call, world) for call in calls}
        times.append((taken[id(traced)], taken[id(plain)]))
    return paired(times[WARM:])


def plain_world(world: World) -> World:
    """The same ranks and axes over groups that nobody is told of."""
    names = world.devices.mesh_dim_names or ()
    plain: Any = dict.fromkeys(names, "gloo")
    devices = init_device_mesh("cpu", world.devices.shape, mesh_dim_names=names, backend_override=plain)
    return replace(world, group=cast(dist.ProcessGroup, dist.new_group(backend="gloo")), devices=devices)


def step_of(plan: Plan, world: World, trace: Trace) -> Callable[[], float]:
    """A step on samples from the stream, its phases told to a trace."""
    corpus = data.open_corpus(plan.data, data.BYTES)
    model = replace(build(plan, source_of(plan, data.BYTES), world, values=True), trace=trace)
    model.module.train()
    trace.label([part.module for part in model.parts])
    optimiser = make_adamw(model.module, plan.optimiser)
    stream = data.Stream(corpus, plan.data, index=world.data_index, size=world.data_size, device=world.device)
    done = 0

    def step() -> float:
        nonlocal done
        done += 1
        trace.step(done)
        loss = train_step(model, optimiser, next(stream), lr=LR, stop_requests=(False, False)).loss
        trace.phase(Phase.OTHER)
        return loss

    return step


def recorded(folder: Path, calls: int) -> tuple[float, float]:
    """CPU seconds of an event, in steps of 50 calls that are all checked, and bytes that a step adds to the files."""
    recorder = Recorder(TraceFiles(folder, b"r" * 16, 0, 1), {})
    group = recorder.group("0", "dp", [0])
    steps = calls // 50
    begun = 0.0
    for step in range(1, steps + 1):
        if step == 5:  # the sequence is known from here on
            begun = time.thread_time()
        recorder.step(step)
        recorder.phase(Phase.FORWARD)
        for number in range(50):
            call = recorder.enter(group, 0, 1024 + number, torch.float32, -1)
            recorder.waited(call, group, 0, recorder.waits(call))
    seconds = (time.thread_time() - begun) / ((steps - 4) * 50)
    chunks = (folder / file_of(0, "steps")).stat().st_size
    return seconds / 2, chunks / (steps // 64 * 64)
