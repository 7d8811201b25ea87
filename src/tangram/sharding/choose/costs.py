"""What a choice costs a rank: seconds of a micro-batch, forward and backward, and bytes that it holds.

Seconds are of work, a product by its operations and another operator by the bytes that it reads and writes, and of
collectives, one after the other: what runtimes hide behind one another is not known here. Bytes are those of
parameters, gradients and optimiser states, and of what the backward needs of the forward.

What the backward needs of a forward autograd itself says: each operator is run on meta, and asked. Tensors that share
memory count once. What is made of parameters alone is not counted: parameters are, and what is gathered is gathered
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from tangram.hardware.catalogue.cluster import Cluster, moved_seconds, product_seconds
from tangram.sharding.choose.options import CommOptions, Options, States, still
from tangram.sharding.choose.transition_time import StepTimes
from tangram.sharding.derive.collectives_between import Customs
from tangram.sharding.derive.problem.folding import Folded, FoldedStep, far_from_borders
from tangram.sharding.derive.problem.rates import effort
from tangram.sharding.derive.problem.states import SAME, SEVERAL, State, part_dim
from tangram.sharding.derive.solve.solve import SolverCosts

Array = NDArray[np.float64]
_FAR = 1e-4
"""What it costs beside, in its seconds, to move a tensor where no border of a module is at hand, as in a derivation."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as it counts here."""

    optimiser: float = 12.0
    """Bytes of the optimiser's states for each element of a parameter: in Adam with mixed precision two moments and the
    parameter itself, each of four bytes."""
    gradient: float | None = None
    """Bytes of the gradient of each element; None: of the parameter's type."""
    micro_batches: int = 1
    """How many are run before gradients are summed over ranks."""


@dataclass(frozen=True)
class Both:
    """The two costs of every choice."""

    seconds: SolverCosts
    nbytes: SolverCosts


def costs(options: Options, cluster: Cluster, training: Training) -> Both:
    """What every choice costs. Raises UserError for an axis that is larger than the cluster."""
    steps = StepTimes(cluster, options.mesh, options.axes, training.micro_batches)
    found = Both(SolverCosts(), SolverCosts())
    _states(options, training, found)
    _work(options, cluster, found)
    _moved(options, steps, found)
    _saved(options, found)
    return found


def _states(options: Options, training: Training, found: Both) -> None:
    """Variables of tensors, and what is kept of parameters."""
    folded, ks = options.folded, options.ks
    for v, own in options.states.items():
        value = folded.value(v)
        each = 0.0
        if value.kind == "parameter":
            each = float(value.dtype.itemsize)
            if value.trained:
                each += training.optimiser + (each if training.gradient is None else training.gradient)
        whole = each * math.prod(value.shape) * folded.times[v]
        found.seconds.variable(("lies", v), [0.0] * len(own))
        found.nbytes.variable(("lies", v), whole * _shares(own, ks))
    for v, own in options.used.items():
        found.seconds.variable(("used", v), [0.0] * len(own))
        found.nbytes.variable(("used", v), [0.0] * len(own))


def work(options: Options, cluster: Cluster) -> float:
    """Seconds that the operators take, each cut as far as it can be: no choice is quicker."""
    return sum(float(own.min()) for _, own in _each_work(options, cluster))


def _work(options: Options, cluster: Cluster, found: Both) -> None:
    for step, own in _each_work(options, cluster):
        found.seconds.variable(("move", step.number), own)
        found.nbytes.variable(("move", step.number), [0.0] * len(own))


def _each_work(options: Options, cluster: Cluster) -> Iterator[tuple[FoldedStep, Array]]:
    for step in options.folded.steps:
        own = options.communication[step.number]
        alone = 0.0
        if any(v in options.folded.differentiable for v in step.outputs):  # masks and positions are no work
            what = effort(options.folded, step)
            size = options.folded.value(step.outputs[0]).dtype.itemsize
            if what.product:
                alone = product_seconds(cluster, what.flops, "bf16" if size <= 2 else "fp32")
            elif what.flops:
                alone = moved_seconds(cluster, what.touched)
        shares = np.array([math.prod(move.share for move in moves) for moves in own])
        # The backward of a product is two of its size, and other operators are taken to be alike.
        yield step, 3 * alone * step.times * shares


def _moved(options: Options, steps: StepTimes, found: Both) -> None:
    """What it takes to bring tensors from how they are kept or made to how they are used and needed."""
    folded = options.folded
    far, customs = far_from_borders(folded), Customs.of(folded)
    for v, own in options.states.items():
        value = folded.value(v)
        kind = "kept" if value.kind == "parameter" else "plain"
        differentiable = v in folded.differentiable
        table = steps.seconds(own, options.used[v], value.nbytes, kind, differentiable=differentiable)
        found.seconds.pair(("lies", v), ("used", v), table * folded.times[v])
    for step in folded.steps:
        name, moves = ("move", step.number), options.communication[step.number]
        for v, given in _output_states(step, moves):
            table = _with_far(_table(options, steps, v, given, options.used[v]), far.get(v, 1))
            table = customs.staying(step, given, options.used[v], table)
            found.seconds.pair(name, ("used", v), table * step.times)
        for v, needed, _ in _needed(step, moves):
            table = _with_far(_table(options, steps, v, options.used[v], needed), 1 + far.get(v, 1))
            table = customs.staying(step, options.used[v], needed, table)
            found.seconds.pair(("used", v), name, table * step.times)


