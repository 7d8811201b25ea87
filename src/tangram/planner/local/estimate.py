"""What a plan needs: memory of the rank that needs most, and seconds of a step. A simple first estimate.

Memory of a rank, in bytes, with P its numbers of parameters (by the plan's own layouts, so uneven cuts count):

    parameters  4 P        gradients  4 P (trained)        optimiser  8 P (trained), all by the types of [precision]:
                2 P where they are kept in 16 bits, and then 4 P more of the optimiser's for the masters; of a base in
                NF4 0.516 P (`models.lora.nf4`)
    activations what the backward of a micro-batch keeps; of layers in run.recompute only their input, and of the one
                that is recomputed all
    logits      the gradient of a micro-batch's, in their own type, and what of them is in float32 at a time
    gathered    what FSDP2 holds whole: what lies outside the layers, two layers, and one block's gradient; all of them
                where run.reshard keeps parameters whole, and all gradients where they are reduced once a step; of a
                pipeline all of its stages and their gradients. Of full replicas there is no FSDP2, but gradients are
                there twice where they are summed after each of several micro-batches
                and of a base in NF4 the weight of the largest layer, while it is made
    process     a constant (`hardware.measuring.overheads`)

Seconds of a step, with M micro-batches, each operator at the rate of its size, but never quicker than a call can be:

    matmuls    M x matmuls, forward, backward, and forward again where recomputed
    moves       M x all other operators, by the bytes that they move; gradients of each micro-batch but the first are
                added to those that are there
    communication  M x (gather each unit twice, reduce its gradient: over gloo as an all-reduce; all-reduce over copies;
                over TP ranks one all-reduce for each module that is cut), and one number at the end of a step;
                gathers and reductions are fewer where run.reshard and run.reduce_every say so
    optimiser   AdamW's passes through what the rank holds, and what each parameter costs to handle

Of a pipeline each rank is counted (`planner.local.stage_shares`): the memory of the one that needs most, the seconds of
the slowest with the time in which it waits; ranks that share a core wait while others use it, so that costs nothing
until all of them wait. Its stages are whole from their first micro-batch to their last. Of tensor parallelism,
activations and matmuls are counted on the model that one TP rank has. Nothing overlaps, and ranks wait for nobody
else. Recomputation inside a block is not seen, only that of layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from tangram.hardware.measuring import overheads
from tangram.hardware.measuring.rates import Rates
from tangram.kernels.cross_entropy import chunk_bytes
from tangram.layout import Layout, Mesh, region
from tangram.models.lora import nf4
from tangram.models.outlines.costs import OUTSIDE, ModelCosts, Parameter, Work
from tangram.planner.local.derived_layouts import CollectiveTraffic
from tangram.planner.local.stage_shares import Share, recomputed, shares
from tangram.planner.space.optimisers_and_offload import OPTIMISERS, optimisers_of
from tangram.schema.plan import Plan

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODED_BYTES = OPTIMISERS[optimisers_of("adamw-8bit")[0]].nbytes
VERSION = 2
"""Of what is predicted: runs that another version predicted are not learned from. Raise it with every change here."""
SPLIT_BACKWARD = 0.2
"""What a backward in two parts takes beyond one in one, as its graph is gone through twice. Chosen, with plans that ran
on one to eight processes of a CPU before its author; `tangram bench planner --only here` says how well it does."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

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


