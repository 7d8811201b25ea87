"""The plans for a job on the machine at hand: its tokens and model, the machine's rates, and the planner's ranking."""

from tangram.errors import UserError
from tangram.hardware.rates import rates
from tangram.planner.counted import Counted
from tangram.planner.job import Job
from tangram.planner.rank import MOST_PROCESSES, rank
from tangram.planner.strategies import PIPELINE
from tangram.planner.table import Ranking
from tangram.training.building import source_of
from tangram.training.data import load_tokens
from tangram.training.launch import pick_device


def plans_of(job: Job, processes: int, *, stages: int = 1, schedule: str = PIPELINE, anew: bool = False) -> Ranking:
    """Rank the plans, of pipelines with so many stages by this schedule.

    `anew` measures the machine even where it is known.

    Raises UserError for a job without a plan.
    """
    if not 1 <= processes <= MOST_PROCESSES:
        raise UserError(f"--processes {processes}: plans are made for 1 to {MOST_PROCESSES}")
    config = source_of(job, load_tokens(job.data, job.model.path)).config
    device = pick_device(job.run.device, 0, 1).type
    found = rates(device, processes, anew=anew)
    counted = Counted(job, config)
    ranked = rank(job, processes, found, config, counted, stages, schedule)
    alone = rank(job, 1, rates(device, 1, anew=anew), config, counted)[0] if processes > 1 else None
    return Ranking(processes, ranked, alone, found)
