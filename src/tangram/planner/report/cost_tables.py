"""What a strategy costs and which energy it takes, at the price and the watts of a device that were told; how long a
training takes on parts of a cluster, and what does not fit into which."""

from __future__ import annotations

from dataclasses import asdict

from tangram.planner.local.ranking_table import Titled
from tangram.planner.search.by_device_count import Budget, Duration, fewest
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


def duration_tables(found: list[Duration], budget: Budget) -> list[Titled]:
    """How long a training takes on parts of the cluster."""
    rows = [
        (
            str(one.devices),
            one.choice.mesh if one.choice else "nothing fits",
            f"{one.choice.step:.2f} s" if one.choice else "",
            f"{one.hours:,.1f}" if one.choice else "",
            f"{one.device_hours:,.0f}" if one.choice else "",
            f"{one.cost:,.0f}" if one.cost is not None else "",
            f"{one.energy / 1000:,.1f}" if one.energy is not None else "",
            _not_into(one),
        )
        for one in found
    ]
    title = f"{budget.tokens:,} tokens"
    least = fewest(found, budget)
    if budget.hours is not None:
        kept = f"{least.devices} devices at least" if least else "no part of this cluster does"
        title += f" in {budget.hours:g} hours: {kept}"
    return [
        (title, ("devices", "best mesh", "step", "hours", "device hours", "cost", "MWh", "what does not fit"), rows)
    ]


def duration_json(found: list[Duration], budget: Budget) -> dict[str, object]:
    """The same for programs; hours are null where nothing fits."""
    least = fewest(found, budget)
    return {
        "tokens": budget.tokens,
        "hours": budget.hours,
        "fewest_devices": least.devices if least else None,
        "sizes": [
            {
                "devices": one.devices,
                "hours": one.hours if one.choice else None,
                "device_hours": one.device_hours if one.choice else None,
                "cost": one.cost,
                "kwh": one.energy,
                "bytes_too_many": one.lacking,
                "hours_too_long": one.late if one.choice else None,
                "tokens_in_time": one.in_time,
                "choice": asdict(one.choice) if one.choice else None,
            }
            for one in found
        ],
    }


def _not_into(one: Duration) -> str:
    """Which part of the budget is too small, and by how much; "" where all fits."""
    if one.choice is None:
        return (
            "devices: no layout of so many is legal"
            if one.lacking is None
            else (f"memory: {one.lacking / 1e9:,.1f} GB too little")
        )
    if not one.late:
        return ""
    return f"hours: {one.late:,.1f} too long, for {(one.in_time or 0) / 1e9:,.2f}B tokens there is time"