@dataclass(frozen=True)
class Seconds:
    """Of one step."""

    products: float
    moves: float
    communication: float
    optimiser: float

    @property
    def total(self) -> float:
        """All of it; nothing overlaps."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Estimate:
    """What a plan is predicted to need."""

    memory: Memory
    seconds: Seconds
    tokens: int
    """In a step, over all ranks."""

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds.total

    def in_words(self) -> list[tuple[str, str]]:
        """What, and how much, for a person."""
        memory = ", ".join(f"{name} {megabytes(size)}" for name, size in asdict(self.memory).items() if size >= 5e4)
        seconds = ", ".join(f"{name} {1e3 * one:.1f}" for name, one in asdict(self.seconds).items())
        return [
            ("memory of a rank", f"{megabytes(self.memory.total)} ({memory})"),
            ("step", f"{1e3 * self.seconds.total:.0f} ms ({seconds})"),
            ("tokens per second", f"{self.tokens_per_second:,.0f}"),
        ]

    def as_json(self) -> dict[str, object]:
        """The parts and their sums; bytes and seconds."""
        return {
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "tokens_per_s": self.tokens_per_second,
            "step_s": self.seconds.total,
            "memory_mb": self.memory.total / 1e6,
        }


def megabytes(size: float) -> str:
    """A size for a person."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def estimate(
    plan: Plan, whole: ModelCosts, local: ModelCosts, rates: Rates, moves: Sequence[CollectiveTraffic] = ()
) -> Estimate:
    """What the plan needs on this machine.

    `whole`: the costs of the whole model, of which only the parameters are used. `local`: those of the model that one
    TP rank computes, for a micro-batch of the plan (the same where no axis is tensor's). `moves`: what moves over
    model axes for one sample, as derived.
    """
    held = largest_parts(plan, whole.parameters)
    stages = shares(plan, whole.parameters, local)
    return Estimate(
        max((_memory(plan, stage, held, rates.device) for stage in stages), key=lambda memory: memory.total),
        max((_seconds(plan, stage, held, rates, moves) for stage in stages), key=lambda seconds: seconds.total),
        plan.data.global_batch * plan.rows_per_sample * plan.data.sequence,
    )


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


def shard_size(plan: Plan) -> int:
    """Over how many ranks FSDP cuts parameters."""
    cutting = {axis for text in plan.layouts.parameters.values() for axis in Layout.parse(text).axes}
    return prod(Mesh.parse(plan.mesh).axis(axis)[0] for axis in plan.axes.data if axis in cutting)


def is_plain_ddp(plan: Plan) -> bool:
    """Whether DP ranks have all parameters whole, and nothing is rounded: then there is no FSDP2 around them.

    Of several ranks the gradients are summed as they are.
    """
    precision = plan.precision
    types = {precision.parameters, precision.compute, precision.reduce, plan.gradients}
    return shard_size(plan) == 1 and len(types) == 1


