"""The table of op rules: text files beside the code, one rule a line, one line a family.

A rule that a variant lacks is that of its base: `add_` and `add.out` have `add`'s. Operators that torch tags as
pointwise have one rule together, `pointwise`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.layout.errors import NotationError
from tangram.layout.rule import Rule
from tangram.sharding.ops import computed_rules, decompose, foreach, views
from tangram.sharding.ops.bind import BoundOp, bind
from tangram.sharding.ops.calls import OpCall, name_of
from tangram.sharding.ops.dim_positions import RuleError

POINTWISE = "pointwise"


@dataclass(frozen=True)
class RuleLine:
    """A rule and where it stands."""

    rule: Rule
    file: str
    number: int
    text: str
    exact: bool = False
    """Whether it is for tensors of as many dims as it writes, and none that broadcast: more was not proved."""


@dataclass(frozen=True)
class RuleTable:
    """Rules by the operators that they name."""

    lines: Mapping[str, tuple[RuleLine, ...]] = field(default_factory=dict[str, tuple[RuleLine, ...]])
    """Of each operator, the rules for different arguments."""

    def find(self, call: OpCall) -> RuleLine | None:
        """The rule of an operator: its own, that of all its overloads, or that of what it is a variant of."""
        return next((line for line in self.all_of(call.operator) if line.rule.holds_for(call.arguments)), None)

    def all_of(self, operator: OpOverload) -> tuple[RuleLine, ...]:
        """The rules of an operator, whatever its arguments."""
        known: dict[OpOverload, tuple[RuleLine, ...]] = vars(self).setdefault("_known", {})
        found = known.get(operator)
        if found is None:
            found = known[operator] = self._all_of(operator)
        return found

    def _all_of(self, operator: OpOverload) -> tuple[RuleLine, ...]:
        name = name_of(operator)
        packet, _, overload = name.partition(".")
        for key in (name, packet, *_bases(packet, overload)):
            if key in self.lines:
                return self.lines[key]
        return self.lines.get(POINTWISE, ()) if torch.Tag.pointwise in operator.tags else ()

    def with_lines(self, lines: Iterable[RuleLine]) -> RuleTable:
        """The table with more rules, which replace those of the same operators."""
        found: dict[str, tuple[RuleLine, ...]] = {}
        for line in lines:
            for name in line.rule.operators:
                found[name] = (*found.get(name, ()), line)
        return RuleTable({**self.lines, **found})


def _bases(packet: str, overload: str) -> list[str]:
    """Names that a variant's rule may stand under."""
    plain = packet.removesuffix("_")
    found = [f"{plain}.{overload}" if overload else plain, plain]
    if overload.endswith("_out"):
        found.insert(0, f"{plain}.{overload.removesuffix('_out')}")
    return found


def parse_lines(text: str, file: str = "<text>") -> list[RuleLine]:
    """The rules of a text, one a line, which goes on where the next one is indented; `#` begins a comment.

    Raises UserError with the place of a mistake.
    """
    found: list[RuleLine] = []
    joined: list[list[_Stretch]] = []
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(^|\s)#.*", "", line).rstrip()
        indent = len(plain) - len(plain.lstrip())
        if plain and indent and joined:
            joined[-1].append(_Stretch(number, indent, plain.strip()))
        elif plain:
            joined.append([_Stretch(number, indent, plain.strip())])
    for stretches in joined:
        body = " ".join(stretch.text for stretch in stretches)
        try:
            found.append(RuleLine(Rule.parse(body), file, stretches[0].number, body))
        except NotationError as error:
            number, column = _place(stretches, error.position)
            rest = f" (at {body[error.position :][:20]!r})" if body[error.position :] else ""
            raise UserError(f"{file}, line {number}, column {column}: {error.reason}{rest}") from None
    return found


class _Stretch(NamedTuple):
    """One line of a rule that goes on over several."""

    number: int
    indent: int
    text: str


