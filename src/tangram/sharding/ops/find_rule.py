"""What can be cut in a call: by its rule, or by the strides of a view; or a refusal."""

from __future__ import annotations

from tangram.errors import UserError
from tangram.sharding.ops import computed_rules, foreach, views
from tangram.sharding.ops.bind import Bound, bind
from tangram.sharding.ops.calls import Call
from tangram.sharding.ops.rule_table import Table


class NoRuleError(UserError):
    """There is no rule for an operator."""


def bound(table: Table, call: Call) -> Bound:
    """The factors of a call. Raises NoRuleError, which says how to find a rule; RuleError where one does not fit."""
    if (rule := computed_rules.rule_of(call)) is not None and call.name not in table.lines:
        return bind(rule, call)
    line = table.find(call)
    if line is not None:
        return bind(line.rule, call)
    view = views.view_of(call.operator)
    if view is not None:
        return views.bind(call, view)
    if foreach.base_of(call.operator) is not None:
        raise NoRuleError(f"{call.name} has a rule for each element: bind what `sharding.ops.foreach.calls` gives")
    raise NoRuleError(f"there is no rule for {call.name}: `tangram shard discover {call.operator.name()}` proposes one")


def each(table: Table, call: Call) -> tuple[tuple[Call, Bound], ...]:
    """The calls that a call is made of, with their factors: of its elements where it is over lists, else itself.

    Raises as `bound`.
    """
    own = foreach.calls(call)
    return tuple((one, bound(table, one)) for one in ((call,) if own is None else own))
