"""Axes that do not divide a model, trained from a plan: losses, gradients, norms and values of one process, kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tangram.checkpoint.inspect.verify import verify
from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.planner.legality.check_plan import legal
from tangram.planner.local.derived_layouts import TensorLayouts
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.peak_memory import largest_parts
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.training.data import BYTES, prepare
from tangram.training.run.launch import run_ranks
from tangram.training.run.run_folder import CHECKPOINTS
from tangram.training.state.build_model import source_of
from tangram.training.trials.dry_run import dry_run
from tests.training.oracle.cases import Case
from tests.training.oracle.compare import findings
from tests.training.oracle.plain import plain_run
from tests.training.oracle.warm import once
from tests.training.small import write_text
from tests.training.uneven_plans import (
    CUT,
    GPT2_LAYOUTS,
    Done,
    Work,
    case,
    llama,
    run_all,
    write_models,
)

FSDP = {"*": "_/dp ..."}
BETWEEN = {"run": {"evaluate_every": 2}}


def _two(text: Path) -> Work:
    cut = case(text, "llama", "tp=2", llama(), **BETWEEN)
    clipped = case(text, "llama", "tp=2", llama(), optimiser={"clip_norm": 0.5})
    dropped = case(text, "gpt2", "tp=2", GPT2_LAYOUTS, **BETWEEN)
    wrong = {
        "a row off": ("a row off", cut),
        "blocks a row off": ("a row off", dropped),
        "counted once": ("counted once", clipped),
    }
    legs = (cut, case(text, "llama", "dp=2", FSDP), cut)
    return Work({"cut": cut, "clipped": clipped, "dropped": dropped}, legs, wrong, text.parent)


def _four(text: Path) -> Work:
    inside = case(text, "llama", "dp=2 tp=2", llama("dp"), **BETWEEN)
    return Work({"inside fsdp": inside}, (inside, case(text, "llama", "tp=4", FOUR)), {}, text.parent)


FOUR = {**llama(), **dict.fromkeys(("*.[qkvo]_proj.weight", "*.[qkv]_proj.bias"), "...")}
"""Attention whole, for three heads are fewer than four ranks."""


def _prepared(folder: Path) -> Path:
    text = write_text(folder / "text")
    write_models(folder)
    prepare(case(text, "llama", "tp=2", llama()).plan.data, BYTES, lambda event: None)
    return text


def _run(work: Work, world: int) -> tuple[Work, list[Done]]:
    return work, run_ranks(run_all, work, world=world, on_event=print, device="cpu")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, list[Done]]:
    return once(tmp_path_factory, "uneven-plans", lambda folder: _run(_two(_prepared(folder)), 2))


def _is_right(case: Case, done: list[Done], name: str) -> None:
    right = plain_run(case)
    for own in done:
        assert findings(own.traces[name], right) == []
    assert done[0].traces[name].norms == pytest.approx(right.norms, rel=1e-5)


def _goes_on(work: Work, done: list[Done]) -> None:
    """Through other layouts a run is that of one process, and what it saved is whole, and is what that has."""
    steps = CUT * len(work.legs)
    right = plain_run(Case("", work.legs[0].plan, until=steps))
    for own in done:
        assert [loss for leg in own.legs for loss in leg.losses] == pytest.approx(right.losses, rel=1e-5)
    for place in range(len(work.legs)):
        assert not verify(work.folder / f"leg-{place}" / f"step-{CUT * (place + 1):08}").findings


@pytest.mark.parametrize("name", ["cut", "clipped", "dropped"])
def test_it_is_the_run_of_one_process(two: tuple[Work, list[Done]], name: str) -> None:
    _is_right(two[0].cases[name], two[1], name)


def test_it_goes_on_at_other_layouts(two: tuple[Work, list[Done]]) -> None:
    _goes_on(*two)


@pytest.mark.parametrize("name", ["a row off", "blocks a row off", "counted once"])
def test_planted_mistakes_are_seen(two: tuple[Work, list[Done]], name: str) -> None:
    work, done = two
    assert findings(done[0].wrong[name], plain_run(work.wrong[name][1])) != []


@pytest.mark.slow
def test_on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    work, done = once(tmp_path_factory, "uneven-plans-four", lambda folder: _run(_four(_prepared(folder)), 4))
    _is_right(work.cases["inside fsdp"], done, "inside fsdp")
    _goes_on(work, done)


# ------------------------------------------------------------ what is refused, before anything starts


@pytest.mark.parametrize(
    "layouts",
    [
        {"*.[qkv]_proj.weight": "out/tp in"},  # rows, and no heads
        {"*.q_proj.weight": "(heads/tp 8) h"},  # heads whose keys are another rank's
        {"*.k_proj.weight": "... h"},  # all keys, and a part of the values
    ],
)
def test_parts_of_heads_are_refused(tmp_path: Path, layouts: dict[str, str]) -> None:
    text = write_text(tmp_path / "text")
    write_models(tmp_path)
    plan = case(text, "llama", "tp=2", {**layouts, **{k: v for k, v in llama().items() if k not in layouts}}).plan
    with pytest.raises(UserError, match=r"tp=2 and 3 key-value heads: neither divides .*: cut whole heads"):
        legal(plan, build_on_meta(source_of(plan, BYTES).config))


# ------------------------------------------------------------ what the planner makes of such a model


def _job(folder: Path) -> Plan:
    text = write_text(folder / "text")
    write_models(folder)
    plan = case(text, "llama", "tp=2", llama()).plan
    return plan.model_copy(update={"data": plan.data.model_copy(update={"tokenizer": "bytes"})})


def test_plans_are_laid_out_and_counted_by_the_rank_that_has_most(tmp_path: Path) -> None:
    plan = _job(tmp_path)
    counted = Counted(plan, source_of(plan, BYTES).config)
    found = counted.tensor(("tp", 2), "dp")
    assert isinstance(found, TensorLayouts)
    assert found.vocabulary
    lies = {name.rsplit(".", 2)[-2]: text for name, text in found.parameters.items() if name.endswith("weight")}
    assert lies["q_proj"] == "(_=3/tp _=16)/dp _"
    assert lies["k_proj"] == lies["v_proj"] == "(_=3/tp _=8)/dp _"
    assert lies["o_proj"] == "_/dp (_=3/tp _=16)"
    assert lies["up_proj"] == lies["embed_tokens"] == lies["lm_head"] == "_/tp/dp _"
    own = plan_of(Strategy("tensor", "tp=2", (), (TENSOR,)), plan, counted)
    # Of 257 tokens 129, of 45 numbers inside 23, of three heads of keys two, with two of queries each.
    attention = (32 * 24 + 32) + 2 * (16 * 24 + 16) + (24 * 32 + 24)
    numbers = 2 * 129 * 24 + 3 * (attention + 3 * 23 * 24 + 2 * 24) + 24
    assert sum(largest_parts(own, counted.costs(1).parameters).values()) == numbers
    assert dry_run(own)[0].memory["parameters"] == 4 * (numbers + 2 * 4)  # and two buffers of rotary frequencies
    local, whole = counted.local_costs(counted.tensor(("tp", 2), None), ("tp", 2), 1), counted.costs(1)
    assert 0.58 < local.forward.flops / whole.forward.flops < 2 / 3  # two of three heads, and half of all else


def test_listed_sizes_are_counted_where_they_are_largest(tmp_path: Path) -> None:
    plan = _job(tmp_path)
    lies = {**llama(), "model.embed_tokens.weight": "v/tp:[100 157] h"}
    plan = plan.model_copy(update={"layouts": plan.layouts.model_copy(update={"parameters": lies})})
    held = largest_parts(plan, Counted(plan, source_of(plan, BYTES).config).costs(1).parameters)
    assert held["model.embed_tokens.weight"] == 157 * 24
    assert dry_run(plan)[0].rank == 1


@pytest.mark.slow
def test_a_whole_run_of_the_command_is_trained_and_exported(tmp_path: Path) -> None:
    """As a user does: plan by the planner, trained on two ranks, saved, exported, the export proved; then resumed."""
    job = _job(tmp_path)
    counted = Counted(job, source_of(job, BYTES).config)
    plan = plan_of(Strategy("tensor", "tp=2", (), (TENSOR,)), job, counted)
    plan = plan.model_copy(update={"run": plan.run.model_copy(update={"steps": 3, "evaluate_every": 2})})
    file, folder = tmp_path / "plan.toml", tmp_path / "run"
    file.write_text(dumps(plan))
    assert main(["train", str(file), "--out", str(folder)]) == 0
    saved = folder / CHECKPOINTS / "step-00000003"
    assert not verify(saved).findings
    loaded = AutoModelForCausalLM.from_pretrained(folder / "export")
    assert loaded.get_input_embeddings().weight.shape == (257, 24)
