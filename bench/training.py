"""The training loop beside one written by hand: the same model, batches, optimiser and FSDP2, without Tangram.

The peer gets its batches ready made, calls `fully_shard`, torch's AdamW and torch's `clip_grad_norm_`, and reads its
loss every step, as a person would. Ours reads packed samples from the stream, sums by counted tokens, and asks whether
to stop. Both take turns of a few steps in the same processes. On one process the peer is the plain model without FSDP.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tangram.hardware.measure import Row
from tangram.models.build import build_on_meta, initial_tensors
from tangram.planner.plan import Plan
from tangram.training import data
from tangram.training.apply import blocks_of, materialise
from tangram.training.building import build, source_of
from tangram.training.launch import Rank, run_ranks
from tangram.training.loop import train_step
from tangram.training.optimise import make_adamw
from tangram.training.world import World, make_world

STEPS = 4  # in a turn


@dataclass(frozen=True)
class Task:
    """What the ranks measure."""

    plan: Plan
    turns: int


def rows(quick: bool) -> Iterable[Row]:
    """The figures; `quick` takes fewer turns and one size."""
    turns = 3 if quick else 9
    presets = ("qwen3-2m",) if quick else ("qwen3-2m", "qwen3-1m")
    with tempfile.TemporaryDirectory() as folder:
        for preset in presets:
            for ranks in (1, 2):
                plan = _plan(preset, ranks, Path(folder))
                data.prepare(plan.data, data.BYTES, lambda event: None)
                ours, peer = run_ranks(
                    measure, Task(plan, turns), world=ranks, on_event=lambda event: None, device="cpu"
                )[0]
                what = "FSDP2 by hand" if ranks > 1 else "plain torch"
                figure = f"a step of {preset} on {ranks} process{'es' if ranks > 1 else ''}"
                yield Row(figure, "ms", ours * 1e3, {what: peer * 1e3}, target_ratio=1.05)


def _plan(preset: str, ranks: int, folder: Path) -> Plan:
    return Plan.model_validate(
        {
            "version": 2,
            "mesh": f"dp={ranks}",
            "axes": {"data": ["dp"]},
            "layouts": {"parameters": {"*": "_/dp ..."}},
            "model": {"preset": preset},
            "data": {
                "sources": [{"path": "stdlib", "pattern": "*.py"}],
                "cache": str(folder),
                "sequence": 128,
                "global_batch": 8,
                "micro_batch": 8 // ranks,
            },
            "optimiser": {"lr": 1e-3},
            "run": {"steps": 1, "device": "cpu"},
        }
    )


def measure(rank: Rank, task: Task) -> tuple[float, float]:
    """On one rank: seconds of a step of ours and of the peer's, medians over the turns."""
    plan, group = task.plan, dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    calls = {"ours": _ours(plan, world), "peer": _peer(plan, world)}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(task.turns + 1):  # the first warms up
        for name in sorted(calls, reverse=turn % 2 == 0):
            dist.barrier(group)
            begun = time.perf_counter()
            for _ in range(STEPS):
                calls[name]()
            samples[name].append((time.perf_counter() - begun) / STEPS)
    return statistics.median(samples["ours"][1:]), statistics.median(samples["peer"][1:])


def _ours(plan: Plan, world: World) -> Callable[[], object]:
    corpus = data.open_corpus(plan.data, data.BYTES)
    model = build(plan, source_of(plan, data.BYTES), world, values=True)
    optimiser = make_adamw(model, plan.optimiser)
    stream = data.Stream(corpus, plan.data, index=world.data_index, size=world.data_size, device=world.device)
    return lambda: train_step(model, optimiser, next(stream), plan, world, lr=1e-3, asks=(False, False))


def _peer(plan: Plan, world: World) -> Callable[[], object]:
    config = source_of(plan, data.BYTES).config
    model = build_on_meta(config)
    if world.size > 1:
        mesh = init_device_mesh(world.device.type, (world.size,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh)
    materialise(model, world.device, initial_tensors(config, plan.seed))
    corpus = data.open_corpus(plan.data, data.BYTES)
    step = partial(data.step_batches, corpus, plan.data, seed=0, index=world.data_index, size=world.data_size)
    batches = [
        step(first_sample=8 * i, micro_steps=plan.micro_steps, device=world.device).micro[0] for i in range(STEPS)
    ]
    return partial(_by_hand, model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches, world)


def _by_hand(model: nn.Module, optimiser: torch.optim.AdamW, batches: list[data.Batch], world: World) -> float:
    batch = batches[0]
    batches.append(batches.pop(0))
    model.train()
    optimiser.zero_grad()
    logits = model(input_ids=batch.inputs_BS, position_ids=batch.positions_BS, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    total = loss.detach()
    dist.all_reduce(total, group=world.group)
    return total.item() + (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
