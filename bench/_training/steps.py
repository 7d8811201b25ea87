"""Steps of ours beside steps by hand and beside those of transformers' trainer."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench._styles import megatron
from bench._training.job import fsdp, job
from tangram.hardware.measuring.measure import Pairs, Row, paired
from tangram.models.building.build import build_on_meta
from tangram.models.building.initial import initial_tensors
from tangram.schema.plan import Plan
from tangram.training import data
from tangram.training.mesh.world import World, make_world
from tangram.training.parallel.apply import blocks_of, materialise
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.state.build_model import build, source_of
from tangram.training.step.loop import train_step
from tangram.training.step.optimiser_step import make_adamw
from tangram.training.trials.local_plans import plans_of

TURN = 4
"""Steps in a turn."""
WARM = 2
"""Turns that are not counted."""
LR = 1e-3


@dataclass(frozen=True)
class Task:
    """What the ranks measure."""

    plan: Plan
    peer: str
    turns: int


@dataclass(frozen=True)
class Found:
    """Of one rank."""

    pairs: Pairs
    losses: tuple[float, float]
    """Of the first step, ours and the peer's: they compute the same."""


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures."""
    turns = 3 if quick else 20
    data.prepare(job(folder).data, data.BYTES, lambda event: None)
    two, tensor = fsdp(folder, 2), tensor_plan(folder)
    copies = two.model_copy(update={"layouts": two.layouts.model_copy(update={"parameters": {"*": "..."}})})
    for what, plan, peer, name, target in (
        ("a step of qwen3-2m, one process", fsdp(folder, 1), "fsdp", "plain torch", 1.02),
        ("a step of qwen3-2m, dp=2, FSDP", two, "fsdp", "FSDP2 by hand", 1.02),
        ("a step of qwen3-2m, tp=2", tensor, "tensor", "torch's parallel styles", 1.02),
        ("a step of qwen3-2m, dp=2, copies", copies, "trainer", "transformers' trainer", 1.0),
    ):
        task = Task(plan, peer, turns)
        found = run_ranks(measure, task, world=plan.ranks, on_event=lambda event: None, device="cpu")[0]
        if abs(found.losses[0] - found.losses[1]) > 1e-3 * found.losses[1]:
            raise RuntimeError(f"{what}: ours begins with the loss {found.losses[0]}, the peer with {found.losses[1]}")
        yield Row(what, "ms", found.pairs.ours * 1e3, {name: found.pairs.peer * 1e3})
        yield found.pairs.row(what, target)


def tensor_plan(folder: Path) -> Plan:
    """The planner's for tensor parallelism over two."""
    found = [one.plan for one in plans_of(job(folder), 2).ranked if one.plan is not None and one.plan.axes.tensor]
    return next(plan for plan in found if plan.axes.tensor and plan.ranks == 2 and not plan.pipeline)


def measure(rank: Rank, task: Task) -> Found:
    """The task of a rank."""
    group = dist.group.WORLD
    assert group is not None
    world = make_world(task.plan, rank.index, rank.device, group)
    return PEERS[task.peer](task, world)


def ours(plan: Plan, world: World) -> Callable[[], float]:
    """A step of ours, on samples from the stream; it gives the loss."""
    corpus = data.open_corpus(plan.data, data.BYTES)
    model = build(plan, source_of(plan, data.BYTES), world, values=True)
    model.module.train()
    optimiser = make_adamw(model.module, plan.optimiser)
    stream = data.Stream(corpus, plan.data, index=world.data_index, size=world.data_size, device=world.device)
    return lambda: train_step(model, optimiser, next(stream), lr=LR, stop_requests=(False, False)).loss


def ready(plan: Plan, world: World, steps: int) -> list[data.RankBatches]:
    """The first batches of the stream, made before the clock runs."""
    corpus = data.open_corpus(plan.data, data.BYTES)
    stream = data.Stream(corpus, plan.data, index=world.data_index, size=world.data_size, device=world.device)
    return [next(stream) for _ in range(steps)]


def turn(step: Callable[[], float], world: World) -> float:
    """Seconds of a step, over a few; ranks begin together."""
    dist.barrier(world.group)
    begun = time.perf_counter()
    for _ in range(TURN):
        step()
    return (time.perf_counter() - begun) / TURN


