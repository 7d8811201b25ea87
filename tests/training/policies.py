"""What two ranks do to show the policies of precision and failures: one start of them serves all tests."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.planner.local.peak_memory import Memory
from tangram.schema.plan import Plan
from tangram.training.data import BYTES, Batch, RankBatches, open_corpus
from tangram.training.mesh.world import World, make_world
from tangram.training.objective.step_guard import Guard
from tangram.training.observe.events import SaveFailed, StepDone, StepSkipped
from tangram.training.parallel.apply import apply
from tangram.training.run.launch import Rank
from tangram.training.run.out_of_memory import explained
from tangram.training.state import build_model
from tangram.training.state.checkpointer import Checkpointer, JobState, load
from tangram.training.step import loop, optimiser_step
from tests.training.small import small_plan, small_tables
from tests.training.strategies import COPIES, TWO_STAGES, Strategy, derived

Found = dict[str, Any]
LITTLE = 64
"""Micro-batches after the first, whose gradients are 2**-9 of its."""


@dataclass(frozen=True)
class Ranks:
    """What a task has to do with."""

    rank: Rank
    folder: Path
    worlds: dict[str, World]

    def world(self, plan: Plan) -> World:
        """Plans of one mesh share the groups."""
        group = dist.group.WORLD
        assert group is not None
        if plan.mesh not in self.worlds:
            self.worlds[plan.mesh] = make_world(plan, self.rank.index, self.rank.device, group)
        return self.worlds[plan.mesh]


class Slope(nn.Module):
    """One weight; the gradient of what comes out is what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def slope_plan(folder: Path, **changes: Any) -> Plan:
    """A plan for a module of one's own over two ranks."""
    tables = small_tables(folder / "text", **changes)
    return Plan.model_validate({**tables, "model": {}})


def small_and_large(rank: int) -> RankBatches:
    """Micro-batches whose inputs are exponents of what they add to the gradient: on rank 0 1, then LITTLE 2**-9."""
    exponents = [0, *[9] * LITTLE] if rank == 0 else [40] * (1 + LITTLE)
    micro = tuple(Batch(torch.tensor([[n]]), torch.zeros(1, 1, dtype=torch.int64), None) for n in exponents)
    return RankBatches(micro, 1, tuple(range(len(micro))))


def slope_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(torch.pow(2.0, -batch.inputs_BS.float())).float()


def local(x: Tensor | None) -> Tensor:
    assert x is not None
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


PRECISIONS: Mapping[str, dict[str, Any]] = {
    "low, computed": {"compute": "bfloat16"},
    "low, reduced": {"compute": "bfloat16", "reduce": "bfloat16"},
    "low, kept": {"compute": "bfloat16", "parameters": "bfloat16"},
    "low, added": {"compute": "bfloat16", "parameters": "bfloat16", "accumulate": "bfloat16"},
    "half, kept": {"compute": "float16", "parameters": "float16"},
    "once, low": {"compute": "bfloat16", "reduce": "bfloat16"},
    "once": {"compute": "bfloat16"},
    "lowest": {"compute": "bfloat16", "parameters": "bfloat16", "masters": "bfloat16", "reduce": "bfloat16"},
}


def added_gradients(ranks: Ranks) -> Found:
    """The gradient that many small ones add up to, and the types of all that is kept, by precision."""
    found: Found = {}
    for name, precision in PRECISIONS.items():
        run = {"reduce_every": "step"} if name.startswith("once") else {}
        plan = slope_plan(ranks.folder, precision=precision, run=run, optimiser={"lr": 1e-3})
        model = Slope()
        parallelized = apply(model, plan, ranks.world(plan))
        optimiser = optimiser_step.make_adamw(model, plan.optimiser, plan.precision.masters)
        loop.backward(parallelized, small_and_large(ranks.rank.index), slope_loss)
        grad, parameter = local(model.weight.grad), model.weight
        found[name] = [str(grad.dtype).removeprefix("torch."), float(grad.flatten()[0])]
        optimiser.step()
        states = {key: x.dtype for key, x in optimiser.state[parameter].items()}
        found[name] += [
            {key: str(x).removeprefix("torch.") for key, x in {"parameter": parameter.dtype, **states}.items()}
        ]
    return found


OVERFLOWS = (3, 4, 9)
"""Steps at which the gradient of rank 1 alone leaves the range of float16; the loss does not."""
SCALE = {"initial": 65536.0, "every": 3}


