"""Calls whose end is waited for where nobody can be told of it, as torch's DDP waits for its buckets in C++.

It asks each call for its future, starts the next ones, and waits for all of them at the end of the backward. So the
time from the last call that was begun to the last end is waiting, and what ended before another began was computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Pending:
    """The calls of one rank that are under way in this manner."""

    _begun: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """By the number of its event: the group, and when it began, ns."""
    _last: tuple[int, int] = (0, 0)
    """Group and begin of the newest one."""
    _until: int = 0

    def begins(self, number: int, group: int, now: int) -> int:
        """A call is under way; the number of the one that is waited for first."""
        self._begun[number] = self._last = group, now
        self._until = 0
        return next(iter(self._begun))

    def ends(self, number: int, now: int) -> tuple[int, int] | None:
        """A call has ended: since when it was under way, and the number of the next that is waited for, 0: none.

        None of a call that is not known, as one of another thread.
        """
        if number not in self._begun:
            return None
        _, since = self._begun.pop(number)
        self._until = now
        return since, next(iter(self._begun), 0)

    def settle(self) -> tuple[int, int, int] | None:
        """The rank does something else: over which group it waited since the last time, and from when to when."""
        if not self._until:
            return None
        (group, since), until, self._until = self._last, self._until, 0
        return group, since, until
