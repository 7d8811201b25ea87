"""A model's operators on all ranks of a mesh in one process, each as the table says: the whole way that a call takes.

    world = World(Mesh.parse("x=2"), builtin())
    out = F.layer_norm(cut(tensor, Layout.parse("b/x h").bind(tensor.shape), world), [8])

A simulated tensor is the list of its parts. Torch's dispatcher brings every operator here, below autograd's own level;
the parts' graph is recorded beneath, through the copies that stand for collectives as well, so a backward pass is what
ranks would do that exchange gradients by the adjoint collectives. Bytes that ranks get from others are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, Region, region
from tangram.layout.intervals import elements
from tangram.layout.locate import indices_of_rank
from tangram.layout.syntax import VOID, Dim
from tangram.sharding.local_ops import random_numbers
from tangram.sharding.local_ops.local_call import run_all
from tangram.sharding.ops import foreach, views
from tangram.sharding.ops.calls import OpCall, is_written, schema_of
from tangram.sharding.ops.decompose import ResultRef
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.proof.execute import REDUCE
from tangram.sharding.proof.propagated import part_of
from tangram.sharding.propagation.propagate import Propagation
from tangram.sharding.propagation.routes import StepRoute, decomposed, route


@dataclass
class SimWorld:
    """A mesh, a table, and what has passed so far."""

    mesh: Mesh
    table: RuleTable
    moved: float = 0.0
    """Bytes that ranks got from others, all ranks together."""
    calls: list[str] = field(default_factory=list[str])
    differentiable: bool = True
    seed: int = 0
    """Of the numbers that operators draw, whichever rank they are for."""
    drawn: int = 0
    """How many operators have drawn: each has a stream of its own."""
    forced: bool = False
    """Whether operators go by their decompositions wherever there is one, also where it moves no less."""
    decomposed: int = 0
    """How many calls went by their decompositions."""
    on_operator: Callable[[Sequence[SimTensor | None], Propagation | None, Sequence[Any]], None] | None = None
    """Hears of each operator that ran: its tensors as it needed them, what it did, its results. Without an operator:
    the second tensor is the first one, moved or written."""


class SimTensor(Tensor):
    """A tensor as its parts on all ranks of a world."""

    parts: list[Tensor]
    own_layout: Layout
    world: SimWorld

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({list(self.shape)}, {self.own_layout})"

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  (a plain attribute there)
        """Whether the parts ask for a gradient: functions look, to compute one ahead or to take another way."""
        return any(part.requires_grad for part in self.parts)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READ_AS_LISTS:
            args = [t.tolist() if i and isinstance(t, SimTensor) else t for i, t in enumerate(args)]
            kwargs = {k: t.tolist() if isinstance(t, SimTensor) else t for k, t in (kwargs or {}).items()}
        with cast(Any, torch)._C.DisableTorchFunctionSubclass():  # what torch makes of no tensor stays a plain one
            return func(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        """The values of the whole tensor."""
        return cast(Any, together(self)).tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = OpCall.of(func, args, kwargs or {})
        world = next(t.world for t in call.tensors if isinstance(t, SimTensor))
        with torch.overrides.enable_reentrant_dispatch():
            return carried_out(call, world)


def of_parts(shape: Sequence[int], parts: Sequence[Tensor], layout: Layout, world: SimWorld) -> SimTensor:
    """A tensor of these parts, one for each rank."""
    made = cast(Any, Tensor)._make_wrapper_subclass(SimTensor, tuple(shape), dtype=parts[0].dtype)
    made.parts, made.own_layout, made.world = list(parts), layout, world
    return made


def cut(tensor: Tensor, layout: Layout, world: SimWorld) -> SimTensor:
    """A whole tensor as its parts, each in memory of its own; a pending sum is all the first rank's.

    Raises UserError for one that is sparse.
    """
    _dense(tensor)
    parts: list[Tensor] = []
    for rank in range(world.mesh.size):
        own = world.mesh.coords(rank)
        part = tensor
        for dim, factor in enumerate(layout.dims):
            there = indices_of_rank(factor, world.mesh, own)
            if there != ((0, tensor.shape[dim]),):
                part = part.index_select(dim, torch.tensor(elements(there), dtype=torch.int64))
        # Of a pending sum one rank has all and the others nothing: so the parts add up to the tensor exactly.
        lead = all(own[axis] == 0 for op, axis in layout.pending if op == "sum")
        parts.append(part.clone() if lead else torch.zeros_like(part))
    return of_parts(tensor.shape, parts, layout, world)


def _dense(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise UserError(f"a {tensor.layout} tensor cannot be cut: its elements have no strides; give a dense one")
    return tensor


def together(tensor: SimTensor) -> Tensor:
    """The whole tensor from its parts, pending reductions done."""
    mesh, layout, shape = tensor.world.mesh, tensor.own_layout, tuple(tensor.shape)
    pending = {axis: op for op, axis in layout.pending}
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(mesh.size):
        key = tuple((axis, i) for axis, i in sorted(mesh.coords(rank).items()) if axis not in pending)
        groups.setdefault(key, []).append(rank)
    out: Tensor | None = None
    seen: set[Region] = set()
    for ranks in groups.values():
        here = region(Layout(layout.dims), mesh, ranks[0])
        if 0 in shape:
            total = torch.stack([part.sum().to(tensor.dtype) for part in tensor.parts]).sum().to(tensor.dtype)
            return torch.zeros(shape, dtype=tensor.dtype) + total  # nothing, with the parts in its graph
        if here in seen or (not here and len(groups) > 1):
            continue
        seen.add(here)
        total = functools.reduce(REDUCE[next(iter(pending.values()), "sum")], [tensor.parts[r] for r in ranks])
        if not shape or here == Region.full(shape):
            return total
        if out is None:
            out = torch.zeros(shape, dtype=total.dtype)
        index = torch.meshgrid(*[torch.tensor(elements(s)) for s in here.boxes[0]], indexing="ij")
        out = out.index_put(index, total)
    assert out is not None
    return out


_WITH_GRADIENTS: Mapping[OpOverload, OpOverload] = {
    torch.ops.aten._embedding_bag_forward_only.default: torch.ops.aten._embedding_bag.default,
}
"""What torch calls for tensors that ask for no gradient, as simulated ones look to it, and for those that do."""
_READ_AS_LISTS = frozenset({torch.tensor_split, Tensor.tensor_split})
"""Functions of torch that read a tensor's memory past the dispatcher; they take numbers as well."""


