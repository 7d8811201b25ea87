"""The collectives that a step makes, from the plan and the shapes of parameters alone: what a trace is held against.

    DDP          an all-reduce for each bucket of gradients
    FSDP         a gather for each unit (a layer; all outside of layers) and pass, a reduction for each backward
    HSDP         an all-reduce of each reduced shard
    pipelines    a send and a receive for each micro-batch at each border of ranks, as the schedule's table has them;
                 of each gradient of tied weights one more
    norms        one all-reduce over all ranks, with the loss and the wishes to stop
    derived      what programs move over model axes at borders and around functions, in each forward and backward

Nothing is asked of FSDP2 or of the runtime of pipelines, so that what they do can be held against it. What is not
said here is learned from the first steps (`tracing.conformance`): gathers of models whose layers do not surely run
once and in order; derived programs of compiled models, of stages of pipelines and of keys that go round in rings, and
backwards of those with frozen parameters; buffers that steps change; the losses of routers; what ranks exchange to
update what they have together. Where other forwards run that are not counted here, as a teacher's, only what is missing
of a kind is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tangram.layout import intervals
from tangram.models.capturing.reasons import layer_drops
from tangram.models.outlines.outlined import FIELDS, int_field
from tangram.planner.local.peak_memory import is_plain_ddp
from tangram.relayout.collectives import one_collective
from tangram.schema.optimiser import SHARED_UPDATES
from tangram.schema.plan import Plan
from tangram.sharding.derive.problem.states import Routed
from tangram.sharding.derive.transitions import Change, Joint
from tangram.sharding.runtime.program import Program
from tangram.tracing.files.format import OPS
from tangram.tracing.groups import axes_of_ranks
from tangram.tracing.planned import (
    CallKind,
    CallsOfKind,
    DerivedCall,
    DerivedCalls,
    PlannedCall,
    PlannedCalls,
    ProgramCheck,
)
from tangram.training.mesh.buffers import RULES
from tangram.training.mesh.layout_to_torch import cuts_of_one, named_modules, over_model_axes
from tangram.training.mesh.local_parts import local
from tangram.training.mesh.world import World
from tangram.training.parallel.apply import blocks_of
from tangram.training.parallel.data_parallel import in_buckets
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.precision import dtype_of
from tangram.training.parallel.schedule_runtime import times_gathered

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV = (
    OPS.index(op) for op in ("all-reduce", "all-gather", "reduce-scatter", "send", "recv")
)
NORM_NUMBERS = 4
"""Loss, norm, routers' loss, share of dropped choices: float64; behind them the wishes."""
WISHES = 3
"""Of any rank, in each step of a run: to stop for its time, to stop by a signal, to save ahead."""


@dataclass(frozen=True)
class _Unit:
    """Parameters that FSDP gathers together."""

    gathered: PlannedCall
    """Of a rank's part, padded to that of the first rank."""
    trained: int
    """How many numbers of that are trained."""


def due_calls(model: ParallelModel, wishes: int = WISHES, figures: int = 0) -> PlannedCalls:
    """The calls of a step on this rank, of the kinds that the plan says. `wishes`, `figures`: how many are given to,
    and told of, each step."""
    plan, world = model.plan, model.world
    if _is_learned(model):
        return {}
    data = _copies(model) if is_plain_ddp(plan) else _shards(model)
    ends = PlannedCall((NORM_NUMBERS + figures + wishes) * 8, torch.float64, what="loss, gradient norm, wishes to stop")
    all_ranks = _axes(world, range(world.size))
    whole = {CallKind(all_ranks, ALL_REDUCE, late=True): CallsOfKind([ends], alone=False)}
    model_axes = {axis for axis in world.axes.model if world.mesh.axes[axis][0] > 1}
    found = {**data, **_between_stages(model), **whole}
    if plan.task == "kto" and (among := found.get(CallKind(all_ranks, ALL_REDUCE))):
        answers = PlannedCall(4 * 8, torch.float64, what="how far answers of others are ahead")
        found[CallKind(all_ranks, ALL_REDUCE)] = replace(among, calls=[answers, *among.calls])
    if (plan.pipeline is not None and plan.other_forwards) or plan.runs_teacher:
        found = {kind: replace(of, alone=kind.op == REDUCE_SCATTER and of.alone) for kind, of in found.items()}
    return {kind: of for kind, of in found.items() if of.calls and not {*kind.axes.split()} <= model_axes}


