"""What `tangram plan MODEL --cluster C` says, for people and programs: the ranking, why the first wins, what if."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from tangram.planner.ask import Answer
from tangram.planner.budget import Budget, Duration, fewest
from tangram.planner.choice import Choice, safe
from tangram.planner.explain import Explained
from tangram.planner.table import Titled

HEADERS = (
    "", "mesh", "micro-batch", "schedule", "experts", "divided", "made again", "memory", "fits", "step", "90 of 100",
    "tokens/s/device", "MFU",
)  # fmt: skip
FITS = 0.9
"""How likely a strategy is not to run out, to be called fitting."""
ZERO = ("nothing", "optimiser", "and gradients", "and parameters")
PARTS = {
    "products": "matrix products", "attention": "attention", "streams": "norms, activations, casts",
    "head": "logits and loss", "launch": "waiting for the host", "tensor": "over tensor ranks",
    "expert": "to experts and back", "context": "keys over context ranks", "stages": "between stages",
    "idle": "waiting for other stages", "data": "gradients and parameters", "optimiser": "optimiser",
}  # fmt: skip
HELD = {
    "parameters": "parameters", "gradients": "gradients", "optimiser": "optimiser's states",
    "activations": "kept for the backward", "passing": "comes and goes: logits, blocks made again, gathered",
    "reserve": "allocator's reserve", "context": "context and workspaces",
}  # fmt: skip


def tables(answer: Answer) -> list[Titled]:
    """Titles, headers and rows."""
    if not answer.choices:
        return [("Nothing fits", ("what", "how"), _too_small(answer))]
    best = answer.choices[0]
    rows = [_row(str(i), one) for i, one in enumerate(answer.choices, start=1)]
    title = f"{answer.outline.name} on {answer.cluster}, predicted ({answer.looked:,} configurations looked at)"
    found: list[Titled] = [
        (title, HEADERS, rows),
        ("Why the first: its step", ("", "seconds", "share"), _shares(best.parts, PARTS, best.step, "{:.2f}", 1.0)),
        (
            f"Its memory, of {answer.limit / 1e9:.0f} GB",
            ("", "GB", "share"),
            _shares(best.held, HELD, best.memory, "{:.1f}", 1e-9),
        ),
        ("What the others lose", ("", "longer", "mostly by"), _losses(answer.choices)),
        ("If it were otherwise", ("", "step", "than now"), _instead(answer, best.step)),
    ]
    if answer.assumed:
        found.append(("Not in the catalogue, and assumed", ("what",), [(one,) for one in answer.assumed]))
    return found


def as_json(answer: Answer) -> dict[str, object]:
    """The same for programs: bytes and seconds."""
    return {
        "model": answer.outline.name,
        "parameters": answer.outline.numbers,
        "cluster": answer.cluster,
        "ask": {name: value for name, value in vars(answer.ask).items() if name != "able"},
        "memory_limit": answer.limit,
        "looked_at": answer.looked,
        "choices": [asdict(one) for one in answer.choices],
        "smallest": asdict(answer.smallest),
        "enough_devices": answer.enough,
        "assumed": list(answer.assumed),
        "instead": {name: None if math.isnan(step) else step for name, step in answer.instead.items()},
    }


def explained_tables(found: Explained) -> list[Titled]:
    """Of a given strategy: why it cannot run, or what it needs and what it loses to the best."""
    best = found.best.choices[0] if found.best.choices else None
    first: list[Titled] = [("The best", HEADERS, [_row("best", best)])] if best else []
    if found.choice is None:
        return [("It cannot run", ("why",), [(reason,) for reason in found.refused]), *first]
    one = found.choice
    rows = [_row("given", one), *([_row("best", best)] if best else [])]
    fits = "it fits" if one.fits >= FITS else f"it fits in {one.fits:.0%} of such runs"
    tables: list[Titled] = [
        (f"{found.best.outline.name}: MFU {one.utilisation:.1%} is to be expected, and {fits}", HEADERS, rows),
        ("Its step", ("", "seconds", "share"), _shares(one.parts, PARTS, one.step, "{:.2f}", 1.0)),
        (f"Its memory, of {found.best.limit / 1e9:.0f} GB", ("", "GB", "share"),
         _shares(one.held, HELD, one.memory, "{:.1f}", 1e-9)),
    ]  # fmt: skip
    if best:
        more = {name: part - best.parts[name] for name, part in one.parts.items()}
        lost = sorted(((part, name) for name, part in more.items() if abs(part) > 0.005 * best.step), reverse=True)
        said = [(PARTS[name], f"{part:+.2f} s") for part, name in lost]
        tables.append((f"Beside the best: {one.step / best.step - 1:+.1%}", ("", "more"), said))
    return tables


def explained_json(found: Explained) -> dict[str, object]:
    """The same for programs."""
    best = found.best.choices[0] if found.best.choices else None
    return {
        "refused": list(found.refused),
        "given": asdict(found.choice) if found.choice else None,
        "best": asdict(best) if best else None,
    }


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
        )
        for one in found
    ]
    title = f"{budget.tokens:,} tokens"
    least = fewest(found, budget)
    if budget.hours is not None:
        kept = f"{least.devices} devices at least" if least else "no part of this cluster does"
        title += f" in {budget.hours:g} hours: {kept}"
    return [(title, ("devices", "best mesh", "step", "hours", "device hours", "cost"), rows)]


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
                "choice": asdict(one.choice) if one.choice else None,
            }
            for one in found
        ],
    }


def _row(place: str, one: Choice) -> tuple[str, ...]:
    experts = f"{one.expert} x {one.expert_tensor}" if one.expert > 1 else ""
    return (
        place,
        one.mesh,
        f"{one.micro} x {one.micros}",
        f"{one.schedule} x {one.virtual}" if one.virtual > 1 else one.schedule,
        experts,
        ZERO[one.zero],
        one.again,
        f"{one.memory / 1e9:.1f} GB",
        f"{one.fits:.0%}",
        f"{one.step:.2f} s",
        f"{one.low:.2f} to {one.high:.2f}",
        f"{one.tokens_per_device:,.0f}",
        f"{one.utilisation:.1%}",
    )


def _shares(
    parts: Mapping[str, float], names: dict[str, str], whole: float, form: str, unit: float
) -> list[tuple[str, ...]]:
    return [
        (names[name], form.format(part * unit), f"{part / whole:.0%}")
        for name, part in sorted(parts.items(), key=lambda item: -item[1])
        if part / whole >= 0.005
    ]


def _losses(choices: tuple[Choice, ...]) -> list[tuple[str, ...]]:
    best = choices[0]
    found: list[tuple[str, ...]] = []
    for i, one in enumerate(choices[1:], start=2):
        more = {name: part - best.parts[name] for name, part in one.parts.items()}
        worst = max(more, key=more.__getitem__)
        found.append((str(i), f"{one.step / best.step - 1:.1%}", f"{PARTS[worst]} (+{more[worst]:.2f} s)"))
    return found


def _instead(answer: Answer, step: float) -> list[tuple[str, ...]]:
    return [
        (name, "nothing fits" if math.isnan(other) else f"{other:.2f} s",
         "" if math.isnan(other) else f"{other / step - 1:+.1%}")
        for name, other in answer.instead.items()
    ]  # fmt: skip


def _too_small(answer: Answer) -> list[tuple[str, ...]]:
    """By how much, and what would fit."""
    least = answer.smallest
    fixed = sum(part for name, part in least.held.items() if name in ("parameters", "gradients", "optimiser"))
    room = f"devices of {least.memory * answer.limit / safe(answer.limit) / 1e9:.0f} GB"
    more = f", or {answer.enough} of these devices" if answer.enough else ""
    return [
        ("the least that a rank needs", f"{least.memory / 1e9:.1f} GB, of {answer.limit / 1e9:.1f}"),
        ("with", f"{least.mesh}, micro-batches of {least.micro}, {ZERO[least.zero]} divided, again {least.again}"),
        ("too much by", f"{(least.memory - safe(answer.limit)) / 1e9:.1f} GB, so that nine of ten such runs fit"),
        ("of it states", f"{fixed / 1e9:.1f} GB"),
        ("what would fit", room + more),
    ]
