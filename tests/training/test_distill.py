"""Learning from a teacher: runs on one process and two beside transformers and formulas written out."""

import gc
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from tangram.errors import UserError
from tangram.planner.local.derived_layouts import ModelAxis
from tangram.planner.local.estimate import estimate
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.planner.local.teacher import teacher_costs, teacher_plan
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import DistillPlan, LoraPlan, PreferencePlan
from tangram.training.data import open_corpus, prepare, step_batches, tokens_of
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin
from tangram.training.state.build_model import source_of
from tangram.training.state.teacher import teacher_source
from tangram.training.step.loop import StepCosts
from tangram.training.step.objectives import objective_of
from tangram.training.trials.dry_run import dry_run
from tests.planner.machine import rates
from tests.training.taught import PADDED, Mistake, oracle, write_taught
from tests.training.tuning_tasks import Traced, assert_as_expected, run_each, run_in_turn

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

Key = tuple[str, str]
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "ddp": Strategy("DDP", "dp=2", ("dp",)),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "cp": Strategy("context", "cp=2", (), (ModelAxis("cp", "context", "gathered"),)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
SET = {
    "data.sequence": "96", "data.global_batch": "6", "data.micro_batch": "6",
    "optimiser.schedule": "constant", "optimiser.lr": "1e-3", "optimiser.weight_decay": "0.0",
}  # fmt: skip
LORA = LoraPlan(rank=4, alpha=16.0)
JOBS: Mapping[str, dict[str, Any]] = {
    "forward": {"alpha": 0.25, "temperature": 2.0},
    "reverse, tied, llama": {"loss_type": "reverse_kl", "alpha": 0.0},
    "jsd": {"loss_type": "jsd", "beta": 0.2, "temperature": 1.5},
    "padded": {"temperature": 2.0},
}
SOME: Mapping[str, tuple[str, ...]] = {
    "forward": ("one", "fsdp", "tp", "pp"), "reverse, tied, llama": ("one", "ddp", "tp"),
    "jsd": ("one", "fsdp", "cp"),     "padded": ("one", "fsdp", "tp", "pp"),
}  # fmt: skip
OTHER = "reverse, tied, llama"
"""The student's head is its embedding; the teacher is of another type."""
STEPS, HALF, LONG = 4, 2, 30


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Plan]:
    """By what is learnt and how: of a rank that has 3 samples, two go through at once, then one."""
    kinds: dict[str, dict[str, Any]] = {"padded": {"padded": PADDED}, OTHER: {"tied": True, "family": "llama"}}
    folders = {job: write_taught(tmp_path_factory.mktemp("taught"), **kinds.get(job, {})) for job in JOBS}
    found: dict[Key, Plan] = {}
    for job, keys in JOBS.items():
        folder = folders[job]
        asked = load(folder / "distill.toml", {**SET, "data.cache": str(folder / "cache")})
        prepare(asked.data, tokens_of(asked), lambda event: None)
        distill = DistillPlan(teacher=str(folder / "teacher"), **keys)
        asked = asked.model_copy(update={"distill": distill, "lora": LORA if job == "forward" else None})
        counted = Counted(asked, source_of(asked, tokens_of(asked)).config)
        for way in SOME[job]:
            found[job, way] = plan_of(WAYS[way], asked, counted, 6 if way == "one" else 2)
    found["forward", "half"], found["forward", "rest"] = found["forward", "tp"], found["forward", "fsdp"]
    found[OTHER, "half"], found[OTHER, "rest"] = found[OTHER, "ddp"], found[OTHER, "one"]
    steps = {key: HALF if key[1] == "half" else STEPS for key in found} | {("jsd", "one"): LONG}
    return {
        key: plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps[key]})})
        for key, plan in found.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ran(runs: Path, plans: dict[Key, Plan]) -> dict[Key, list[Traced]]:
    """What all ranks have measured, each number of ranks started once."""
    after = {(job, "rest"): (job, "half") for job in ("forward", OTHER)}
    return run_each(plans, runs, after)


@pytest.mark.parametrize("job", JOBS)
def test_losses_and_gradients_are_those_of_formulas_on_any_mesh(
    plans: dict[Key, Plan], ran: dict[Key, list[Traced]], job: str
) -> None:
    expected = oracle(plans[job, "one"])
    assert expected.losses[-1] < expected.losses[0]
    for way in [way for way in WAYS if (job, way) in ran]:
        assert_as_expected(ran[job, way], expected, way, plans[job, way].run.steps)
    if (job, "rest") in ran:  # on another mesh, with the same teacher
        assert ran[job, "rest"][0].losses == pytest.approx(expected.losses[HALF:], rel=1e-5)


