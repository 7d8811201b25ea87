"""What the table says of an operator, for people."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tangram.errors import UserError
from tangram.sharding.ops import computed_rules, decompose, foreach, views
from tangram.sharding.ops.calls import name_of
from tangram.sharding.ops.rule_table import builtin


def rules_of(operator: str) -> list[tuple[str, str, str]]:
    """The rules of an operator by its name, `sum.dim_IntList` or `sum`: overload, rule and place in the table.

    Raises UserError where torch has no such operator.
    """
    packet, _, overload = operator.removeprefix("aten::").removeprefix("aten.").partition(".")
    found: Any = getattr(torch.ops.aten, packet, None)
    if found is None:
        raise UserError(f"torch has no operator aten.{packet}")
    overloads: Mapping[str, Any] = {name: getattr(found, name) for name in found.overloads()}
    if overload and overload not in overloads:
        raise UserError(f"aten.{packet} has no overload {overload}, but {', '.join(overloads)}")
    rows: list[tuple[str, str, str]] = []
    for name, one in overloads.items():
        if overload not in ("", name):
            continue
        shown = packet if name == "default" else f"{packet}.{name}"
        rows += [(shown, *row) for row in _rows(one)]
        where = decompose.place_of(name_of(one))
        if where:
            rows.append((shown, "in steps, where that moves less: of a cut dim sums and maxima", where))
    return rows


def _rows(operator: Any) -> list[tuple[str, str]]:
    """The rules of one overload, and where they stand."""
    packet = name_of(operator).partition(".")[0]
    made = computed_rules.shown(operator)
    if made is not None and name_of(operator) not in builtin().lines:
        return [(made[0], f"escapes.py, {made[1]}")]
    base = foreach.base_of(operator)
    if base is not None:
        return [(f"each element: {rule}", place) for rule, place in _rows(base.operator)]
    lines = builtin().all_of(operator)
    if lines:
        return [(str(replace(line.rule, operators=(packet,))), f"{line.file}, line {line.number}") for line in lines]
    return [("by the strides of a view" if views.view_of(operator) else "none", "")]
