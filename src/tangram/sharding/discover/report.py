"""The standing report: what can be cut in torch's samples and is not allowed by the table.

A cut counts where it was right in calls of two shapes or more, of dims of three elements at least, and where something
is gained: a result that is cut or pending, not the same on all ranks. It is a candidate, not a proof: numbers coincide,
as in a maximum of which each part has its own. What the table keeps whole for a reason is listed with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from tangram.errors import UserError
from tangram.hardware import workers
from tangram.sharding.discover.coverage import reason
from tangram.sharding.discover.cuts import DimsTogether
from tangram.sharding.discover.propose import findings
from tangram.sharding.ops import find_rule
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import RuleTable, builtin
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
    jobs = [workers.Job(f"{__name__}:job", {"part": i, "parts": 2}) for i in range(2)]
    found: list[Gap] = []
    for outcome in workers.run(jobs, LIMIT, {"OMP_NUM_THREADS": "1"}):
        if not outcome.ok:
            raise UserError(f"discovery did not end: {outcome.error}")
        found += [Gap(**cast("dict[str, Any]", one)) for one in cast("list[Any]", outcome.value)]
    return sorted(found, key=lambda gap: (gap.operator, -gap.calls))


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
        except find_rule.NoRuleError:
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
    bound = find_rule.bound(table, call)
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
