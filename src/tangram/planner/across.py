"""The search over parts of a cluster: the best plan of each size, and the best of all sizes by an objective.

A part is the cluster, half of it, a quarter, as long as that is whole. Sizes are taken from the smallest; each
search is told the longest step with which a plan of its size could still be among the best (`Objective.longest`), and
stops there. So what is returned is what trying everything returns, as in each search (`planner.search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.hardware.cluster import Cluster
from tangram.models.outline import Outline
from tangram.planner.ask import Answer, plan, requested
from tangram.planner.choice import Ask, Choice, limit_of, safe, setting_of, unlike
from tangram.planner.learn import published
from tangram.planner.objectives import Aim
from tangram.planner.ranked import ranked

__all__ = ["Sized", "best", "by_size", "sizes"]


@dataclass(frozen=True)
class Sized:
    """The quickest on so many devices."""

    devices: int
    choice: Choice | None
    """None where nothing fits."""
    lacking: float | None = 0.0
    """Bytes that a rank lacks at least; None where no layout of so many devices is legal."""


def sizes(devices: int) -> Iterator[int]:
    """So many, and halves of it as long as they are whole."""
    while devices >= 1:
        yield devices
        if devices % 2:
            return
        devices //= 2


def by_size(outline: Outline, cluster: Cluster, ask: Ask, whole: Choice | None = None) -> list[Sized]:
    """Of each size of the cluster the quickest plan, the largest size first; `whole`: that of the largest, if known.

    Raises UserError for mistakes.
    """
    _told(cluster, ask)
    found = [] if whole is None else [Sized(whole.devices, whole)]
    for devices in list(sizes(ask.devices or cluster.ranks))[len(found) :]:
        try:
            answer = plan(outline, cluster, replace(ask, devices=devices, most=1), what_if=False)
        except UserError:  # no legal layout of so many devices
            found.append(Sized(devices, None, None))
            continue
        if answer.choices:
            found.append(Sized(devices, answer.choices[0]))
        else:
            found.append(Sized(devices, None, answer.smallest.memory - safe(answer.limit)))
    return found


def best(outline: Outline, cluster: Cluster, ask: Ask, aim: Aim, *, what_if: bool = True) -> Answer:
    """The best plans by an objective, over all sizes of the cluster where it is one of those.

    What would be otherwise is said of the first's number of devices. Raises UserError.
    """
    if not aim.objective.sizes:
        return replace(plan(outline, cluster, ask, what_if=what_if), aim=aim)
    _told(cluster, ask)
    choices, looked = _over_sizes(outline, cluster, ask, aim)
    if not choices:
        whole = plan(outline, cluster, ask, what_if=what_if)
        quickest = whole.choices[0] if whole.choices else None
        return replace(whole, aim=aim, choices=(), otherwise={}, missed=_missed(whole, aim), quickest=quickest)
    devices = choices[0].devices
    there = plan(outline, cluster, replace(ask, devices=devices), what_if=what_if)
    return replace(there, ask=ask, aim=aim, choices=choices, looked=looked)


def _told(cluster: Cluster, ask: Ask) -> None:
    """Mistakes are told, and not taken for what does not fit."""
    for told in (requested, setting_of, limit_of):
        told(cluster, ask)


def _over_sizes(outline: Outline, cluster: Cluster, ask: Ask, aim: Aim) -> tuple[tuple[Choice, ...], int]:
    limit, learned = limit_of(cluster, ask), published()
    kept: list[tuple[float, float, float, Choice]] = []
    looked, bar = 0, math.inf
    for devices in reversed(list(sizes(ask.devices or cluster.ranks))):
        longest = math.inf if math.isinf(bar) else aim.longest(devices, bar)
        request = requested(cluster, replace(ask, devices=devices))
        try:
            found = ranked(outline, cluster, ask, request, limit, 4 * ask.most, learned, longest)
        except UserError:  # no legal layout of so many devices
            continue
        looked += found.looked
        for one in unlike(found.choices):
            value = aim.value(devices, one.step)
            if math.isfinite(value):
                kept.append((value, one.step, one.memory, one))
        kept = sorted(kept, key=lambda row: row[:3])[: ask.most]
        bar = kept[-1][0] if len(kept) == ask.most else math.inf
    return tuple(one for *_, one in kept), looked


def _missed(whole: Answer, aim: Aim) -> str:
    """What is to be said where something fits and nothing keeps the deadline."""
    if not whole.choices:
        return ""
    terms, one = aim.terms, whole.choices[0]
    return (
        f"no part of {whole.cluster} trains {terms.training:,} tokens in {terms.hours:g} hours: "
        f"the quickest plan takes {terms.took(one.devices, one.step):,.1f} on {one.devices} devices"
    )
