"""Op rules of one's own: a file of lines, as `tangram shard discover` writes them, checked and proved before use.

    rules = own_rules("own.rules")              # each line proved with drawn calls of its operator
    rules = own_rules("own.rules", calls)       # with the calls that a function gives
    parallel(model, marks, devices, inputs, rules=rules)

What is derived of a model depends on its rules, so a captured graph carries the text of them (`Graph.rules`), and
`rule_table.table_of` is the table of that text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.models.building.build import did_you_mean
from tangram.sharding.ops import computed_rules, views
from tangram.sharding.ops.calls import OpCall, name_of
from tangram.sharding.ops.rule_table import POINTWISE, RuleLine, builtin, read_lines, table_of

Samples = Callable[[], Iterable[Any]]
"""Gives calls: tuples of arguments, or `(args, kwargs)`; of several operators a dict of such lists, by their names."""
_NOTES = frozenset({"whole", "taken", "shape", "same", "unless", "if", "undefined", "random", "filled", "counted"})


@dataclass(frozen=True)
class OwnRules:
    """Rules that have been proved."""

    text: str
    """One a line."""


def own_rules(file: Path | str, samples: Samples | None = None) -> OwnRules:
    """The rules of a file, checked and proved by numbers in this process, forward and backward.

    `samples` gives calls to prove them with, beside those that are drawn from the operator's schema and its rule. The
    operators have to be known to torch, so what defines them is imported first. Raises UserError where the file cannot
    be read, a line is no rule, names no operator or contradicts a built-in rule, and where a rule is wrong.
    """
    lines = read_lines(file)
    named = _checked(lines)
    fresh = [line for line in lines if any(own is line for _, own in named)]
    rules = OwnRules("\n".join(line.text for line in fresh))
    operators = {name_of(operator): operator for operator, _ in named}
    calls = _calls_of(samples, operators, str(file))
    for name, operator in operators.items():
        line = next(line for own, line in named if own is operator)
        if name in calls:
            _prove(rules.text, operator, line, calls[name])
        else:
            _prove_drawn(rules.text, operator, line)
    return rules


def rules_text(rules: Path | str | OwnRules | None) -> str:
    """The text of rules: of a file's, once they are proved. Raises UserError as `own_rules`."""
    return "" if rules is None else rules.text if isinstance(rules, OwnRules) else own_rules(rules).text


# ---------------------------------------------------------------- what a line may say


def _checked(lines: Sequence[RuleLine]) -> list[tuple[OpOverload, RuleLine]]:
    """The operators of lines that say something new, each with its line. Raises UserError."""
    pairs: list[tuple[OpOverload, RuleLine]] = []
    always: dict[str, RuleLine] = {}
    for line in lines:
        _refuse_unknown_notes(line)
        for name in line.rule.operators:
            if name in always:
                raise UserError(
                    f"{_at(line)}: {name} has the rule of line {always[name].number} for all its calls, and this one "
                    "would never be used: leave one of them out, or say which calls each is for, as `if(dim 1)`"
                )
            if not {"if", "unless"} & {note for note, _ in line.rule.notes}:
                always[name] = line
            pairs += [(operator, line) for operator in _operators(name, line) if not _is_built_in(operator, line)]
    return pairs


def _operators(name: str, line: RuleLine) -> list[OpOverload]:
    """What a name in a rule stands for: an overload, or all of them. Raises UserError where torch has none."""
    first, _, rest = name.partition(".")
    packets = [("aten", first, rest)]
    packets += [(first, *rest.partition(".")[::2])] if rest else []
    for space, packet, overload in packets:
        own: Any = getattr(getattr(torch.ops, space), packet, None)
        some = [] if own is None else [overload] if overload else [*own.overloads()]
        if own is not None and set(some) <= {*own.overloads()}:
            return [cast(OpOverload, getattr(own, one)) for one in some]
    from tangram.sharding.discover.sample_calls import near

    named = name.replace(".", "::", 1)
    raise UserError(
        f"{_at(line)}: torch has no operator {named}: import what defines it first (--import MODULE; model.code of a "
        f"job){near(named) or near(f'aten::{first}')}"
    )


def _is_built_in(operator: OpOverload, line: RuleLine) -> bool:
    """Whether a built-in rule says the same already. Raises UserError where one says something else."""
    name = name_of(operator)
    there = [own for own in builtin().all_of(operator) if POINTWISE not in own.rule.operators]
    made = name in computed_rules.ESCAPES or views.view_of(operator) is not None
    if not there and not made:
        return False
    if any(_body(own) == _body(line) for own in there):
        return True
    shown = f"`{there[0].rule}` ({there[0].file}, line {there[0].number})" if there else "by its arguments and strides"
    raise UserError(f"{_at(line)}: {name} has a built-in rule, {shown}, which this one contradicts: leave it out")


def _body(line: RuleLine) -> str:
    return str(line.rule).partition(" : ")[2]


def _refuse_unknown_notes(line: RuleLine) -> None:
    known = _NOTES | {note for own in builtin().lines.values() for one in own for note, _ in one.rule.notes}
    for note, _ in line.rule.notes:
        if note not in known:
            raise UserError(f"{_at(line)}: rules have no note {note}{did_you_mean(note, sorted(known), listed=False)}")


def _at(line: RuleLine) -> str:
    return f"{line.file}, line {line.number}"


# ---------------------------------------------------------------- proof


def _calls_of(samples: Samples | None, operators: Mapping[str, OpOverload], file: str) -> dict[str, list[OpCall]]:
    """The calls that samples give, by operator. Raises UserError."""
    from tangram.sharding.discover.sample_calls import calls_from, made_by

    if samples is None or not operators:
        return {}
    several = ", ".join(operator.name() for operator in operators.values())
    made = made_by(samples, several)
    if not isinstance(made, dict) and len(operators) == 1:
        made = dict.fromkeys(operators, made)
    if not isinstance(made, dict):
        raise UserError(f"{file} has rules of {several}: let the samples be a dict of lists of calls, by operator")
    some: Mapping[str, list[Any]] = made
    return {
        name: calls_from(operator, lambda name=name: some[name]) for name, operator in operators.items() if name in some
    }


@lru_cache(256)
def _prove_drawn(text: str, operator: OpOverload, line: RuleLine) -> None:
    """With drawn calls alone, which are the same each time: once in a process. A wrong one is refused each time."""
    _prove(text, operator, line, ())


def _prove(text: str, operator: OpOverload, line: RuleLine, calls: Sequence[OpCall]) -> None:
    """Raise UserError where the rule of an operator is wrong, or nothing shows that it is right."""
    from tangram.sharding.discover.sample_calls import calls_to_prove
    from tangram.sharding.proof.prove import prove_operator

    table, name = table_of(text), operator.name()
    ways = "give some (--samples FILE.py:function; model.code of a job; own_rules(file, function))"
    if not (tried := calls_to_prove(calls, operator, table)):
        raise UserError(f"{_at(line)}: nothing shows that the rule of {name} is right, as no drawn call runs: {ways}")
    with torch.random.fork_rng(devices=[]):
        verdict = prove_operator(table, name_of(operator), tried)
    if verdict.kind not in ("proved", "whole"):
        more = "" if calls else f". It was drawn; where calls have to be of other sizes, {ways}"
        raise UserError(
            f"{_at(line)}: the rule of {name} is wrong: {verdict.why}; `tangram shard discover {name}` proposes "
            f"one{more}"
        )