def _alive(vocabulary: int) -> int:
    """How many numbers logits have that are there now."""
    some = (one for one in gc.get_objects() if type(one) is torch.Tensor)  # no fake ones
    return sum({one.data_ptr(): one.numel() for one in some if one.dim() == 3 and one.shape[2] == vocabulary}.values())


def _kept_of_teacher(rank: Rank, work: tuple[Plan, Path]) -> list[int]:
    """Numbers in a teacher's logits: after its forward, with those of a micro-batch, and when these are gone."""
    plan, folder = work
    corpus = open_corpus(plan.data, tokens_of(plan))
    model = begin(rank, RankJob(plan, folder, corpus.digest, StepCosts(), None)).model
    assert model.pipeline is not None
    assert model.teacher is not None
    batches = step_batches(
        corpus, plan.data, seed=0, first_sample=0, index=0, size=1, micro_steps=plan.micro_steps, device=rank.device
    )
    vocabulary = model.teacher.module.config.vocab_size  # pyright: ignore
    references = objective_of(plan).references(model, batches.micro)
    found = [_alive(vocabulary)]
    for number, batch in enumerate(batches.micro):
        said = references[number]
        assert (said is None) == (not model.pipeline.is_last)
        found.append(_alive(vocabulary) // batch.inputs_BS.numel())
        del said
    return [*found, _alive(vocabulary)]


def test_a_pipeline_keeps_logits_of_a_teacher_of_one_micro_batch(plans: dict[Key, Plan], tmp_path: Path) -> None:
    plan = plans["padded", "pp"]
    assert plan.micro_steps == 3
    found = run_ranks(_kept_of_teacher, (plan, tmp_path), world=2, on_event=lambda _: None, device="cpu")
    vocabulary = Counted(plan, source_of(plan, tokens_of(plan)).config).teacher.config.vocab_size  # pyright: ignore
    assert found == [[0] * 5, [0, *[vocabulary] * 3, 0]]


@pytest.mark.parametrize("mistake", [m for m in get_args(Mistake) if m])
def test_mistakes_are_seen(plans: dict[Key, Plan], ran: dict[Key, list[Traced]], mistake: Mistake) -> None:
    job = "padded" if mistake == "padding counted" else "forward"
    wrong = oracle(plans[job, "one"], mistake)
    assert ran[job, "one"][0].losses[0] != pytest.approx(wrong.losses[0], rel=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_taught(tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"data.packing": "packed"}, "windows of packed text cut conversations"),
        ({"distill.beta": "0.1"}, 'of the loss "jsd" only'),
        ({"distill.alpha": "1.0"}, "distill.alpha"),
        ({"task": "sft"}, 'is what the task "distill" learns from'),
        ({"distill.lmbda": "0.5"}, "lmbda"),
    ],
)
def test_jobs_that_are_refused(folder: Path, change: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        load(folder / "distill.toml", change)


def test_a_job_without_a_teacher_is_refused(folder: Path, tmp_path: Path) -> None:
    text = (folder / "distill.toml").read_text().replace('distill.teacher = "teacher"\n', "")
    (tmp_path / "distill.toml").write_text(text)
    with pytest.raises(UserError, match="learns from a teacher: give the directory of its weights"):
        load(tmp_path / "distill.toml")


def test_teachers_that_are_refused(folder: Path, tmp_path: Path) -> None:
    job = load(folder / "distill.toml")
    tokens = tokens_of(job)
    shutil.copytree(folder / "teacher", tmp_path / "another tokenizer")
    file = tmp_path / "another tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|im_begin|>"))
    shutil.copytree(folder / "teacher", tmp_path / "without weights")
    (tmp_path / "without weights" / "model.safetensors").unlink()
    shutil.copytree(folder / "teacher", tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    (tmp_path / "nothing").mkdir()
    for name, why in {
        "not there": "not there",
        "another tokenizer": "take a teacher with the same tokenizer",
        "without weights": "no weights to learn from",
        "short": "the model has 64 positions",
        "nothing": "config.json",
    }.items():
        distill = DistillPlan(teacher=str(tmp_path / name))
        with pytest.raises(UserError, match=why) as caught:
            teacher_source(job.model_copy(update={"distill": distill}), tokens)
        assert str(caught.value).startswith("distill.teacher: ")
        assert "\n" not in str(caught.value)


def test_a_run_beside_another_teacher_is_refused(
    tmp_path: Path, plans: dict[Key, Plan], ran: dict[Key, list[Traced]], runs: Path
) -> None:
    assert ran
    plan = plans[OTHER, "rest"]
    assert plan.distill is not None
    shutil.copytree(str(plan.distill.teacher), tmp_path / "teacher")
    moved = plan.model_copy(update={"distill": plan.distill.model_copy(update={"teacher": str(tmp_path / "teacher")})})
    key: Key = (OTHER, "moved")
    before: dict[Key, Key] = {key: (OTHER, "half")}
    (done,) = run_ranks(run_in_turn, ({key: moved}, runs, before), world=1, on_event=print, device="cpu")
    assert done[key].losses == ran[OTHER, "rest"][0].losses
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1e-6
    model.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match=r"had other values than distill\.teacher has now"):
        run_ranks(run_in_turn, ({key: moved}, runs, before), world=1, on_event=print, device="cpu")