def scaled_steps(ranks: Ranks) -> Found:
    """The scale after each step and which were skipped, with overflows on one rank; and the weight at the end."""
    plan = slope_plan(ranks.folder, precision={"compute": "float16", "scale": SCALE})
    model = Slope()
    parallelized = apply(model, plan, ranks.world(plan))
    optimiser, guard = optimiser_step.make_adamw(model, plan.optimiser), Guard(plan)
    found: Found = {"scales": [], "skipped": [], "norms": []}
    for step in range(12):
        large = ranks.rank.index == 1 and step in OVERFLOWS
        batch = Batch(torch.tensor([[-8 if large else 10]]), torch.zeros(1, 1, dtype=torch.int64), None)
        given = RankBatches((batch,), 16, (step,))
        before = local(model.weight).clone()
        done = loop.train_step(parallelized, optimiser, given, lr=1e-3, loss_sum=slope_loss, guard=guard)
        assert torch.equal(before, local(model.weight)) == (done.skipped is not None)
        found["scales"].append(guard.scale.value)
        found["norms"].append(done.norm)
        if done.skipped is not None:
            found["skipped"].append(step)
            assert not done.astray
    found["updates"] = float(optimiser.state[model.weight]["step"])
    return found


def trained(
    ranks: Ranks,
    plan: Plan,
    until: int,
    start: Path | None = None,
    plant: Callable[[nn.Module], object] | None = None,
    predicted: Memory | None = None,
) -> tuple[loop.Trained, JobState, list[object]]:
    """Train the small model by the loop of `tangram train`, and save; what came of it, and the events of rank 0."""
    world, events = ranks.world(plan), list[object]()
    model = build_model.build(plan, build_model.source_of(plan, BYTES), world, values=start is None)
    state = JobState(model.module, optimiser_step.make_adamw(model.module, plan.optimiser, plan.precision.masters))
    if start is not None:
        state.progress = load(start, state, plan, world)
    if plant is not None:
        plant(model.module)
    folder = ranks.folder / f"run-{len([*ranks.folder.glob('run-*')])}"
    folder = Path(world.peers.from_first(str(folder)))
    folder.mkdir(exist_ok=True)
    checkpointer = Checkpointer(folder / "checkpoint", plan, world)
    hooks = loop.Hooks(events.append, lambda: state.progress.step + 1 >= until, folder=folder)
    with explained(model.module, state.optimiser, predicted):
        done = loop.train_steps(model, state, open_corpus(plan.data, BYTES), checkpointer, hooks)
    checkpointer.save(state, wait=True)
    saved = [event for event in checkpointer.close() if isinstance(event, SaveFailed)]
    assert not saved, saved
    return done, state, [*events, folder / "checkpoint" / f"step-{state.progress.step:08}"]


HALF = {
    "compute": "float16",
    "parameters": "float16",
    "scale": {"initial": 2.0**24, "every": 2},
}


def resumed_scale(ranks: Ranks) -> Found:
    """The losses and the state of a run in float16, whole and in two parts; the scale is too high at first."""
    plan = small_plan(ranks.folder / "text", precision=HALF, run={"steps": 12})
    whole, right, events = trained(ranks, plan, 12)
    first, _, told = trained(ranks, plan, 9)
    second, state, _ = trained(ranks, plan, 12, start=Path(str(world_word(ranks, plan, told[-1]))))

    def masters(of: JobState) -> list[Tensor]:
        assert of.optimiser is not None
        return [local(of.optimiser.state[p]["master"]) for p in of.model.parameters()]

    return {
        "whole": whole.losses,
        "parts": first.losses + second.losses,
        "progress": [asdict(of.progress) | {"seconds": 0} for of in (right, state)],
        "masters": all(map(torch.equal, masters(right), masters(state))),
        "rounded": all(
            torch.equal(local(p), master.half())
            for p, master in zip(state.model.parameters(), masters(state), strict=True)
        ),
        "skips": [(event.step, event.reason) for event in events if isinstance(event, StepSkipped)],
        "steps": [(event.step, event.skipped) for event in events if isinstance(event, StepDone)],
    }


def world_word(ranks: Ranks, plan: Plan, word: object) -> Any:
    return ranks.world(plan).peers.from_first(str(word))


