"""Pipelines in plans: where a model is cut, what a stage keeps, and plans that say it wrongly."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, token_inputs
from tangram.models.capturing.capture import capture
from tangram.models.capturing.stages import Stages, refuse_unlike_chain
from tangram.models.outlines.costs import costs
from tangram.planner.legality.check_plan import bound_layout, legal
from tangram.planner.local import stage_shares
from tangram.planner.local.estimate import estimate
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.rank import Ranked, predict, rank
from tangram.planner.local.show import rows
from tangram.schema.files import dumps, load, mistakes
from tangram.schema.parallelism import PipelinePlan
from tangram.schema.plan import Plan
from tangram.schema.schedule_table import parse
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
    return next(one for one in four if one.name == name).chosen_plan


def changed(plan: Plan, **tables: Any) -> Plan:
    return Plan.model_validate({**plan.model_dump(), **tables})


def test_every_strategy_inside_of_stages(four: tuple[Ranked, ...]) -> None:
    found = {(one.name, one.mesh, one.micro_batch) for one in four}
    assert found == {
        *(("2 stages x FSDP", "pp=2 dp=2", size) for size in (1, 2)),
        *(("2 stages x DDP", "pp=2 dp=2", size) for size in (1, 2)),
        *(("2 stages x TP", "pp=2 tp=2", size) for size in (1, 2, 4)),
    }
    model = build_on_meta(CONFIG)
    for one in four:
        legal(one.chosen_plan, model)
        assert one.chosen_plan.ranks == 4
        assert one.chosen_plan.micro_steps >= 2
        assert predict(one.chosen_plan, rates(4), CONFIG) == one.estimate


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
    """With two stages each keeps two micro-batches of half of the model, and the last waits for the first's forward."""
    whole = next(
        one for one in rank(job(), 2, rates(2), CONFIG, counted) if one.name == "FSDP" and one.micro_batch == 2
    )
    ours = next(one for one in four if one.name == "2 stages x FSDP" and one.micro_batch == 2)
    assert whole.estimate is not None
    assert ours.estimate is not None
    assert ours.estimate.memory.optimiser < whole.estimate.memory.optimiser
    first, last = (one.work for one in shares_of(counted, taken(four)))
    assert 0.5 <= last < 1
    steps = ours.chosen_plan.micro_steps
    ratio = last + first / steps  # all of its own, and once the forward and the backward of the other
    assert ours.estimate.seconds.products == pytest.approx(whole.estimate.seconds.products * ratio)


def shares_of(counted: Counted, plan: Plan) -> list[stage_shares.Share]:
    costs = counted.costs(plan.data.micro_batch)
    return stage_shares.shares(plan, costs.parameters, costs)


FOUR = (("model.embed_tokens",), ("model.layers.0",), ("model.layers.1",), ("model.norm", "lm_head"))


def with_schedule(four: tuple[Ranked, ...], name: str, pipeline: PipelinePlan | None = None) -> Plan:
    """A plan of two stage ranks and four micro-batches."""
    data = job(micro_batch=1).data.model_dump()
    tables = {"schedule": name, "stages": FOUR} if pipeline is None else pipeline.model_dump()
    return changed(taken(four), pipeline=tables, data=data)


def test_what_stages_keep_is_what_the_formulas_say(counted: Counted, four: tuple[Ranked, ...]) -> None:
    plan, gpipe = (with_schedule(four, name, counted.pipeline(2, name)) for name in ("1F1B", "GPipe"))
    assert plan.micro_steps == 4
    assert [one.kept for one in shares_of(counted, plan)] == [(2,), (1,)]
    assert [one.kept for one in shares_of(counted, gpipe)] == [(4,), (4,)]
    for one in (plan, gpipe):
        found = shares_of(counted, one)
        assert sum(share.work for share in found) == pytest.approx(1)
        names = [p.name for share in found for p in share.parameters]
        assert sorted(names) == sorted(p.name for p in counted.costs(1).parameters)
        for share in found:
            assert share.activations == share.kept[0] * sum(part.kept_bytes for part in share.local.parts)


