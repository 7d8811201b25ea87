"""Going on with fewer ranks: the planner's best layout for those that are left.

Batch, data, seed and model stay, and a snapshot is loaded into any layout: so each step is what it would have been, and
its loss within rounding. A run that is started again has all ranks again.
"""

from tangram.errors import UserError
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.run.resume import other_micro_batch
from tangram.training.trials.local_plans import planned


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
