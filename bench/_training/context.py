"""Ways to attend over a context axis of two: steps and memory beside the model's own attention, all keys gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from bench._training.job import tables
from bench._training.steps import WARM, ours, turn
from tangram.hardware.measuring.measure import Pairs, Row, paired
from tangram.schema.plan import Plan
from tangram.training import data
from tangram.training.mesh.world import make_world
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.state.build_model import source_of
from tangram.training.trials.dry_run import counted_alone

SEQUENCE = 2048
WAYS: Mapping[str, Mapping[str, str]] = {
    "by tokens": {},
    "by tokens, balanced": {"order": "balanced"},
    "in a ring": {"keys": "ring"},
    "in a ring, balanced": {"keys": "ring", "order": "balanced"},
}
SEQUENCES_CUT = "{model.embed_tokens,model.layers.*,model.norm}"


@dataclass(frozen=True)
class Task:
    """What the ranks measure."""

    plan: Plan
    peer: Plan
    turns: int


def rows(quick: bool, folder: Path) -> Iterable[Row]:
    """The figures."""
    peer = planned(folder, "model", {})
    data.prepare(peer.data, data.BYTES, lambda event: None)
    theirs = memory(peer)
    for name, context in WAYS.items():
        plan = planned(folder, "tokens", context)
        found = run_ranks(measure, Task(plan, peer, 2 if quick else 4), world=2, on_event=lambda event: None)[0]
        what = f"a step of {SEQUENCE} tokens, cp=2, {name}"
        yield Row(what, "ms", found.ours * 1e3, {"the model's attention": found.peer * 1e3})
        yield found.row(what, 1.0)
        yield Row(f"activations, cp=2, {name}", "MiB", memory(plan), {"the model's attention": theirs})


def planned(folder: Path, attention: str, context: Mapping[str, str]) -> Plan:
    """One sample of a long sequence over two ranks."""
    change = {"max_position_embeddings": SEQUENCE}
    found = tables(folder, model={"preset": "qwen3-2m", "change": change})
    found["data"] |= {"sequence": SEQUENCE, "global_batch": 1, "micro_batch": 1}
    found["run"] |= {"attention": attention}
    layouts = {"parameters": {"*": "..."}, "marks": {SEQUENCES_CUT: "b s/cp h"}}
    axes = {"data": ["one"], "context": ["cp"]}
    return Plan.model_validate({**found, "mesh": "one=1 cp=2", "axes": axes, "layouts": layouts, "context": context})


def memory(plan: Plan) -> float:
    """MiB that the last rank's backward keeps, at the peak of a step, as a dry run counts it."""
    last = counted_alone(plan, source_of(plan, data.BYTES), plan.ranks - 1)[-1]
    return last.memory["activations"] / 2**20


def measure(rank: Rank, task: Task) -> Pairs:
    """The task of a rank: turns with each plan."""
    group = dist.group.WORLD
    assert group is not None
    world = make_world(task.plan, rank.index, rank.device, group)
    mine, theirs = (ours(plan, world) for plan in (task.plan, task.peer))
    times: list[tuple[float, float]] = []
    for number in range(WARM + task.turns):
        pair = {step: turn(step, world) for step in ((mine, theirs) if number % 2 else (theirs, mine))}
        times.append((pair[mine], pair[theirs]))
    return paired(times[WARM:])
