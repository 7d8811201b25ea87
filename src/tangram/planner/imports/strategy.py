"""What comes of a file: a strategy, what of it is taken otherwise, and what was not looked at."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.models.outlines.outline import Group
from tangram.planner.exports.numbers import Numbers
from tangram.planner.space.recompute import EXPLAINED, again_name


@dataclass(frozen=True)
class ReadStrategy:
    """A strategy that was read."""

    numbers: Numbers
    """`sequence` is 0 where the file does not say it."""
    framework: str
    """An entry of `frameworks.toml`: whose file it is."""
    notes: tuple[str, ...]
    """Of layout or time, and taken otherwise than it says."""
    ignored: tuple[str, ...]
    """Names in the file that say nothing of either."""


def nearest(groups: Group, share: float, told: list[str], said: str) -> str:
    """What is recomputed; of sets of operators that have no name the nearest that has one, which is told."""
    if groups in (Group.NONE, Group.BLOCK):
        return again_name(int(groups), share)
    name = min(EXPLAINED, key=lambda one: int(EXPLAINED[one] ^ groups).bit_count())
    if groups.bit_count() < int(EXPLAINED[name] ^ groups).bit_count():
        name = again_name(0, 1.0)
    if EXPLAINED.get(name) != groups:
        told.append(f"{said}: taken as {name}, recomputed")
    return name