def carried_out(call: OpCall, world: SimWorld) -> Any:
    """A call on simulated ranks; its tensors may be plain ones, which every rank has whole. Returns what it returns."""
    listed = foreach.calls(call)
    if listed is not None:  # each element lies by itself
        made: list[Any] = []
        for one in listed:
            here = any(isinstance(t, SimTensor) for t in one.tensors)
            made.append(carried_out(one, world) if here else one.run(in_place=True)[0])
        return made if schema_of(call.operator).returns else None
    if call.operator in _WITH_GRADIENTS:
        call = replace(call, operator=_WITH_GRADIENTS[call.operator])
    world.calls.append(call.name)
    given = [None if t is None else t if isinstance(t, SimTensor) else _everywhere(t, world) for t in call.tensors]
    plain = _full_call(call, given)
    try:
        way = _way(plain, given, world)
    except UserError:  # what it writes cannot lie as the result would: then it is whole first
        for t, (name, _) in zip(given, call.places, strict=True):
            if t is not None and name in _written(call):
                whole = _everywhere(together(t), world)
                world.moved += t.nbytes * (world.mesh.size - 1)
                t.parts, t.own_layout = whole.parts, whole.own_layout
        way = _way(plain, given, world)
    return _returned(call, _travelled(way, given, world))


def _full_call(call: OpCall, inputs: Sequence[Any]) -> OpCall:
    """A call with the whole tensors that simulated ones are parts of."""
    return call.with_tensors([None if t is None else together(t).detach() for t in inputs])


def _travelled(way: StepRoute, inputs: Sequence[SimTensor | None], world: SimWorld) -> list[Any]:
    """Every leg of a route on every rank; the results of the last."""
    world.decomposed += not way.direct
    values: dict[ResultRef, Any] = {ResultRef(-1, i): t for i, t in enumerate(inputs)}
    for number, leg in enumerate(way.legs):
        own = [None if ref is None else values[ref] for ref in leg.sources]
        if leg.propagation is None:
            made = [_everywhere(t, world) for t in leg.call.run()]
        else:
            call = leg.call if way.direct else _full_call(leg.call, own)
            ready = _moved(leg.propagation, own, world)
            made = _on_ranks(call, leg.propagation, ready, world)
            if world.on_operator is not None:
                for before, after in zip(own, ready, strict=True):
                    if after is not before:
                        world.on_operator([before], None, [after])
                world.on_operator(ready, leg.propagation, made)
            reduced = leg.reduced
            values.update((ref, t) for ref, t in zip(leg.sources, ready, strict=True) if ref and ref in reduced)
        if way.direct:
            return made  # of a list of results a rule may have one pattern
        values.update((ResultRef(number, i), t) for i, t in enumerate(made))
    return [None if ref is None else values[ref] for ref in way.results]


