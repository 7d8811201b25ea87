"""What a strategy costs and which energy it takes, at the price and the watts of a device that were told."""

from __future__ import annotations

from tangram.planner.local.ranking_table import Titled
from tangram.planner.search.objectives import Terms
from tangram.planner.search.strategy import Choice


def _hours(one: Choice, terms: Terms) -> dict[str, float]:
    """Hours of all its devices, with what interruptions take of them."""
    step = one.devices * terms.real(one.devices, one.step) / 3600
    return {"a step": step, "1M tokens": step * 1e6 / terms.tokens, "a day": one.devices * 24.0}


def document(one: Choice, terms: Terms) -> dict[str, dict[str, float | None]] | None:
    """The cost (in the user's money) and kWh of each; None where neither a price nor watts are told."""
    if terms.price is None and terms.watts is None:
        return None
    return {
        name: {
            "cost": None if terms.price is None else hours * terms.price,
            "kwh": None if terms.watts is None else hours * terms.watts / 1000,
        }
        for name, hours in _hours(one, terms).items()
    }


def tables(one: Choice, terms: Terms) -> list[Titled]:
    """The same for people; none where nothing is told."""
    found = document(one, terms)
    if found is None:
        return []
    rows = [(name, *("" if part is None else f"{part:,.4g}" for part in of.values())) for name, of in found.items()]
    return [(f"What {one.devices} devices take", ("", "cost", "kWh"), rows)]
