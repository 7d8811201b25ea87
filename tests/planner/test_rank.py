"""The plans for a job: all of them, legal each, sorted, the same every time; and the independent check turns red."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.planner.legality.check_plan import legal
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.rank import FILLED, Ranked, predict, rank
from tangram.planner.local.ranking_table import Ranking
from tangram.schema.job import Job
from tangram.schema.parallelism import LayoutsPlan
from tangram.schema.plan import Plan
from tests.models.tiny import FIELDS, tiny
from tests.planner.machine import rates


def job(**data: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"preset": "qwen3-1m"},
            "data": {"sources": [{"path": "stdlib"}], "sequence": 16, "global_batch": 8, **data},
            "optimiser": {"lr": 1e-3},
            "run": {"steps": 10},
        }
    )


CONFIG: PreTrainedConfig = tiny("qwen3", vocab_size=64)


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted(job(), CONFIG)


@pytest.fixture(scope="module")
def four(counted: Counted) -> tuple[Ranked, ...]:
    return rank(job(), 4, rates(4), CONFIG, counted)


def test_the_whole_space(four: tuple[Ranked, ...]) -> None:
    found = {(one.name, one.mesh, one.micro_batch) for one in four}
    assert found == {
        *(("FSDP", "dp=4", size) for size in (1, 2)),
        *(("DDP", "dp=4", size) for size in (1, 2)),
        *(("HSDP", "dp=2 fsdp=2", size) for size in (1, 2)),
        *(("FSDP x TP", "dp=2 tp=2", size) for size in (1, 2, 4)),
        ("TP", "tp=4", 0),
    }
    refused = [one for one in four if not one.fits]
    assert [one.why_not for one in refused] == ["the 2 key-value heads (num_key_value_heads) do not divide by tp=4"]
    assert four[-1] is refused[0]


def test_sorted_and_the_same_every_time(four: tuple[Ranked, ...]) -> None:
    speeds = [one.estimate.tokens_per_second for one in four if one.estimate]
    assert speeds == sorted(speeds, reverse=True)
    assert rank(job(), 4, rates(4), CONFIG) == four


def test_every_plan_is_of_the_job_and_legal(four: tuple[Ranked, ...]) -> None:
    model = build_on_meta(CONFIG)
    for one in four:
        if one.plan is not None:
            legal(one.plan, model)
            assert one.plan.ranks == 4
            assert one.plan.data.micro_batch == one.micro_batch
            assert {**one.plan.model_dump()}.items() >= {**job(micro_batch=one.micro_batch).model_dump()}.items()


def test_a_plan_that_is_ranked_is_predicted_alike(four: tuple[Ranked, ...]) -> None:
    for name in ("HSDP", "FSDP x TP"):
        one = next(one for one in four if one.name == name)
        assert predict(one.chosen_plan, rates(4), CONFIG) == one.estimate


def test_tensor_parallelism_cuts_parameters_activations_and_products(counted: Counted) -> None:
    found = {one.name: one for one in rank(job(global_batch=2), 2, rates(2), CONFIG, counted) if one.micro_batch == 1}
    tensor, copies = found["TP"].estimate, found["DDP"].estimate
    assert tensor
    assert copies
    assert tensor.memory.parameters < 0.6 * copies.memory.parameters
    assert tensor.memory.activations < copies.memory.activations
    assert tensor.seconds.products == pytest.approx(copies.seconds.products, rel=0.02)  # half a sample each


def test_one_process(counted: Counted) -> None:
    found = rank(job(), 1, rates(1), CONFIG, counted)
    assert {(one.name, one.mesh) for one in found} == {("one process", "dp=1")}
    assert sorted(one.micro_batch for one in found) == [1, 2, 4, 8]
    assert all(one.fits for one in found)


def test_what_does_not_fit_says_so(counted: Counted) -> None:
    machine = rates(2, memory=400e6)
    found = rank(job(global_batch=512), 2, machine, CONFIG, counted)
    tight = [one for one in found if one.estimate and not one.fits]
    assert tight
    assert all("MB a rank, and there are 360.0 MB" in one.why_not for one in tight)
    assert all(one.estimate.memory.total <= FILLED * 400e6 for one in found if one.fits and one.estimate)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)


def test_a_batch_smaller_than_the_ranks(counted: Counted) -> None:
    found = rank(job(global_batch=2), 4, rates(4), CONFIG, counted)
    refused = {one.name: one.why_not for one in found if not one.fits}
    assert refused["FSDP"] == "data.global_batch: 2 samples cannot be cut over the 4 ranks of the data axes"
    assert {one.name for one in found if one.fits} == {"FSDP x TP"}


def test_a_share_that_does_not_divide(counted: Counted) -> None:
    found = rank(job(global_batch=7), 2, rates(2), CONFIG, counted)
    assert {one.micro_batch for one in found if one.name == "FSDP"} == {1, 2, 4}
    assert all(one.plan.micro_steps * one.micro_batch * one.plan.data_ranks >= 7 for one in found if one.plan)


def test_a_huge_batch_is_planned_at_once(counted: Counted) -> None:
    found = rank(job(global_batch=10**12), 1, rates(1), CONFIG, counted)
    assert len(found) == 13 * 13
    assert not all(one.fits for one in found)


def test_bad_numbers_of_processes() -> None:
    for processes in (0, -1, 65):
        with pytest.raises(UserError, match="cannot be planned for"):
            rank(job(), processes, rates(1), CONFIG)


def _tensor_plan(four: tuple[Ranked, ...]) -> Plan:
    return next(one.plan for one in four if one.name == "FSDP x TP" and one.plan)


def test_a_tensor_plan_is_derived_from_marks(four: tuple[Ranked, ...]) -> None:
    lies = _tensor_plan(four).layouts
    assert lies.marks["model.layers.*"] == "b s/tp h"
    assert lies.parameters == {
        "model.embed_tokens.weight": "_/tp/dp _",
        "lm_head.weight": "_/tp/dp _",
        "model.layers.*.self_attn.q_proj.weight": "_/tp/dp _",
        "model.layers.*.self_attn.k_proj.weight": "_/tp/dp _",
        "model.layers.*.self_attn.v_proj.weight": "_/tp/dp _",
        "model.layers.*.self_attn.o_proj.weight": "_/dp _/tp",
        "model.layers.*.mlp.gate_proj.weight": "_/tp/dp _",
        "model.layers.*.mlp.up_proj.weight": "_/tp/dp _",
        "model.layers.*.mlp.down_proj.weight": "_/dp _/tp",
        "*": "_/dp ...",
    }


def test_a_models_own_plan_is_read_as_marks() -> None:
    config = AutoConfig.for_model("qwen2", **{**FIELDS, "vocab_size": 64})
    found = [one.plan for one in rank(job(), 2, rates(2), config) if one.name == "TP" and one.plan]
    lies = found[0].layouts
    assert lies.marks["model.layers.*.mlp.down_proj.weight"] == "_ _/tp"
    assert lies.parameters["model.layers.*.self_attn.k_proj.bias"] == "_/tp"  # of which the published plan says nothing


def test_a_vocabulary_of_odd_size_is_cut() -> None:
    found = [one.plan for one in rank(job(), 2, rates(2), tiny("qwen3", vocab_size=65)) if one.name == "TP"]
    assert found[0] is not None
    assert "embed_tokens" in " ".join((*found[0].layouts.marks, *found[0].layouts.parameters))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parameters": {"*": "a b c"}}, "does not fit model.embed_tokens.weight"),
        ({"parameters": {"*.q_proj.weight": "..."}}, "no rule in \\[layouts.parameters\\] matches"),
        (
            {"parameters": {"*.norm.weight": "(a/tp a5)", "*": "_/dp ..."}, "sizes": {"a5": 5}},
            "does not fit model.norm",
        ),
    ],
)
def test_the_check_turns_red(change: dict[str, Any], reason: str, four: tuple[Ranked, ...]) -> None:
    plan = _tensor_plan(four)
    model = build_on_meta(CONFIG)
    legal(plan, model)
    broken = plan.model_copy(update={"layouts": LayoutsPlan(**{**plan.layouts.model_dump(), **change})})
    with pytest.raises(UserError, match=reason):
        legal(broken, model)


def test_a_plan_without_marks_moves_what_follows_from_its_parameters(four: tuple[Ranked, ...]) -> None:
    """Their layouts are marks, too; only what marks say beyond them is lost: here what is cut along the sequence."""
    plan = _tensor_plan(four)
    bare = plan.model_copy(update={"layouts": LayoutsPlan(parameters=plan.layouts.parameters)})
    legal(bare, build_on_meta(CONFIG))
    marked, alone = (predict(one, rates(4), CONFIG).seconds for one in (plan, bare))
    assert alone.products == marked.products
    whole = predict(bare.model_copy(update={"mesh": "dp=2 tp=1"}), rates(2), CONFIG).seconds
    assert whole.communication < alone.communication < 2 * marked.communication


def test_other_things_that_are_not_legal(four: tuple[Ranked, ...]) -> None:
    model = build_on_meta(CONFIG)
    hybrid = next(one.plan for one in four if one.name == "HSDP" and one.plan)
    for layout, reason in (
        ("_/fsdp _/dp ...", "cut over the data axes dp, fsdp"),
        ("... sum:dp", "leaves a sum or a rank out"),
        ("... @dp=0", "leaves a sum or a rank out"),
    ):
        broken = hybrid.model_copy(update={"layouts": LayoutsPlan(parameters={"*norm*": "...", "*": layout})})
        with pytest.raises(UserError, match=reason):
            legal(broken, model)
    with pytest.raises(UserError, match="plans of up to 1,000,000 are checked"):
        legal(hybrid.model_copy(update={"mesh": "dp=999999 fsdp=2"}), model)


def test_meshes_of_thousands_of_ranks_are_checked(four: tuple[Ranked, ...]) -> None:
    model = build_on_meta(CONFIG)
    hybrid = next(one.plan for one in four if one.name == "HSDP" and one.plan)
    large = hybrid.model_copy(update={"mesh": "dp=8192 fsdp=64"})
    legal(large, model)
    twice = LayoutsPlan(parameters={"*norm*": "...", "*": "(_/fsdp + 2) ..."})
    with pytest.raises(UserError, match="does not give every element to exactly one place"):
        legal(large.model_copy(update={"layouts": twice}), model)


def test_tables_and_json(four: tuple[Ranked, ...], counted: Counted) -> None:
    alone = rank(job(), 1, rates(1), CONFIG, counted)[0]
    ranking = Ranking(4, four, alone, rates(4))
    (title, headers, rows), (_, step_headers, steps), (_, memory_headers, memory), (_, _, refused) = ranking.tables()
    assert title == "Plans for 4 processes, predicted"
    assert all(len(row) == len(headers) for row in rows)
    assert all(len(row) == len(step_headers) for row in steps)
    assert all(len(row) == len(memory_headers) for row in memory)
    assert [row[0] for row in rows] == [*map(str, range(1, len(ranking.fitting) + 1)), "-"]
    assert rows[-1][1] == "one process"
    assert refused == [("TP", "tp=4", "", "the 2 key-value heads (num_key_value_heads) do not divide by tp=4")]
    told: Any = ranking.as_json()
    assert len(told["plans"]) == len(four)
    assert told["plans"][0]["predicted"]["step_s"] > 0
    assert told["plans"][-1]["predicted"] is None
    nothing = Ranking(4, (replace(four[-1]),), None, rates(4))
    assert [title for title, _, _ in nothing.tables()] == ["Not possible"]
    with pytest.raises(UserError, match="TP is no plan here"):
        assert four[-1].chosen_plan
