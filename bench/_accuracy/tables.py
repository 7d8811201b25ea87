"""Outcomes of one operator and type put together, as tables and figures show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench._accuracy.judge import CLASSES, Outcome
from bench._accuracy.sheet import Sheet


@dataclass(frozen=True)
class Found:
    """Over all cases of an operator and a type."""

    cases: tuple[tuple[str, Outcome], ...]

    @property
    def verdict(self) -> str:
        """The worst class."""
        return max((one.verdict for _, one in self.cases), key=CLASSES.index)

    @property
    def right(self) -> float:
        """The share of elements that are correctly rounded."""
        count = sum(one.count for _, one in self.cases)
        return sum(one.histogram[0] for _, one in self.cases) / count if count else 1.0

    @property
    def worst(self) -> float:
        """In ulps."""
        return max(one.worst for _, one in self.cases)

    @property
    def ulps(self) -> str:
        """The worst, as it is read."""
        return "0.5" if 0 < self.worst <= 0.5 else f"{self.worst:.3g}" if self.worst < 1e4 else f"{self.worst:.0e}"

    @property
    def over(self) -> float:
        """The largest error over its bound."""
        return max(one.over for _, one in self.cases)

    @property
    def outside(self) -> int:
        """How many cases are."""
        return len(self.wrong)

    @property
    def wrong(self) -> Sequence[tuple[str, Outcome]]:
        """The cases that are outside."""
        return [(case, one) for case, one in self.cases if one.verdict == "outside"]


def rows_of(sheet: Sheet) -> dict[tuple[str, str], Found]:
    """By operator and type, in the sheet's order."""
    own: dict[tuple[str, str], list[tuple[str, Outcome]]] = {}
    for (name, kind, case), outcome in sheet.outcomes.items():
        own.setdefault((name, kind), []).append((case, outcome))
    return {key: Found(tuple(cases)) for key, cases in own.items()}


def reasons(found: Found) -> str:
    """Why cases are outside, as their figures tell, and how many."""
    counts = Counter(_reason(one) for _, one in found.wrong)
    return "; ".join(f"{text} ({number})" for text, number in counts.items())


def _reason(one: Outcome) -> str:
    if one.special:
        return "NaN or infinite where it should not be"
    if one.worst <= 1:
        return "another value than the nearest"
    return "within a bound for its own type" if one.own <= 1 else "beyond that bound, too"
