"""What is made of a failure: go on, with fewer ranks where not all can be kept alive, or stop and say why.

A job goes on as long as it gets further. What will come again is not tried again: the same error at the same step, or
failures in a row between which no step was done that had not been done before. Of fewer ranks batch, data, seed and
model stay, and a snapshot is loaded into any layout: so each step is what it would have been, its loss within rounding.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tangram.errors import UserError
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.run.resume import other_micro_batch
from tangram.training.trials.local_plans import planned

DAY = 86_400.0


class Cause(Enum):
    """What ended the ranks."""

    KILLED = "a rank was killed"
    """From outside: by the kernel where memory ran out, a person, a machine that is going down. No last words."""
    RAISED = "a rank raised an error"
    STORE = "snapshots could not be written"


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
    if last.cause is Cause.RAISED and len(same) > 1:
        return f"the same error came twice after step {last.step}, so it would come again"
    if sum(last.at - one.at < DAY for one in failures) > limits.restarts:
        return f"it was started again {limits.restarts} times in a day already (--restarts)"
    if (times := _in_a_row(failures)) > limits.in_a_row:
        return f"it failed {times} times in a row after step {last.step}"
    return ""


def lost_capacity(failures: Sequence[Failure], limits: Limits) -> bool:
    """Whether so many ranks cannot be kept alive here: killed again and again, without a step between."""
    here = failures[-_in_a_row(failures) :]
    return len(here) > limits.in_a_row and all(one.cause is Cause.KILLED for one in here)


def _in_a_row(failures: Sequence[Failure]) -> int:
    return sum(one.step == failures[-1].step for one in failures)


def fewer_ranks(plan: Plan, least: int) -> Plan:
    """The job of a plan on as many ranks as can be, fewer than it has and at least `least`.

    Raises UserError, with the numbers of ranks that would do, where there is none.
    """
    for ranks in range(plan.ranks - 1, least - 1, -1):
        if (found := plan_for(plan, ranks)) is not None:
            return found
    less = [str(ranks) for ranks in range(1, least) if plan_for(plan, ranks) is not None]
    would = f"; with --min-ranks {less[-1]} it could go on" if less else ""
    raise UserError(f"this job has no plan for fewer than {plan.ranks} and at least {least} ranks{would}")


def plan_for(plan: Plan, ranks: int) -> Plan | None:
    """The first plan of the planner's ranking that trains the same on so many ranks; None without one."""
    tables = {name: getattr(plan, name) for name in Job.model_fields}
    try:
        ranking = planned(Job(**tables), ranks, stages=0).ranking
    except (UserError, ValueError):  # no strategy divides this batch, or these heads, among so many
        return None
    fitting = (one.plan for one in ranking.ranked if one.plan is not None and one.fits)
    return next((found for found in fitting if not other_micro_batch(plan, found)), None)
