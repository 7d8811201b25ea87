"""The standing report: what can be cut in torch's samples and is not allowed by the table.

A cut counts where it was right in calls of two shapes or more, of dims of three elements at least, and where something
is gained: a result that is cut or pending, not the same on all ranks. It is a candidate, not a proof: numbers coincide,
as in a maximum of which each part has its own. What the table keeps whole for a reason is listed with the reason.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, cast

import torch
from torch import _decomp as decomposition
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.hardware.host import workers
from tangram.sharding.discover.cuts import DimsTogether
from tangram.sharding.discover.propose import findings
from tangram.sharding.ops import rule_table, views
from tangram.sharding.ops.calls import OpCall, name_of, tensor_arguments
from tangram.sharding.ops.computed_rules import ESCAPES
from tangram.sharding.ops.rule_table import POINTWISE, RuleLine, RuleTable, builtin
from tangram.sharding.proof.samples import samples

CALLS = 10
"""Of an operator that are tried."""
LIMIT = 600.0
"""Seconds for all."""
LEAST = 3
"""Elements of a dim whose cut counts."""


@dataclass(frozen=True)
class Gap:
    """A cut that is valid and not in the table."""

    operator: str
    cut: str
    """Which dims of which inputs, and what becomes of the results."""
    calls: int
    """In how many calls it was right."""
    call: str
    """One of them."""
    reason: str
    """Why the table keeps it whole, where it says so."""


def gaps() -> list[Gap]:
    """Every cut that is valid and not in the table. Raises UserError where torch has no samples, or the time is up."""
    shares = workers.in_parts(f"{__name__}:job", {}, LIMIT, "discovery did not end")
    return sorted((Gap(**one) for share in shares for one in share), key=lambda gap: (gap.operator, -gap.calls))


def job(part: int, parts: int) -> Any:
    """One process's share: every `parts`-th operator, from `part` on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table, calls = builtin(), samples.recorded()
    return [asdict(gap) for name in sorted(calls)[part::parts] for gap in gaps_of(table, name, calls[name])]


def gaps_of(table: RuleTable, name: str, calls: Sequence[OpCall]) -> list[Gap]:
    """The cuts of one operator that are valid and not in a table."""
    some = [c for c in calls if all(t is None or t.numel() for t in c.tensors)][:CALLS]
    found: dict[str, list[OpCall]] = {}
    for call, finding in zip(some, findings(some), strict=True):
        if isinstance(finding, str):
            continue
        try:
            known = _allowed(table, call)
        except rule_table.NoRuleError:
            known = set[frozenset[tuple[int, int]]]()
        except UserError:
            continue  # a rule that does not fit is the proof's to say
        for one in finding[0]:
            if frozenset(one.dims) not in known and _gains(one, call):
                found.setdefault(_shown(one, call), []).append(call)
    lines = table.all_of(some[0].operator) if some else ()
    why = reason(lines[0]) if lines and lines[0].file == "whole.rules" else ""
    return [Gap(name, cut, len(seen), str(seen[0]), why) for cut, seen in found.items() if len(_shapes(seen)) > 1]


def _allowed(table: RuleTable, call: OpCall) -> set[frozenset[tuple[int, int]]]:
    bound = rule_table.bound(table, call)
    return {
        frozenset((i, d) for i, dims in enumerate(bound.inputs) for d, fs in enumerate(dims or ()) if factor in fs)
        for factor in bound.cuttable
    }


def _gains(one: DimsTogether, call: OpCall) -> bool:
    sizes = [t.shape[d] for i, d in one.dims for t in [call.tensors[i]] if t is not None]
    return min(sizes) >= LEAST and any(op != "same" for op, _ in one.outputs)


def _shapes(calls: Sequence[OpCall]) -> set[Any]:
    return {tuple(None if t is None else tuple(t.shape) for t in call.tensors) for call in calls}


def _shown(one: DimsTogether, call: OpCall) -> str:
    """Dims counted from the end, as operators with more dims before them have them in common."""
    dims = ", ".join(f"input {i} dim {d - t.ndim}" for i, d in one.dims for t in [call.tensors[i]] if t is not None)
    after = ", ".join("cut" if op == "cut" else op for op, _ in one.outputs)
    notes = " scaled" * one.scale + (f" once {one.once[0]}" if one.once else "")
    return f"{dims} -> {after}{notes}"


# ----------------------------------------------------------------
# How each operator of torch is covered: by a line, a view, a decomposition, or whole with a reason.
# rule            a line of its own or of what it is a variant of
# pointwise       the line of all that torch tags so
# view            its factors follow from strides
# whole           a line that cuts nothing; the reason is the comment above it
# decomposition   torch says how it is made of others
# factory         it takes no tensor: there is nothing to cut but its result


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
        if all(cuts_nothing(line) for line in lines):
            return OperatorCoverage(name, "whole", reason(lines[0]))
        return OperatorCoverage(name, "pointwise" if lines[0].rule.operators[0] == POINTWISE else "rule", lines[0].text)
    if views.view_of(operator) is not None:
        return OperatorCoverage(name, "view")
    if not tensor_arguments(operator):
        return OperatorCoverage(name, "factory")
    return OperatorCoverage(name, "decomposition" if is_decomposed(operator) else "")


def cuts_nothing(line: RuleLine) -> bool:
    """Whether a line cuts nothing."""
    pieces = [piece for operand in line.rule.inputs for piece in operand.pieces]
    return all(piece.uncut or str(piece) == "_" for piece in pieces)


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
