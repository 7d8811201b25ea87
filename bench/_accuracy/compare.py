"""Two sheets side by side: what differs, and what of that is wrong.

same        the bits are equal
differs     they are not, and the class is the same and not outside
better, worse    the class is another
is wrong    the second is outside, and the first is not: differing would be no fault, this is
both wrong  they differ, and both are outside
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bench._accuracy.judge import CLASSES, Outcome
from bench._accuracy.sheet import Key, Sheet

VERDICTS = ("same", "differs", "better", "worse", "is wrong", "both wrong")


@dataclass(frozen=True)
class Comparison:
    """By operator, type and case."""

    verdicts: Mapping[Key, str]
    missing: int
    """Cases that only one of both has."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many cases of each verdict."""
        found = Counter(self.verdicts.values())
        return {verdict: found[verdict] for verdict in VERDICTS}


def compared(before: Sheet, after: Sheet) -> Comparison:
    """What `after` is, held against `before`."""
    both = [key for key in after.outcomes if key in before.outcomes]
    verdicts = {key: verdict(before.outcomes[key], after.outcomes[key]) for key in both}
    return Comparison(verdicts, len(before.outcomes.keys() ^ after.outcomes.keys()))


def verdict(before: Outcome, after: Outcome) -> str:
    """One of VERDICTS."""
    if before.digest == after.digest:
        return "same"
    if after.verdict == "outside":
        return "both wrong" if before.verdict == "outside" else "is wrong"
    old, new = CLASSES.index(before.verdict), CLASSES.index(after.verdict)
    return "differs" if old == new else "better" if new < old else "worse"
