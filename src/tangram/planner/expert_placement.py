"""Where experts go so that ranks have as much to do: some of them in several places.

The greedy way of DeepSeek's expert-parallel load balancer (EPLB): as long as there are slots, the expert of which each
copy has most to do gets one more copy; then the copies, from the heaviest on, go each to the rank that has least to do
and has room. With nodes, groups of experts first go to nodes in the same way, and copies stay within their node.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.4, and the repository deepseek-ai/EPLB. What is
added: a placement is never worse than experts in their own order, which is taken where it is better.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean

from tangram.errors import UserError

Placement = tuple[tuple[int, ...], ...]
"""By rank, the expert in each of its slots."""


def balance(loads: Sequence[float], placement: Placement) -> float:
    """What ranks have to do on average, as a part of what the busiest one has: 1 where all have the same.

    `loads`: by expert. Copies of an expert have equal parts of its load.
    """
    did = ranks_do(loads, placement)
    most = max(did, default=0.0)
    return fmean(did) / most if most > 0 else 1.0


def ranks_do(loads: Sequence[float], placement: Placement) -> list[float]:
    """By rank, the load of what is in its slots."""
    copies = [0] * len(loads)
    for slots in placement:
        for expert in slots:
            copies[expert] += 1
    return [sum(loads[expert] / copies[expert] for expert in slots) for slots in placement]


def in_order(experts: int, ranks: int, slots: int) -> Placement:
    """Experts in their own order, as many on each rank; further slots have copies of what the rank has.

    Raises UserError where ranks cannot have as many.
    """
    if experts % ranks:
        raise UserError(f"{experts} experts in their order must divide evenly among {ranks} ranks")
    own, room = experts // ranks, slots // ranks
    return tuple(tuple(r * own + i % own for i in range(room)) for r in range(ranks))


def place(loads: Sequence[float], ranks: int, slots: int, *, nodes: int = 1, groups: int = 1) -> Placement:
    """A placement of experts with these loads. `slots`: over all ranks; `groups`: of experts, which keep to a node.

    Raises UserError for numbers that do not divide, fewer slots than experts, and loads that are none.
    """
    _refuse(loads, ranks, slots, nodes, groups)
    size = len(loads) // groups
    weights = [sum(loads[g * size : (g + 1) * size]) for g in range(groups)]
    found: list[tuple[int, ...]] = []
    for own in _packed(weights, nodes, groups // nodes) if nodes > 1 else [list(range(groups))]:
        experts = [g * size + i for g in sorted(own) for i in range(size)]
        copies = _copies([loads[e] for e in experts], slots // nodes)
        packs = _packed([loads[experts[i]] / copies.count(i) for i in copies], ranks // nodes, slots // ranks)
        found += [tuple(sorted(experts[copies[place]] for place in pack)) for pack in packs]
    if len(loads) % ranks:  # as many experts in order on each rank are not to be had
        return tuple(found)
    plain = in_order(len(loads), ranks, slots)
    return plain if balance(loads, plain) > balance(loads, tuple(found)) else tuple(found)


def _copies(loads: Sequence[float], slots: int) -> list[int]:
    """The expert of each copy: one of each, and then more of those with most for each copy to do."""
    found, count = [*range(len(loads))], [1] * len(loads)
    queue = [(-load, i) for i, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(slots - len(loads)):
        _, i = heapq.heappop(queue)
        found.append(i)
        count[i] += 1
        heapq.heappush(queue, (-loads[i] / count[i], i))
    return found


def _packed(weights: Sequence[float], packs: int, room: int) -> list[list[int]]:
    """Things of some weights in packs of `room` each, from the heaviest on to the lightest pack that has room."""
    found: list[list[int]] = [[] for _ in range(packs)]
    queue = [(0.0, p) for p in range(packs)]
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        total, p = heapq.heappop(queue)
        found[p].append(i)
        if len(found[p]) < room:
            heapq.heappush(queue, (total + weights[i], p))
    return found


def _refuse(loads: Sequence[float], ranks: int, slots: int, nodes: int, groups: int) -> None:
    experts = len(loads)
    if not experts or any(not 0 <= load < float("inf") for load in loads):
        raise UserError("loads are numbers of tokens, one for each expert: none of them is negative or infinite")
    if min(ranks, nodes, groups) < 1 or slots % ranks:
        raise UserError(f"{slots} slots must divide evenly among {ranks} ranks")
    if slots < experts:
        raise UserError(f"{slots} slots hold no {experts} experts: give {experts} or more")
    if ranks % nodes or experts % groups or groups % nodes:
        raise UserError(
            f"{ranks} ranks and {groups} groups of {experts} experts must divide evenly among {nodes} nodes"
        )
