"""One thing that is wrong in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WAITED_FOR = frozenset({"died", "stopped", "skipped", "extra", "reordered", "mis-sized", "unlike", "absent"})
"""Kinds for which others stand still. Whatever else is wrong, as a loss that has jumped, ends no run."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """died, stopped, skipped, extra, reordered, mis-sized, corrupted, unlike, absent, replicas, not finite, loss
    spike, gradient spike, expert load, activation outlier, attention logits, stood still, slow, slow link."""
    ranks: tuple[int, ...]
    """Whose fault it is."""
    text: str
    """One sentence."""
    step: int = 0
    axes: str = ""
    """Of the mesh, of the group that it happened in."""
    layer: str = ""
    line: str = ""
    details: tuple[str, ...] = ()
    cause: str = ""
    """Of a slow rank, where it is known: computes, starved (others have its CPU) or waits (for what is outside)."""
    step_ms: float = 0.0
    """Of slow ranks: how long a step takes; of those that stand or stood still, how long that step, so far."""
    without_ms: float = 0.0
    """How long it would, had these ranks not stood still, or they and those of slow findings before taken what their
    peers take."""

    def as_json(self) -> dict[str, object]:
        lists = {"ranks": [*self.ranks], "details": [*self.details]}
        return {**vars(self), **lists}

    @staticmethod
    def of_json(words: Mapping[str, Any]) -> Finding:
        """The inverse. Raises KeyError or TypeError for what is no finding."""
        lists: dict[str, Any] = {"ranks": (*words["ranks"],), "details": (*words["details"],)}
        return Finding(**{**words, **lists})
