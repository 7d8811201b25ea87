"""What a step was trained on that has gone astray: its samples, written to a file in the folder of the run.

A sample is named by its number in the order of the whole job, its source and its window of the source's training text;
the documents in that window by their numbers, as they lie in the source's text. By these it is found again in any run
on the same text, whatever its ranks.
"""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np

from tangram.errors import UserError
from tangram.schema.plan import Plan
from tangram.text import write_file
from tangram.training.data import Corpus, RankBatches, sample_ids
from tangram.training.data.corpus import is_single
from tangram.training.mesh.world import World
from tangram.training.objective.step_guard import AstrayError, Guard, NotFiniteError
from tangram.training.observe.events import StepSkipped
from tangram.training.parallel.model import ParallelModel
from tangram.training.state.state import Progress
from tangram.training.step.first_not_finite import first_not_finite


def write_samples(folder: Path, corpus: Corpus, plan: Plan, step: int, first: int, reason: str) -> Path:
    """Write what the step number `step` (from 0), that begins with sample `first`, was trained on; the file."""
    path = folder / f"astray-step-{step + 1}.json"
    rows = sample_ids(corpus, plan.data, plan.seed, first, plan.data.global_batch)
    samples = [
        {
            "sample": first + place,
            "data_rank": _data_rank(place, plan),
            "source": plan.data.sources[source].path,
            "window": window,
            "documents": _documents(corpus, plan, source, window),
        }
        for place, (source, window) in enumerate(rows)
    ]
    told = {"step": step + 1, "reason": reason, "seed": plan.seed, "text": corpus.digest, "samples": samples}
    write_file(path, json.dumps(told, indent=1) + "\n", "the samples")
    return path


def rank_samples(plan: Plan, world: World, batches: RankBatches) -> str:
    """What this rank is trained on in a step, in words."""
    rows, index, size = plan.data.global_batch, world.data_index, world.data_size
    first = batches.begin // plan.rows_per_sample
    start, stop = (first + at * rows // size for at in (index, index + 1))
    return f"the samples {start} to {stop - 1} of the job"


def _data_rank(place: int, plan: Plan) -> int:
    """Which DP rank has a row of the batch: shares are contiguous and differ by one row at most."""
    rows, ranks = plan.data.global_batch, plan.data_ranks
    return next(rank for rank in range(ranks) if place < (rank + 1) * rows // ranks)


def _documents(corpus: Corpus, plan: Plan, source: int, window: int) -> list[int]:
    split = corpus.training[source]
    found: list[int] = []
    single = is_single(plan.data)
    pieces = [split.pieces(row, plan.data.sequence, single=single) for row in split.rows_of(window).tolist()]
    for start, stop in chain.from_iterable(pieces):
        ends = np.array([start, max(start, stop - 1)], split.end_D.dtype)
        low, high = np.searchsorted(split.end_D, ends, "right")
        found += range(int(low), int(high) + 1)
    return found


def located(
    error: AstrayError,
    model: ParallelModel,
    batches: RankBatches,
    emit: Callable[[object], None],
    folder: Path | None,
    corpus: Corpus,
    progress: Progress,
) -> AstrayError:
    """The error with the step, where its numbers began to be not finite, and the file that says what it was trained on.

    That is there when this returns. Collective over all ranks: the first that raises ends the others.
    """
    where = first_not_finite(model, batches, emit) if isinstance(error, NotFiniteError) else ""
    plan, world, step = model.plan, model.world, progress.step
    said = f"step {step + 1}: {error}" + (f"; {where}" if where else "")
    if folder is None:
        return AstrayError(said)
    words: list[str] = []
    if world.index == 0:
        try:
            path = write_samples(folder, corpus, plan, step, progress.samples, str(error))
            words.append(f'{said}; its samples are listed in "{path}"')
        except (OSError, UserError) as failure:
            words.append(f"{said}; its samples could not be written: {failure}")
    return AstrayError(world.peers.from_first(words[0] if words else ""))


def skipped_event(
    skipped: tuple[str, bool], folder: Path | None, corpus: Corpus, plan: Plan, progress: Progress, guard: Guard
) -> StepSkipped:
    """A step that was not applied, and where its samples are written; those of an overflow are not.

    `skipped`: why, and whether for another reason than an overflow; `progress`: as it is after the step. Samples that
    cannot be written stop nothing: the event says why.
    """
    (reason, astray), path = skipped, ""
    if astray and folder is not None:
        first = progress.samples - plan.data.global_batch
        try:
            path = str(write_samples(folder, corpus, plan, progress.step - 1, first, reason))
        except (OSError, UserError) as failure:
            reason = f"{reason}; its samples could not be written: {failure}"
    return StepSkipped(progress.step, reason, guard.skipped, path)
