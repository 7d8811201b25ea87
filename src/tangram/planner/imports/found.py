"""What comes of a file: a strategy, what of it is taken otherwise, and what was not looked at."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.models.outline import Group
from tangram.planner.exports.numbers import Numbers
from tangram.planner.space import EXPLAINED

__all__ = ["Found", "nearest"]


@dataclass(frozen=True)
class Found:
    """A strategy that was read."""

    numbers: Numbers
    """`sequence` is 0 where the file does not say it."""
    framework: str
    """An entry of `frameworks.toml`: whose file it is."""
    told: tuple[str, ...]
    """Of layout or time, and taken otherwise than it says."""
    ignored: tuple[str, ...]
    """Names in the file that say nothing of either."""


def nearest(groups: Group, share: float, told: list[str], said: str) -> str:
    """The row of what can be computed again that is nearest; where it is not the same, that is told."""
    blocks = groups == Group.BLOCK

    def far(row: tuple[str, Group, float]) -> float:
        _, group, of = row
        if blocks:
            return abs((of if group else 0.0) - share) if group in (Group.BLOCK, Group.NONE) else 1.0
        return int(group ^ groups).bit_count() if of == share else 32.0

    name, group, of = min(EXPLAINED, key=far)
    if (group and (group, of) != (groups, share)) or (not group and groups):
        told.append(f"{said}: taken as {name}, computed again")
    return name
