"""What binds the best strategy: what its step is spent on by kind, and how near its memory is to the limit."""

from __future__ import annotations

from tangram.planner.ask import Answer
from tangram.planner.choice import safe

__all__ = ["KINDS", "document", "rows"]

KINDS = {
    "computing": ("products", "attention", "head"),
    "the device's memory, its rate": ("streams", "optimiser"),
    "the network": ("tensor", "expert", "context", "stages", "data"),
    "waiting": ("idle", "launch", "host"),
}
"""Parts of a step by what would have to be quicker. What hides behind computation is no part of a step."""


def document(answer: Answer) -> dict[str, object] | None:
    """Seconds of the best step by kind, and bytes that its fullest rank has left; None where nothing fits."""
    if not answer.choices:
        return None
    best = answer.choices[0]
    step = {kind: sum(best.parts.get(part, 0.0) for part in parts) for kind, parts in KINDS.items()}
    return {"step": step, "memory_left": safe(answer.limit) - best.memory}


def rows(answer: Answer) -> list[tuple[str, str]]:
    """The same for people, the largest first; memory last, and whether more of it would help."""
    best = answer.choices[0]
    step = {kind: sum(best.parts.get(part, 0.0) for part in parts) / best.step for kind, parts in KINDS.items()}
    found = [(kind, f"{share:.0%} of the step") for kind, share in sorted(step.items(), key=lambda one: -one[1])]
    left = (safe(answer.limit) - best.memory) / 1e9
    more = answer.otherwise.get("with 5 GB more memory")
    gain = "" if more is None else f"; 5 GB more shorten the step by {max(0.0, 1 - more.step / best.step):.1%}"
    return [*found, ("room for more", f"{left:.1f} GB are left of what is safe{gain}")]
