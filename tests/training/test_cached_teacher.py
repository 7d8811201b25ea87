"""Learning from what a teacher has said, kept in a folder: with all classes the losses of the teacher itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from tangram.cli import main
from tangram.errors import UserError
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.planner.local.teacher import teacher_costs
from tangram.schema.files import load
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.data import batches_once, held_out_batches, open_corpus, prepare, tokens_of
from tangram.training.objective.cached_teacher import INDEX, CachedTeacher, open_cache
from tangram.training.run.launch import run_ranks
from tangram.training.state.build_model import source_of
from tangram.training.state.teacher import classes_of, teacher_stamp
from tangram.training.trials.dry_run import dry_run
from tangram.training.trials.teach import teach
from tests.training.taught import PADDED, write_taught
from tests.training.tuning_tasks import Traced, run_each, run_in_turn

Key = tuple[str, str]
SET = {
    "data.sequence": "96", "data.global_batch": "6", "data.held_out": "0.2", "optimiser.schedule": "constant",
    "optimiser.lr": "1e-3", "distill.temperature": "2.0", "run.steps": "4",
}  # fmt: skip
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "cp": Strategy("context", "cp=2", (), (ModelAxis("cp", "context", "gathered"),)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
STEPS, HALF, SOME = 4, 2, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_taught(tmp_path_factory.mktemp("kept"), padded=PADDED)


def job_of(folder: Path, cache: str = "", **more: str) -> Job:
    kept = {"distill.cache": f'"{cache}"'} if cache else {}
    job = load(folder / "distill.toml", {**SET, "data.cache": str(folder / "cache"), **kept, **more})
    assert not isinstance(job, Plan)
    return job


@pytest.fixture(scope="module")
def kept(folder: Path) -> dict[str, Path]:
    """All classes that both have, by two ranks; a few, by one process and as typed."""
    job = job_of(folder)
    every = classes_of(source_of(job, tokens_of(job)).config)
    teach(job, folder / "all", every, 2, print)
    words = [
        word
        for key, value in {**SET, "data.cache": str(folder / "cache")}.items()
        for word in ("--set", f"{key}={value}")
    ]
    assert (
        main(["data", "teach", str(folder / "distill.toml"), "--out", str(folder / "few"), "-k", str(SOME), *words])
        == 0
    )
    return {"all": folder / "all", "few": folder / "few"}


@pytest.fixture(scope="module")
def ran(folder: Path, kept: dict[str, Path]) -> dict[Key, Traced]:
    plans: dict[Key, Plan] = {}
    for what in ("online", *kept):
        job = job_of(folder, "" if what == "online" else what)
        counted = Counted(job, source_of(job, tokens_of(job)).config)
        for way in ("one",) if what == "online" else WAYS if what == "all" else ("one", "tp"):
            plans[what, way] = plan_of(WAYS[way], job, counted, 6 if way == "one" else 2)
    plans["all", "half"], plans["all", "rest"] = plans["all", "tp"], plans["all", "fsdp"]
    for (what, way), plan in plans.items():
        steps = HALF if way == "half" else STEPS
        plans[what, way] = plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps})})
    after: dict[Key, Key] = {("all", "rest"): ("all", "half")}
    return {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", after).items()}


def test_all_classes_have_the_losses_of_the_teacher_on_any_mesh(ran: dict[Key, Traced]) -> None:
    online = ran["online", "one"]
    for way in WAYS:
        found = ran["all", way]
        assert found.losses == pytest.approx(online.losses, rel=1e-6 if way == "one" else 1e-5), way
        assert found.norms == pytest.approx(online.norms, rel=1e-5), way
        for figure, values in online.figures.items():
            assert found.figures[figure] == pytest.approx(values, rel=1e-5), way
    assert ran["all", "rest"].losses == pytest.approx(online.losses[HALF:], rel=1e-5)


def test_what_is_kept_is_the_same_of_a_teacher_that_tp_cuts(folder: Path, kept: dict[str, Path]) -> None:
    """Alone and with FSDP; each row is written once."""
    job = job_of(folder)
    every = json.loads((kept["all"] / "index.json").read_text())
    with pytest.raises(UserError, match="3 processes are no multiple of it: set -n 4"):
        teach(job, folder / "none", every["top"], 3, print, tp=2)
    before = _said(kept["all"], every["files"])
    for processes in (2, 4):
        made = folder / f"tp {processes}"
        teach(job, made, every["top"], processes, print, tp=2)
        index = json.loads((made / "index.json").read_text())
        assert {**index, "files": []} == {**every, "files": []}
        after = _said(made, index["files"])
        assert after.keys() == before.keys()
        for key, one in before.items():
            assert torch.allclose(one.exp(), after[key].exp(), atol=1e-6), key


def _said(folder: Path, files: Sequence[str]) -> dict[bytes, Tensor]:
    """Of each row what is kept of its tokens, in the order of classes."""
    found: dict[bytes, Tensor] = {}
    for x in (load_file(folder / file) for file in files):
        order = x["classes"].long().argsort(1)
        logp = torch.cat([x["logp"][:, :-1].gather(1, order), x["logp"][:, -1:]], 1)
        ends = [0, *map(int, x["ends"])]
        for row, key in enumerate(x["keys"]):
            found[key.numpy().tobytes()] = logp[ends[row] : ends[row + 1]]
    return found


def test_few_classes_are_a_smaller_divergence_alike_on_ranks(ran: dict[Key, Traced]) -> None:
    whole, few = ran["online", "one"].figures["divergence"][0], ran["few", "one"].figures["divergence"][0]
    assert 0.2 * whole < few < 0.95 * whole
    assert ran["few", "tp"].losses == pytest.approx(ran["few", "one"].losses, rel=1e-5)
    assert ran["few", "one"].losses[-1] < ran["few", "one"].losses[0]


def test_a_run_is_trained_and_evaluated_without_a_teacher(
    folder: Path, kept: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bare.toml").write_text(
        (folder / "distill.toml").read_text().replace('distill.teacher = "teacher"', 'distill.cache = "few"')
    )
    job = load(folder / "bare.toml", {**SET, "data.cache": str(folder / "cache")})
    assert job.distill is not None
    assert job.distill.teacher is None
    words = [
        word
        for key, value in {**SET, "data.cache": str(folder / "cache")}.items()
        for word in ("--set", f"{key}={value}")
    ]
    assert main(["train", str(folder / "bare.toml"), "--out", str(folder / "out"), *words]) == 0
    steps = [json.loads(line) for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]
    assert all(step["divergence"] > 0 for step in steps if "divergence" in step)
    capsys.readouterr()


def test_no_teacher_is_planned_for(folder: Path, kept: dict[str, Path]) -> None:
    job = job_of(folder, "few")
    counted = Counted(job, source_of(job, tokens_of(job)).config)
    plan = plan_of(WAYS["tp"], job, counted, 2)
    assert teacher_costs(plan, counted) is None
    (beside,), (alone,) = dry_run(plan), dry_run(plan.model_copy(update={"task": "sft", "distill": None}))
    assert beside.memory["parameters"] == alone.memory["parameters"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"distill.temperature": "1.0"}, r"was made of distill\.temperature = 2\.0: make it anew"),
        ({"data.sequence": "64"}, r"was made of data\.sequence = 96"),
        ({"data.held_out": "0.1"}, "was made of another text or tokenizer"),
        ({"distill.cache": '"nothing"'}, "has not what a teacher says: make it by `tangram data teach"),
    ],
)
def test_folders_of_other_jobs_are_refused(
    folder: Path, kept: dict[str, Path], change: dict[str, str], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        opened(job_of(folder, "few", **change))


def opened(job: Job) -> CachedTeacher:
    tokens = tokens_of(job)
    prepare(job.data, tokens, lambda event: None)
    classes = classes_of(source_of(job, tokens).config)
    found = open_cache(job, open_corpus(job.data, tokens).digest, classes, teacher_stamp(job))
    assert found is not None
    return found


def test_a_folder_of_another_teacher_is_refused(folder: Path, kept: dict[str, Path], tmp_path: Path) -> None:
    """Whose weights are others, be it by one number at the end of a tensor, or that computes otherwise by them."""
    shutil.copytree(folder / "teacher", tmp_path / "moved")
    shutil.copytree(folder / "teacher", tmp_path / "other")
    shutil.copytree(folder / "teacher", tmp_path / "turned")
    weights = load_file(folder / "teacher" / "model.safetensors")
    weights["lm_head.weight"][-1, -1] += 1.0
    save_file(weights, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "teacher" / "config.json").read_text())
    (tmp_path / "turned" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))

    def of(name: str) -> CachedTeacher:
        return opened(job_of(folder, "few", **{"distill.teacher": f'"{tmp_path / name}"'}))

    assert of("moved").top == of("not here").top == SOME
    for name in ("other", "turned"):
        with pytest.raises(UserError, match=f'few" was made of another teacher than "{tmp_path / name}": make it'):
            of(name)


@pytest.mark.parametrize("damage", ["a number", "the end", "a file", "a key", "no table"])
def test_a_damaged_folder_is_refused(folder: Path, kept: dict[str, Path], tmp_path: Path, damage: str) -> None:
    shutil.copytree(kept["few"], tmp_path / "bad")
    index = json.loads((tmp_path / "bad" / INDEX).read_text())
    file = tmp_path / "bad" / index["files"][0]
    if damage == "a number":
        said = load_file(file)
        said["logp"][-1, -1] += 1e-3
        save_file(said, file)
    elif damage == "the end":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "a file":
        file.unlink()
    else:
        del index["top"]
        (tmp_path / "bad" / INDEX).write_text(json.dumps(index if damage == "a key" else 1))
    job = job_of(folder, str(tmp_path / "bad"))
    why = "has other bytes of a row than were written" if damage == "a number" else "has not what a teacher says"
    with pytest.raises(UserError, match=why):
        read_all(job)


def read_all(job: Job) -> None:
    """What is said of the rows of the steps, and of those that are held out."""
    teacher = opened(job)
    corpus, device = open_corpus(job.data, tokens_of(job)), torch.device("cpu")
    once = batches_once(corpus, job.data, seed=job.seed, steps=job.run.steps, index=0, size=1, device=device)
    for batch in (*once, *held_out_batches(corpus, job.data, index=0, size=1, device=device)):
        teacher.top_logits(batch)


def test_rows_that_are_not_there_are_refused(folder: Path, kept: dict[str, Path]) -> None:
    job = job_of(folder, "few", **{"seed": "5", "run.steps": "6"})
    counted = Counted(job, source_of(job, tokens_of(job)).config)
    plan = plan_of(WAYS["one"], job, counted, 6)
    work: Any = ({("few", "more"): plan}, folder / "runs", {})
    with pytest.raises(UserError, match="has nothing of a row of this run: make it anew"):
        run_ranks(run_in_turn, work, world=1, on_event=print, device="cpu")


def test_another_number_of_classes_is_another_teacher(
    folder: Path, kept: dict[str, Path], ran: dict[Key, Traced]
) -> None:
    assert ran
    job = job_of(folder, "few")
    plan = plan_of(WAYS["one"], job, Counted(job, source_of(job, tokens_of(job)).config), 6)
    work: Any = ({("few", "resumed"): plan}, folder / "runs", {("few", "resumed"): ("all", "half")})
    with pytest.raises(UserError, match=r"had other values than distill\.cache has now"):
        run_ranks(run_in_turn, work, world=1, on_event=print, device="cpu")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--out", "all"], "is there already"),
        (["--out", "new", "-k", "9999"], "classes in common: give as many at most"),
        (["--out", "new", "--set", "distill.on=text"], "which documents share a sample"),
    ],
)
def test_commands_that_are_refused(
    folder: Path, kept: dict[str, Path], words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / word) if word in ("all", "new") else word for word in words]
    extra = ["--set", "data.packing=auto"] if "distill.on=text" in words else []
    assert main(["data", "teach", str(folder / "distill.toml"), *given, *extra]) == 2
    assert why in capsys.readouterr().err
    assert not (folder / "new").exists()


def test_what_is_kept_has_eight_bytes_a_class(kept: dict[str, Path]) -> None:
    about = json.loads((kept["few"] / INDEX).read_text())
    tokens = about["tokens"]
    size = sum((kept["few"] / name).stat().st_size for name in about["files"])
    assert size == pytest.approx(tokens * (8 * SOME + 4) + about["rows"] * 32, abs=1000)