def _table(options: Options, steps: StepTimes, v: int, sources: Sequence[States], targets: Sequence[States]) -> Array:
    """Each pair of states that are not the same costs what it takes; worked out once for each state."""
    a, b = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
    folded = options.folded
    kind = "standing" if v in folded.standing else "plain"
    table = steps.seconds(a, b, folded.value(v).nbytes, kind, differentiable=v in folded.differentiable)
    rows, columns = {s: i for i, s in enumerate(a)}, {s: i for i, s in enumerate(b)}
    return table[np.ix_([rows[s] for s in sources], [columns[s] for s in targets])]


def _with_far(table: Array, far: float) -> Array:
    return table * (1 + _FAR * far)


def _output_states(step: FoldedStep, comms: Sequence[CommOptions]) -> list[tuple[int, list[States]]]:
    return [(v, [tuple(m.outputs[i] for m in some) for some in comms]) for i, v in enumerate(step.outputs)]


def _needed(step: FoldedStep, comms: Sequence[CommOptions]) -> list[tuple[int, list[States], int]]:
    found: list[tuple[int, list[States], int]] = []
    for i, v in enumerate(step.inputs):
        if v is None:
            continue
        needed: list[States] = []
        for some in comms:
            states = [m.inputs[i] for m in some]
            if None in states:
                break
            needed.append(tuple(state for state in states if state is not None))
        else:
            found.append((v, needed, i))
    return found


def _saved(options: Options, found: Both) -> None:
    """What the backward needs: once as it is used, and once more for each operator that needs it otherwise."""
    folded, ks = options.folded, options.ks
    shared = memories(folded)
    apart = {*folded.standing, *still(folded, {})}  # parameters, which are counted, and masks and positions
    seen = set(apart)

    def once(v: int) -> None:
        memory = shared.get(v, v)
        if memory not in seen and v not in apart:
            seen.add(memory)
            whole = folded.value(v).nbytes * folded.times[v]
            found.nbytes.variable(("used", v), whole * _shares(options.used[v], ks))

    for step in folded.steps:
        own = saved(folded, step)
        for v, needed, place in _needed(step, options.communication[step.number]):
            if place in own.inputs and v not in apart:
                once(v)
                again = _others(options.used[v], needed)
                table = again * _shares(needed, ks)[None, :] * (folded.value(v).nbytes * step.times)
                if table.any():
                    found.nbytes.pair(("used", v), ("move", step.number), table)
        for place in own.outputs:
            once(step.outputs[place])
    for w in folded.graph.outputs.values():
        if folded.classes[w] in folded.differentiable:
            once(folded.classes[w])


def _others(used: Sequence[States], needed: Sequence[States]) -> Array:
    """1 where a tensor that is needed so is another one in memory than as it is used."""
    known: dict[State, int] = {SEVERAL: 0, SAME: 0}
    a, b = (np.array([[known.setdefault(s, len(known)) for s in states] for states in side]) for side in (used, needed))
    return (a[:, None, :] != b[None, :, :]).any(axis=2).astype(np.float64)


def _shares(own: Sequence[States], ks: Sequence[int]) -> Array:
    """Of the whole, what a rank has."""
    return np.array(
        [math.prod(1 / k for s, k in zip(states, ks, strict=True) if part_dim(s) is not None) for states in own]
    )


class SavedBytes(NamedTuple):
    """By place, what an operator saves."""

    inputs: frozenset[int]
    outputs: frozenset[int]


def saved(folded: Folded, step: FoldedStep) -> SavedBytes:
    """What an operator saves of its tensors; remembered with its call. One that cannot be asked: all that it takes."""
    known = vars(step.call)
    if "_saved_of" not in known:
        known["_saved_of"] = _saved_of(folded, step)
    return known["_saved_of"]


def _saved_of(folded: Folded, step: FoldedStep) -> SavedBytes:
    if not any(v in folded.differentiable for v in step.outputs):
        return SavedBytes(frozenset(), frozenset())
    given: list[Tensor | None] = []
    for v, tensor in zip(step.inputs, step.call.tensors, strict=True):
        if v is None or tensor is None:
            given.append(None)
            continue
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        follows = v in folded.differentiable or v in folded.standing
        given.append(own.requires_grad_(follows and (own.is_floating_point() or own.is_complex())))
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(_memory(x))
        return x

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = step.call.with_tensors(given).run()
    except (NotImplementedError, RuntimeError):  # nothing runs it without memory: count all that it takes
        return SavedBytes(frozenset(i for i, v in enumerate(step.inputs) if v is not None), frozenset())
    made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    into = {_memory(x): i for i, x in enumerate(given) if x is not None}
    out = {_memory(x): i for i, x in enumerate(made) if i < len(step.outputs)}
    return SavedBytes(
        frozenset(into[one] for one in kept if one in into),
        frozenset(out[one] for one in kept if one in out and one not in into),
    )


def _memory(x: Tensor) -> int:
    return int(cast(Any, x.untyped_storage())._cdata)


def memories(folded: Folded) -> dict[int, int]:
    """Of each class, the one whose memory it is a view of; itself where it has its own."""
    found: dict[int, int] = {}
    for step in folded.steps:
        returns = cast(Any, step.node.operator)._schema.returns
        views = step.call.name == "_unsafe_view" or any(one.alias_info is not None for one in returns)
        of = next((v for v in step.inputs if v is not None), None)
        for v in step.outputs:
            if views and of is not None and v != of:
                found[v] = found.get(of, of)
    return found
