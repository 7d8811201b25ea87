"""The table of op rules: text files beside the code, one rule a line, one line a family.

A rule that a variant lacks is that of its base: `add_` and `add.out` have `add`'s. Operators that torch tags as
pointwise have one rule together, `pointwise`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources

import torch
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.layout.errors import NotationError
from tangram.layout.rule import Rule
from tangram.sharding.ops.calls import Call, name_of

POINTWISE = "pointwise"


@dataclass(frozen=True)
class Line:
    """A rule and where it stands."""

    rule: Rule
    file: str
    number: int
    text: str


@dataclass(frozen=True)
class Table:
    """Rules by the operators that they name."""

    lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict[str, tuple[Line, ...]])
    """Of each operator, the rules for different arguments."""

    def find(self, call: Call) -> Line | None:
        """The rule of an operator: its own, that of all its overloads, or that of what it is a variant of."""
        return next((line for line in self.all_of(call.operator) if line.rule.holds_for(call.arguments)), None)

    def all_of(self, operator: OpOverload) -> tuple[Line, ...]:
        """The rules of an operator, whatever its arguments."""
        known: dict[OpOverload, tuple[Line, ...]] = vars(self).setdefault("_known", {})
        found = known.get(operator)
        if found is None:
            found = known[operator] = self._all_of(operator)
        return found

    def _all_of(self, operator: OpOverload) -> tuple[Line, ...]:
        name = name_of(operator)
        packet, _, overload = name.partition(".")
        for key in (name, packet, *_bases(packet, overload)):
            if key in self.lines:
                return self.lines[key]
        return self.lines.get(POINTWISE, ()) if torch.Tag.pointwise in operator.tags else ()

    def with_lines(self, lines: Iterable[Line]) -> Table:
        """The table with more rules, which replace those of the same operators."""
        found: dict[str, tuple[Line, ...]] = {}
        for line in lines:
            for name in line.rule.operators:
                found[name] = (*found.get(name, ()), line)
        return Table({**self.lines, **found})


def _bases(packet: str, overload: str) -> list[str]:
    """Names that a variant's rule may stand under."""
    plain = packet.removesuffix("_")
    found = [f"{plain}.{overload}" if overload else plain, plain]
    if overload.endswith("_out"):
        found.insert(0, f"{plain}.{overload.removesuffix('_out')}")
    return found


def parse_lines(text: str, file: str = "<text>") -> list[Line]:
    """The rules of a text, one a line, which goes on where the next one is indented; `#` begins a comment.

    Raises UserError with the place of a mistake.
    """
    found: list[Line] = []
    joined: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if plain and plain[0].isspace() and joined:
            joined[-1] = joined[-1][0], f"{joined[-1][1]} {plain.strip()}"
        elif plain:
            joined.append((number, plain.strip()))
    for number, body in joined:
        try:
            found.append(Line(Rule.parse(body), file, number, body))
        except NotationError as error:
            raise UserError(f"{file}, line {number}: {error.reason} (at {body[error.position :][:20]!r})") from None
    return found


@lru_cache(1)
def builtin() -> Table:
    """The rules that come with Tangram."""
    files = sorted(resources.files("tangram.sharding.rules").iterdir(), key=lambda f: f.name)
    return Table().with_lines(
        line for f in files if f.name.endswith(".rules") for line in parse_lines(f.read_text(), f.name)
    )