def _unit_numbers(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> dict[str, float]:
    """The numbers of each FSDP unit as it is gathered: whole but for what the tensor axis cuts."""
    shards = shard_size(plan)
    units: dict[str, float] = {OUTSIDE: 0.0}
    for one in parameters:
        share = nf4.BYTES / BYTES[plan.precision.compute] if one.quantised else 1
        gathered = min(one.size, held[one.name] * shards) * share
        units[one.block] = units.get(one.block, 0.0) + gathered
    return units


def _memory(plan: Plan, stage: Share, held: Mapping[str, int], kind: str) -> Memory:
    parameters, local = stage.parameters, stage.local
    kept = sum(held[one.name] * _bytes_of(plan, one) for one in parameters)
    trained = sum(held[one.name] for one in parameters if one.trained)
    again = [part for part in local.blocks if recomputed(plan, part.name)]
    activations = stage.activations + max((part.kept_bytes for part in again), default=0.0)
    return Memory(
        parameters=kept,
        gradients=BYTES[plan.gradients] * trained,
        optimiser=sum(held[one.name] * _states_bytes(plan, one) for one in parameters if one.trained),
        activations=activations,
        logits=_logits(plan, local, kind),
        gathered=_gathered(plan, parameters, held) + _made(plan, parameters, held),
        process=overheads.PROCESS_BYTES,
    )


def _bytes_of(plan: Plan, one: Parameter) -> float:
    """For each number that a rank keeps of a parameter."""
    return nf4.BYTES if one.quantised else BYTES[plan.precision.parameters]


def _states_bytes(plan: Plan, one: Parameter) -> float:
    """Of the optimiser's states for each number that is trained: two moments, and where it has one the master."""
    master = BYTES[plan.precision.masters]
    moments = CODED_BYTES if plan.optimiser.has_codes(one.name, one.shape) else 2.0 * master
    return moments + (0 if _own_masters(plan) else master)


def _made(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> float:
    """Of a quantised base, what the largest layer's weight takes: the part that TP leaves, and some of it in float32,
    two times, while it is made."""
    shards = shard_size(plan)
    largest = max((min(one.size, held[one.name] * shards) for one in parameters if one.quantised), default=0)
    types = {plan.precision.parameters, plan.precision.compute}
    return float(sum(BYTES[name] for name in types) * largest + 8 * min(largest, nf4.AT_ONCE))


def _logits(plan: Plan, local: ModelCosts, kind: str) -> float:
    """The gradient, and the rows that the loss takes at a time on this kind of device."""
    as_float32 = local.logits_bytes * 4 / BYTES[plan.precision.compute]
    return local.logits_bytes + min(as_float32, chunk_bytes(kind))


def _gathered(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> float:
    """What FSDP2 holds whole beside a rank's parts, in bytes; of full replicas, what their sums take."""
    if is_plain_ddp(plan):
        return _of_sums(plan, parameters, held)
    units = _unit_numbers(plan, parameters, held)
    block = max((size for name, size in units.items() if name != OUTSIDE), default=0.0)
    whole = units[OUTSIDE] + 2 * block
    if plan.pipeline is not None or plan.run.reshard != "after forward":
        whole = sum(units.values())
    found = BYTES[plan.precision.compute] * whole + BYTES[plan.precision.reduce] * block
    if plan.adds_before_reducing:
        trained = tuple(one for one in parameters if one.trained)
        found += BYTES[plan.accumulates] * sum(_unit_numbers(plan, trained, held).values())
    return found


def _of_sums(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int]) -> float:
    """Bytes beside the gradients while copies' are summed."""
    if plan.data_ranks == 1:
        return 0.0
    gradients = float(BYTES[plan.gradients] * sum(held[one.name] for one in parameters if one.trained))
    if plan.pipeline is not None:  # sums begin when all are there; else gradients lie in buckets from the start
        return min(gradients, overheads.COPY_BUCKET_BYTES)
    return 0.0 if plan.adds_before_reducing or plan.micro_steps == 1 else gradients


def _own_masters(plan: Plan) -> bool:
    """Whether the parameters are what is updated."""
    return plan.precision.parameters == plan.precision.masters


def _seconds(
    plan: Plan, stage: Share, held: Mapping[str, int], rates: Rates, derived: Sequence[CollectiveTraffic]
) -> Seconds:
    parameters, local = stage.parameters, stage.local
    over_tensor = stage.work * _communication_seconds(plan, derived, rates)
    products, moves = 0.0, 0.0
    parts = [part for part in local.blocks if recomputed(plan, part.name)]
    again = sum(part.forward_flops for part in parts)
    kept = sum(part.made[kind].flops for part in parts for kind in plan.run.recompute_keep)
    all_flops = stage.work * local.forward.flops
    extra, extra_products = (again / all_flops, (again - kept) / all_flops) if all_flops else (0.0, 0.0)
    for work, times, times_products in ((local.forward, 1 + extra, 1 + extra_products), (local.backward, 1.0, 1.0)):
        product, move = _work_seconds(work, plan, rates)
        products += stage.work * times_products * product
        moves += stage.work * times * move
    if plan.splits_backward:
        products, moves = products * (1 + SPLIT_BACKWARD), moves * (1 + SPLIT_BACKWARD)
    gather, reduce = _data_seconds(plan, parameters, held, rates)
    gathers = 1 if plan.pipeline is not None or plan.run.reshard == "after step" else plan.micro_steps
    reduces = 1 if plan.adds_before_reducing else plan.micro_steps
    over_data = gathers * gather + reduces * reduce
    slots = max(float(plan.micro_steps), stage.slots / rates.crowd)
    return Seconds(
        products=slots * products,
        moves=slots * moves + (plan.micro_steps - 1) * _adding_seconds(plan, parameters, held, rates),
        communication=slots * (over_tensor + len(stage.stages) * _stages_seconds(plan, local, rates))
        + over_data
        + (rates.latency if plan.ranks > 1 else 0.0),
        optimiser=_optimiser_seconds(parameters, held, rates),
    )


def _adding_seconds(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int], rates: Rates) -> float:
    """To add the gradients of a micro-batch to those of others: both are read, one is written.

    They are added where they lie: as parts, or whole where ranks reduce them once a step.
    """
    shards = shard_size(plan) if plan.adds_before_reducing else 1
    trained = (min(one.size, held[one.name] * shards) for one in parameters if one.trained)
    return sum(rates.moves.seconds(3.0 * BYTES[plan.accumulates] * numbers) for numbers in trained)


def _stages_seconds(plan: Plan, local: ModelCosts, rates: Rates) -> float:
    """What a stage hands on of a micro-batch, and the gradient that comes back."""
    if plan.pipeline is None:
        return 0.0
    hidden = max((part.input_bytes for part in local.blocks), default=0.0)
    return 2 * (rates.latency + rates.links.seconds(hidden))


def _work_seconds(work: Work, plan: Plan, rates: Rates) -> tuple[float, float]:
    call = overheads.MODULE_CALLS * rates.call_seconds
    curve = rates.products_in(plan.precision.compute)
    return (
        sum(max(call, curve.seconds(flops)) for flops in work.products),
        sum(max(call, rates.moves.seconds(size)) for size in work.memory_traffic),
    )


def _data_seconds(
    plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int], rates: Rates
) -> tuple[float, float]:
    """Of FSDP and copies: to gather parameters for a micro-batch, and to reduce gradients."""
    if is_plain_ddp(plan):
        trained = BYTES[plan.gradients] * sum(held[one.name] for one in parameters if one.trained)
        return 0.0, _sums_seconds(trained, plan.data_ranks, rates)
    shards = shard_size(plan)
    copies = plan.data_ranks // shards
    over_gloo = rates.device == "cpu"
    gather = reduce = 0.0
    for name, numbers in _unit_numbers(plan, parameters, held).items():
        if not numbers:
            continue
        weights = BYTES[plan.precision.compute] * numbers
        gradients = BYTES[plan.precision.reduce] * numbers
        # What lies outside the blocks stays whole until the backward, and of a pipeline all of a stage.
        gathers = 2 if name != OUTSIDE and plan.run.reshard == "after forward" and plan.pipeline is None else 1
        gather += overheads.FSDP_UNIT_CALLS * rates.call_seconds
        gather += gathers * (rates.moves.seconds(2 * weights) + _exchange(weights, shards, rates))
        reduce += rates.moves.seconds(2 * gradients)
        reduce += _exchange(gradients * (2 if over_gloo else 1), shards, rates)  # gloo reduces all, then takes a part
        reduce += _exchange(2 * gradients / shards, copies, rates)
    return gather, reduce


