"""Which placements a call of DTensors is given: one row of its rule for each mesh axis.

A row is what DTensor calls a strategy over one mesh dim: all whole; one factor cut; or a sum that stays pending. Each
axis takes the row that costs the least to get to from the placements at hand, by torch's own figures. So the time goes
with axes times rows, and not with rows to the power of axes. The trade-off: axes are settled one after the other.

`Shard` cuts a dim in one stretch for each rank. A factor that is the whole dim can be cut so, and one that comes first
in its dim where the ranks divide it; others stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from tangram.layout.syntax import Cut
from tangram.sharding.local_ops.local_call import Cuts
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall

Specs = tuple[DTensorSpec | None, ...]


@dataclass(frozen=True)
class ChoiceRow:
    """What one mesh axis may do: the placement of each input and output on it."""

    factor: str
    """That is cut; nothing where none is."""
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    divides: int = 1
    """What the number of ranks must divide, or 0 where it need not."""


@dataclass(frozen=True)
class DTensorChoice:
    """Placements of every tensor of a call, over all axes, and the cuts of its factors that they are."""

    inputs: Specs
    outputs: Specs
    cuts: Cuts


def axis_name(axis: int) -> str:
    """How a mesh dim is called in cuts: DTensor's need no names."""
    return f"a{axis}"


def rows(bound: BoundOp, call: OpCall, results: Sequence[TensorMeta | None]) -> list[ChoiceRow]:
    """The rows of a bound call: all whole, then each factor that `Shard` can cut."""
    n_in, n_out = len(bound.inputs), len(bound.outputs)
    found = [ChoiceRow("", (Replicate(),) * n_in, (Replicate(),) * n_out, 0)]
    shapes = [
        *(t.ndim if t is not None else -1 for t in call.tensors),
        *(-1 if r is None else len(r.shape) for r in results),
    ]
    places = [len(dims) if dims is not None else -1 for dims in (*bound.inputs, *bound.outputs)]
    if len(shapes) != len(places) or any(n not in (-1, m) for n, m in zip(shapes, places, strict=True)):
        return found  # a rule that does not fit says nothing of parts
    alone = [f for f in bound.cuttable if f not in bound.linked]  # torch has no placement that reads its neighbours
    return [*found, *(row for factor in alone if (row := _cut(bound, factor)) is not None)]


def _cut(bound: BoundOp, factor: str) -> ChoiceRow | None:
    inputs: list[Placement] = []
    outputs: list[Placement] = []
    compound = False
    for i, dims in enumerate((*bound.inputs, *bound.outputs)):
        place: Placement = Replicate()
        at = next((d for d, factors in enumerate(dims or ()) if factor in factors), None)
        if at is not None:
            others = _others(dims or (), at, factor, bound)
            if others is None:
                return None
            compound |= others
            place = Shard(at)
        elif i >= len(bound.inputs):
            op = bound.after(factor, i - len(bound.inputs))
            if op not in ("sum", "max", "min"):
                return None
            place = Partial(op)
        (inputs if i < len(bound.inputs) else outputs).append(place)
    return ChoiceRow(factor, tuple(inputs), tuple(outputs), bound.sizes[factor] if compound else 0)


def _others(dims: Dims, at: int, factor: str, bound: BoundOp) -> bool | None:
    """Whether a dim has more factors than one; None where others come before it."""
    before, _, after = _split(dims[at], factor)
    if any(bound.sizes[f] > 1 for f in before):
        return None
    return any(bound.sizes[f] > 1 for f in after)


def _split(factors: tuple[str, ...], factor: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    i = factors.index(factor)
    return factors[:i], factor, factors[i + 1 :]


def _pending_rows(
    bound: BoundOp, call: OpCall, specs: Specs, axis: int, results: Sequence[TensorMeta | None]
) -> Iterator[ChoiceRow]:
    """Sums that are pending on this axis and may stay so."""
    there = [i for i, t in enumerate(call.tensors) if t is not None]
    numbers = [t.dtype for t in call.tensors if t is not None] + [r.dtype for r in results if r is not None]
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in numbers):
        return
    for name, args in bound.rule.notes:
        named = [int(a) for a in args] if name in ("linear", "each") else []
        sets = [named or there] if name == "linear" else [[i] for i in named]
        for places in sets:
            given = [specs[i] for i in places] if set(places) <= set(there) else []
            kinds = {s.placements[axis] for s in given if s is not None}
            kind = next(iter(kinds), None)
            if len(kinds) == 1 and type(kind) is Partial and kind.reduce_op in ("sum", "avg"):
                inputs = tuple(kind if i in places else Replicate() for i in range(len(bound.inputs)))
                yield ChoiceRow("", inputs, (kind,) * len(bound.outputs), 0)


def choose(
    bound: BoundOp, call: OpCall, specs: Specs, mesh: DeviceMesh, results: Sequence[TensorMeta | None]
) -> DTensorChoice:
    """The placements of a call whose inputs have these."""
    listed = rows(bound, call, results)
    taken: list[ChoiceRow] = []
    for axis in range(mesh.ndim):
        options = [*listed, *_pending_rows(bound, call, specs, axis, results)]
        able = [row for row in options if _fits(row, taken, mesh, axis)]
        taken.append(min(able, key=lambda row: (_cost(row, specs, axis), not _is_at_hand(row, specs, axis))))
    inputs = [
        None if spec is None else DTensorSpec(mesh, tuple(row.inputs[i] for row in taken), tensor_meta=spec.tensor_meta)
        for i, spec in enumerate(specs)
    ]
    outputs = [
        None if meta is None else DTensorSpec(mesh, tuple(row.outputs[i] for row in taken), tensor_meta=meta)
        for i, meta in enumerate(results)
    ]
    cuts: dict[str, tuple[Cut, ...]] = {}
    for axis, row in enumerate(taken):
        if row.factor:
            cuts[row.factor] = (*cuts.get(row.factor, ()), Cut(axis_name(axis)))
    return DTensorChoice(tuple(inputs), tuple(outputs), cuts)


def _fits(row: ChoiceRow, taken: Sequence[ChoiceRow], mesh: DeviceMesh, axis: int) -> bool:
    """Whether a row can stand beside those of the axes before: no two kinds pending, and what must divide does."""
    for i, place in enumerate(row.outputs):
        kinds = {other.outputs[i] for other in taken if isinstance(other.outputs[i], Partial)}
        if isinstance(place, Partial) and kinds - {place}:
            return False
    same = [mesh.size(a) for a, other in enumerate(taken) if row.factor and other.factor == row.factor]
    return not row.divides or row.divides % math.prod([*same, mesh.size(axis)]) == 0


def _is_at_hand(row: ChoiceRow, specs: Specs, axis: int) -> bool:
    return all(s is None or s.placements[axis] == row.inputs[i] for i, s in enumerate(specs))


def _cost(row: ChoiceRow, specs: Specs, axis: int) -> float:
    """What it costs to get the inputs to a row's placements on one axis."""
    total = 0.0
    for spec, place in zip(specs, row.inputs, strict=True):
        if spec is not None and spec.placements[axis] != place:
            placements = (*spec.placements[:axis], place, *spec.placements[axis + 1 :])
            total += redistribute_cost(spec, DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta))
    return total


def placed(call: OpCall, arguments: dict[str, Any]) -> list[Any]:
    """What stands at the places of a call's tensors in another mapping of the same arguments."""
    return [arguments[name] if i is None else arguments[name][i] for name, i in call.places]