def _is_learned(model: ParallelModel) -> bool:
    """Whether the calls of a step do not follow from the plan alone."""
    early = model.plan.optimiser.in_backward and model.plan.optimiser.name in SHARED_UPDATES
    if model.world.size == 1 or early:
        return True
    buffers = any(isinstance(module, tuple(RULES)) for module in model.module.modules())
    return buffers or any(part.routers is not None or part.capacity is not None for part in model.parts)


def due_in_forwards(model: ParallelModel) -> ProgramCheck:
    """What is told, in each forward, what its derived program moves in it and in its backward."""
    plan, world = model.plan, model.world
    derived = None if _is_learned(model) or plan.pipeline or plan.run.compile else model.parts[0].derived
    if derived is None or derived.rings:
        return ProgramCheck()
    whole = all(p.requires_grad for p in model.module.parameters())  # else some gradients are not made
    sizes = {axis: world.mesh.axes[axis][0] for axis in world.axes.model if world.mesh.axes[axis][0] > 1}
    check, known = ProgramCheck(tuple(sizes)), dict[int, tuple[Program, DerivedCalls]]()

    def begins(program: Program) -> None:
        if check.active:
            if id(program) not in known:
                moved = _moved(program, sizes)
                moved = moved if whole else replace(moved, backward=())
                known[id(program)] = program, moved  # held, so that no other has its number
            check.forward(known[id(program)][1])

    derived.begins = begins
    return check


def _moved(program: Program, sizes: Mapping[str, int]) -> DerivedCalls:
    """The calls of a program over axes of these sizes; none of what runs operators one by one, or of routes."""
    graph = program.derived.folded.graph
    # Within one place what a module takes is brought from outside in, what it gives from inside out.
    placed: list[tuple[tuple[int, ...], str, int, Change]] = []
    once = not program.gathered and len({run.module for run in graph.runs}) == len(graph.runs)
    unknown = set[str]()  # the modules that call more than is said here
    for at, border in program.borders.items():
        run = graph.runs[at]
        taken = {(run.takes[leaf], change): leaf for leaf, change in reversed(border.takes.items())}
        given = {(run.gives[leaf], change): leaf for leaf, change in reversed(border.gives.items())}
        # An equal tensor in several places is brought once.
        placed += [((run.first, 1, at, i), run.module, v or 0, change) for (v, change), i in taken.items()]
        placed += [((run.stop, 0, -at, i), run.module, v or 0, change) for (v, change), i in given.items()]
    for at, actions in program.actions.items():
        for key in actions:
            action, path = actions[key], graph.runs[at].module
            call = graph.calls[action.call]
            if action.why or key not in program.sure[at]:
                unknown.add(path)
                continue
            taken = {(call.takes[leaf], change): leaf for leaf, change in reversed(action.takes.items())}
            given = {(call.gives[leaf], change): leaf for leaf, change in reversed(action.gives.items())}
            placed += [((call.first, 2, at, i), path, v or 0, change) for (v, change), i in taken.items()]
            placed += [((call.stop, -1, at, i), path, v or 0, change) for (v, change), i in given.items()]
    forward: list[DerivedCall] = []
    backward: list[DerivedCall] = []
    for _, path, v, change in sorted(placed, key=lambda one: one[0]):
        value = graph.values[v]
        if not value.dtype.is_floating_point or value.dtype.itemsize == 1:  # is sent as another type
            unknown.add(path)
        else:
            there, back = _sent(change, sizes)
            forward += [DerivedCall(axes, op, value.dtype, path) for axes, op in there if path]
            backward += [DerivedCall(axes, op, value.dtype) for axes, op in back if value.differentiable]
    ordered = once and unknown.isdisjoint(one.layer for one in forward)
    return DerivedCalls(tuple(forward), tuple(backward), ordered)


