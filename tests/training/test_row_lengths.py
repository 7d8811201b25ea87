"""A local plan of single documents knows how long rows are: against the FLOPs of steps that ran, counted."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tangram.cli.plan.options import Taking
from tangram.cli.plan.plan_files import job_in
from tangram.models.outlines.costs import MORE_FLOPS
from tangram.planner.local.model_costs import Counted, Rows
from tangram.planner.local.rank import predict
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.planner.search.query import ask_of
from tangram.schema.files import load
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.data import (
    open_corpus,
    padding,
    prepare,
    sample_ids,
    step_batches,
    step_length,
    step_lengths,
    tokens_of,
)
from tangram.training.data.samples import IGNORE
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin, empty_places
from tangram.training.state.build_model import source_of
from tangram.training.step import loop
from tangram.training.trials import local_plans
from tangram.training.trials.local_plans import rows_of_steps
from tests.planner.machine import rates
from tests.training.causal_models import write_config
from tests.training.pairs import write_pairs
from tests.training.tuning_tasks import write_folder

STEPS = 12
JOB = """version = 3
[model]
path = "{config}"
[data]
sources = [{{ path = "text.jsonl" }}]
tokenizer = "bytes"
sequence = 256
global_batch = 4
cache = "cache"
[optimiser]
lr = 1e-3
[run]
steps = 4
"""
"""As little as a job has to say."""
ONE = Strategy("one process", "dp=1", ("dp",), shard="dp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("lengths"))
    rows = [
        {"messages": [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": "so " * size},
        ]}
        for n, size in enumerate(np.random.default_rng(0).lognormal(2.5, 0.7, 60).astype(int).tolist())
    ]  # fmt: skip
    (folder / "rows" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def job_of(folder: Path, **changes: str) -> Job:
    sizes = {"data.sequence": "640", "data.global_batch": "2", "run.steps": str(STEPS)}
    return load(folder / "sft.toml", {**sizes, "data.cache": str(folder / "cache"), **changes})


def counted_steps(rank: Rank, plan: Plan) -> list[int]:
    """The task of a rank: FLOPs of each step."""
    corpus, found = open_corpus(plan.data, tokens_of(plan)), list[int]()
    begun = begin(rank, RankJob(plan, Path(plan.data.cache or "") / "run", corpus.digest, loop.StepCosts()))
    begun.model.module.train()
    for first in range(0, STEPS * plan.data.global_batch, plan.data.global_batch):
        batches = step_batches(
            corpus, begun.model.plan.data, seed=plan.seed, first_sample=first, index=0, size=1,
            micro_steps=plan.micro_steps, device=rank.device,
        ).cut(step_length(corpus, begun.model.plan.data, plan.seed, first))  # fmt: skip
        with FlopCounterMode(display=False, custom_mapping=MORE_FLOPS) as counter:
            assert begun.state.optimiser is not None
            loop.train_step(begun.model, begun.state.optimiser, batches, lr=1e-3)
        found.append(counter.get_total_flops())
    return found


def test_flops_and_memory_are_those_of_steps_that_ran(folder: Path) -> None:
    job = job_of(folder)
    rows, told = rows_of_steps(job, tokens_of(job))
    assert rows is not None
    assert told == (f"rows have {rows.mean} of 640 tokens in the mean and at most {rows.longest}: time is of the mean",)
    config = source_of(job, tokens_of(job)).config
    counted = Counted(job, config, rows)
    plan = plan_of(ONE, job, counted, 2)
    ran: list[int] = run_ranks(counted_steps, plan, world=1, on_event=lambda _: None, device="cpu")[0]
    short, full = counted.timed.costs(2), Counted(job, config).costs(2)
    said, before = (one.forward.flops + one.backward.flops for one in (short, full))
    assert said == pytest.approx(np.mean(ran), rel=0.1)
    assert before > 4 * np.mean(ran), "which is what each step was predicted to take"
    alone = rates(1)
    ours, theirs = predict(plan, alone, config, counted), predict(plan, alone, config)
    assert ours.seconds.total < 0.5 * theirs.seconds.total
    assert (ours.tokens, theirs.tokens) == (2 * rows.mean, 2 * 640)
    longest = counted.costs(2)
    assert ours.memory.activations == pytest.approx(longest.activation_bytes)
    assert rows.mean < longest.sequence == rows.longest < 640


def test_rows_are_the_plans_where_nothing_says_else(folder: Path) -> None:
    for changes in ({"data.packing": "best-fit"}, {"run.compile": "true"}):
        asked = job_of(folder, **changes)
        assert rows_of_steps(asked, tokens_of(asked)) == (None, ())
    gone = job_of(folder)
    source = gone.data.sources[0].model_copy(update={"path": str(folder / "nowhere")})
    gone = gone.model_copy(update={"data": gone.data.model_copy(update={"sources": (source,)})})
    rows, (told,) = rows_of_steps(gone, tokens_of(gone))
    assert rows is None
    assert told.startswith("planned as if each row had 640 tokens: ")
    assert "nowhere" in told


@pytest.mark.parametrize(("family", "apart"), [("qwen3", True), ("lfm2", False)])
def test_rows_of_what_the_model_is_found_fit_for(
    family: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data.packing = "auto": full rows where documents share them, short ones where each has its own; both
    planners say so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": "so " * n}) for n in range(5, 45)))
    config = write_config(tmp_path / family, family, max_position_embeddings=512)
    (tmp_path / "job.toml").write_text(JOB.format(config=config))
    job = load(tmp_path / "job.toml")
    rows, told = rows_of_steps(job, tokens_of(job))
    if apart:
        assert (rows, told) == (None, ())
    else:
        single = job.model_copy(update={"data": job.data.model_copy(update={"packing": "single"})})
        assert (rows, told) == rows_of_steps(single, tokens_of(single))
        assert rows is not None
        assert rows.mean <= rows.longest < 256
    found = job_in(str(tmp_path / "job.toml"), Taking(None, 1, runs=False), (None,) * 3, {})
    assert found.rows == rows
    tokens, sequence, *_ = cast("Any", found.typed(cast("Any", ("", None, None))))
    assert (int(tokens) // 4, sequence) == 2 * (256 if rows is None else rows.longest,)
    whole = found.of(ask_of(tokens, sequence, "fp32", "tangram", "", 0.0, 8))
    assert whole.filled == (1.0 if rows is None else rows.mean / rows.longest)


def test_a_model_that_is_too_large_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_plans, "MOST_ASKED", 1000)
    asked = job_of(folder, **{"data.packing": "auto"})
    assert rows_of_steps(asked, tokens_of(asked)) == (None, ()), "as a narrower one says"
    monkeypatch.setattr(local_plans, "MOST_NARROW", 1000)
    job = job_of(folder, **{"data.packing": "auto"})
    rows, (told,) = rows_of_steps(job, tokens_of(job))
    assert rows is None
    assert told.startswith("planned as if each row had 640 tokens: ")
    assert 'data.packing = "single"' in told


def test_lengths_of_steps(folder: Path) -> None:
    asked = job_of(folder)
    prepare(asked.data, tokens_of(asked), lambda _: None)
    corpus = open_corpus(asked.data, tokens_of(asked))
    each = [step_length(corpus, asked.data, asked.seed, 2 * step) for step in range(STEPS)]
    mean, longest = step_lengths(corpus, asked.data, asked.seed, STEPS)
    assert mean == round(np.mean(each))
    assert max(step_length(corpus, asked.data, seed, 0) for seed in range(60)) == longest, "a step of each seed"
    shorter = asked.data.model_copy(update={"sequence": 100})
    assert step_lengths(corpus, shorter, asked.seed, STEPS)[1] == 100


def test_held_out_rows_are_as_long_as_the_plan_says(folder: Path) -> None:
    """Their logits may be the most that there is, where steps have short rows."""
    job = job_of(folder, **{"data.held_out": "0.2"})
    config = source_of(job, tokens_of(job)).config
    alone, short = rates(1), Rows(16, 16)
    plan = plan_of(ONE, job, Counted(job, config), 2)
    measured = predict(plan, alone, config, Counted(job, config, short)).memory
    never = plan.model_copy(update={"data": plan.data.model_copy(update={"held_out": 0.0})})
    assert measured.total > predict(never, alone, config, Counted(job, config, short)).memory.total


def test_places_that_hold_none_are_those_of_rows_that_are_trained_on(folder: Path) -> None:
    """They were told of rows of `data.sequence` tokens, of which nothing computes."""
    asked = job_of(folder)
    prepare(asked.data, tokens_of(asked), lambda _: None)
    corpus, filled, places = open_corpus(asked.data, tokens_of(asked)), 0, 0
    for first in range(0, STEPS * 2, 2):
        length = step_length(corpus, asked.data, asked.seed, first)
        windows = [window for _, window in sample_ids(corpus, asked.data, asked.seed, first, 2)]
        start, stop = corpus.training[0].spans(windows, asked.data.sequence, single=True)
        filled, places = filled + int((stop - start).sum()), places + 2 * length
    assert empty_places(asked, corpus) == pytest.approx(1 - filled / places, abs=0.15)
    assert empty_places(asked, corpus) < padding(corpus, asked.data) - 0.3
    compiled = job_of(folder, **{"run.compile": "true"})
    assert empty_places(compiled, corpus) == pytest.approx(padding(corpus, asked.data))


def test_rows_of_answers_with_labels_are_as_long_as_a_step_needs(tmp_path: Path) -> None:
    """A row whose prompt is answered by another sample's answer is longer than both, and nothing of it is cut off."""
    folder = write_pairs(tmp_path)
    turns = [("why " * 20, "no"), ("x?", "so " * 25)]  # a long prompt or a long answer
    rows = [{"prompt": f"{n} {turns[n % 2][0]}", "completion": turns[n % 2][1], "label": n % 3 > 0} for n in range(40)]
    (folder / "labels" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = load(
        folder / "kto.toml", {"data.cache": str(folder / "cache"), "data.global_batch": "6", "data.micro_batch": "6"}
    )
    prepare(job.data, tokens_of(job), lambda event: None)
    corpus = open_corpus(job.data, tokens_of(job))
    mean, most = step_lengths(corpus, job.data, job.seed, 8)
    assert mean <= most < job.data.sequence == 1024
    for step in range(8):
        length = step_length(corpus, job.data, job.seed, 6 * step)
        assert length <= most
        full = step_batches(
            corpus, job.data, seed=job.seed, first_sample=6 * step, index=0, size=1, micro_steps=1,
            device=torch.device("cpu"),
        )  # fmt: skip
        for one, cut in zip(full.micro, full.cut(length).micro, strict=True):
            assert one.others is not None
            assert cut.others is not None
            assert cut.bad_B is one.bad_B
            ends = [int((x.labels_BS != IGNORE).any(0).nonzero().max()) + 1 for x in (one, one.others)]
            assert cut.inputs_BS.shape[1] == cut.others.inputs_BS.shape[1] == length
            assert max(ends) <= length < max(ends) * 9 / 8 + 8
