"""Documents apart on which the held-out loss is measured: none is trained on, and of all others none is held out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.errors import UserError
from tangram.schema.files import load
from tangram.schema.job import Job
from tangram.training.data import (
    IGNORE,
    held_out_batches,
    held_out_samples,
    measured_and_trained,
    open_corpus,
    prepare,
    tokens_of,
)
from tangram.training.run.resume import compared
from tests.training.data.test_chat import tokenizer_of
from tests.training.small import small_plan


def job(folder: Path, **data: Any) -> Job:
    """Conversations whose answers say of which folder they are."""
    (folder / "chat-model").mkdir(exist_ok=True)
    tokenizer_of(folder / "chat-model")
    for name, count in (("rows", 12), ("apart", 7), ("more", 3)):
        (folder / name).mkdir(exist_ok=True)
        rows = [{"prompt": f"{name} {n}?", "completion": f"{name}"} for n in range(count)]
        (folder / name / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "sft.toml").write_text(
        'version = 3\ntask = "sft"\nmodel.path = "chat-model"\ndata.sources = [{ path = "rows" }]\nrun.steps = 1\n'
        f'data.cache = "{folder}/cache"\n' + "".join(f"data.{key} = {value}\n" for key, value in data.items())
    )
    return load(folder / "sft.toml")


def answers(plan: Job) -> list[str]:
    """What is counted of the held-out samples."""
    tokens = tokens_of(plan)
    prepare(plan.data, tokens, lambda event: None)
    batches = held_out_batches(
        open_corpus(plan.data, tokens), plan.data, index=0, size=1, device=torch.device("cpu")
    )  # fmt: skip
    rows = [row for batch in batches for row in batch.labels_BS if bool((row != IGNORE).any())]
    ids: list[list[int]] = [row[row != IGNORE].tolist() for row in rows]
    return [tokens.spelled(some).partition("<")[0] for some in ids]


def test_all_that_is_apart_is_measured_on_and_all_else_is_trained_on(tmp_path: Path) -> None:
    plan = job(tmp_path, held_out=0.5, evaluation='[{ path = "apart" }]')
    assert answers(plan) == ["apart"] * 7
    (split,) = open_corpus(plan.data, tokens_of(plan)).training
    assert len(split.end_D) == 12


def test_several_have_their_shares(tmp_path: Path) -> None:
    plan = job(tmp_path, evaluation='[{ path = "apart" }, { path = "more", weight = 2.0 }]', held_out_samples=6)
    assert sorted(answers(plan)) == ["apart"] * 3 + ["more"] * 3  # of "more" there are no others
    assert len(held_out_samples(open_corpus(plan.data, tokens_of(plan)), plan.data)) == 6


def test_without_a_share_a_run_measures_what_is_apart_as_it_trains(tmp_path: Path) -> None:
    plan = job(tmp_path, evaluation='[{ path = "apart" }]')
    assert plan.data.held_out == 0
    assert load(tmp_path / "sft.toml", {"run.evaluate_every": "1"}).data.measured == plan.data.evaluation
    job(tmp_path)
    with pytest.raises(UserError, match="nothing to measure the held-out loss on"):
        load(tmp_path / "sft.toml", {"run.evaluate_every": "1"})


def test_other_documents_apart_are_another_text(tmp_path: Path) -> None:
    plan = job(tmp_path, evaluation='[{ path = "apart" }]')
    answers(plan)
    first = open_corpus(plan.data, tokens_of(plan)).digest
    other = job(tmp_path, evaluation='[{ path = "more" }]')
    answers(other)
    assert open_corpus(other.data, tokens_of(other)).digest != first
    with_some = small_plan(tmp_path, data={"evaluation": [{"path": "apart"}]})
    (change,) = compared(small_plan(tmp_path), with_some, {"text": "the tokens of the text are others"})[:1]
    assert change.refused
    assert change.key.startswith("data.evaluation")


def test_nothing_apart_is_refused(tmp_path: Path) -> None:
    plan = job(tmp_path, evaluation='[{ path = "apart" }]')
    (tmp_path / "apart" / "a.jsonl").write_text("")
    with pytest.raises(UserError, match=r"data\.evaluation has no text to measure the loss on"):
        answers(plan)


def test_what_is_trained_on_too_is_told(tmp_path: Path) -> None:
    def words(plan: Job) -> str:
        tokens = tokens_of(plan)
        prepare(plan.data, tokens, lambda event: None)
        return measured_and_trained(plan.data, open_corpus(plan.data, tokens))

    assert words(job(tmp_path, evaluation='[{ path = "apart" }]')) == ""
    same = '[{ path = "apart" }, { path = "rows" }]'
    assert words(job(tmp_path, evaluation=same)) == "12 of 19 conversations of data.evaluation are trained on, too"
    (tmp_path / "apart" / "a.jsonl").write_text(json.dumps({"completion": "rows", "prompt": "rows 3?", "id": 1}))
    plan = load(tmp_path / "sft.toml", {"data.evaluation": '[{ path = "apart" }]'})
    assert words(plan) == "1 of 1 conversations of data.evaluation are trained on, too"
    for name, text in (("all", "abc"), ("all/eval", "xyz"), ("copy", "abc"), ("other", "pqr")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "a.txt").write_text(text * 30)
    for name, both in (("all/eval", True), ("copy", True), ("other", False)):
        sources = {"sources": [{"path": str(tmp_path / "all")}], "evaluation": [{"path": str(tmp_path / name)}]}
        found = words(small_plan(tmp_path, data=sources))
        assert found == ("1 of 1 files of data.evaluation are trained on, too" if both else "")
