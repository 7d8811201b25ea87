"""What our loop takes beyond a step on ready batches, of a model so small that it shows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from bench._training.job import fsdp
from tangram.hardware.measuring.measure import Pairs, Row, paired
from tangram.schema.plan import Plan
from tangram.training import data
from tangram.training.mesh.world import make_world
from tangram.training.observe.boards import Boards
from tangram.training.observe.events import Record
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.state.build_model import build, source_of
from tangram.training.state.checkpointer import Checkpointer, JobState
from tangram.training.step import loop
from tangram.training.step.optimiser_step import make_adamw

TURN, WARM = 25, 2
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What the rank measures."""

    plan: Plan
    turns: int
    folder: Path


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures: the parent takes the events in as `tangram train` does."""
    plan = fsdp(folder, 1, model={"preset": "qwen3-2m", "change": SMALL})
    data.prepare(plan.data, data.BYTES, lambda event: None)
    record, board = Record(), Boards(folder, plan)

    def everybody(event: object) -> None:
        record(event)
        board(event)

    task = Task(plan, 5 if quick else 30, folder)
    try:
        found = run_ranks(measure, task, world=1, on_event=everybody, device="cpu")[0]
    finally:
        board.close()
    yield Row("a step of a tiny model in our loop", "ms", found.ours * 1e3, {"on ready batches": found.peer * 1e3})
    yield Row("what the loop adds to a step: data, events, logs", "ms", (found.ours - found.peer) * 1e3, target=1.0)


def measure(rank: Rank, task: Task) -> Pairs:
    """The task of the rank: the loop, and the same steps without what is around them."""
    plan, group = task.plan, dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    corpus = data.open_corpus(plan.data, data.BYTES)
    model = build(plan, source_of(plan, data.BYTES), world, values=True)
    optimiser = make_adamw(model.module, plan.optimiser)
    state = JobState(model.module, optimiser)
    checkpointer = Checkpointer(task.folder / "checkpoint", plan, world)
    hooks = loop.Hooks(rank.emit, rank.stop.requested)
    stream = data.Stream(corpus, plan.data, device=world.device)
    ready = itertools.cycle([next(stream) for _ in range(TURN)])

    def in_loop(turn: int) -> float:
        run = plan.run.model_copy(update={"steps": (turn + 1) * TURN})
        begun = time.perf_counter()
        loop.train_steps(replace(model, plan=plan.model_copy(update={"run": run})), state, corpus, checkpointer, hooks)
        return (time.perf_counter() - begun) / TURN

    def alone() -> float:
        begun = time.perf_counter()
        for _ in range(TURN):
            loop.train_step(model, optimiser, next(ready), lr=1e-3, stop_requests=(False, False))
        return (time.perf_counter() - begun) / TURN

    model.module.train()
    times = [(in_loop(turn), alone()) for turn in range(WARM + task.turns)]
    checkpointer.close()
    return paired(times[WARM:])