def _sums_seconds(gradients: float, copies: int, rates: Rates) -> float:
    """Of full replicas: into buckets, and each over the ranks."""
    if copies == 1:
        return 0.0
    buckets = 1 + gradients // overheads.COPY_BUCKET_BYTES
    more = (buckets - 1) * rates.latency * (copies - 1)
    return rates.moves.seconds(2 * gradients) + _exchange(2 * gradients, copies, rates) + more


def _communication_seconds(plan: Plan, moves: Sequence[CollectiveTraffic], rates: Rates) -> float:
    """Of what moves over the tensor axis, as derived, for a micro-batch."""
    ranks, samples = plan.model_ranks, plan.data.micro_batch * plan.rows_per_sample
    each = rates.latency * (ranks - 1) + overheads.TENSOR_MODULE_CALLS * rates.call_seconds
    return sum(one.times * (each + rates.links.seconds(samples * one.nbytes)) for one in moves)


def _exchange(size: float, ranks: int, rates: Rates) -> float:
    """A collective in a ring, in which each rank sends `size` bytes but for its own part."""
    if ranks == 1:
        return 0.0
    sent = size * (ranks - 1) / ranks
    return rates.latency * (ranks - 1) + rates.links.seconds(sent)


def _optimiser_seconds(parameters: tuple[Parameter, ...], held: Mapping[str, int], rates: Rates) -> float:
    calls = overheads.OPTIMISER_PARAMETER_CALLS + overheads.STEP_PARAMETER_CALLS
    return sum(
        overheads.OPTIMISER_PASSES * rates.moves.seconds(12.0 * held[one.name]) + calls * rates.call_seconds
        for one in parameters
        if one.trained
    )