def test_memory_and_time_of_a_teacher_are_predicted(plans: dict[Key, Plan]) -> None:
    """The bytes of its parameters to the last, on one rank and on two, and its forward."""
    for way, share in (("one", 1.0), ("fsdp", 0.5), ("tp", None)):
        plan = plans["forward", way]
        counted = Counted(plan, source_of(plan, tokens_of(plan)).config)
        found = teacher_costs(plan, counted)
        assert found is not None
        assert counted.teacher is not None
        whole = 4 * sum(p.numel() for p in counted.teacher.model.parameters())
        assert found.nbytes == pytest.approx(whole * share, rel=0.01) if share else found.nbytes < 0.8 * whole
        assert 1.5 < found.forwards < 4  # three layers of 48 beside two of 32
        assert sum(found.units) == pytest.approx(whole if way == "fsdp" else 0)
        costs = counted.costs(plan.data.micro_batch)
        beside, without = (
            estimate(plan, costs, costs, rates(), teacher=one)
            for one in (found, replace(found, units=(), gathered=0.0))
        )
        gathers = beside.seconds.communication - without.seconds.communication
        assert gathers > 0 if way == "fsdp" else gathers == 0
        large = estimate(plan, costs, costs, rates(), teacher=replace(found, gathered=1e9))
        assert (
            1e9 < large.memory.activations + large.memory.logits + large.memory.gathered < 1.01e9
        )  # nothing of the student is there then


def test_what_waits_for_a_teacher_in_a_pipeline_is_predicted(plans: dict[Key, Plan]) -> None:
    plan = plans["forward", "pp"]
    counted = Counted(plan, source_of(plan, tokens_of(plan)).config)
    found, costs = teacher_costs(plan, counted), counted.costs(plan.data.micro_batch)
    assert found is not None
    waits = plan.micro_steps * plan.data.micro_batch * costs.sequence * 48 * 4
    beside, alone = (estimate(plan, costs, costs, rates(), teacher=one).memory.logits for one in (found, None))
    assert beside - alone == pytest.approx(costs.logits_bytes + waits, rel=0.01)


def test_gathers_of_a_reference_are_predicted(plans: dict[Key, Plan]) -> None:
    plan = plans["forward", "fsdp"].model_copy(update={"task": "sft", "distill": None})
    costs = Counted(plan, source_of(plan, tokens_of(plan)).config).costs(plan.data.micro_batch)
    compared = plan.model_copy(update={"task": "dpo", "preference": PreferencePlan()})
    assert compared.other_forwards == 1
    alone, beside = (estimate(one, costs, costs, rates()).seconds for one in (plan, compared))
    assert beside.communication > 1.1 * alone.communication


def test_a_teacher_is_not_cut_over_expert_axes(plans: dict[Key, Plan]) -> None:
    plan = plans["jsd", "one"]
    teacher = Counted(plan, source_of(plan, tokens_of(plan)).config).teacher
    assert teacher is not None
    other = plan.model_copy(update={"axes": plan.axes.model_copy(update={"expert": ("ep",)})})
    with pytest.raises(UserError, match=r"distill\.teacher, on the mesh of its student: .* expert axes"):
        teacher_plan(other, teacher)


@pytest.mark.parametrize("way", ["one", "fsdp", "tp"])
def test_a_dry_run_has_the_bytes_that_are_predicted_of_a_teacher(plans: dict[Key, Plan], way: str) -> None:
    plan = plans["forward", way]
    alone = plan.model_copy(update={"task": "sft", "distill": None})
    (beside,), (without,) = dry_run(plan), dry_run(alone)
    costs = teacher_costs(plan, Counted(plan, source_of(plan, tokens_of(plan)).config))
    assert costs is not None
    assert beside.memory["parameters"] - without.memory["parameters"] == pytest.approx(costs.nbytes, rel=0.01)


def test_documents_are_learnt_from_as_they_are(folder: Path) -> None:
    text = load(folder / "distill.toml", {"distill.on": "text", "data.packing": "packed"})
    assert tokens_of(text).context is None
    assert tokens_of(load(folder / "distill.toml")).context is not None
