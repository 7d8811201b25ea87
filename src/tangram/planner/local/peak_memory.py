"""The memory of a rank, by the moments of a step.

What is there when most is: at the loss, in the backward of one of the layers, or at the update. Of a single micro-batch
no gradient is there beside all of its activations. In bytes, with P the rank's numbers of parameters (by the plan's own
layouts, so uneven cuts count):

    parameters  4 P        gradients  4 P (trained)        optimiser  8 P (trained), all by the types of [precision]:
                2 P where they are kept in 16 bits, and then 4 P more of the optimiser's for the masters; of a base in
                NF4 0.516 P, in 8 bits P (`models.lora.bases`)
    activations what the backward of a micro-batch keeps; of layers in run.recompute only their input, and of the one
                that is recomputed all
    logits      the gradient of a micro-batch's, in their own type, and what of them is in float32 at a time
    gathered    what FSDP2 holds whole: what lies outside the layers, two layers, and one block's gradient; all of them
                where run.reshard keeps parameters whole, and all gradients where they are reduced once a step; of a
                pipeline all of its stages and their gradients. Of full replicas there is no FSDP2, but gradients are
                there twice where they are summed after each of several micro-batches
                and of a quantised base the weight of the largest layer, while it is made
    process     a constant (`hardware.measuring.overheads`)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import NamedTuple

from tangram.hardware.measuring import overheads
from tangram.kernels.cross_entropy import chunk_bytes
from tangram.layout import Layout, Mesh, region
from tangram.models.lora import nf4
from tangram.models.lora.bases import BASES
from tangram.models.outlines.costs import OUTSIDE, ModelCosts, Parameter, Part
from tangram.planner.local.stage_shares import Share, kept_bytes, recomputed
from tangram.planner.space.optimisers_and_offload import OPTIMISERS, optimisers_of
from tangram.schema.optimiser import RuleName
from tangram.schema.plan import Plan

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODED_BYTES = OPTIMISERS[optimisers_of("adamw-8bit")[0]].nbytes


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most, at the moment of a step at which that is."""

    parameters: float
    gradients: float
    optimiser: float
    activations: float
    logits: float
    gathered: float
    process: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(asdict(self).values())


def largest_parts(plan: Plan, parameters: tuple[Parameter, ...]) -> Mapping[str, int]:
    """How many numbers of each parameter the rank with the largest part of it holds."""
    mesh = Mesh.parse(plan.mesh)
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    held: dict[str, int] = {}
    for parameter in parameters:
        text = plan.layout_of(parameter.name)
        key = (text, parameter.shape)
        if key not in known:
            layout = Layout.parse(text).bind(parameter.shape, **plan.layouts.sizes)
            known[key] = region(layout, mesh, mesh.rank(fullest([layout]))).size
        held[parameter.name] = known[key]
    return held


def fullest(layouts: Iterable[Layout]) -> dict[str, int]:
    """Where on axes of listed sizes the rank stands that has most; on other axes that is the first, as maps cut."""
    cuts = [cut for layout in layouts for dim in layout.dims for node in dim.nodes for cut in node.cuts]
    listed = {cut.axis: cut.args for cut in cuts if cut.map == "sizes" and not isinstance(cut.args, str)}
    return {axis: sizes.index(max(sizes)) for axis, sizes in listed.items()}


def is_plain_ddp(plan: Plan) -> bool:
    """Whether DP ranks have all parameters whole, and nothing is rounded: then there is no FSDP2 around them.

    Of several ranks the gradients are summed as they are.
    """
    precision = plan.precision
    types = {precision.parameters, precision.compute, precision.reduce, plan.gradients}
    return plan.shard_ranks == 1 and len(types) == 1