def test_the_last_stage_has_the_embeddings_that_its_head_is_tied_to() -> None:
    """By the plan, in memory, and in where a checkpoint has them; a schedule that has both on one rank is refused."""
    config = tiny("qwen3", vocab_size=64, tie_word_embeddings=True)
    counted = Counted(job(), config)
    plan = taken(rank(job(), 4, rates(4), config, counted, stages=2))
    assert plan.pipeline is not None
    assert plan.pipeline.stages[-1][-1] == "lm_head"
    assert plan.pipeline.tied == ("model.embed_tokens",)
    word = "model.embed_tokens.weight"
    assert str(bound_layout(plan, word, (64, 32))).endswith("@pp=0,1")
    assert plan.places_of(word) == (0, 1)
    shares = shares_of(counted, plan)
    assert [word in {p.name for p in share.parameters} for share in shares] == [True, True]
    alone = taken(rank(job(), 2, rates(2), config, counted, stages=2), "2 stages")  # nothing else is exchanged but flow
    apart = changed(alone, pipeline={**plan.pipeline.model_dump(), "tied": []})
    costs = counted.costs(alone.data.micro_batch)
    more, less = (estimate(one, costs, costs, rates(2)).seconds.communication for one in (alone, apart))
    assert more > less
    legal(plan, build_on_meta(config))
    with pytest.raises(ValidationError, match=r"puts model.embed_tokens and the head that is tied to it on one rank"):
        changed(
            plan, pipeline={"schedule": "ZBVZeroBubble", "stages": FOUR, "tied": ["model.embed_tokens"]},
            data=job(micro_batch=1).data.model_dump(),
        )  # fmt: skip
    three = {"schedule": "ZBVZeroBubble", "stages": (*FOUR[:2], (*FOUR[2], *FOUR[3])), "tied": ["model.embed_tokens"]}
    with pytest.raises(ValidationError, match=r"3 stages for the 2 ranks of the pipeline axis"):
        changed(plan, pipeline=three)
    with pytest.raises(ValidationError, match=r'"lm_head" is tied and in no stage before the last'):
        changed(plan, pipeline={**plan.pipeline.model_dump(), "tied": ["lm_head"]})


def test_several_stages_of_a_rank_are_one_share(counted: Counted, four: tuple[Ranked, ...]) -> None:
    looped, folded = (shares_of(counted, with_schedule(four, name)) for name in ("LoopedBFS", "ZBVZeroBubble"))
    assert [one.stages for one in looped] == [(0, 2), (1, 3)]
    assert [one.stages for one in folded] == [(0, 3), (1, 2)]
    assert looped[0].kept == (4, 4)
    for found in (looped, folded):
        assert sum(one.work for one in found) == pytest.approx(1)
        assert [any(p.name == "lm_head.weight" for p in one.parameters) for one in found] == [
            3 in one.stages for one in found
        ]
    assert all(one.slots >= 4 for one in folded)


