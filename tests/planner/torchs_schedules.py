"""The tables that torch's own classes make, without any process: of the stages they ask only numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class


@dataclass
class Numbers:
    """What torch asks of a stage while it makes a table."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    is_last: bool = False
    submod: nn.Module = field(default_factory=nn.Module)


def torchs(name: str, ranks: int, own: int, micros: int) -> list[list[str]]:
    """For each rank its actions in order; pairs that torch would overlap one after the other."""
    kind: Any = get_schedule_class(name)
    stages = [Numbers(ranks * own, ranks) for _ in range(own)]
    if name in ("GPipe", "1F1B"):
        made = kind.__new__(kind)
        made._num_stages, made._n_microbatches = ranks, micros
        order = made._get_pipeline_order()
        if name == "1F1B":  # which torch shows with the last rank's forwards counted from 1; it runs them from 0
            last = order[ranks - 1]
            order[ranks - 1] = [
                a._replace(microbatch_index=a.microbatch_index - 1) if _is_forward(a) else a for a in last
            ]
    else:
        order = kind(stages, micros).pipeline_order
    rows = cast("dict[int, list[Any]]", order)
    return [[word for action in rows[rank] for word in _words(action)] for rank in range(ranks)]


def _is_forward(action: Any) -> bool:
    return action is not None and action.computation_type.value == "F"


def _words(action: Any) -> Iterator[str]:
    if action is None or "REDUCE_GRAD" in str(action):
        return
    yield from map(str, action.sub_actions or [action])
