"""What a plan can be best by: a table of objectives over a number of devices and the seconds of a step.

Each has a value of which less is better and which never falls with the step. So among plans of one number of devices
the order is that of their steps, whatever the objective, and the search's bounds of steps hold for all of them;
`longest` turns a value back into a step, so that a search on other devices stops where it cannot be better
(`planner.search.by_device_count`). Of the step it is what it takes with interruptions (`planner.cost.goodput`), where
those are told.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.planner.cost.goodput import Goodput

__all__ = ["OBJECTIVES", "TIME", "Aim", "Objective", "Terms", "aim_of", "hour_price", "objective"]

ROUNDING = 1 + 1e-9
"""By how much a step that a value is turned into may be off."""


def hour_price(price: float | None, watts: float | None, kwh: float | None) -> float | None:
    """Of a device's hour with its power: `price` without it, `watts` of a device, `kwh` the price of 1,000 watt hours.

    None where neither is told. Raises UserError for one of the two without the other, and for numbers that cannot be.
    """
    if watts is not None and not 0 < watts < math.inf:
        raise UserError("--watts, of a device with its part of the host and of cooling, is a number above 0")
    if kwh is None:
        return price
    if watts is None or not 0 <= kwh < math.inf:
        raise UserError("--kwh is a price from 0 of what --watts take: give both")
    return (price or 0.0) + watts * kwh / 1000


@dataclass(frozen=True)
class Terms:
    """What values are made of beside devices and steps. Raises UserError for numbers that cannot be."""

    tokens: int
    """Of a step."""
    price: float | None = None
    """Of a device's hour, in the user's money."""
    training: int | None = None
    """Tokens to train on."""
    hours: float | None = None
    """The deadline for them."""
    goodput: Goodput | None = None
    watts: float | None = None
    """Of a device with its part of the host and of cooling; what they cost is in the price."""

    def __post_init__(self) -> None:
        """Look at the numbers. Raises UserError."""
        if self.training is not None and self.training < self.tokens:
            raise UserError(f"{self.training} tokens are less than a step of {self.tokens}: ask for more")
        if self.hours is not None and not 0 < self.hours < math.inf:
            raise UserError("--hours is a number above 0, --price one from 0")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise UserError("--hours is a number above 0, --price one from 0")

    def share(self, devices: float) -> float:
        """Of the time that is progress."""
        return 1.0 if self.goodput is None else self.goodput.share(devices)

    def real(self, devices: float, step: float) -> float:
        """Seconds of a step with its part of interruptions; infinite where nothing is ever done."""
        share = self.share(devices)
        return step / share if share > 0 else math.inf

    def steps(self) -> int:
        """Of the training."""
        return -(-(self.training or 0) // self.tokens)

    def took(self, devices: float, step: float) -> float:
        """Hours of the training."""
        return self.steps() * self.real(devices, step) / 3600


@dataclass(frozen=True)
class Objective:
    """One row of the table."""

    name: str
    title: str
    """Of a column, with its unit."""
    sizes: bool
    """Whether parts of the cluster are looked at, too."""
    needs: tuple[tuple[str, str], ...]
    """Of the terms, and the option that gives each."""
    value: Callable[[Terms, float, float], float]
    """Of terms, devices, seconds of a step: less is better; infinite where it is not kept."""
    longest: Callable[[Terms, float, float], float]
    """Of terms, devices, a value: the longest step with at most this value; below 0 where there is none."""
    shown: Callable[[float], str]
    """A value in words."""


def _keeps(terms: Terms, devices: float, step: float) -> float:
    return devices if terms.took(devices, step) <= (terms.hours or 0.0) else math.inf


def _last_minute(terms: Terms, devices: float, bar: float) -> float:
    return -1.0 if devices > bar else (terms.hours or 0.0) * 3600 / terms.steps() * terms.share(devices)


def _cost(terms: Terms, devices: float, step: float) -> float:
    return (terms.price or 0.0) * devices * terms.real(devices, step) / 3600 * 1e6 / terms.tokens


OBJECTIVES = (
    Objective(
        "time", "step, s", False, (),
        lambda terms, devices, step: terms.real(devices, step),
        lambda terms, devices, bar: bar * terms.share(devices),
        "{:.2f}".format,
    ),
    Objective(
        "per-device", "tokens/s/device", True, (),
        lambda terms, devices, step: devices * terms.real(devices, step) / terms.tokens,
        lambda terms, devices, bar: bar * terms.tokens / devices * terms.share(devices),
        lambda value: f"{1 / value:,.0f}",
    ),
    Objective(
        "cost", "cost of 1M tokens", True, (("price", "--price"),),
        _cost,
        lambda terms, devices, bar: bar * terms.share(devices) / _cost(Terms(terms.tokens, terms.price), devices, 1.0),
        "{:.4g}".format,
    ),
    Objective(
        "devices", "devices", True, (("training", "--train-tokens"), ("hours", "--hours")),
        _keeps, _last_minute,
        "{:,.0f}".format,
    ),
)  # fmt: skip
TIME = OBJECTIVES[0]


@dataclass(frozen=True)
class Aim:
    """An objective with what its values are made of."""

    objective: Objective
    terms: Terms

    def value(self, devices: float, step: float) -> float:
        """Less is better."""
        return self.objective.value(self.terms, devices, step)

    def longest(self, devices: float, bar: float) -> float:
        """The longest step, in seconds, whose value is at most `bar`; below 0 where there is none."""
        return self.objective.longest(self.terms, devices, bar) * ROUNDING

    def shown(self, devices: float, step: float) -> str:
        """The value in words."""
        value = self.value(devices, step)
        return self.objective.shown(value) if math.isfinite(value) else "not kept"


def objective(name: str) -> Objective:
    """By name. Raises UserError."""
    found = next((one for one in OBJECTIVES if one.name == name), None)
    if found is None:
        names = [one.name for one in OBJECTIVES]
        near = difflib.get_close_matches(name, names, 1)
        raise UserError(
            f'there is no objective "{name}"{f" (did you mean {near[0]}?)" if near else ""}: give one of '
            f"{', '.join(names)}"
        )
    return found


def aim_of(name: str, terms: Terms) -> Aim:
    """An objective that has what it needs. Raises UserError."""
    found = objective(name)
    lacking = [option for term, option in found.needs if getattr(terms, term) is None]
    if lacking:
        raise UserError(f"the objective {name} needs {' and '.join(lacking)}")
    if name == "cost" and not terms.price:
        raise UserError("the objective cost needs a --price above 0, of a device's hour, or --watts and --kwh")
    return Aim(found, terms)
