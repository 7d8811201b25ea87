"""How long a training takes on parts of a cluster, what it costs, and the fewest devices for a deadline.

For each number of nodes that halves the cluster the best strategy is searched; what takes longer on more devices, or
costs more and takes longer, is not on the front of the two (Pareto).
"""

from __future__ import annotations

from dataclasses import dataclass

from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.goodput import Goodput
from tangram.planner.search.by_device_count import by_size
from tangram.planner.search.objectives import Terms
from tangram.planner.search.strategy import Ask, Choice

__all__ = ["Budget", "Duration", "durations", "fewest"]


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
