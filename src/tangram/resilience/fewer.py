"""A job on fewer ranks than its plan has: batch, data, seed and model stay, and a snapshot is loaded into any layout.
So each step is what it would have been, its loss within rounding.
"""

from collections.abc import Callable
from dataclasses import replace

from tangram.errors import UserError
from tangram.hardware.host.machine import room_for_ranks
from tangram.resilience.nodes import Nodes
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.mesh.world import axes_of
from tangram.training.observe.events import Note
from tangram.training.run.rank import RankJob
from tangram.training.run.resume import other_micro_batch
from tangram.training.trials.local_plans import planned

OnEvent = Callable[[object], None]


def with_room(job: RankJob, least: int | None, nodes: Nodes | None, tell: OnEvent) -> RankJob:
    """A job on fewer ranks than its plan has, where it may be, and there are not as many devices on the nodes that are
    left, or ranks do not divide among them."""
    if least is None:
        return job
    here = room_for_ranks(job.plan.run.device)
    every, count = ([here], 1) if nodes is None else (nodes.words(here), nodes.count)
    some = [one for one in every if one is not None]
    most = count * min(some) if some else job.plan.ranks
    if job.plan.ranks <= most and job.plan.ranks % count == 0:
        return job
    where = "this machine has" if nodes is None else f"{count} nodes have"
    why = f"the plan has {job.plan.ranks} ranks, and {where} room for {most // count * count}"
    return shrunk(job, least, why, tell, most, count)


def shrunk(job: RankJob, least: int, why: str, tell: OnEvent, most: int | None = None, nodes: int = 1) -> RankJob:
    """The same job on fewer ranks. Raises UserError where no plan has so many."""
    try:
        plan = fewer_ranks(job.plan, least, most, nodes)
    except UserError as error:
        raise UserError(f"{why}; {error}") from None
    tell(Note(f'{why}; going on with {plan.ranks} of {job.plan.ranks} ranks, mesh "{plan.mesh}"'))
    trace = job.trace and replace(job.trace, mesh=plan.mesh, stages=axes_of(plan).pipeline)
    return replace(job, plan=plan, memory=None, trace=trace)


def fewer_ranks(plan: Plan, least: int, most: int | None = None, nodes: int = 1) -> Plan:
    """The job of a plan on as many ranks as can be, fewer than it has and at least `least`.

    `most`: for how many there are devices. `nodes`: among which they divide. Raises UserError where there is none, with
    the numbers of ranks that would do.
    """
    most = plan.ranks - 1 if most is None else min(most, plan.ranks - 1)
    for ranks in range(most, least - 1, -1):
        if ranks % nodes == 0 and (found := plan_for(plan, ranks)) is not None:
            return found
    under = range(nodes, min(least, most + 1), nodes)
    less = [str(ranks) for ranks in under if plan_for(plan, ranks) is not None]
    would = f"; with --min-ranks {less[-1]} it could go on" if less else ""
    raise UserError(f"this job has no plan for fewer than {most + 1} and at least {least} ranks{would}")


def plan_for(plan: Plan, ranks: int) -> Plan | None:
    """The first plan of the planner's ranking that trains the same on so many ranks; None without one."""
    tables = {name: getattr(plan, name) for name in Job.model_fields}
    try:
        ranking = planned(Job(**tables), ranks, stages=0).ranking
    except (UserError, ValueError):  # no strategy divides this batch, or these heads, among so many
        return None
    fitting = (one.plan for one in ranking.ranked if one.plan is not None and one.fits)
    return next((found for found in fitting if not other_micro_batch(plan, found)), None)
