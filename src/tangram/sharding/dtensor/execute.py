"""Calls of DTensors carried out by the rules: as a strategy that torch executes, or here, from inputs to results.

Placements alone say enough of operators whose local part takes the same arguments as the whole call; those get a
strategy. What a rule's notes put right (indices into a cut factor, a mean's divisor, sizes, what is added once, parts
of nothing) is done by `sharding.local_ops.local_call`; and so are calls that torch's runtime would not redistribute in
full (tensors by keyword) or not be able to (results written into a tensor that is placed otherwise).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._logging import LazyString
from torch._ops import OpOverload
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils._python_dispatch import (
    return_and_correct_aliasing,  # pyright: ignore[reportUnknownVariableType]
)
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from tangram.layout import Mesh
from tangram.layout.rule import Rule
from tangram.layout.syntax import Operand
from tangram.sharding.dtensor.choose import DTensorChoice, Specs, axis_name, choose, placed
from tangram.sharding.local_ops import local_call
from tangram.sharding.local_ops.local_variants import RUNNERS
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall, is_written, schema_of
from tangram.sharding.ops.rule_table import RuleTable
from tangram.sharding.ops.rule_table import bound as find_bound

CORRECTED = frozenset({"offset", "scale", "once", "size", "product", "filled", "shape"}) | RUNNERS.keys()
"""Notes that say that a part needs more than its placement."""
_KEPT_PLANS = 4096


@dataclass(frozen=True)
class DTensorPlan:
    """How a call is carried out; the same for each call with such inputs."""

    call: OpCall
    """Its tensors whole, and without memory."""
    bound: BoundOp
    choice: DTensorChoice
    part: local_call.RankPart | None
    """Of this rank; None where it is not of the mesh."""
    plain: bool
    """Whether the operator does on parts what it does on the whole."""


class Executor:
    """Carries out calls by one table. Plans are kept by torch's own key of a call, and the types of its arguments."""

    def __init__(self, table: RuleTable) -> None:
        self._table = table
        self._plans: dict[object, DTensorPlan] = {}

    def strategy(self, schema: OpSchema) -> OpStrategy:
        """What `register_op_strategy` wants: here, the one strategy that was chosen."""
        plain = OpSchema(schema.op, _specs_of(schema.args_schema), _specs_of(schema.kwargs_schema))
        chosen = self._plan(plain).choice
        inputs = [spec for spec in chosen.inputs if spec is not None]
        for given, wanted in zip(plain.args_spec, inputs, strict=True):
            if given.placements == wanted.placements and given.shard_order != wanted.shard_order:
                raise NotImplementedError(f"{schema.op} of a tensor cut in another order of axes; redistribute it")
        outputs = chosen.outputs[0] if len(chosen.outputs) == 1 else chosen.outputs
        return OpStrategy([OpSpec(outputs, inputs, [[0.0] for _ in inputs])])

    def handle(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a custom handler does: the whole call, from DTensors to DTensors."""
        dispatcher = cast(Any, DTensor)._op_dispatcher
        info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
        leaves: list[object] = tree_leaves((info.schema.args_schema, info.schema.kwargs_schema))
        key: object = info.schema, tuple(map(type, leaves))  # 1 is True to torch's key alone
        try:
            plan = self._plans.get(key)
        except TypeError:  # sizes that are symbols have no hash
            key = plan = None
        if plan is None:
            plan = self._plan(info.schema)
            if key is not None:
                if len(self._plans) >= _KEPT_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        given = info.local_args if info.args_tree_spec is None else tree_unflatten(info.local_args, info.args_tree_spec)
        own = OpCall.of(operator, given, info.local_kwargs)
        specs = _specs(plan.call, OpCall.of(operator, info.schema.args_schema, info.schema.kwargs_schema))
        pairs = zip(own.tensors, specs, plan.choice.inputs, strict=True)
        here = plan.part is not None  # a rank that is not of the mesh holds nothing to move
        tensors = [None if t is None else _moved(t, a, b, operator) if here else t for t, a, b in pairs]
        written = _written(operator, args, kwargs)
        _refuse_copies(operator, written)
        if written and plan.plain and _stays(written, plan, operator):
            _call(own.with_tensors(tensors))
            return written[0]
        results = self._results(plan, tensors, own)
        if written and not here:
            return written[0] if len(written) == 1 else tuple(written)
        if written:
            for target, result, spec in zip(written, results, plan.choice.outputs, strict=True):
                _write(target, result, cast(DTensorSpec, spec), operator)
            return written[0] if len(written) == 1 else tuple(written)
        return _wrapped(operator, results, plan.choice.outputs, args, kwargs)

    def _results(self, plan: DTensorPlan, tensors: Sequence[Tensor | None], own: OpCall) -> Sequence[Any]:
        device = next(t.device for t in tensors if t is not None)
        if plan.part is None:
            return [
                None if s is None else torch.empty(0, dtype=_meta(s).dtype, device=device) for s in plan.choice.outputs
            ]
        empty = {name: torch.empty(0, dtype=own.arguments[name].dtype, device=device) for name in _outs(own.operator)}
        call = OpCall(plan.call.operator, {**plan.call.arguments, **own_values(own, plan.call), **empty})
        return [
            r.to(device) if isinstance(r, Tensor) else r for r in local_call.run(call, plan.bound, plan.part, tensors)
        ]

    def _plan(self, schema: OpSchema) -> DTensorPlan:
        propagator = cast(Any, DTensor)._op_dispatcher.sharding_propagator
        found: Any = propagator._propagate_tensor_meta_non_cached(schema)
        listed: list[TensorMeta | None] = [found] if isinstance(found, TensorMeta) else [*(found or ())]
        given = OpCall.of(schema.op, schema.args_schema, schema.kwargs_schema)
        call = OpCall(
            schema.op, tree_map(_on_meta, dict(given.arguments), is_leaf=lambda value: isinstance(value, DTensorSpec))
        )
        specs = _specs(call, given)
        mesh = next(s.mesh for s in specs if s is not None)
        if any(s is not None and s.mesh != mesh for s in specs):
            raise RuntimeError(f"{call} has DTensors of different meshes; put them on one")
        bound = diagonal(call) if call.name == "diagonal" else find_bound(self._table, call)
        if len(bound.outputs) != len(listed):
            raise NotImplementedError(f"the rule of {call.name} has {len(bound.outputs)} results, not {len(listed)}")
        choice = choose(bound, call, specs, mesh, listed)
        return DTensorPlan(
            call, bound, choice, _part(bound, choice, mesh), not CORRECTED & {n for n, _ in bound.rule.notes}
        )


def with_replicated_keywords(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom handler that makes whole what is given by keyword, and leaves the rest to torch's own rule."""
    found = {
        name: value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if isinstance(value, DTensor)
        else value
        for name, value in kwargs.items()
    }
    return _by_torch(operator, args, found)


def not_into_a_copy(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom handler that refuses what would be lost, and leaves the rest to torch's own rule."""
    _refuse_copies(operator, _written(operator, args, kwargs))
    return _by_torch(operator, args, kwargs)


def with_its_shape(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom handler of `squeeze_`: torch forgets the shape where no placement changes."""
    before: DTensorSpec = args[0]._spec
    found = _by_torch(operator, args, kwargs)
    if found._spec is not before:
        return found
    whole = _on_meta(before)
    operator(whole, *args[1:], **kwargs)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    found._spec = DTensorSpec(before.mesh, before.placements, tensor_meta=meta)
    return cast(Any, return_and_correct_aliasing(operator, args, kwargs, found))


def _by_torch(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers: dict[Any, Any] = cast(Any, DTensor)._op_dispatcher._custom_op_handlers
    own = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = own


def _refuse_copies(operator: OpOverload, written: Sequence[Any]) -> None:
    """Raise RuntimeError where what is written is taken for a view, and is none: torch gathers for a view across a cut,
    as `x[0]` of rows that are cut, and what is written there reaches nobody."""
    for target in written:
        base = getattr(target, "_base", None)
        if not isinstance(target, DTensor) or not isinstance(base, DTensor):
            continue
        here, there = (cast(Any, t)._local_tensor.untyped_storage()._cdata for t in (target, base))
        if here != there:
            raise RuntimeError(
                f"{operator} would write to a copy, and not to the DTensor of which it is a view across a cut;"
                " redistribute that one first, so that the dim of the view is whole"
            )


def diagonal(call: OpCall) -> BoundOp:
    """What can be cut of a view of a diagonal: the dims beside it, which no strides tell from it."""
    first = call.tensors[0]
    assert first is not None
    gone = {*call.dims("dim1", first.ndim), *call.dims("dim2", first.ndim)}
    sizes = {f"d{i}": n for i, n in enumerate(first.shape) if i not in gone}
    dims = tuple((f"d{i}",) if f"d{i}" in sizes else () for i in range(first.ndim))
    rule = Rule((call.name,), (Operand(()),), (Operand(()),))
    return BoundOp(
        rule, (dims,), ((*(dim for dim in dims if dim), ()),), sizes, frozenset(), dict.fromkeys(sizes, ("",))
    )


def _part(bound: BoundOp, choice: DTensorChoice, mesh: DeviceMesh) -> local_call.RankPart | None:
    at = mesh.get_coordinate()
    if at is None:
        return None
    own = Mesh((tuple((axis_name(i), mesh.size(i)) for i in range(mesh.ndim)),))
    return local_call.part_of(bound, choice.cuts, own, own.rank({axis_name(i): at[i] for i in range(mesh.ndim)}))


def _meta(spec: DTensorSpec) -> TensorMeta:
    assert spec.tensor_meta is not None
    return spec.tensor_meta


def _on_meta(value: Any) -> Any:
    if isinstance(value, DTensorSpec):
        meta = _meta(value)
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    return value


def _specs_of(value: Any) -> Any:
    """Arguments with specs in the place of strategies of one spec each."""
    if isinstance(value, OpStrategy):
        return value.strategies[0].output_spec
    if isinstance(value, TupleStrategy):
        return [_specs_of(child) for child in value.children]
    if isinstance(value, Mapping):
        return {key: _specs_of(one) for key, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        found = [_specs_of(one) for one in cast("Sequence[Any]", value)]
        return tuple(found) if isinstance(value, tuple) else found
    return value


def _specs(call: OpCall, inputs: OpCall) -> Specs:
    return tuple(s if isinstance(s, DTensorSpec) else None for s in placed(call, dict(inputs.arguments)))


def own_values(own: OpCall, full: OpCall) -> dict[str, Any]:
    """The arguments without tensors, as they were given this time."""
    tensors = {name for name, _ in full.places}
    return {name: value for name, value in own.arguments.items() if name not in tensors}


def _moved(tensor: Tensor, inputs: DTensorSpec | None, target: DTensorSpec | None, operator: OpOverload) -> Tensor:
    assert inputs is not None
    assert target is not None
    if inputs.placements == target.placements and inputs.shard_order == target.shard_order:
        return tensor
    ExplicitRedistributionContext.observe_redistribution(inputs, target, LazyString(lambda: f"for {operator}"))
    moved = redistribute_local_tensor(tensor, inputs, target)
    return moved.contiguous()  # which kernels insist on, and what was gathered is not


def _outs(operator: OpOverload) -> list[str]:
    return [a.name for a in schema_of(operator).arguments if a.is_out]


def _written(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DTensor]:
    """The tensors that results are written to."""
    arguments = OpCall.of(operator, args, kwargs).arguments
    return [arguments[a.name] for a in schema_of(operator).arguments if is_written(a)]


def _stays(written: Sequence[DTensor], plan: DTensorPlan, operator: OpOverload) -> bool:
    """Whether the operator can write where the only tensor lies that it writes."""
    if _outs(operator) or len(written) != 1:
        return False
    now = written[0]._spec.placements  # pyright: ignore[reportPrivateUsage]
    first, output = plan.choice.inputs[0], plan.choice.outputs[0]
    return first is not None and output is not None and now == first.placements == output.placements


def _call(call: OpCall) -> None:
    arguments = schema_of(call.operator).arguments
    positional = [call.arguments[a.name] for a in arguments if not a.kwarg_only]
    call.operator(*positional, **{a.name: call.arguments[a.name] for a in arguments if a.kwarg_only})


def _write(target: DTensor, result: Tensor, spec: DTensorSpec, operator: OpOverload) -> None:
    """Put a result into a DTensor that stays placed as it is; where a sum is pending there, on its first rank."""
    now = target._spec  # pyright: ignore[reportPrivateUsage]
    if now.shape != spec.shape:
        raise RuntimeError(f"{operator} gives shape {list(spec.shape)}, and is to write it to {list(now.shape)}")
    pending: dict[int, str] = {i: p.reduce_op for i, p in enumerate(now.placements) if isinstance(p, Partial)}
    if any(type(now.placements[i]) is not Partial or op == "product" for i, op in pending.items()):
        raise NotImplementedError(f"{operator} cannot write to a tensor on which {now.placements} is pending")
    here: Any = now
    if pending:
        kept = tuple(Replicate() if i in pending else p for i, p in enumerate(now.placements))
        here = DTensorSpec(now.mesh, kept, tensor_meta=now.tensor_meta)
    result = _moved(result, spec, here, operator)
    at = now.mesh.get_coordinate()
    if at is not None and any(op == "sum" and at[i] for i, op in pending.items()):
        result = torch.zeros_like(result)
    target._local_tensor.copy_(result)  # pyright: ignore[reportPrivateUsage]


def _wrapped(operator: OpOverload, results: Sequence[Any], specs: Specs, args: Any, kwargs: Any) -> Any:
    made = [
        r if s is None or not isinstance(r, Tensor) else cast(Any, DTensor)(r, s, requires_grad=False)
        for r, s in zip(results, specs, strict=True)
    ]
    returns = schema_of(operator).returns
    listed = len(returns) == 1 and "List" in str(returns[0].type)
    value = made if listed else made[0] if len(returns) == 1 else tuple(made)
    if schema_of(operator)._is_view_op():
        return cast(Any, return_and_correct_aliasing(operator, args, kwargs, value))
    return value