def poisoned(ranks: Ranks, steps: tuple[int, ...]) -> Callable[[nn.Module], object]:
    """Makes the logits of rank 1 nothing that is a number, in these steps (from 1)."""
    seen = [0]

    def hook(module: nn.Module, _: object, logits: Tensor) -> Tensor:
        seen[0] += module.training
        return logits * float("nan") if seen[0] in steps and module.training else logits

    def plant(model: nn.Module) -> object:
        return cast(Any, model).lm_head.register_forward_hook(hook) if ranks.rank.index == 1 else None

    return plant


def astray_steps(ranks: Ranks) -> Found:
    """What happens to steps whose loss is not a number on one rank."""
    found: Found = {}
    for name, run, steps in (
        ("stop", {}, (2,)),
        ("skip", {"on_nonfinite": "skip"}, (2, 4)),
        ("limit", {"on_nonfinite": "skip", "skips_in_a_row": 2}, (2, 3, 4)),
    ):
        plan = small_plan(ranks.folder / "text", run={"steps": 6, **run}, data={"micro_batch": 4})
        try:
            _, state, events = trained(ranks, plan, 6, plant=poisoned(ranks, steps))
            found[name] = {
                "skips": [
                    (event.step, event.reason, event.samples) for event in events if isinstance(event, StepSkipped)
                ],
                "steps": [event.step for event in events if isinstance(event, StepDone)],
                "progress": (state.progress.step, state.progress.skipped),
                "metric": state.metrics["loss"],
            }
        except FloatingPointError as error:
            found[name] = str(error)
    return found


def _too_large(model: nn.Module) -> None:
    """Its layer 1 overflows in the forward, where that layer lies."""
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.mlp.up_proj.weight"):
            with torch.no_grad():
                local(parameter).fill_(3e38)


def _steep(ranks: Ranks) -> Callable[[nn.Module], None]:
    """The gradient of rank 1 alone is infinite behind what layer 0's attention computes."""

    def after(_: nn.Module, __: Any, x: Tensor) -> Tensor:
        return x + (x.detach() - x).abs().sqrt()

    def plant(model: nn.Module) -> None:
        if ranks.rank.index == 1:
            cast(Any, model).model.layers[0].post_attention_layernorm.register_forward_hook(after)

    return plant


LIES: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {},
    "compiled": {"run": {"steps": 2, "compile": True}},
    "tp": Strategy("tp=2", (), ("tp",), derived("")).tables,
    "pp": Strategy("pp=2", stages=TWO_STAGES, parameters=COPIES).tables,
}


def where_it_begins(ranks: Ranks) -> Found:
    """What is told of a step whose numbers are not finite, by how the model lies and what is wrong."""
    cases = {name: (changes, _too_large) for name, changes in LIES.items()} | {"steep": ({}, _steep(ranks))}
    found: Found = {}
    for name, (changes, plant) in cases.items():
        plan = small_plan(ranks.folder / "text", **{"run": {"steps": 2}, **changes})
        try:
            trained(ranks, plan, 2, plant=plant)
        except FloatingPointError as error:
            found[name] = str(error)
    return found


def too_much(*_: object) -> None:
    """Asks for memory that no machine has: the error is torch's own."""
    torch.empty(1 << 60)


PREDICTED = Memory(parameters=2e6, gradients=2e6, optimiser=4e6, activations=3e6, logits=1e6, gathered=5e5, process=1e8)


def without_memory(ranks: Ranks) -> Found:
    """What is said where memory ends, by what is being done."""
    plan = small_plan(ranks.folder / "text", run={"steps": 2})

    def forward(model: nn.Module) -> object:
        return cast(Any, model).model.layers[1].register_forward_hook(too_much)

    def backward(model: nn.Module) -> object:
        return cast(Any, model).model.layers[1].register_full_backward_pre_hook(too_much)

    found: Found = {}
    for name, plant in (("forward", forward), ("backward", backward)):
        try:
            trained(ranks, plan, 2, plant=plant, predicted=PREDICTED)
        except MemoryError as error:
            found[name] = str(error)
    return found


TASKS: Mapping[str, Callable[[Ranks], Found]] = {
    "added": added_gradients,
    "scaled": scaled_steps,
    "resumed": resumed_scale,
    "astray": astray_steps,
    "begins": where_it_begins,
    "no memory": without_memory,
}


def two_ranks(rank: Rank, folder: Path) -> Mapping[str, Found]:
    """All tasks, each by its name."""
    ranks = Ranks(rank, folder, {})
    return {name: task(ranks) for name, task in TASKS.items()}
