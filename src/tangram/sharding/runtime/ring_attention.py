"""Attention whose keys go round, in the stead of putting them together before it.

A mark says of every call of `attend` that its queries, keys, values and results are cut over their tokens (`Passed`).
So the program has keys and values brought from parts of them to all just before; with that step left out the ring
(`relayout.collectives.ring_attention`) does both at once. Where the mark does not hold, as of a probe that is too short
to be cut, keys are put together as the program says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tangram.kernels.attention import ATTEND, Heads
from tangram.layout import Layout
from tangram.models.capturing.graph import Graph, refs
from tangram.relayout.collectives.ring_attention import ring_attend
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.problem.states import cut
from tangram.sharding.derive.transitions import Change, apart

NAME = "attend.default"
QUERIES, KEYS, VALUES, OWN, SEEN, SINKS = range(6)
"""The places of its tensors, as `kernels.attention` calls it."""
TOKENS = cut(2)


@dataclass(frozen=True)
class RingMark(Mark):
    """The mark of what attention by tokens takes and gives: (batch, heads, tokens, width)."""

    @staticmethod
    def over(axes: Sequence[str]) -> RingMark:
        """With the tokens cut over axes, which stand in the order of the mesh."""
        return RingMark("attention by tokens", Layout.parse(f"b h t{''.join(f'/{axis}' for axis in axes)} e"))

    def on(self, graph: Graph) -> dict[str, int]:
        """Of every call."""
        found: dict[str, int] = {}
        for node in graph.nodes:
            if node.operator is ATTEND.default and not node.backward:
                taken = [(name, v) for name in "qkv" for v in refs(node.arguments[name])]
                for name, v in (*taken, ("result", node.results[0])):
                    if v is not None:
                        found[f"{name} of {node.module}#{len(found)}"] = v
        return found


class Rings:
    """Those of one model on one rank. `groups`: by axis; `bring`: does the other steps."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], bring: Callable[[Tensor, Change], Tensor]) -> None:
        self._groups, self._bring = groups, bring

    def attend(self, takes: Mapping[int, Change], args: Sequence[Any]) -> Any:
        """The function with what moves before it; NotImplemented where a ring does not do that."""
        keys, values = (tuple(apart(takes.get(place, ()))) for place in (KEYS, VALUES))
        if not keys or keys[-1:] != values[-1:] or keys[-1].source != TOKENS or keys[-1].target.kind != "several":
            return NotImplemented
        before = {**takes, KEYS: keys[:-1], VALUES: values[:-1]}
        given: list[Any] = [
            self._bring(x, before[i]) if i in before and isinstance(x, Tensor) else x for i, x in enumerate(args)
        ]
        heads, (own, seen, sinks, scale, window) = Heads(*given[:OWN]), given[OWN:]
        return ring_attend(heads, own, seen, sinks, scale, window, self._groups[keys[-1].axis])