def _place(stretches: Sequence[_Stretch], position: int) -> tuple[int, int]:
    """The line and the column, both from 1 on, of a place in the rule."""
    for stretch in stretches[:-1]:
        if position <= len(stretch.text):
            return stretch.number, stretch.indent + position + 1
        position -= len(stretch.text) + 1
    return stretches[-1].number, stretches[-1].indent + position + 1


@lru_cache(1)
def builtin() -> RuleTable:
    """The rules that come with Tangram."""
    files = sorted(resources.files("tangram.sharding.rules").iterdir(), key=lambda f: f.name)
    return RuleTable().with_lines(
        line for f in files if f.name.endswith(".rules") for line in parse_lines(f.read_text(), f.name)
    )


@lru_cache(16)
def table_of(text: str) -> RuleTable:
    """The built-in table with the lines of a text, which have been checked."""
    return builtin().with_lines(replace(line, exact=True) for line in parse_lines(text)) if text else builtin()


def read_lines(file: Path | str) -> list[RuleLine]:
    """The lines of a file. Raises UserError where it cannot be read, or one is no rule."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the rules {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the rules {file} cannot be read: they are not UTF-8 text") from None
    return parse_lines(text, str(file))


class NoRuleError(UserError):
    """There is no rule for an operator."""


class OwnCollectiveError(NoRuleError):
    """Code calls a collective, which no rule can be for."""


COLLECTIVES = ("c10d.", "c10d_functional.", "_c10d_functional.")


def bound(table: RuleTable, call: OpCall) -> BoundOp:
    """The factors of a call. Raises NoRuleError, which says how to find a rule; RuleError where one does not fit."""
    if (rule := computed_rules.rule_of(call)) is not None and call.name not in table.lines:
        return bind(rule, call)
    line = table.find(call)
    if line is not None:
        if line.exact and (why := misfit(line.rule, call)):
            raise RuleError(why)
        return bind(line.rule, call)
    view = views.view_of(call.operator)
    if view is not None:
        return views.bind(call, view)
    if foreach.base_of(call.operator) is not None:
        raise NoRuleError(f"{call.name} has a rule for each element: bind what `sharding.ops.foreach.calls` gives")
    if call.name.startswith(COLLECTIVES):
        raise OwnCollectiveError(
            f"the model's code calls a collective itself ({call.name}), while what ranks exchange is derived: leave "
            "it out of the forward, or make the axis a data axis"
        )
    raise NoRuleError(f"there is no rule for {call.name}: `tangram shard discover {call.operator.name()}` proposes one")


def misfit(rule: Rule, call: OpCall) -> str:
    """Why a rule is for tensors of other numbers of dims, or for such as broadcast; "" where it is not."""
    operands: dict[str, int] = {}
    sizes: dict[int, tuple[int, str]] = {}  # of the dims of `...`, from the right
    for (name, _), tensor in zip(call.places, call.tensors, strict=True):
        operand = rule.inputs[min(operands.setdefault(name, len(operands)), len(rule.inputs) - 1)]
        if tensor is None:
            continue
        if operand.is_fixed and tensor.ndim != len(operand.pieces):
            return f"the rule of {call.name} has `{operand}` for {name}, which has {tensor.ndim} dims: {call}"
        rest = next((i for i, piece in enumerate(operand.pieces) if piece.rest and not piece.uncut), None)
        if rest is None or rule.slots:
            continue
        for k, n in enumerate(reversed(tensor.shape[rest : tensor.ndim - (len(operand.pieces) - rest - 1)])):
            other, of = sizes.setdefault(k, (n, name)) if n != 1 else (1, name)
            if other != n and of != name:
                return (
                    f"the rule of {call.name} has `...` for dims that have {other} elements in {of} and {n} in {name}, "
                    f"and of `...` they are equal, or 1: write a letter or _ for each: {call}"
                )
    return ""


def each(table: RuleTable, call: OpCall) -> tuple[tuple[OpCall, BoundOp], ...]:
    """The calls that a call is made of, with their factors: of its elements where it is over lists, else itself.

    Raises as `bound`.
    """
    own = foreach.calls(call)
    return tuple((one, bound(table, one)) for one in ((call,) if own is None else own))


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
