"""The search over parts of a cluster: the best plan of each size, and the best of all sizes by an objective.

A part is the cluster, half of it, a quarter, as long as that is whole; of a range of devices each power of two, each
number of whole nodes, and its ends. Sizes are taken from that which is likely to be the best, and each search is told
the longest step with which a plan of its size could still be among the best (`Objective.longest`), and stops there. So
what is returned is what trying everything returns, as in each search (`planner.search.branch_and_bound`).

How long a training takes on parts of a cluster, what it costs, and the fewest devices for a deadline.

For each number of nodes that halves the cluster the best strategy is searched; what takes longer on more devices, or
costs more and takes longer, is not on the front of the two (Pareto).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import published
from tangram.planner.cost.goodput import Goodput
from tangram.planner.search.by_precision import ranked
from tangram.planner.search.objectives import Aim, Terms
from tangram.planner.search.query import Answer, plan, requested
from tangram.planner.search.strategy import Ask, Choice, limit_of, safe, setting_of, unlike

__all__ = ["Budget", "Duration", "Sized", "best", "by_size", "durations", "fewest", "in_order", "sizes"]


@dataclass(frozen=True)
class Sized:
    """The quickest on so many devices."""

    devices: int
    choice: Choice | None
    """None where nothing fits."""
    lacking: float | None = 0.0
    """Bytes that a rank lacks at least; None where no layout of so many devices is legal."""


MOST_SIZES = 64
"""Of a range that are searched; as many searches one after the other."""


def sizes(cluster: Cluster, ask: Ask) -> list[int]:
    """The parts that are looked at, the smallest first. Raises UserError for a range of too many."""
    most = ask.devices or cluster.ranks
    if not ask.fewest:
        return sorted(most >> halved for halved in range(most.bit_length()) if most % (1 << halved) == 0)
    node = cluster.links[0].ranks
    doubled = {1 << power for power in range(most.bit_length())}
    found = {ask.fewest, most, *(one for one in doubled if one >= ask.fewest)}
    found |= set(range(-(-ask.fewest // node) * node, most + 1, node))
    if len(found) > MOST_SIZES:
        raise UserError(
            f"{ask.fewest} to {most} devices are {len(found)} sizes, and {MOST_SIZES} at most are searched: give "
            "--gpus a narrower range"
        )
    return sorted(found)


def in_order(found: list[int], aim: Aim) -> list[int]:
    """Sizes, likely the best first: the most devices have the quickest step, the fewest do most each."""
    return sorted(found, reverse=not aim.objective.sizes)


def by_size(outline: Outline, cluster: Cluster, ask: Ask, known: Choice | None = None) -> list[Sized]:
    """Of each size of the cluster the quickest plan, the largest size first; `known`: that of one size.

    Raises UserError for mistakes.
    """
    _refuse_mistakes(cluster, ask)
    given = {} if known is None else {known.devices: Sized(known.devices, known)}
    return [given.get(size) or _sized(outline, cluster, ask, size) for size in reversed(sizes(cluster, ask))]


def _sized(outline: Outline, cluster: Cluster, ask: Ask, devices: int) -> Sized:
    try:
        answer = plan(outline, cluster, replace(ask.on(devices), most=1), what_if=False)
    except UserError:  # no legal layout of so many devices
        return Sized(devices, None, None)
    if answer.choices:
        return Sized(devices, answer.choices[0])
    return Sized(devices, None, answer.smallest.memory - safe(answer.limit))


def best(outline: Outline, cluster: Cluster, ask: Ask, aim: Aim, *, what_if: bool = True) -> Answer:
    """The best plans by an objective, over all sizes of the cluster where it is one of those or a range is asked for.

    What would be otherwise is said of the first's number of devices. Raises UserError.
    """
    if not (aim.objective.sizes or ask.fewest):
        return replace(plan(outline, cluster, ask, what_if=what_if), aim=aim)
    _refuse_mistakes(cluster, ask)
    choices, looked, largest = _over_sizes(outline, cluster, ask, aim)
    if not choices:
        whole = plan(outline, cluster, ask.on(largest), what_if=what_if)
        quickest = whole.choices[0] if whole.choices else None
        return replace(whole, ask=ask, aim=aim, choices=(), otherwise={}, missed=_missed(whole, aim), quickest=quickest)
    there = plan(outline, cluster, ask.on(choices[0].devices), what_if=what_if)
    return replace(there, ask=ask, aim=aim, choices=choices, looked=looked)


def _refuse_mistakes(cluster: Cluster, ask: Ask) -> None:
    """Mistakes are told, and not taken for what does not fit."""
    for told in (requested, setting_of, limit_of):
        told(cluster, ask.on(ask.devices))


def _over_sizes(outline: Outline, cluster: Cluster, ask: Ask, aim: Aim) -> tuple[tuple[Choice, ...], int, int]:
    """The best, how many configurations were looked at, and the most devices that have a legal layout, if any have."""
    limit, learned = limit_of(cluster, ask), published()
    kept: list[tuple[float, float, float, Choice]] = []
    looked, bar = 0, math.inf
    legal: list[int] = []
    for devices in in_order(sizes(cluster, ask), aim):
        longest = math.inf if math.isinf(bar) else aim.longest(devices, bar)
        request = requested(cluster, ask.on(devices))
        try:
            found = ranked(outline, cluster, ask, request, limit, 4 * ask.most, learned, longest)
        except UserError:  # no legal layout of so many devices
            continue
        legal.append(devices)
        looked += found.looked
        for one in unlike(found.choices):
            value = aim.value(devices, one.step)
            if math.isfinite(value):
                kept.append((value, one.step, one.memory, one))
        kept = sorted(kept, key=lambda row: row[:3])[: ask.most]
        bar = kept[-1][0] if len(kept) == ask.most else math.inf
    return tuple(one for *_, one in kept), looked, max(legal, default=ask.devices)


def _missed(whole: Answer, aim: Aim) -> str:
    """What is to be said where something fits and nothing keeps the deadline."""
    if not whole.choices:
        return ""
    terms, one = aim.terms, whole.choices[0]
    if terms.training is None or terms.hours is None:
        return f"devices of {whole.cluster} fail so often that no part of it ever gets anything done"
    return (
        f"no part of {whole.cluster} trains {terms.training:,} tokens in {terms.hours:g} hours: "
        f"the quickest plan takes {terms.took(one.devices, one.step):,.1f} on {one.devices} devices"
    )


@dataclass(frozen=True)
class Budget:
    """What a training may take."""

    tokens: int
    """To be trained on."""
    hours: float | None = None
    """The deadline."""
    price: float | None = None
    """Of a device's hour, in the user's money."""
    goodput: Goodput | None = None
    """What interrupts it."""
    watts: float | None = None
    """Of a device with its part of the host and of cooling; the price is with them."""


@dataclass(frozen=True)
class Duration:
    """On so many devices."""

    devices: int
    choice: Choice | None
    """The best strategy; None where nothing fits."""
    hours: float
    """Infinite where nothing fits."""
    cost: float | None
    energy: float | None = None
    """In kWh; None where watts are not told, or nothing fits."""
    lacking: float | None = 0.0
    """Bytes that a rank lacks at least; None where no layout of so many devices is legal."""
    late: float = 0.0
    """Hours beyond the deadline; 0 where it is kept, there is none, or nothing fits."""
    in_time: int | None = None
    """Tokens that are trained on before the deadline, where not all are."""

    @property
    def device_hours(self) -> float:
        """Of all devices."""
        return self.devices * self.hours


def durations(outline: Outline, cluster: Cluster, ask: Ask, budget: Budget) -> list[Duration]:
    """For each size of the cluster, the largest first. Raises UserError where the budget cannot be."""
    terms = Terms(ask.tokens_met, budget.price, budget.tokens, budget.hours, budget.goodput)
    found: list[Duration] = []
    for one in by_size(outline, cluster, ask):
        hours = terms.took(one.devices, one.choice.step) if one.choice else float("inf")
        cost = one.devices * hours * budget.price if budget.price is not None and one.choice else None
        energy = one.devices * hours * budget.watts / 1000 if budget.watts is not None and one.choice else None
        late = max(0.0, hours - budget.hours) if one.choice and budget.hours is not None else 0.0
        in_time = _in_time(terms, hours, ask.tokens_met) if late else None
        found.append(Duration(one.devices, one.choice, hours, cost, energy, one.lacking, late, in_time))
    return found


def _in_time(terms: Terms, hours: float, batch: int) -> int:
    """Tokens of as many whole steps as the deadline leaves time for."""
    assert terms.hours is not None
    assert terms.training is not None
    steps = -(-terms.training // batch)
    return int(steps * terms.hours / hours) * batch


def fewest(found: list[Duration], budget: Budget) -> Duration | None:
    """The fewest devices that keep the deadline; None where none do, or where there is none."""
    within = [one for one in found if budget.hours is not None and one.hours <= budget.hours]
    return min(within, key=lambda one: one.devices, default=None)
