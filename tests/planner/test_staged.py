"""Pipelines in plans: where a model is cut, what a stage keeps, and plans that say it wrongly."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tangram.errors import UserError
from tangram.models.build import build_on_meta
from tangram.planner import staged
from tangram.planner.legal import bound_layout, legal
from tangram.planner.plan import Plan
from tangram.planner.rank import Counted, Ranked, predict, rank
from tangram.planner.read import mistakes
from tests.models.tiny import tiny
from tests.planner.machine import rates
from tests.planner.test_rank import job

CONFIG = tiny("qwen3", vocab_size=64)


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted(job(), CONFIG)


@pytest.fixture(scope="module")
def four(counted: Counted) -> tuple[Ranked, ...]:
    return rank(job(), 4, rates(4), CONFIG, counted, stages=2)


def taken(four: tuple[Ranked, ...], name: str = "2 stages x FSDP") -> Plan:
    return next(one for one in four if one.name == name).taken


def changed(plan: Plan, **tables: Any) -> Plan:
    return Plan.model_validate({**plan.model_dump(), **tables})


def test_every_strategy_inside_of_stages(four: tuple[Ranked, ...]) -> None:
    found = {(one.name, one.mesh, one.micro_batch) for one in four}
    assert found == {
        *(("2 stages x FSDP", "pp=2 dp=2", size) for size in (1, 2)),
        *(("2 stages x copies", "pp=2 dp=2", size) for size in (1, 2)),
        *(("2 stages x tensor", "pp=2 tp=2", size) for size in (1, 2, 4)),
    }
    model = build_on_meta(CONFIG)
    for one in four:
        legal(one.taken, model)
        assert one.taken.ranks == 4
        assert one.taken.micro_steps >= 2
        assert predict(one.taken, rates(4), CONFIG) == one.estimate


def test_each_parameter_is_on_the_ranks_of_its_stage(four: tuple[Ranked, ...]) -> None:
    plan = taken(four)
    assert plan.pipeline is not None
    assert plan.pipeline.stages[0][:2] == ("model.embed_tokens", "model.layers.0")
    assert plan.pipeline.stages[1][-2:] == ("model.norm", "lm_head")
    assert str(bound_layout(plan, "lm_head.weight", (64, 32))).endswith("@pp=1")
    assert plan.stage_of("model.layers.0.mlp.gate_proj.weight") == 0
    with pytest.raises(UserError, match=r"other.weight is in no stage of the pipeline"):
        plan.stage_of("other.weight")


def test_a_stage_needs_less_memory_and_waits(counted: Counted, four: tuple[Ranked, ...]) -> None:
    """With two stages each keeps two micro-batches of half of the model, and a step has one slot more."""
    whole = next(
        one for one in rank(job(), 2, rates(2), CONFIG, counted) if one.name == "FSDP" and one.micro_batch == 2
    )
    ours = next(one for one in four if one.name == "2 stages x FSDP" and one.micro_batch == 2)
    assert whole.estimate is not None
    assert ours.estimate is not None
    assert ours.estimate.memory.optimiser < whole.estimate.memory.optimiser
    share = max(one.work for one in shares_of(counted, taken(four)))
    assert 0.5 <= share < 1
    steps = ours.taken.micro_steps
    ratio = share * (steps + 1) / steps
    assert ours.estimate.seconds.products == pytest.approx(whole.estimate.seconds.products * ratio)


def shares_of(counted: Counted, plan: Plan) -> list[staged.Share]:
    costs = counted.costs(1, False, plan.data.micro_batch)
    return staged.shares(plan, costs.parameters, costs)


def test_what_stages_keep(counted: Counted, four: tuple[Ranked, ...]) -> None:
    plan = changed(taken(four), data={**job(micro_batch=1).data.model_dump()})
    assert [one.kept for one in shares_of(counted, plan)] == [2, 1]
    assert plan.pipeline is not None
    gpipe = changed(plan, pipeline={"schedule": "GPipe", "stages": plan.pipeline.stages})
    assert [one.kept for one in shares_of(counted, gpipe)] == [plan.micro_steps] * 2
    assert sum(one.work for one in shares_of(counted, plan)) == pytest.approx(1)
    names = [p.name for one in shares_of(counted, plan) for p in one.parameters]
    assert sorted(names) == sorted(p.name for p in counted.costs(1, False, 1).parameters)


@given(st.lists(st.integers(1, 20).map(float), min_size=1, max_size=7), st.integers(0, 20).map(float), st.data())
def test_no_other_cut_is_better(work: list[float], end: float, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(work)))

    def worst(bounds: tuple[int, ...]) -> float:
        parts = [sum(work[a:b]) for a, b in itertools.pairwise([0, *bounds, len(work)])]
        return max([*parts[:-1], parts[-1] + end])

    every = itertools.combinations(range(1, len(work)), count - 1)
    found = staged._least_bounds(work, end, count)  # pyright: ignore[reportPrivateUsage]
    assert len(found) == count - 1
    assert worst(found) == min(map(worst, every))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"pipeline": None}, "there is axes.pipeline, but no pipeline"),
        ({"axes": {"data": ["dp"], "tensor": ["pp"]}}, "there is [pipeline], but no axes.pipeline"),
        ({"pipeline": {"stages": [["model.embed_tokens"]]}}, "1 stages for the 2 ranks of the pipeline axis"),
        ({"pipeline": {"stages": [["a"], []]}}, "stage 1 has no modules"),
        ({"pipeline": {"stages": [["a", "b"], ["a"]]}}, '"a" is in two places of the stages'),
        ({"pipeline": {"stages": [["a"], ["a.b"]]}}, '"a.b" is in two places of the stages: also in a'),
        ({"pipeline": {"schedule": "zigzag", "stages": [["a"], ["b"]]}}, "'GPipe' or '1F1B'"),
        ({"layouts": {"parameters": {"*": "_/dp ... @pp=1"}}}, "who has a parameter is said by [pipeline]"),
    ],
)
def test_plans_that_say_it_wrongly(four: tuple[Ranked, ...], tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as found:
        changed(taken(four), **tables)
    assert said in mistakes(found.value)


def test_fewer_micro_batches_than_stages(four: tuple[Ranked, ...]) -> None:
    data = {**taken(four).data.model_dump(), "micro_batch": 4}
    with pytest.raises(ValidationError, match=r"1 micro-batches for 2 stages: lower data.micro_batch"):
        changed(taken(four), data=data)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.q_prog.weight", "`*.q_prog.weight: a/tp b` names no tensor of the model"),
        ("logits", "layouts.marks names logits, a result of the model: in a pipeline mark the module that gives it"),
    ],
)
def test_marks_that_no_stage_would_see(four: tuple[Ranked, ...], pattern: str, said: str) -> None:
    plan = taken(four, "2 stages x tensor")
    layouts = {**plan.layouts.model_dump(), "marks": {pattern: "a ..." if pattern == "logits" else "a/tp b"}}
    with pytest.raises(UserError, match=re.escape(said)):
        legal(changed(plan, layouts=layouts), build_on_meta(CONFIG))


def test_more_stages_than_blocks(counted: Counted) -> None:
    (one, *_) = rank(job(), 8, rates(8), CONFIG, counted, stages=8)
    assert one.why_not == "the model has 2 blocks, too few for 8 stages"


def test_stages_that_processes_cannot_be_dealt_to(counted: Counted) -> None:
    with pytest.raises(UserError, match="4 processes cannot be dealt to 3 stages: give a divisor"):
        rank(job(), 4, rates(4), CONFIG, counted, stages=3)
