"""Operators that are only ever whole though discovery finds a cut of theirs that is valid in calls of two shapes.

Where the table says why an operator is whole, the row says so, too: discovery proposes what was right in the calls that
it tried, and numbers coincide. Operators that are carried out in steps are not whole only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload

from tangram.hardware.measuring.measure import Row
from tangram.sharding.discover.report import Gap, cuts_nothing
from tangram.sharding.discover.report import gaps as found_gaps
from tangram.sharding.ops.computed_rules import ESCAPES
from tangram.sharding.ops.decompose import is_decomposed
from tangram.sharding.ops.rule_table import builtin


def rows() -> Iterator[Row]:
    """Run discovery over all operators, some minutes, and list what it finds of whole ones."""
    yield from listed(found_gaps())


def listed(gaps: Sequence[Gap]) -> Iterator[Row]:
    """One row for those without a reason, and one for each operator."""
    cuts: dict[str, list[Gap]] = {}
    for gap in gaps:
        if whole_only(gap.operator):
            cuts.setdefault(gap.operator, []).append(gap)
    bare = [name for name, some in cuts.items() if not some[0].reason]
    what = "operators that are whole only without a reason, and of which discovery finds a valid cut"
    yield Row(what, "operators", len(bare), target=0)
    for name, some in sorted(cuts.items()):
        why = some[0].reason or "no reason is given"
        yield Row(f"whole: {name}: {why} (found: {some[0].cut})", "cuts", len(some))


def whole_only(name: str) -> bool:
    """Whether no line of an operator cuts anything, and nothing else does."""
    packet, _, overload = name.partition(".")
    operator: Any = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if not isinstance(operator, OpOverload) or name in ESCAPES or is_decomposed(name):
        return False
    lines = builtin().all_of(cast(Any, operator))
    return bool(lines) and all(map(cuts_nothing, lines))
