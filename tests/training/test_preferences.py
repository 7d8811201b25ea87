"""Learning from preferences: formulas, and runs on one process and two beside transformers and peft."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from tangram.cli import main
from tangram.errors import UserError
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan, LossType, PreferencePlan
from tangram.training.data import prepare, tokens_of
from tangram.training.objective.preferences import FORMULAS, Scores
from tangram.training.parallel.model import Reference
from tangram.training.run.launch import run_ranks
from tangram.training.state.build_model import source_of
from tests.house.doc_blocks import ROOT, blocks_of, commands_of
from tests.training.pairs import Mistake, oracle, write_pairs
from tests.training.tuning_tasks import Traced, assert_as_expected, run_each, run_in_turn

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

Key = tuple[str, str]
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
    "pp, fsdp": Strategy("2 stages, FSDP", "pp=2 dp=2", ("dp",), shard="dp", stages=2),
}
SET = {
    "data.sequence": "64", "data.global_batch": "6", "data.micro_batch": "6",
    "optimiser.schedule": "constant", "optimiser.lr": "1e-3",
}  # fmt: skip
LORA = LoraPlan(rank=4, alpha=16.0)
STEPS, HALF = 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[Key, Plan]:
    """By what is learnt and how, with the tokens made: of a rank that has 3 pairs, two go through at once, then one."""
    asked = load(folder / "dpo.toml", {**SET, "data.cache": str(folder / "cache")})
    prepare(asked.data, tokens_of(asked), lambda event: None)
    counted = Counted(asked, source_of(asked, tokens_of(asked)).config)
    ways = {way: plan_of(one, asked, counted, 6 if way == "one" else 2) for way, one in WAYS.items()}
    jobs: dict[str, dict[str, Any]] = {
        "dpo": {"lora": LORA},
        "ipo, whole": {"preference": PreferencePlan(loss_type="ipo")},
        "orpo": {"preference": PreferencePlan(loss_type="orpo"), "lora": LORA},
        "kto": {"lora": LORA},
    }
    some = {
        "dpo": ("one", "fsdp", "tp", "pp"), "ipo, whole": ("one", "fsdp", "pp, fsdp"), "orpo": ("one", "tp", "pp"),
        "kto": ("one", "fsdp", "tp", "pp, fsdp"),
    }  # fmt: skip
    single = load(folder / "kto.toml", {**SET, "data.cache": str(folder / "cache")})
    prepare(single.data, tokens_of(single), lambda event: None)
    of_kto = {name: getattr(single, name) for name in ("task", "data", "preference")}
    jobs["kto"] |= of_kto
    found = {(job, way): ways[way].model_copy(update=jobs[job]) for job, own in some.items() for way in own}
    for key in [key for key in found if key[0] == "kto"]:  # each way takes its own micro-batch
        micro = {"micro_batch": ways[key[1]].data.micro_batch}
        found[key] = found[key].model_copy(update={"data": single.data.model_copy(update=micro)})
    found["dpo", "half"], found["dpo", "rest"] = found["dpo", "tp"], found["dpo", "fsdp"]
    found["ipo, whole", "half"], found["ipo, whole", "rest"] = found["ipo, whole", "fsdp"], found["ipo, whole", "one"]
    return {
        key: plan.model_copy(update={"run": plan.run.model_copy(update={"steps": HALF if key[1] == "half" else STEPS})})
        for key, plan in found.items()
    }


@pytest.fixture(scope="module")
def ran(folder: Path, plans: dict[Key, Plan]) -> dict[Key, list[Traced]]:
    """What all ranks have measured, each number of ranks started once."""
    after = {(job, "rest"): (job, "half") for job in ("dpo", "ipo, whole")}
    return run_each(plans, folder / "runs", after)


@pytest.mark.parametrize("job", ["dpo", "ipo, whole", "orpo", "kto"])
def test_losses_and_gradients_are_those_of_transformers_and_peft_on_any_mesh(
    plans: dict[Key, Plan], ran: dict[Key, list[Traced]], job: str
) -> None:
    expected = oracle(plans[job, "one"])
    assert expected.losses[-1] < expected.losses[0]
    for way in [way for way in WAYS if (job, way) in ran]:
        assert_as_expected(ran[job, way], expected, way, plans[job, way].run.steps)
    if (job, "rest") in ran:  # on another mesh, with the reference of the begin
        assert ran[job, "rest"][0].losses == pytest.approx(expected.losses[HALF:], rel=1e-5)


def test_what_fails_within_a_reference_is_told_though_parameters_are_still_gathered() -> None:
    module = torch.nn.Linear(3, 2)
    reference = Reference(module)

    def fails() -> None:
        with reference.used():
            module.weight = torch.nn.Parameter(torch.zeros(4, 3))  # as FSDP leaves it
            raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        fails()


def test_a_reference_of_other_weights_is_refused(
    folder: Path, tmp_path: Path, plans: dict[Key, Plan], ran: dict[Key, list[Traced]]
) -> None:
    """A run goes on only beside the values that it began with, though no checkpoint has them."""
    assert ran
    shutil.copytree(folder / "chat-model", tmp_path / "chat-model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "chat-model")
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1e-6
    model.save_pretrained(tmp_path / "chat-model")
    plan = plans["ipo, whole", "rest"]
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"path": str(tmp_path / "chat-model")})})
    key, before = ("ipo, whole", "other"), ("ipo, whole", "half")
    with pytest.raises(UserError, match="put back the weights that the run began with"):
        run_ranks(run_in_turn, ({key: other}, folder / "runs", {key: before}), world=1, on_event=print, device="cpu")


@pytest.mark.parametrize("mistake", [m for m in get_args(Mistake) if m])
def test_mistakes_are_seen(plans: dict[Key, Plan], ran: dict[Key, list[Traced]], mistake: Mistake) -> None:
    # of sums a prompt has no part: both sides have it
    job = {"prompt counted": "ipo, whole", "own answer": "kto"}.get(mistake, "dpo")
    wrong = oracle(plans[job, "one"], mistake)
    assert ran[job, "one"][0].losses[1:] != pytest.approx(wrong.losses[1:], rel=1e-5)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


@pytest.mark.parametrize(("c", "r"), [(-1.5, -4.0), (3.0, -2.5), (-7.0, -0.3)])
def test_formulas_are_those_that_were_published(c: float, r: float) -> None:
    beta, eps, gamma, nc, nr = 0.3, 0.1, 0.5, 3, 5
    ahead, means = beta * (c - r), beta * (c / nc - r / nr)
    expected: dict[LossType, float] = {
        "sigmoid": -(1 - eps) * math.log(sigma(ahead)) - eps * math.log(sigma(-ahead)),
        "hinge": max(0.0, 1 - ahead),
        "ipo": (c / nc - r / nr - 1 / (2 * beta)) ** 2,
        "robust": (-(1 - eps) * math.log(sigma(ahead)) + eps * math.log(sigma(-ahead))) / (1 - 2 * eps),
        "sigmoid_norm": -math.log(sigma(means)),
        "apo_zero": 1 - sigma(beta * c) + sigma(beta * r),
        "apo_down": sigma(beta * c) + 1 - sigma(ahead),
        "kto": 1 - sigma(beta * c) + sigma(beta * r),
        "simpo": -(1 - eps) * math.log(sigma(means - gamma)) - eps * math.log(sigma(gamma - means)),
    }
    if c < 0:
        expected["orpo"] = -beta * math.log(sigma(math.log(odds(c / nc) / odds(r / nr))))
        assert expected.keys() == FORMULAS.keys() == set(get_args(LossType))
    scores = Scores(*(torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (c, r)),
                    *(torch.tensor([n]) for n in (nc, nr)))  # fmt: skip
    for name, loss in expected.items():
        smoothing = eps if name in ("sigmoid", "robust", "simpo") else 0.0
        plan = PreferencePlan(loss_type=name, beta=beta, label_smoothing=smoothing, simpo_gamma=gamma)
        found = FORMULAS[name].loss(scores, plan)
        assert found.item() == pytest.approx(loss, rel=1e-12), name
        (slope,) = torch.autograd.grad(found.sum(), scores.chosen)
        assert slope.isfinite().all(), name
    with pytest.raises(ValidationError, match="has no label_smoothing"):
        PreferencePlan(loss_type="ipo", label_smoothing=0.1)


@pytest.mark.slow
def test_the_page_is_what_happens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job and its commands, with dropout, held-out pairs, a save on the way, on two processes; and going on."""
    job, commands, *others = blocks_of(ROOT / "docs" / "preferences.md")
    example = ROOT / "examples" / "preferences"
    assert job.text == (example / "dpo.toml").read_text()
    assert not others
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat-model").symlink_to(folder / "chat-model")
    (tmp_path / "pairs").symlink_to(example / "pairs")
    (tmp_path / "dpo.toml").write_text(job.text)
    show, train = (list(command.arguments) for command in commands_of(commands))
    some = [x for key, value in {
        "lora.dropout": "0.1", "data.sequence": "128", "data.cache": str(tmp_path / "cache"), "data.held_out": "0.3",
        "run.evaluate_every": "1", "checkpoint.every_steps": "1", "optimiser.lr": "1e-3", "data.global_batch": "3",
    }.items() for x in ("--set", f"{key}={value}")]  # fmt: skip
    assert main([*show, *some]) == 0
    shown = capsys.readouterr().out
    assert shown.count(", chosen: ") == shown.count(", rejected: ") == 3
    assert shown.count("<|im_start|>assistant\n[[") == 6
    assert shown.count("<|im_start|>user\n[[") == 0
    assert main([*train, *some, "--steps", "2", "-n", "2"]) == 0
    said = capsys.readouterr().out
    assert "margins" in said
    assert "accuracies" in said
    assert main(["train", "dpo.toml", *some, "--steps", "3", "-n", "1", "--resume", "--out", "runs/dpo"]) == 0
    base, tuned = (AutoModelForCausalLM.from_pretrained(name) for name in ("chat-model", "runs/dpo/export"))
    ids = torch.arange(40)[None]
    assert not torch.equal(base(ids).logits, tuned(ids).logits)


def test_what_is_refused(folder: Path, plans: dict[Key, Plan]) -> None:
    for change, why in (
        ({"data.packing": "best-fit"}, "share no row"),
        ({"preference.loss_type": "kto"}, "is that of the task"),
        ({"task": "kto", "preference.loss_type": "sigmoid"}, "is that of the task"),
        ({"task": "kto", "preference.loss_type": "kto", "data.global_batch": "1"}, "take at least 2"),
        ({"preference.desirable_weight": "2.0"}, "no weights of good and bad answers"),
        ({"task": "sft"}, "preferences are what the task"),
    ):
        with pytest.raises(UserError, match=why):
            load(folder / "dpo.toml", {"preference.beta": "0.1", **change})
