"""How often to save where nobody says it: so that saving takes no more than a share of training, by measured cost.

What a save costs is the time that training stood still for it, and the processor's time of copying and writing where
training computes on the same cores. Rank 0 measures, and wishes for a save ahead of a step; all ranks hear of it in the
all-reduce that each step has anyway.
"""

import math
import statistics
from collections import deque

SHARE = 0.03
LAST = 5
"""Costs and steps of which the median is taken: the first of a run are none of those to come."""


class Pace:
    """When a save is due."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._costs: deque[float] = deque(maxlen=LAST)
        self._steps: deque[float] = deque(maxlen=LAST)
        self._since = 0
        self._before: float | None = None
        self._told = False

    @property
    def every(self) -> int:
        """Steps from one save to the next, at least 1; 1 as long as nothing is measured."""
        if not self._costs or not self._steps:
            return 1
        step = statistics.median(self._steps)
        return max(1, math.ceil(statistics.median(self._costs) / max(self._share * step, 1e-9)))

    def due(self, now: float) -> bool:
        """Whether to save after the step that begins `now` (seconds of any clock); called once before each step."""
        if self._before is not None:
            self._steps.append(now - self._before)
        self._before = now
        self._since += 1
        return self._since >= self.every

    def begun(self) -> None:
        """A save has begun."""
        self._since = 0

    def cost(self, seconds: float) -> None:
        """What one that has ended cost."""
        self._costs.append(seconds)

    def news(self) -> str:
        """What is worth saying, once: how often, and why."""
        if self._told or len(self._costs) < LAST or not self._steps:
            return ""
        self._told = True
        cost, step = statistics.median(self._costs), statistics.median(self._steps)
        every = "every step" if self.every == 1 else f"every {self.every} steps"
        return (
            f"a snapshot {every}: one costs {1e3 * cost:.0f} ms, and steps take {1e3 * step:.0f} ms "
            f"(at most {100 * self._share:.0f} % of training; --snapshot-every N is every N)"
        )
