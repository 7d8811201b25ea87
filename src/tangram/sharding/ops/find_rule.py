"""What can be cut in a call: by its rule, or by the strides of a view; or a refusal."""

from __future__ import annotations

from tangram.errors import UserError
from tangram.layout.rule import Rule
from tangram.sharding.ops import computed_rules, foreach, views
from tangram.sharding.ops.bind import BoundOp, bind
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.dim_positions import RuleError
from tangram.sharding.ops.rule_table import RuleTable


class NoRuleError(UserError):
    """There is no rule for an operator."""


def bound(table: RuleTable, call: OpCall) -> BoundOp:
    """The factors of a call. Raises NoRuleError, which says how to find a rule; RuleError where one does not fit."""
    if (rule := computed_rules.rule_of(call)) is not None and call.name not in table.lines:
        return bind(rule, call)
    line = table.find(call)
    if line is not None:
        if line.exact:
            _refuse_broadcast(line.rule, call)
        return bind(line.rule, call)
    view = views.view_of(call.operator)
    if view is not None:
        return views.bind(call, view)
    if foreach.base_of(call.operator) is not None:
        raise NoRuleError(f"{call.name} has a rule for each element: bind what `sharding.ops.foreach.calls` gives")
    raise NoRuleError(f"there is no rule for {call.name}: `tangram shard discover {call.operator.name()}` proposes one")


def _refuse_broadcast(rule: Rule, call: OpCall) -> None:
    operands: dict[str, int] = {}
    for (name, _), tensor in zip(call.places, call.tensors, strict=True):
        operand = rule.inputs[min(operands.setdefault(name, len(operands)), len(rule.inputs) - 1)]
        if tensor is not None and operand.is_fixed and tensor.ndim != len(operand.pieces):
            raise RuleError(f"the rule of {call.name} has `{operand}` for {name}, which has {tensor.ndim} dims: {call}")


def each(table: RuleTable, call: OpCall) -> tuple[tuple[OpCall, BoundOp], ...]:
    """The calls that a call is made of, with their factors: of its elements where it is over lists, else itself.

    Raises as `bound`.
    """
    own = foreach.calls(call)
    return tuple((one, bound(table, one)) for one in ((call,) if own is None else own))
