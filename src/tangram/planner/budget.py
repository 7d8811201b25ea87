"""How long a training takes on parts of a cluster, what it costs, and the fewest devices for a deadline.

For each number of nodes that halves the cluster the best strategy is searched; what takes longer on more devices, or
costs more and takes longer, is not on the front of the two (Pareto).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tangram.errors import UserError
from tangram.hardware.cluster import Cluster
from tangram.models.outline import Outline
from tangram.planner.ask import plan, requested
from tangram.planner.choice import Ask, Choice, limit_of, setting_of

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


@dataclass(frozen=True)
class Duration:
    """On so many devices."""

    devices: int
    choice: Choice | None
    """The best strategy; None where nothing fits."""
    hours: float
    """Infinite where nothing fits."""
    cost: float | None

    @property
    def device_hours(self) -> float:
        """Of all devices."""
        return self.devices * self.hours


def sizes(devices: int) -> Iterator[int]:
    """So many, and halves of it as long as they are whole."""
    while devices >= 1:
        yield devices
        if devices % 2:
            return
        devices //= 2


def durations(outline: Outline, cluster: Cluster, ask: Ask, budget: Budget) -> list[Duration]:
    """For each size of the cluster, the largest first. Raises UserError where the budget cannot be."""
    if budget.tokens < ask.tokens:
        raise UserError(f"{budget.tokens} tokens are less than a step of {ask.tokens}: ask for more")
    if (budget.hours is not None and not budget.hours > 0) or (budget.price is not None and not budget.price >= 0):
        raise UserError("--hours is a number above 0, --price one from 0")
    for told in (requested, setting_of, limit_of):  # mistakes are told, and not taken for what does not fit
        told(cluster, ask)
    steps = -(-budget.tokens // ask.tokens)
    found: list[Duration] = []
    for devices in sizes(ask.devices or cluster.ranks):
        try:
            choices = plan(outline, cluster, replace(ask, devices=devices, most=1), what_if=False).choices
        except UserError:  # no legal layout of so many devices
            choices = ()
        best = choices[0] if choices else None
        hours = steps * best.step / 3600 if best else float("inf")
        cost = devices * hours * budget.price if budget.price is not None and best else None
        found.append(Duration(devices, best, hours, cost))
    return found


def fewest(found: list[Duration], budget: Budget) -> Duration | None:
    """The fewest devices that keep the deadline; None where none do, or where there is none."""
    within = [one for one in found if budget.hours is not None and one.hours <= budget.hours]
    return min(within, key=lambda one: one.devices, default=None)
