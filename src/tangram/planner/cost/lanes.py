"""One rank while a step is played: what it computes, layer by layer, and what its links carry beside that.

A rank has a lane for computation and one for each link. Exchanges that a layer waits for go first; what runs beside
(parameters gathered ahead of use, gradients reduced behind it) has a link whenever no layer's own exchange does, in the
order in which it was begun. A layer waits until its parameters are there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

DONE = 1e-12
"""Seconds of work that is none: what is left of adding and taking away."""


@dataclass(frozen=True)
class Layer:
    """What one layer of a pass takes."""

    alone: float
    """Seconds in which no link carries anything of it."""
    after: float
    """Seconds after those, in which its own exchanges run, some of them beside the rest of its computation."""
    links: tuple[float, ...]
    """Of these seconds how many each link is busy."""


@dataclass
class Item:
    """Something that links carry beside computation."""

    left: list[float]
    """Seconds of each link."""


@dataclass
class Lanes:
    """Of a rank, as far as it has been played."""

    links: int
    now: float = 0.0
    queues: list[deque[Item]] = field(init=False)

    def __post_init__(self) -> None:
        """A queue for each link."""
        self.queues = [deque() for _ in range(self.links)]

    def begin(self, seconds: tuple[float, ...]) -> Item:
        """Something more beside computation, behind what is under way."""
        item = Item([took if took > DONE else 0.0 for took in seconds])
        for link, took in enumerate(item.left):
            if took:
                self.queues[link].append(item)
        return item

    def run(self, layer: Layer, share: float = 1.0) -> None:
        """A layer; what runs beside has `share` of the time in which it leaves links free."""
        for link in range(self.links):
            self._carry(link, (layer.alone + max(layer.after - layer.links[link], 0.0)) * share)
        self.now += layer.alone + layer.after

    def idle(self, until: float) -> None:
        """Nothing is computed until then."""
        if until > self.now:
            for link in range(self.links):
                self._carry(link, until - self.now)
            self.now = until

    def wait(self, item: Item | None = None) -> None:
        """Until an item is done; without one until all are."""
        longest = 0.0
        for link, queue in enumerate(self.queues):
            if item is None or item.left[link] > 0:
                longest = max(longest, self._until(link, queue, item))
        self.idle(self.now + longest * (1 + 1e-12))

    def _until(self, link: int, queue: deque[Item], item: Item | None) -> float:
        """Seconds that a link needs for an item and all before it."""
        took = 0.0
        for one in queue:
            took += one.left[link]
            if one is item:
                break
        return took

    def _carry(self, link: int, seconds: float) -> None:
        """So long a link is free for what runs beside."""
        queue = self.queues[link]
        while queue and seconds > 0:
            done = min(queue[0].left[link], seconds)
            queue[0].left[link] -= done
            seconds -= done
            if queue[0].left[link] <= DONE:
                queue[0].left[link] = 0.0
                queue.popleft()
