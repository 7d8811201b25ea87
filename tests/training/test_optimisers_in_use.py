"""Optimisers beside what people have with them: tied and frozen weights, adapters, dropout, a step that is not finite,
a run that goes on on another mesh."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tangram.cli import main
from tangram.errors import UserError
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import prepare, tokens_of
from tangram.training.run.launch import run_ranks
from tests.training.optimiser_tasks import Astray, with_a_bad_step
from tests.training.small import SMALL_MODEL, small_plan, write_text
from tests.training.test_stochastic_rounding import LOW
from tests.training.tuning_tasks import VOCABULARY, counted_for, run_each, write_folder

STEPS, HALF, BF16 = 3, 1, "bfloat16"
WIDE = {"preset": "qwen3-1m", "change": {**SMALL_MODEL, "hidden_size": 128, "intermediate_size": 256, "head_dim": 128}}
"""Two ranks can have whole blocks of codes of it."""
LOW_TABLE = {"compute": BF16, "parameters": BF16, "masters": BF16}
SET = {"data.sequence": "64", "data.global_batch": "4", "optimiser.schedule": "constant"}
RULES: Mapping[str, Mapping[str, str]] = {
    "sgd": {"optimiser.name": '"sgd"', "optimiser.lr": "0.1"},
    "momentum": {"optimiser.name": '"sgd"', "optimiser.lr": "0.03", "optimiser.momentum": "0.9"},
    "adafactor": {"optimiser.name": '"adafactor"', "optimiser.lr": "0.02"},
    "muon": {"optimiser.name": '"muon"', "optimiser.lr": "3e-3"},
    "adamw-8bit": {"optimiser.moments": '"8-bit"', "optimiser.lr": "3e-3"},
    "adamw": {"optimiser.lr": "3e-3"},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "attention_dropout": 0.2},
    "frozen": {},
    "adapters": {},
}
FSDP = Strategy("FSDP", "dp=2", ("dp",), shard="dp")
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": FSDP,
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
    "tp of 1": Strategy("FSDP", "dp=2 tp=1", ("dp",), (TENSOR,), "dp"),
}
CASES: Mapping[str, tuple[str, str, bool, str]] = {
    "momentum": ("momentum", "tied", False, "fsdp"),
    "adafactor": ("adafactor", "tied", False, "tp of 1"),
    "adamw-8bit": ("adamw-8bit", "adapters", False, "tp"),
    "rounded muon": ("muon", "frozen", True, "tp"),
    "tied adamw-8bit": ("adamw-8bit", "tied", False, "pp"),
    "rounded tied adamw": ("adamw", "tied", True, "pp"),
}
"""The optimiser, the model, whether it is rounded stochastically, and on which ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in-use")
    for name, fields in MODELS.items():
        (folder / name).mkdir()
        write_folder(folder / name, fields={"vocab_size": VOCABULARY - 1, **fields})
        job = folder / name / "sft.toml"
        if name != "adapters":
            job.write_text(job.read_text().replace("lora.rank = 4\n", ""))
        if name == "frozen":
            job.write_text(job.read_text() + 'model.freeze = ["*layers.0*", "*norm*"]\n')
    return folder


@cache
def counted(job: Path, low: bool) -> Counted:
    asked = load(job, {**SET, "data.cache": str(job.parent / "cache"), **(LOW if low else {})})
    return counted_for(asked)


def planned(folder: Path, case: str, way: str, steps: int = STEPS) -> Plan:
    rule, model, rounded, _ = CASES[case]
    job = folder / model / "sft.toml"
    changes = {**SET, "data.cache": str(job.parent / "cache"), **RULES[rule], **(LOW if rounded else {})}
    plan = plan_of(WAYS[way], load(job, changes), counted(job, rounded), 2)
    return plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps})})


def test_ranks_have_the_losses_of_one_process_and_go_on_elsewhere(folder: Path) -> None:
    plans = {(case, way): planned(folder, case, way) for case, (*_, own) in CASES.items() for way in (own, "one")}
    after: dict[tuple[str, str], tuple[str, str]] = {}
    for case, first, then in (("adafactor", "fsdp", "pp"), ("rounded muon", "fsdp", "pp"), ("momentum", "pp", "tp")):
        plans[f"{case}, half", first] = planned(folder, case, first, HALF)
        plans[f"{case}, resumed", then] = planned(folder, case, then)
        after[f"{case}, resumed", then] = (f"{case}, half", first)
    ran = {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", after).items()}
    for (key, way), found in ran.items():
        case, _, part = key.partition(", ")
        whole = ran[case, "one"].losses
        wanted = {"": whole, "half": whole[:HALF], "resumed": whole[HALF:]}[part]
        sums = "rounded" in case and (way == "tp" or "tied" in case)
        near = 2e-4 if sums else 2e-5 if "muon" in case else 1e-6  # sums in bfloat16
        assert found.losses == pytest.approx(wanted, rel=near), (key, way)
        assert max(whole) - min(whole) > 1e-3, case


def test_a_step_that_is_not_finite_on_one_rank_leaves_no_trace(tmp_path: Path) -> None:
    """Neither in parameters nor in states, of any optimiser; the next step is applied."""
    text = write_text(tmp_path / "text")
    plans: dict[str, Plan] = {}
    for rule, changes in RULES.items():
        own = {key.removeprefix("optimiser."): tomllib.loads(f"x = {value}")["x"] for key, value in changes.items()}
        own |= {"moments_skip": ["*norm*"]} if "moments" in own else {}
        for kind, low in (("nearest", dict[str, Any]()), ("stochastic", dict[str, Any](LOW_TABLE))):
            optimiser = {**own, "rounding": kind}
            plans[f"{rule}, {kind}"] = small_plan(
                text, optimiser=optimiser, precision=low, run={"on_nonfinite": "skip"}, model=WIDE
            )
    (plan, *_) = plans.values()
    prepare(plan.data, tokens_of(plan), lambda event: None)
    found: list[dict[str, Astray]] = run_ranks(
        with_a_bad_step, (plans, tmp_path / "runs"), world=2, on_event=print, device="cpu"
    )
    for rank in found:
        assert rank.keys() == plans.keys()
        for case, one in rank.items():
            assert one == Astray("the loss is nan", kept=True, goes_on=True), case


def test_a_task_has_no_rate_for_optimisers_whose_updates_are_of_another_size(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = folder / "adapters" / "sft.toml"
    for name in ("sgd", "adafactor"):
        with pytest.raises(UserError, match=r'"optimiser.lr" is missing'):
            load(job, {"optimiser.name": f'"{name}"'})
        assert load(job, {"optimiser.name": f'"{name}"', "optimiser.lr": "0.5"}).optimiser.lr == 0.5
    assert load(job, {"optimiser.name": '"muon"'}).optimiser.lr == load(job).optimiser.lr == 2e-4
    assert main(["train", str(job), "--set", 'optimiser.name="sgd"']) == 2
    assert "optimiser.lr" in capsys.readouterr().err
