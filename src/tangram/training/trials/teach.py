"""`tangram data teach`: what a teacher says of each row of a job, written once, for `distill.cache`.

The teacher is cut over the ranks by TP, FSDP or both, and each DP rank asks it about its share of the rows of the job's
steps, and of those that are held out. What is written has no part in how a job trains later: any mesh reads it.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from tangram.errors import UserError
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.text import write_file
from tangram.training.data import batches_once, held_out_batches, open_corpus, prepare, tokens_of
from tangram.training.mesh.world import make_world
from tangram.training.objective.cached_teacher import INDEX, CacheIndex, CacheWriter, made_of, row_keys, top_rows
from tangram.training.objective.packing import logits_in_order
from tangram.training.observe.events import Doing, Note
from tangram.training.parallel.model import evaluating
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.state.build_model import source_of
from tangram.training.state.reference_digest import reference_digest
from tangram.training.state.teacher import build_teacher, classes_of, teacher_source, teacher_stamp


@dataclass(frozen=True)
class Taught:
    """What a rank has written."""

    files: tuple[str, ...]
    rows: int
    tokens: int
    share: float
    """Of the teacher's probability, summed over its tokens, in the classes that are kept."""
    digest: str


@dataclass(frozen=True)
class TeachJob:
    """What a rank is told."""

    plan: Plan
    folder: Path
    top: int
    shared: int


def teach(job: Job, folder: Path, top: int, processes: int, on_event: Callable[[object], None], tp: int = 1) -> None:
    """Write it. Raises UserError for a job without a teacher, and for a folder that has something."""
    if processes % tp:
        raise UserError(f"--tp {tp}: {processes} processes are no multiple of it: set -n {-(-processes // tp) * tp}")
    if job.distill is None or job.distill.teacher is None:
        raise UserError('what a teacher says is written for the task "distill": give distill.teacher in the job')
    if job.data.packing == "auto":
        raise UserError('which documents share a sample is asked of the model: add --set data.packing="packed"')
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'"{folder}" is there already: give an empty or new folder as --out')
    job = job.model_copy(update={"distill": job.distill.model_copy(update={"cache": None})})
    tokens = tokens_of(job)
    config, teacher = source_of(job, tokens).config, teacher_source(job, tokens)
    assert teacher is not None
    theirs = classes_of(teacher.config)
    shared = min(classes_of(config), theirs)
    if top > shared:
        raise UserError(f"--top {top}: student and teacher have {shared:,} classes in common: give as many at most")
    on_event(Doing("reading the text"))
    prepare(job.data, tokens, on_event)
    strategy = Strategy("FSDP", f"dp={processes}", ("dp",), shard="dp")
    if tp > 1:
        strategy = Strategy("TP", f"dp={processes // tp} tp={tp}", ("dp",), (TENSOR,), shard="dp")
    plan = plan_of(strategy, job, Counted(job, config))
    folder.mkdir(parents=True, exist_ok=True)
    work = TeachJob(plan, folder, top, shared)
    found = run_ranks(teach_rank, work, world=processes, on_event=on_event, device=plan.run.device)
    kept = CacheIndex(
        made_of(plan, open_corpus(plan.data, tokens).digest, teacher_stamp(plan)),
        teacher=found[0].digest,
        top=top,
        classes=shared,
        teacher_classes=theirs,
        rows=sum(one.rows for one in found),
        tokens=sum(one.tokens for one in found),
        files=[*chain.from_iterable(one.files for one in found)],
    )
    write_file(folder / INDEX, json.dumps(asdict(kept), indent=1) + "\n", "what was taught")
    share = sum(one.share for one in found) / max(1, kept.tokens)
    size = sum(one.stat().st_size for one in folder.iterdir())
    on_event(
        Note(
            f"written    {kept.tokens:,} tokens of {kept.rows:,} rows, {size / 1e6:,.1f} MB: the likeliest {top:,} of "
            f"{shared:,} classes have {share:.4%} of the teacher's probability"
        )
    )


def teach_rank(rank: Rank, job: TeachJob) -> Taught:
    """The task of a rank. Collective: all make as many forwards."""
    plan, group = job.plan, dist.group.WORLD
    assert group is not None
    assert plan.distill is not None  # `teach` has looked
    world, tokens = make_world(plan, rank.index, rank.device, group), tokens_of(plan)
    corpus = open_corpus(plan.data, tokens)
    teacher = build_teacher(plan, tokens, world)
    assert teacher is not None
    writer, counted, share = CacheWriter(job.folder, rank.index), 0, 0.0
    index, size, device = world.data_index, world.data_size, rank.device
    writes = all(world.mesh.coords(rank.index)[axis] == 0 for axis in plan.model_axes)  # others have the same
    batches = batches_once(
        corpus, plan.data, seed=plan.seed, steps=plan.run.steps, index=index, size=size, device=device
    )
    held_out = held_out_batches(corpus, plan.data, index=index, size=size, device=device) if plan.data.measured else ()
    for batch in chain(batches, held_out):
        with evaluating(teacher.module):
            logits_BSV = logits_in_order(teacher.module, teacher.parts[0].tokens, batch)
        for row, found in enumerate(row_keys(batch) if writes else ()):
            if found is None or found[0] in writer.known:
                continue
            key, at_N = found
            said = top_rows(logits_BSV[row, at_N.to(rank.device)], job.top, job.shared, plan.distill.temperature)
            writer.add(key, said)
            counted += len(at_N)
            share += float(said.logp_NC[:, :-1].exp().sum())
    writer.flush()
    return Taught(tuple(writer.files), len(writer.known), counted, share, reference_digest(teacher))
