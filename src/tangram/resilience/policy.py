"""What is made of a failure: go on, with fewer ranks (`resilience.fewer`) where not all can be kept alive, or stop and
say why.

A job goes on as long as it gets further. What will come again is not tried again: the same error at the same step, or
failures in a row between which no step was done that had not been done before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

DAY = 86_400.0


class Cause(Enum):
    """What ended the ranks, as `failures.jsonl` has it."""

    KILLED = "killed"
    """A rank, from outside: by a person, a machine that is going down. No last words."""
    MEMORY = "memory"
    """By the kernel, as that ran out: no device has failed."""
    RAISED = "raised"
    HANG = "hang"
    STORE = "storage"
    """Snapshots could not be written."""


@dataclass(frozen=True)
class Failure:
    """The end of the ranks."""

    cause: Cause
    words: str
    """What the rank, or the system, said."""
    step: int
    """Steps of the run that had been done by then, or more in an attempt before."""
    at: float = 0.0
    """When, in seconds of a clock that no one sets."""

    @property
    def error(self) -> object:
        """What it has in common with the same one at another time: not which rank was first, nor how much was there."""
        return self.cause, re.sub(r"\d[\d.,]*", "0", self.words), self.step


@dataclass(frozen=True)
class Limits:
    """When to give up."""

    restarts: int = 100
    """In a day: over months devices fail more often (Llama 3: 419 times in 54 days), and each time it gets further."""
    in_a_row: int = 3
    """Failures without a step between them that had not been done before."""


def verdict(failures: Sequence[Failure], limits: Limits) -> str:
    """Why the job stops after these failures, as the end of a sentence; "" where it goes on. `failures`: at least one,
    in order."""
    last = failures[-1]
    same = [one for one in failures if one.error == last.error]
    if last.cause in (Cause.RAISED, Cause.HANG) and len(same) > 1:
        return f"the same error came twice after step {last.step}, so it would come again"
    if sum(last.at - one.at < DAY for one in failures) > limits.restarts:
        return f"it was started again {limits.restarts} times in a day already (--restarts)"
    if (times := _in_a_row(failures)) > limits.in_a_row:
        return f"it failed {times} times in a row after step {last.step}"
    return ""


def lost_capacity(failures: Sequence[Failure], limits: Limits) -> bool:
    """Whether so many ranks cannot be kept alive here: killed again and again, without a step between."""
    here = failures[-_in_a_row(failures) :]
    return len(here) > limits.in_a_row and all(one.cause in (Cause.KILLED, Cause.MEMORY) for one in here)


def _in_a_row(failures: Sequence[Failure]) -> int:
    return sum(one.step == failures[-1].step for one in failures)