def beside(make: Callable[[Plan, World], Callable[[], float]], task: Task, world: World) -> Found:
    """Take turns with a peer that is a function."""
    mine, theirs = ours(task.plan, world), make(task.plan, world)
    losses = mine(), theirs()
    times: list[tuple[float, float]] = []
    for number in range(WARM + task.turns):
        calls = (mine, theirs) if number % 2 else (theirs, mine)
        taken = {id(call): turn(call, world) for call in calls}
        times.append((taken[id(mine)], taken[id(theirs)]))
    return Found(paired(times[WARM:]), losses)


# ---------------------------------------------------------------- by hand


def by_hand(cut: Callable[[nn.Module, World], None], plan: Plan, world: World) -> Callable[[], float]:
    """A step as a person writes it; the model is cut before or after it has its values, as torch wants it."""
    config = source_of(plan, data.BYTES).config
    model = build_on_meta(config)
    if cut is fully:
        cut(model, world)
    materialise(model, world.device, initial_tensors(config, plan.seed))
    if cut is not fully:
        cut(model, world)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR)
    batches = [found.micro[0] for found in ready(plan, world, TURN)]
    return partial(_step, model, optimiser, batches, world)


def fully(model: nn.Module, world: World) -> None:
    """FSDP2 around each block and the rest."""
    if world.size > 1:
        mesh = init_device_mesh(world.device.type, (world.size,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh)


def in_parallel(model: nn.Module, world: World) -> None:
    """Torch's parallel styles over all ranks."""
    megatron(model, init_device_mesh(world.device.type, (world.size,)))


def _step(model: nn.Module, optimiser: torch.optim.AdamW, batches: list[data.Batch], world: World) -> float:
    batch = batches[0]
    batches.append(batches.pop(0))
    optimiser.zero_grad()
    logits = model(input_ids=batch.inputs_BS, position_ids=batch.positions_BS, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    total = loss.detach()
    dist.all_reduce(total, group=world.group)
    float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return total.item() / world.size


# ---------------------------------------------------------------- transformers' trainer


def beside_trainer(task: Task, world: World) -> Found:
    """The trainer has the loop, so ours takes its turns when a step of it has ended."""
    os.environ |= {"RANK": f"{world.index}", "WORLD_SIZE": f"{world.size}", "LOCAL_RANK": f"{world.index}"}
    os.environ |= {"LOCAL_WORLD_SIZE": f"{world.size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from transformers import Trainer, TrainerCallback, TrainingArguments

    mine = ours(task.plan, world)
    config = source_of(task.plan, data.BYTES).config
    model = build_on_meta(config)
    materialise(model, world.device, initial_tensors(config, task.plan.seed))
    batches = [found.micro[0] for found in ready(task.plan, world, TURN)]
    losses = mine(), _loss(model, batches[0], world)
    times: list[tuple[float, float]] = []

    class Turns(TrainerCallback):
        """Takes the time of its steps, and ours."""

        begun = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                dist.barrier(world.group)
                self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % TURN == 0:
                theirs = (time.perf_counter() - self.begun) / TURN
                times.append((turn(mine, world), theirs))
                dist.barrier(world.group)
                self.begun = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=TURN * (WARM + task.turns), report_to=[], disable_tqdm=True,
            per_device_train_batch_size=task.plan.data.micro_batch, learning_rate=LR, max_grad_norm=1.0,
            save_strategy="no", logging_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=cast(Any, _samples(batches)), callbacks=[Turns()]).train()
    return Found(paired(times[WARM:]), losses)


def _samples(batches: list[data.Batch]) -> list[dict[str, Tensor]]:
    """The rows, as many for each rank as it has steps in a turn; the trainer deals them out."""
    names = ("input_ids", "shift_labels", "labels", "position_ids")
    rows: list[dict[str, Tensor]] = [
        dict(zip(names, (x[i] for x in (b.inputs_BS, b.labels_BS, b.labels_BS, b.positions_BS)), strict=True))
        for b in batches
        if b.positions_BS is not None
        for i in range(len(b.inputs_BS))
    ]
    return rows * dist.get_world_size()


@torch.no_grad()
def _loss(model: nn.Module, batch: data.Batch, world: World) -> float:
    logits = model(input_ids=batch.inputs_BS, position_ids=batch.positions_BS, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
    dist.all_reduce(loss, group=world.group)
    return loss.item() / world.size


PEERS: Mapping[str, Callable[[Task, World], Found]] = {
    "fsdp": partial(beside, partial(by_hand, fully)),
    "tensor": partial(beside, partial(by_hand, in_parallel)),
    "trainer": beside_trainer,
}