@given(st.lists(st.integers(1, 20).map(float), min_size=1, max_size=7), st.integers(0, 20).map(float), st.data())
def test_no_other_cut_is_better(work: list[float], end: float, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(work)))

    def worst(bounds: tuple[int, ...]) -> float:
        parts = [sum(work[a:b]) for a, b in itertools.pairwise([0, *bounds, len(work)])]
        return max([*parts[:-1], parts[-1] + end])

    every = itertools.combinations(range(1, len(work)), count - 1)
    found = stage_shares._least_bounds(work, end, count)  # pyright: ignore[reportPrivateUsage]
    assert len(found) == count - 1
    assert worst(found) == min(map(worst, every))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"pipeline": None}, "there is axes.pipeline, but no pipeline"),
        (
            {"axes": {"data": ["dp"], "tensor": ["pp"]}, "layouts": {"parameters": {"*": "_/pp ..."}}},
            "there is [pipeline], but no axes.pipeline",
        ),
        ({"pipeline": {"stages": [["model.embed_tokens"]]}}, "1 stages for the 2 ranks of the pipeline axis"),
        (
            {"pipeline": {"schedule": "LoopedBFS", "stages": [["a"], ["b"], ["c"]]}},
            '3 stages for the 2 ranks of the pipeline axis: with the schedule "LoopedBFS" each rank has as many as the '
            "others: give 4",
        ),
        (
            {"pipeline": {"schedule": "DualPipeV", "stages": [["a"], ["b"]]}},
            'with the schedule "DualPipeV" each has two: give 4',
        ),
        ({"pipeline": {"schedule": "table", "stages": [["a"], ["b"]]}}, "and table, the file of it, go together"),
        ({"pipeline": {"table": "x.csv", "stages": [["a"], ["b"]]}}, "and table, the file of it, go together"),
        ({"pipeline": {"stages": [["a"], []]}}, "stage 1 has no modules"),
        ({"pipeline": {"stages": [["a", "b"], ["a"]]}}, '"a" is in two places of the stages'),
        ({"pipeline": {"stages": [["a"], ["a.b"]]}}, '"a.b" is in two places of the stages: also in a'),
        (
            {"pipeline": {"schedule": "zigzag", "stages": [["a"], ["b"]]}},
            '"zigzag" is no schedule: give one of GPipe, 1F1B, Interleaved1F1B',
        ),
        ({"layouts": {"parameters": {"*": "_/dp ... @pp=1"}}}, "who has a parameter is said by [pipeline]"),
    ],
)
def test_plans_that_say_it_wrongly(four: tuple[Ranked, ...], tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as found:
        changed(taken(four), **tables)
    assert said in mistakes(found.value)


def test_numbers_of_micro_batches_that_a_schedule_does_not_take(four: tuple[Ranked, ...]) -> None:
    data = {**taken(four).data.model_dump(), "micro_batch": 4}
    said = r'a step has 1 micro-batches, and the schedule "1F1B" takes 2 or more over 2 ranks: set data.micro_batch = 2'
    with pytest.raises(ValidationError, match=said):
        changed(taken(four), data=data)
    stages = [["a"], ["b"], ["c"], ["d"]]
    data = {**data, "micro_batch": 1, "global_batch": 10}
    said = r'5 micro-batches, and the schedule "Interleaved1F1B" takes 2 rounds .* set data.micro_batch = 2'
    with pytest.raises(ValidationError, match=said):
        changed(taken(four), data=data, pipeline={"schedule": "Interleaved1F1B", "stages": stages})
    said = r"takes 4 or more over 2 ranks: set another data.global_batch"
    with pytest.raises(ValidationError, match=said):
        changed(taken(four), data={**data, "global_batch": 6}, pipeline={"schedule": "DualPipeV", "stages": stages})


THREE = (FOUR[0], FOUR[1], (*FOUR[2], *FOUR[3]))


def with_table(four: tuple[Ranked, ...], folder: Path, table: str, stages: Stages = THREE) -> Path:
    """The file of a plan of two micro-batches with a schedule beside it."""
    (folder / "mine.csv").write_text(table)
    plan = taken(four)
    tables = plan.model_dump(exclude_defaults=True)
    tables["data"]["micro_batch"] = 2
    tables["pipeline"] = {"schedule": "table", "table": "mine.csv", "stages": [list(stage) for stage in stages]}
    (folder / "plan.toml").write_text(tomli_w.dumps({"version": 3, **tables}))
    return folder / "plan.toml"


MINE = "0F0,0F1,2F1,2B1,2F0,2B0,0B1,0B0\n1F0,1F1,1B1,1B0\n"


def test_a_table_is_read_from_beside_the_plan(four: tuple[Ranked, ...], tmp_path: Path) -> None:
    plan = load(with_table(four, tmp_path, MINE))
    assert isinstance(plan, Plan)
    assert plan.rank_of_stage == (0, 1, 0)
    assert plan.stages_at(0) == (0, 2)
    assert (plan.stage_of("lm_head.weight"), plan.places_of("lm_head.weight")[0]) == (2, 0)
    assert str(bound_layout(plan, "lm_head.weight", (64, 32))).endswith("@pp=0")
    assert plan.actions().rows[1] == parse(MINE, "x").rows[1]
    legal(plan, build_on_meta(CONFIG))
    again = tmp_path / "elsewhere.toml"
    again.write_text(dumps(plan))
    assert load(again) == plan


def test_a_plan_says_who_has_which_stage_and_how_long_ranks_wait(four: tuple[Ranked, ...]) -> None:
    said = dict(rows(with_schedule(four, "ZBVZeroBubble")))
    assert said["schedule"] == "ZBVZeroBubble, 4 stages; ranks wait 4% of a step where stages are alike"
    assert [said[f"stage {i}"].split("; ")[1] for i in range(4)] == [f"on rank {rank} of pp" for rank in (0, 1, 1, 0)]


@pytest.mark.parametrize(
    ("table", "stages", "said"),
    [
        (MINE, FOUR, "mine.csv is for 3 stages, but the plan has 4: change one"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0\n", THREE, "mine.csv: 0B0, action 1 of rank 0, waits for 1B0, which comes later"),
        ("0F0,1F0,2F0,2B0,1B0,0B0\n", THREE, "mine.csv is for 1 ranks, but the plan has 2: change one"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", THREE, "mine.csv is for 1 micro-batches, but the plan has 2: change one"),
        ("0F0,0F1,0G0\n", THREE, 'mine.csv: "0G0", slot 2 of rank 0, is no action'),
    ],
)
def test_tables_that_do_not_fit(
    four: tuple[Ranked, ...], tmp_path: Path, table: str, stages: Stages, said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        load(with_table(four, tmp_path, table, stages))


def test_a_table_that_splits_backwards_is_refused_with_recomputing(four: tuple[Ranked, ...], tmp_path: Path) -> None:
    path = with_table(four, tmp_path, MINE.replace("2B1", "2I1,2W1"))
    load(path)
    with pytest.raises(UserError, match=r"run\.recompute: the schedule does backwards in two parts"):
        load(path, {"run.recompute": '["model.layers.*"]'})


@pytest.mark.parametrize(
    ("run", "said"),
    [({"compile": True}, "those of compiled blocks are not"), ({"recompute": ["*"]}, "for each of its weights")],
)
def test_what_cannot_be_split(four: tuple[Ranked, ...], run: dict[str, Any], said: str) -> None:
    plan = taken(four)
    pipeline = {"schedule": "ZBVZeroBubble", "stages": [["a"], ["b"], ["c"], ["d"]]}
    tables = {"run": {**plan.run.model_dump(), **run}, "data": job(micro_batch=1).data.model_dump()}
    changed(plan, **tables)
    with pytest.raises(ValidationError, match=f"backwards in two parts, .*{said}.*LoopedBFS"):
        changed(plan, **tables, pipeline=pipeline)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.q_prog.weight", "`*.q_prog.weight: a/tp b` names no tensor of the model"),
        ("logits", "layouts.marks names logits, a result of the model: in a pipeline mark the module that gives it"),
    ],
)
def test_marks_that_no_stage_would_see(four: tuple[Ranked, ...], pattern: str, said: str) -> None:
    plan = taken(four, "2 stages x TP")
    layouts = {**plan.layouts.model_dump(), "marks": {pattern: "a/tp ..." if pattern == "logits" else "a/tp b"}}
    with pytest.raises(UserError, match=re.escape(said)):
        legal(changed(plan, layouts=layouts), build_on_meta(CONFIG))


def test_more_stages_than_blocks(counted: Counted) -> None:
    (one, *_) = rank(job(), 8, rates(8), CONFIG, counted, stages=8)
    assert one.why_not == "the model has 2 layers, too few for 8 stages"


def test_plans_of_a_schedule_with_several_stages_for_a_rank(counted: Counted) -> None:
    found = rank(job(global_batch=10), 2, rates(2), CONFIG, counted, stages=2, schedule="GPipe")
    assert [one.name for one in found if one.plan] == ["2 stages by GPipe"] * 4
    (one, *_) = rank(job(global_batch=10), 4, rates(4), CONFIG, counted, stages=4, schedule="Interleaved1F1B")
    assert (one.mesh, one.why_not) == ("pp=2 dp=2", "the model has 2 layers, too few for 4 stages")
    deeper = tiny("qwen3", vocab_size=64, num_hidden_layers=4)
    for schedule, sizes in (("Interleaved1F1B", {5}), ("ZBVZeroBubble", {1, 2, 5, 10})):
        found = rank(job(global_batch=10), 2, rates(2), deeper, Counted(job(), deeper), stages=4, schedule=schedule)
        assert {one.micro_batch for one in found if one.plan} >= sizes
        for one in found:
            assert one.chosen_plan.pipeline is not None
            assert (one.mesh, one.chosen_plan.pipeline.schedule) == ("pp=2 dp=1", schedule)
            assert [len(one.chosen_plan.stages_at(place)) for place in (0, 1)] == [2, 2]


def test_schedules_that_plans_cannot_have(counted: Counted) -> None:
    with pytest.raises(UserError, match=r'there is no schedule "2F2B": give one of GPipe, 1F1B,'):
        rank(job(), 2, rates(2), CONFIG, counted, stages=2, schedule="2F2B")
    with pytest.raises(UserError, match=r'3 stages by the schedule "DualPipeV", of which .*: give 4'):
        rank(job(), 2, rates(2), CONFIG, counted, stages=3, schedule="DualPipeV")
    with pytest.raises(UserError, match=r'1 stages by the schedule "GPipe"'):
        rank(job(), 2, rates(2), CONFIG, counted, schedule="GPipe")


def test_stages_that_processes_cannot_be_dealt_to(counted: Counted) -> None:
    with pytest.raises(UserError, match="4 processes are no multiple of 3 stages: give a multiple"):
        rank(job(), 4, rates(4), CONFIG, counted, stages=3)


def test_lists_of_modules_are_cut_in_the_order_in_which_they_run() -> None:
    """Gemma 3n's projections lie behind its layers and run before them: it is no chain, and that is what is said."""
    config = AutoConfig.for_model(
        "gemma3n_text", vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_kv_shared_layers=2, layer_types=2 * ["sliding_attention", "full_attention"], laurel_rank=4,
        activation_sparsity_pattern=4 * [0.0],
    )  # fmt: skip
    model = build_on_meta(config)
    graph = capture(model, token_inputs(1, 8))
    stages = stage_shares.cut_into_stages(graph, costs(model, 8), (name for name, _ in model.named_parameters()), 2)
    runs = {run.module: run.first for run in reversed(graph.runs)}
    order = [runs[name] for stage in stages for name in stage]
    assert order == sorted(order)
    with pytest.raises(UserError, match=r"model\.layers\.2\.self_attn .* takes a tensor that is made in stage 0"):
        refuse_unlike_chain(graph, stages)
