"""How each operator of torch is covered: by a line, a view, a decomposition, or whole with a reason.

rule            a line of its own or of what it is a variant of
pointwise       the line of all that torch tags so
view            its factors follow from strides
whole           a line that cuts nothing; the reason is the comment above it
decomposition   torch says how it is made of others
factory         it takes no tensor: there is nothing to cut but its result
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, cast

import torch
from torch import _decomp as decomposition
from torch._ops import OpOverload

from tangram.sharding.ops import views
from tangram.sharding.ops.calls import name_of, tensor_arguments
from tangram.sharding.ops.computed_rules import ESCAPES
from tangram.sharding.ops.rule_table import POINTWISE, RuleLine, builtin


@dataclass(frozen=True)
class OperatorCoverage:
    """How an operator is covered."""

    operator: str
    kind: str
    """As above; nothing where it is not."""
    what: str = ""
    """The line, or the reason why it is whole."""


def core() -> Iterator[OpOverload]:
    """The operators of torch's core set, which all others come down to."""
    for name in sorted(cast(Any, torch)._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten":
            one = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(one, OpOverload) and torch.Tag.core in one.tags:
                yield one


def coverage() -> list[OperatorCoverage]:
    """How each core operator is covered."""
    return [way(one) for one in core()]


def way(operator: OpOverload) -> OperatorCoverage:
    """How one operator is covered."""
    name, lines = name_of(operator), builtin().all_of(operator)
    if name in ESCAPES:
        return OperatorCoverage(name, "rule", "a function of escapes.py")
    if lines:
        if all(is_whole(line) for line in lines):
            return OperatorCoverage(name, "whole", reason(lines[0]))
        return OperatorCoverage(name, "pointwise" if lines[0].rule.operators[0] == POINTWISE else "rule", lines[0].text)
    if views.view_of(operator) is not None:
        return OperatorCoverage(name, "view")
    if not tensor_arguments(operator):
        return OperatorCoverage(name, "factory")
    return OperatorCoverage(name, "decomposition" if is_decomposed(operator) else "")


def is_whole(line: RuleLine) -> bool:
    """Whether a line cuts nothing."""
    pieces = [piece for operand in line.rule.inputs for piece in operand.pieces]
    return all(piece.whole or str(piece) == "_" for piece in pieces)


def is_decomposed(operator: OpOverload) -> bool:
    """Whether torch itself says how an operator is made of others."""
    composite = cast(Any, torch)._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    return composite or operator in cast(Any, decomposition).decomposition_table or operator in _core_decompositions()


@lru_cache(1)
def _core_decompositions() -> Any:
    return decomposition.core_aten_decompositions()


@lru_cache(1)
def _comments() -> dict[tuple[str, int], str]:
    """Of each line of the table's files, the last comment before it."""
    found: dict[tuple[str, int], str] = {}
    for file in resources.files("tangram.sharding.rules").iterdir():
        if not file.name.endswith(".rules"):
            continue
        last = ""
        for number, text in enumerate(file.read_text().splitlines(), 1):
            beside = re.search(r"(?:^|\s)# *(.*)", text)
            if beside is not None and text.startswith("#"):
                last = beside[1]
            found[file.name, number] = beside[1] if beside is not None else last
    return found


def reason(line: RuleLine) -> str:
    """The comment beside a line, or the last one before it."""
    return _comments().get((line.file, line.number), "")
