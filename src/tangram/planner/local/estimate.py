"""What a plan needs: memory of the rank that needs most, and seconds of a step. A simple first estimate.

Memory is that of `planner.local.peak_memory`.

Seconds of a step, with M micro-batches, each operator at the rate of its size, but never quicker than a call can be:

    matmuls    M x matmuls, forward, backward, and forward again where recomputed
    moves       M x all other operators, by the bytes that they move; gradients of each micro-batch but the first are
                added to those that are there
    communication  M x (gather each unit twice, reduce its gradient: over gloo as an all-reduce; all-reduce over copies;
                over TP ranks one all-reduce for each module that is cut), and one number at the end of a step;
                gathers and reductions are fewer where run.reshard and run.reduce_every say so; what stages are tied
                by is exchanged once
    optimiser   AdamW's passes through what the rank holds, and what each parameter costs to handle

Of a pipeline each rank is counted (`planner.local.stage_shares`): the memory of the one that needs most, the seconds of
the slowest with the time in which it waits; ranks that share a core wait while others use it, so that costs nothing
until all of them wait. Its stages are whole from their first micro-batch to their last. Of tensor parallelism,
activations and matmuls are counted on the model that one TP rank has. Nothing overlaps, and ranks wait for nobody
else. Recomputation inside a block is not seen, only that of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tangram.hardware.measuring import overheads
from tangram.hardware.measuring.rates import Rates
from tangram.models.outlines.costs import OUTSIDE, ModelCosts, Parameter, Work
from tangram.planner.local.derived_layouts import CollectiveTraffic
from tangram.planner.local.peak_memory import (
    BYTES,
    Memory,
    is_plain_ddp,
    largest_parts,
    memory_of,
    unit_numbers,
)
from tangram.planner.local.stage_shares import Share, recomputed, shares
from tangram.schema.plan import Plan

VERSION = 5
"""Of what is predicted: runs that another version predicted are not learned from. Raise it with every change here."""
SPLIT_BACKWARD = 0.2
"""What a backward in two parts takes beyond one in one, as its graph is gone through twice. Chosen, with plans that ran
on one to eight processes of a CPU before its author; `tangram bench planner --only here` says how well it does."""


WORDS = {"products": "matmuls", "moves": "memory-bound"}
"""What people call the parts whose names here are kept in the history of runs."""


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
        seconds = ", ".join(f"{WORDS.get(name, name)} {1e3 * one:.1f}" for name, one in asdict(self.seconds).items())
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


@dataclass(frozen=True)
class TeacherCosts:
    """What a teacher adds to a step of its student."""

    nbytes: float
    """Of its parameters, on the rank that has most of them."""
    forwards: float
    """How many forwards of the student one of its own is."""
    gathered: float = 0.0
    """Bytes of what FSDP holds whole of it at a time, in its forward."""
    units: tuple[float, ...] = ()
    """Bytes of each of its FSDP units, as it is gathered."""
    shards: int = 1
    flow: float = 0.0
    """Bytes of what a stage of a pipeline hands on of a micro-batch."""


def estimate(
    plan: Plan,
    whole: ModelCosts,
    local: ModelCosts,
    rates: Rates,
    moves: Sequence[CollectiveTraffic] = (),
    timed: ModelCosts | None = None,
    teacher: TeacherCosts | None = None,
) -> Estimate:
    """What the plan needs on this machine.

    `whole`: the costs of the whole model, of which only the parameters are used. `local`: those of the model that one
    TP rank computes, for a micro-batch of the plan (the same where no axis is tensor's). `moves`: what moves over
    model axes for one sample, as derived. `timed`: the local costs of rows as long as a step's are in the mean, where
    `local` is of the longest.
    """
    held = largest_parts(plan, whole.parameters)
    stages, timed = shares(plan, whole.parameters, local), timed or local
    timed_stages = stages if timed is local else shares(plan, whole.parameters, timed)
    memory = max((memory_of(plan, stage, held, rates.device) for stage in stages), key=lambda memory: memory.total)
    if teacher is not None:  # hidden states of all micro-batches wait at the last stage
        logits = local.logits_bytes + (teacher.flow * plan.micro_steps if plan.pipeline is not None else 0.0)
        memory = replace(memory, parameters=memory.parameters + teacher.nbytes, logits=memory.logits + logits)
        flow = memory.activations + memory.logits + memory.gathered  # of its own forward, nothing of the student's
        memory = replace(memory, gathered=memory.gathered + max(0.0, teacher.gathered + logits - flow))
    return Estimate(
        memory,
        max((_seconds(plan, one, held, rates, moves, teacher) for one in timed_stages), key=lambda s: s.total),
        plan.data.global_batch * plan.rows_per_sample * timed.sequence,
    )


def _seconds(
    plan: Plan,
    stage: Share,
    held: Mapping[str, int],
    rates: Rates,
    derived: Sequence[CollectiveTraffic],
    teacher: TeacherCosts | None,
) -> Seconds:
    parameters, local = stage.parameters, stage.local
    over_tensor = stage.work * _communication_seconds(plan, derived, rates, local.sequence / plan.data.sequence)
    products, moves = 0.0, 0.0
    parts = [part for part in local.blocks if recomputed(plan, part.name)]
    again = sum(part.forward_flops for part in parts)
    kept = sum(part.made[kind].flops for part in parts for kind in plan.run.recompute_keep)
    all_flops = stage.work * local.forward.flops
    extra, extra_products = (again / all_flops, (again - kept) / all_flops) if all_flops else (0.0, 0.0)
    first = 1 + plan.other_forwards + (teacher.forwards if teacher else 0.0)
    for work, times, times_products in (
        (local.forward, first + extra, first + extra_products), (local.backward, 1.0, 1.0),
    ):  # fmt: skip
        product, move = _work_seconds(work, plan, rates)
        products += stage.work * times_products * product
        moves += stage.work * times * move
    if plan.splits_backward:
        products, moves = products * (1 + SPLIT_BACKWARD), moves * (1 + SPLIT_BACKWARD)
    gather, reduce = _data_seconds(plan, parameters, held, rates)
    if teacher is not None:
        gather += sum(_gather_seconds(size, teacher.shards, rates) for size in teacher.units)
    gathers = 1 if plan.pipeline is not None or plan.run.reshard == "after step" else plan.micro_steps
    reduces = 1 if plan.adds_before_reducing else plan.micro_steps
    over_data = gathers * gather + reduces * reduce
    slots = max(float(plan.micro_steps), stage.slots / rates.crowd)
    return Seconds(
        products=slots * products,
        moves=slots * moves + (plan.micro_steps - 1) * _adding_seconds(plan, parameters, held, rates),
        communication=slots * (over_tensor + len(stage.stages) * _stages_seconds(plan, local, rates))
        + over_data
        + _tied_seconds(plan, parameters, held, rates)
        + (rates.latency if plan.ranks > 1 else 0.0),
        optimiser=_optimiser_seconds(parameters, held, rates),
    )


def _adding_seconds(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int], rates: Rates) -> float:
    """To add the gradients of a micro-batch to those of others: both are read, one is written.

    They are added where they lie: as parts, or whole where ranks reduce them once a step.
    """
    shards = plan.shard_ranks if plan.adds_before_reducing else 1
    trained = (min(one.size, held[one.name] * shards) for one in parameters if one.trained)
    return sum(rates.moves.seconds(3.0 * BYTES[plan.accumulates] * numbers) for numbers in trained)


def _stages_seconds(plan: Plan, local: ModelCosts, rates: Rates) -> float:
    """What a stage hands on of a micro-batch, and the gradient that comes back."""
    if plan.pipeline is None:
        return 0.0
    hidden = max((part.input_bytes for part in local.blocks), default=0.0)
    return 2 * (rates.latency + rates.links.seconds(hidden))


def _tied_seconds(plan: Plan, parameters: tuple[Parameter, ...], held: Mapping[str, int], rates: Rates) -> float:
    """To exchange and add up the gradients of what two stages have, once a step."""
    size = BYTES[plan.gradients] * sum(held[one.name] for one in parameters if one.trained and plan.is_tied(one.name))
    return rates.latency + rates.links.seconds(size) + rates.moves.seconds(3 * size) if size else 0.0


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
    shards = plan.shard_ranks
    copies = plan.data_ranks // shards
    over_gloo = rates.device == "cpu"
    gather = reduce = 0.0
    for name, numbers in unit_numbers(plan, parameters, held).items():
        if not numbers:
            continue
        weights = BYTES[plan.precision.compute] * numbers
        gradients = BYTES[plan.precision.reduce] * numbers
        # What lies outside the blocks stays whole until the backward, and of a pipeline all of a stage.
        gathers = 2 if name != OUTSIDE and plan.run.reshard == "after forward" and plan.pipeline is None else 1
        gather += overheads.FSDP_UNIT_CALLS * rates.call_seconds
        gather += (gathers + plan.other_forwards) * _gather_seconds(weights, shards, rates)
        reduce += rates.moves.seconds(2 * gradients)
        reduce += _exchange(gradients * (2 if over_gloo else 1), shards, rates)  # gloo reduces all, then takes a part
        reduce += _exchange(2 * gradients / shards, copies, rates)
    return gather, reduce


def _gather_seconds(weights: float, shards: int, rates: Rates) -> float:
    return rates.moves.seconds(2 * weights) + _exchange(weights, shards, rates)


def _sums_seconds(gradients: float, copies: int, rates: Rates) -> float:
    """Of full replicas: into buckets, and each over the ranks."""
    if copies == 1:
        return 0.0
    buckets = 1 + gradients // overheads.COPY_BUCKET_BYTES
    more = (buckets - 1) * rates.latency * (copies - 1)
    return rates.moves.seconds(2 * gradients) + _exchange(2 * gradients, copies, rates) + more


def _communication_seconds(plan: Plan, moves: Sequence[CollectiveTraffic], rates: Rates, length: float) -> float:
    """Of what moves over the tensor axis, as derived, for a micro-batch of rows of this share of their length."""
    ranks, samples = plan.model_ranks, plan.data.micro_batch * plan.rows_per_sample * length
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
