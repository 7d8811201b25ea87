"""What torch's own layers cost around an operator, as multiples of one operator's overhead.

A model so small that nothing but the interpreter takes time runs plain, and cut by FSDP2 over one rank; what is more is
the layer's. The figures that the planner uses stand beside them as the target: `tangram.hardware.measuring.overheads`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from tangram.hardware.measuring import overheads
from tangram.hardware.measuring.measure import Row
from tangram.hardware.measuring.rates import measure
from tangram.models.building.build import build_on_meta, make_config
from tangram.models.building.initial import initial_tensors
from tangram.models.outlines.costs import costs
from tangram.schema.plan import Plan
from tangram.training.data.samples import Batch
from tangram.training.mesh.world import make_world
from tangram.training.parallel.apply import apply, materialise
from tangram.training.parallel.pipeline import ModelPart
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.step.objectives import next_token_loss
from tangram.training.step.optimiser_step import make_adamw

SEQUENCE = 8
SMALL = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 8, "head_dim": 4}
PLAN = {
    "model": {"preset": "qwen3-2m", "change": {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2}},
    "data": {"sources": [{"path": "stdlib"}], "sequence": SEQUENCE, "global_batch": 1},
    "optimiser": {"lr": 1e-3},
    "run": {"steps": 1},
    "mesh": "dp=1",
    "axes": {"data": ["dp"]},
    "layouts": {"parameters": {"*": "_/dp ..."}},
}


def rows(quick: bool) -> Iterable[Row]:
    """The figures, in calls of one bare operator."""
    turns = 10 if quick else 50
    call = measure("cpu", 1).call_seconds
    found = run_ranks(seconds, turns, world=1, on_event=lambda event: None, device="cpu")[0]
    for figure, ours, used in (
        ("an operator inside a model", found[0], overheads.MODULE_CALLS),
        ("a unit of FSDP2, forward and backward", found[1], overheads.FSDP_UNIT_CALLS),
        ("a parameter in AdamW's step, as a DTensor", found[2], overheads.OPTIMISER_PARAMETER_CALLS),
    ):
        yield Row(figure, "calls", ours=ours / call, peers={"the planner's constant": used})


def seconds(rank: Rank, turns: int) -> tuple[float, float, float]:
    """Of an operator, of a unit, of a parameter; runs in a rank."""
    plan = Plan.model_validate(PLAN)
    torch.set_num_threads(1)  # the interpreter's time is what is measured, not that of threads that wait for each other
    group = dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    config = make_config("qwen3-2m", plan.model.change)
    counted = costs(build_on_meta(config), SEQUENCE)
    plain, cut = ModelPart(build_on_meta(config)), apply(build_on_meta(config), plan, world).parts[0]
    for part in (plain, cut):
        materialise(part.module, rank.device, initial_tensors(config, 1))
    half = torch.arange(SEQUENCE // 2)
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
    batch = Batch(ids, ids, torch.cat([half, half])[None])

    def run(part: ModelPart) -> Callable[[], None]:
        def once() -> None:
            part.module.zero_grad()
            next_token_loss(part, batch).backward()

        return once

    def update() -> None:
        optimiser.step()

    bare, whole = best(run(plain), turns), best(run(cut), turns)
    parameters = len(list(cut.module.parameters()))
    optimiser = make_adamw(cut.module, plan.optimiser)
    step = best(update, turns)
    units = len(counted.blocks) + 1
    return bare / (counted.forward.calls + counted.backward.calls), (whole - bare) / units, step / parameters


def best(call: Callable[[], object], turns: int) -> float:
    """Seconds of the quickest of some calls."""
    call()
    taken: list[float] = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
