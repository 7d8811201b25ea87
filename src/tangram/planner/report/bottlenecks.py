"""What binds a strategy: what its step is spent on by kind, and how near its memory is to the limit."""

from __future__ import annotations

from tangram.planner.report.figures import seconds
from tangram.planner.search.query import Answer
from tangram.planner.search.strategy import Choice, safe

KINDS = {
    "computation": ("products", "attention", "head"),
    "memory bandwidth": ("streams", "optimiser"),
    "network": ("tensor", "expert", "context", "stages", "data"),
    "idle": ("idle", "launch", "host"),
}
"""Parts of a step by what would have to be quicker. What hides behind computation is no part of a step."""


def _step(one: Choice) -> dict[str, float]:
    return {kind: sum(one.parts.get(part, 0.0) for part in parts) for kind, parts in KINDS.items()}


def document(answer: Answer) -> dict[str, object] | None:
    """Seconds of the best step by kind, and bytes that its fullest rank has left; None where nothing fits."""
    if not answer.choices:
        return None
    best = answer.choices[0]
    return {"step": _step(best), "memory_left": safe(answer.limit) - best.memory}


def links(one: Choice) -> list[tuple[str, str]]:
    """How long of its step each link carries something, the busiest first; what carries nothing is left out."""
    busy = sorted(one.links.items(), key=lambda link: -link[1])
    return [(name, f"{seconds(took)} of a {seconds(one.step)} step") for name, took in busy if took > 0.0005 * one.step]


def rows(answer: Answer, one: Choice) -> list[tuple[str, str]]:
    """The same of any strategy for people, the largest first; memory last, and of the best whether more would help."""
    step = sorted(_step(one).items(), key=lambda kind: -kind[1])
    left = (safe(answer.limit) - one.memory) / 1e9
    room = f"{left:.1f} GB are left of what is safe" if left >= 0 else f"{-left:.1f} GB more are needed than is safe"
    more = answer.otherwise.get("with 5 GB more memory") if one in answer.choices[:1] else None
    gain = "" if more is None else f"; 5 GB more shorten the step by {max(0.0, 1 - more.step / one.step):.1%}"
    return [
        *((kind, f"{max(took, 0.0) / one.step:.0%} of the step") for kind, took in step),
        ("room for more", room + gain),
    ]