def unit_numbers(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> dict[str, float]:
    """The numbers of each FSDP unit as it is gathered: whole but for what the tensor axis cuts."""
    shards = plan.shard_ranks
    units: dict[str, float] = {OUTSIDE: 0.0}
    for one in parameters:
        share = _coded_bytes(plan) / BYTES[plan.precision.compute] if one.quantised else 1
        gathered = min(one.size, held[one.name] * shards) * share
        units[one.block] = units.get(one.block, 0.0) + gathered
    return units


def memory_of(plan: Plan, stage: Share, held: Mapping[str, int], kind: str) -> Memory:
    """Of a rank with this share, on a kind of device."""
    parameters, trained = stage.parameters, [one for one in stage.parameters if one.trained]
    reference = trained if plan.has_reference else []
    kept = () if plan.run.stream_layers else parameters  # those lie in files
    gathered = _gathered(plan, parameters, held)
    moments = _moments(plan, stage, held, _logits(plan, stage.local, kind), *_made(plan, parameters, held))
    most = max(moments, key=lambda one: sum(one[:4]) + gathered * one.within)
    return Memory(
        parameters=sum(held[one.name] * _bytes_of(plan, one) for one in [*kept, *reference]),
        gradients=most.gradients,
        optimiser=sum(_states_bytes(plan, one, held[one.name]) for one in trained if one in kept),
        activations=most.activations,
        logits=most.logits,
        gathered=gathered * most.within + most.made,
        process=overheads.PROCESS_BYTES,
    )


class _Moment(NamedTuple):
    """What is there in bytes at a moment of a step, beside what is always there."""

    gradients: float
    activations: float
    logits: float = 0.0
    made: float = 0.0
    within: bool = True
    """Whether it is in a forward or a backward: at the update ranks have their parts alone."""


def _moments(
    plan: Plan, stage: Share, held: Mapping[str, int], logits: float, made: float, making: float
) -> Iterator[_Moment]:
    """The loss; each layer's backward, which begins with all that it keeps and ends with its gradients; the update; the
    loss of held-out samples.

    Of a pipeline all at once, as its micro-batches are not in step. Of updates in the backward the gradients of one
    parameter, of FSDP those of a layer, and what ranks add up later.
    """
    local, lent = stage.local, _lent(plan, stage)
    late, early = _gradients(plan, stage, held)
    every = float(late.total())
    rounding = _rounding(plan, stage, held)
    updates = rounding if early else 0.0
    if plan.pipeline is not None:
        again = [part.kept_bytes for part in local.blocks if recomputed(plan, part.name)]
        yield _Moment(every, stage.activations + max(again, default=0.0), logits, made + making)
        return
    before = every if plan.micro_steps > 1 else 0.0  # of the micro-batches before
    yield _Moment(before, stage.activations, logits, lent.head)
    there, left = before or late[OUTSIDE], sum(kept_bytes(plan, part) for part in local.blocks)
    if early:
        yield _Moment(there + early[OUTSIDE], stage.activations, local.logits_bytes, updates + lent.head)
    made += lent.layers
    for part in reversed(local.blocks):
        left -= kept_bytes(plan, part)
        yield _Moment(there, left + part.kept_bytes + part.input_bytes, 0.0, made + making)
        flowing = _flowing(plan, local, part)
        yield _Moment(there, left + part.kept_bytes + flowing, 0.0, made)
        if early:  # of a product whose inputs are the widest, the gradients of its weight and of one of them
            beside = part.input_bytes if plan.shard_ranks > 1 else part.kept_bytes + (flowing + part.input_bytes) / 2
            yield _Moment(there + early[part.name], left + beside, 0.0, made + updates)
        there = before or there + late[part.name]
        yield _Moment(there, left + part.input_bytes, 0.0, made + making)
    yield _Moment(every + max(early.values(), default=0.0), 0.0, 0.0, rounding, within=False)
    if plan.data.measured:  # whose rows are as long as the plan says, where those of steps are not
        yield _Moment(0.0, 0.0, logits * plan.data.sequence / local.sequence)


def _gradients(plan: Plan, stage: Share, held: Mapping[str, int]) -> tuple[Counter[str], Counter[str]]:
    """Bytes by layer of those that stay until the update, and of those that updates in the backward have at a time."""
    late: Counter[str] = Counter()
    early: Counter[str] = Counter()
    for one in stage.parameters:
        if one.trained:
            last = _comes_last(one, stage.parameters)
            block, own = one.block or ("last" if last else OUTSIDE), BYTES[plan.gradients] * held[one.name]
            if not plan.updates_early(one.name) or _is_tied(one, stage.parameters):  # made by the head, then added to
                late[block] += own
            else:
                early[block] = early[block] + own if plan.shard_ranks > 1 else max(early[block], own)
    return late, early


class _Lent(NamedTuple):
    """Bytes of streamed parameters that are there: of the head, and of two layers."""

    head: float = 0.0
    layers: float = 0.0


def _lent(plan: Plan, stage: Share) -> _Lent:
    if not plan.run.stream_layers or plan.shard_ranks > 1:  # of FSDP they are what is gathered
        return _Lent()
    of_block: Counter[str] = Counter()
    for one in stage.parameters:
        of_block[one.block] += one.size * BYTES[plan.precision.parameters]
    outside = [one for one in stage.parameters if not one.block and not _comes_last(one, stage.parameters)]
    head = float(sum(one.size for one in outside) * BYTES[plan.precision.parameters])
    return _Lent(head, float(sum(sorted(n for block, n in of_block.items() if block != OUTSIDE)[-2:])))


def _rounding(plan: Plan, stage: Share, held: Mapping[str, int]) -> float:
    """Of an update that is rounded stochastically, what the largest parameter takes beside it."""
    if plan.optimiser.rounding != "stochastic":
        return 0.0
    rule, trained = plan.optimiser.rule_of, [one for one in stage.parameters if one.trained]
    bytes_of = (ROUNDED_BYTES[rule(x.name, x.shape, in_layer=x.block != OUTSIDE)] * held[x.name] for x in trained)
    return max(bytes_of, default=0.0)


def _flowing(plan: Plan, local: ModelCosts, part: Part) -> float:
    """Of a layer's backward, the gradients of both inputs of a product of what is widest in it, and of its result."""
    own = (one.shape[-2:] for one in local.parameters if one.block == part.name and len(one.shape) > 1)
    widest = max(map(max, own), default=0)
    return 2.0 * BYTES[plan.precision.compute] * local.micro_batch * local.sequence * widest + part.input_bytes


def _is_tied(one: Parameter, parameters: tuple[Parameter, ...]) -> bool:
    """Whether it is an embedding that is the head, too."""
    first = next((n for n, other in enumerate(parameters) if other.block), 0)
    return len(one.shape) > 1 and one in parameters[:first] and not _comes_last(one, parameters)


def _comes_last(one: Parameter, parameters: tuple[Parameter, ...]) -> bool:
    """Whether a parameter outside of the blocks has its gradient at the end of the backward: an embedding that is no
    head, before the blocks where another matrix is behind them."""
    first = next((n for n, other in enumerate(parameters) if other.block), 0)
    heads = [other for other in parameters[first:] if not other.block and len(other.shape) > 1]
    return bool(heads) and one in parameters[:first]


def _bytes_of(plan: Plan, one: Parameter) -> float:
    """For each number that a rank keeps of a parameter."""
    return _coded_bytes(plan) if one.quantised else BYTES[plan.precision.parameters]


def _coded_bytes(plan: Plan) -> float:
    """The same of a quantised base."""
    assert plan.lora is not None  # beside which it is
    return BASES[plan.lora.base].nbytes


def _states_bytes(plan: Plan, one: Parameter, held: int) -> float:
    """Of the states of a parameter of which a rank holds so many numbers, and where it has one the master."""
    master = BYTES[plan.precision.masters]
    rule = plan.optimiser.rule_of(one.name, one.shape, in_layer=one.block != OUTSIDE)
    states = STATES[rule](plan, one, held) * (1 if rule == "adamw-8bit" else master)
    return states + (0 if own_masters(plan) else master * held)


def _rows_and_columns(plan: Plan, one: Parameter, held: int) -> float:
    """Numbers of Adafactor: a row and a column of the part of each matrix that a rank has; of a vector all."""
    if len(one.shape) < 2:
        return held
    mesh, layout = Mesh.parse(plan.mesh), Layout.parse(plan.layout_of(one.name)).bind(one.shape, **plan.layouts.sizes)
    shape = region(layout, mesh, mesh.rank(fullest([layout]))).local_shape or one.shape
    return prod(shape) / max(1, shape[-1]) + prod(shape) / max(1, shape[-2])


STATES: Mapping[RuleName, Callable[[Plan, Parameter, int], float]] = {
    "adamw": lambda plan, one, held: 2.0 * held,
    "adamw-8bit": lambda plan, one, held: CODED_BYTES * held,
    "sgd": lambda plan, one, held: 0.0,
    "sgd-momentum": lambda plan, one, held: 1.0 * held,
    "adafactor": _rows_and_columns,
    "muon": lambda plan, one, held: 1.0 * held,
}
"""Numbers of the type of masters that a rank keeps of a parameter; of codes bytes."""
ROUNDED_BYTES: Mapping[RuleName, float] = {
    "adamw": 20.0, "adamw-8bit": 10.25, "sgd": 8.0, "sgd-momentum": 12.0, "adafactor": 8.0, "muon": 20.0,
}  # fmt: skip
"""For each number, while it and its states are in float32 to be rounded stochastically: counted on a CPU."""


def _made(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> tuple[float, float]:
    """Of a quantised base, what the largest layer's weight takes, the part that TP leaves; and before that, while it is
    made, some of it in float32 two times."""
    shards = plan.shard_ranks
    largest = max((min(one.size, held[one.name] * shards) for one in parameters if one.quantised), default=0)
    types = {plan.precision.parameters, plan.precision.compute}
    return float(sum(BYTES[name] for name in types) * largest), 8.0 * min(largest, nf4.AT_ONCE)


def _logits(plan: Plan, local: ModelCosts, kind: str) -> float:
    """The gradient, and the rows that the loss takes at a time on this kind of device."""
    as_float32 = local.logits_bytes * 4 / BYTES[plan.precision.compute]
    return local.logits_bytes + min(as_float32, chunk_bytes(kind))


def _gathered(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> float:
    """What FSDP2 holds whole beside a rank's parts, in bytes; of full replicas, what their sums take."""
    if is_plain_ddp(plan):
        return _of_sums(plan, parameters, held)
    units = unit_numbers(plan, parameters, held)
    block = max((size for name, size in units.items() if name != OUTSIDE), default=0.0)
    whole = units[OUTSIDE] + 2 * block
    if plan.pipeline is not None or plan.run.reshard != "after forward":
        whole = sum(units.values())
    found = BYTES[plan.precision.compute] * whole + BYTES[plan.precision.reduce] * block
    if plan.adds_before_reducing:
        trained = tuple(one for one in parameters if one.trained)
        found += BYTES[plan.accumulates] * sum(unit_numbers(plan, trained, held).values())
    return found


def _of_sums(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> float:
    """Bytes beside the gradients while copies' are summed."""
    if plan.data_ranks == 1:
        return 0.0
    gradients = float(BYTES[plan.gradients] * sum(held[one.name] for one in parameters if one.trained))
    if plan.pipeline is not None:  # sums begin when all are there; else gradients lie in buckets from the start
        return min(gradients, overheads.COPY_BUCKET_BYTES)
    return 0.0 if plan.adds_before_reducing or plan.micro_steps == 1 else gradients


def own_masters(plan: Plan) -> bool:
    """Whether the parameters are what is updated."""
    return plan.precision.parameters == plan.precision.masters