def _moved(found: Propagation, inputs: Sequence[SimTensor | None], world: SimWorld) -> list[SimTensor | None]:
    """Tensors as an operator needs them; what that moves is counted."""
    moved = {one.place: one.nbytes for one in found.relayouts}
    world.moved += sum(moved.values()) * world.mesh.size
    return [
        cut(together(t), wanted, world) if t is not None and i in moved and wanted is not None else t
        for i, (t, wanted) in enumerate(zip(inputs, found.inputs, strict=True))
    ]


def _on_ranks(call: OpCall, found: Propagation, ready: Sequence[SimTensor | None], world: SimWorld) -> list[Any]:
    """An operator on every rank, on tensors that lie as it needs them."""
    in_place = bool(_written(call)) and not views.view_of(call.operator)
    parts, local = [part_of(found, rank) for rank in range(world.mesh.size)], list[list[Tensor | None]]()
    for rank in range(world.mesh.size):
        own = [None if t is None else t.parts[rank] for t in ready]
        if (
            call.name == "view"
        ):  # a wrapper looks dense whatever its parts are, so torch takes a view where it would copy
            own = [None if t is None else t.contiguous() for t in own]
        local.append(own)
    with random_numbers.using(random_numbers.Key(world.seed, world.drawn)):
        results = run_all(call, found.bound, parts, local, in_place=in_place)
    world.moved += sum(one.nbytes for one in found.totals) * world.mesh.size
    world.drawn += found.bound.rule.note("counted") is not None
    return [_result(values, i, found.outputs, world) for i, values in enumerate(zip(*results, strict=True))]


def _returned(call: OpCall, made: list[Any]) -> Any:
    """The results as the caller expects them: a tensor of its own where the operator writes one."""
    returns = schema_of(call.operator).returns
    named = any(r.alias_info is not None and r.alias_info.is_write for r in returns)  # else it writes beside them
    for i, (name, result) in enumerate(zip(_written(call) if named else (), made, strict=False)):
        own = call.arguments[name]
        if isinstance(own, SimTensor) and isinstance(result, SimTensor):
            if own.shape != result.shape:  # the wrapper has no memory: the operator changes its shape and nothing else
                with cast(Any, torch)._C._DisableTorchDispatch():
                    call.run(in_place=True)
            own.parts, own.own_layout = result.parts, result.own_layout
            made[i] = own
            if own.world.on_operator is not None:
                own.world.on_operator([result], None, [own])
    if not returns:
        return None
    if len(returns) == 1:
        return made if str(returns[0].type).startswith("List") else made[0]
    return tuple(made)


def _everywhere(tensor: Tensor, world: SimWorld) -> SimTensor:
    """A tensor whole on every rank."""
    return cut(tensor, Layout(tuple(Dim(VOID, n) for n in tensor.shape)), world)


def _way(call: OpCall, inputs: Sequence[SimTensor | None], world: SimWorld) -> StepRoute:
    layouts = [None if t is None else t.own_layout for t in inputs]
    if world.forced:
        way = decomposed(world.table, call, layouts, world.mesh, differentiable=world.differentiable)
        if way is not None:
            return way
    return route(world.table, call, layouts, world.mesh, differentiable=world.differentiable)


def _written(call: OpCall) -> list[str]:
    return [a.name for a in schema_of(call.operator).arguments if is_written(a)]


def _result(values: Sequence[Any], i: int, layouts: Sequence[Layout], world: SimWorld) -> Any:
    """One result, from what the ranks have of it. Where a dim is whole, its size is what they have."""
    if not isinstance(values[0], Tensor):
        return values[0]
    _dense(values[0])
    layout = layouts[min(i, len(layouts) - 1)]
    if len(layout.dims) != values[0].ndim:  # of an operator that is whole, whose rule says nothing of its results
        layout = replace(layout, dims=tuple(Dim(VOID) for _ in values[0].shape))
    dims = [
        replace(dim, size=n) if dim.size is None and not dim.terms else dim
        for dim, n in zip(layout.dims, values[0].shape, strict=True)
    ]
    layout = replace(layout, dims=tuple(dims))
    return of_parts(layout.shape, values, layout, world)