def _sent(change: Change, sizes: Mapping[str, int]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The collectives of a change, by axes and kind, in the forward and in the backward."""
    there: list[tuple[str, int]] = []
    back: list[tuple[str, int]] = []
    for one in change:
        if isinstance(one, Joint):
            for steps, found in ((one.there, there), (one.back or (), back)):
                known = ((" ".join(axis for axis in step.axes if axis in sizes), step.collective) for step in steps)
                found += [(axes, OPS.index(op)) for axes, op in known if axes and op in OPS]
        elif one.axis in sizes and not isinstance(one.source, Routed) and not isinstance(one.target, Routed):
            for op, found in zip(one_collective.way(one.source, one.target), (there, back), strict=True):
                found += [(one.axis, OPS.index(op))] if op in OPS else []
    return there, back


def _axes(world: World, ranks: Sequence[int]) -> str:
    return axes_of_ranks(str(world.mesh), ranks) or "all ranks"


def _axes_of_dim(world: World, dim: str) -> str:
    return _axes(world, dist.get_process_group_ranks(world.devices.get_group(dim)))


def _reductions(plan: Plan) -> int:
    """How often gradients are reduced in a step."""
    return plan.micro_steps if plan.run.reduce_every == "micro-batch" and plan.pipeline is None else 1


def _copies(model: ParallelModel) -> dict[CallKind, CallsOfKind]:
    """Of gradients in buckets, behind each a number for each parameter."""
    plan, world = model.plan, model.world
    if world.data_size == 1:
        return {}
    calls: list[PlannedCall] = []
    for part in model.parts:
        for bucket in in_buckets(reversed([p for p in part.module.parameters() if p.requires_grad])):
            numbers = sum(_numel(one) for one in bucket.parameters) + len(bucket.parameters)
            dtype = dtype_of(plan.gradients)
            calls.append(PlannedCall(numbers * dtype.itemsize, dtype, what="gradients"))
    kind = CallKind(_axes_of_dim(world, "replicate"), ALL_REDUCE)
    return {kind: CallsOfKind(calls * _reductions(plan), ordered=len(model.parts) == 1)}


def _numel(parameter: nn.Parameter) -> int:
    return local(parameter).numel()


def _shards(model: ParallelModel) -> dict[CallKind, CallsOfKind]:
    """Of parameters that FSDP cuts."""
    plan, world = model.plan, model.world
    shards = world.devices["shard"].size()
    if shards == 1 or (plan.precision.compute == "float32" and plan.precision.parameters != "float32"):
        return {}
    if plan.pipeline is None and not runs_in_order(model.module):
        return {}
    reduce = dtype_of(plan.precision.reduce if plan.precision.compute != "float32" else plan.precision.parameters)
    gathers: list[PlannedCall] = []
    reductions: list[PlannedCall] = []
    copies: list[PlannedCall] = []
    ordered = in_turn = alone = plan.pipeline is None
    for at, part in enumerate(model.parts):
        root, *layers = _units(model, part.module)
        forward = [unit.gathered for unit in (root, *layers)]
        # Below the first layer that is trained no backward comes, but for what is gathered ahead of it.
        first = next((at for at, unit in enumerate(layers) if unit.trained), len(layers))
        backward = [unit.gathered for unit in reversed(layers[first:])]
        if plan.pipeline is not None:
            row, stage = plan.actions().rows[world.stage], plan.stages_at(world.stage)[at]
            gathers += forward * times_gathered(row, stage)
        else:
            gathers += _other_gathers(plan, forward)
            again = plan.run.reshard == "after forward"
            each = 1 if plan.run.reshard == "after step" else plan.micro_steps
            gathers += [*forward, *(backward if again else ())] * each
        alone = ordered and first == 0
        # The layer that a backward ends with is reduced after what lies outside, if nothing before it is trained.
        in_turn = ordered and (not root.trained or all(p.requires_grad for p in part.module.parameters()))
        ends = [unit for unit in (*reversed(layers), root) if unit.trained]
        parts = [PlannedCall(u.trained * reduce.itemsize, reduce, u.gathered.layer, "gradients") for u in ends]
        reductions += [one._replace(nbytes=one.nbytes * shards) for one in parts] * _reductions(plan)
        copies += parts * _reductions(plan)
    over = _axes_of_dim(world, "shard")
    found = {
        CallKind(over, ALL_GATHER): CallsOfKind([c for c in gathers if c.nbytes], ordered, alone or not ordered),
        CallKind(over, REDUCE_SCATTER): CallsOfKind(reductions, in_turn),
    }
    if world.devices["replicate"].size() > 1:
        found[CallKind(_axes_of_dim(world, "replicate"), ALL_REDUCE)] = CallsOfKind(copies, in_turn)
    return found


def _other_gathers(plan: Plan, forward: list[PlannedCall]) -> Iterator[PlannedCall]:
    """Of a reference's forwards, and for "kto" of those of others' answers by the reference and by what is trained.

    What lies outside of layers is gathered once for several, and so are layers where they are kept.
    """
    root, *layers = forward
    for rounds in {0: (), 1: (1,), 3: (2, 1)}[plan.other_forwards]:
        yield root
        yield from layers * (rounds * plan.micro_steps if plan.run.reshard == "after forward" else 1)


def runs_in_order(model: nn.Module) -> bool:
    """Whether a forward surely runs each layer once, in the order in which they stand.

    So it is of a model whose configuration has as many layers as there are modules of them, in one list. Layers that
    are run several times (as ALBERT's), in an order of the model's own or at random are gathered as they come.
    """
    config: Any = getattr(model, "config", None)
    if config is None or layer_drops(model):
        return False
    said = int_field(config.get_text_config(), FIELDS["layers"])
    return said is not None and said[1] == len(blocks_of(model))


def _units(model: ParallelModel, part: nn.Module) -> Iterator[_Unit]:
    """What lies outside of the layers, then the layers."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    blocks = {*blocks_of(part)}
    layers = {path: [*module.parameters()] for path, module in named_modules(part) if module in blocks}
    inside = {parameter for some in layers.values() for parameter in some}
    outside = [parameter for parameter in part.parameters() if parameter not in inside]
    compute = dtype_of(model.plan.precision.compute)
    for path, some in (("the root", outside), *layers.items()):
        # In a pipeline FSDP2 gathers a stage before its modules have learned their names.
        layer = path if model.pipeline is None else ""
        shards = {one: _shard_of(model, names[one], one) for one in some}
        types = {one: compute if one.is_floating_point() else one.dtype for one in some}
        alike = len({*types.values()}) < 2  # else bytes are gathered, as of a quantised base
        nbytes = sum(n * types[one].itemsize for one, n in shards.items())
        gathered = PlannedCall(nbytes, compute if alike else torch.uint8, layer, "parameters")
        yield _Unit(gathered, sum(n for one, n in shards.items() if one.requires_grad))


def _shard_of(model: ParallelModel, name: str, parameter: nn.Parameter) -> int:
    """The numbers of a rank's part, padded to the first rank's: what FSDP2 sends."""
    plan, world = model.plan, model.world
    shape = tuple(parameter.shape) if name not in model.plain else tuple(model.plain[name].shape)
    cuts = cuts_of_one(name, shape, plan)
    at = world.mesh.coords(world.index)
    sizes = [intervals.size(over_model_axes(shape, cuts, world.mesh, at, dim)) for dim in range(len(shape))]
    if sizes:
        dim = cuts.shard or 0
        sizes[dim] = -(-sizes[dim] // world.devices["shard"].size())
    return int(torch.Size(sizes).numel())


def _between_stages(model: ParallelModel) -> dict[CallKind, CallsOfKind]:
    """What a rank sends to and receives from others of its pipeline: hidden states on, their gradients back."""
    plan, world = model.plan, model.world
    if plan.pipeline is None:
        return {}
    table, place, dtype = plan.actions(), world.stage, dtype_of(plan.precision.compute)
    even = plan.data.global_batch == plan.data.micro_batch * plan.micro_steps * plan.data_ranks
    even = even and plan.data.packing != "single"  # whose rows are as long as a step needs
    numbers = plan.data.micro_batch * plan.data.sequence * model.pipeline.hidden if even and model.pipeline else -1
    call = PlannedCall(numbers * dtype.itemsize if even else -1, dtype, what="activations or gradients between stages")
    counts: Counter[CallKind] = Counter()
    axes = _axes_of_dim(world, "pipeline")
    tied = {other: [*some.values()] for other, some in model.pipeline.tied().items()} if model.pipeline else {}
    for action in table.rows[place]:
        ahead = action.stage + 1 if action.kind == "F" else action.stage - 1
        behind = action.stage - 1 if action.kind == "F" else action.stage + 1
        for op, other in ((SEND, ahead), (RECV, behind)):
            if action.kind != "W" and 0 <= other < table.stages and table.rank_of[other] != place:
                counts[CallKind(axes, op, table.rank_of[other])] += 1
    found = {kind: CallsOfKind([call] * count) for kind, count in counts.items()}
    for other, some in tied.items():
        gradients = dtype_of(plan.gradients)
        calls = [PlannedCall(_numel(p) * gradients.itemsize, gradients, what="gradients of tied weights") for p in some]
        found |= {CallKind(axes, op, other, late=True): CallsOfKind(calls) for op in (SEND, RECV)}
    return found
