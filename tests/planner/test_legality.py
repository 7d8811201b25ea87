"""One engine of legality: what its tables say of a configuration is what making, judging and reading a plan says."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.models.building.build import read_source
from tangram.models.outlines.outline import Outline
from tangram.models.outlines.outlined import outline_of
from tangram.planner.exports.targets import EXPORTS
from tangram.planner.legality.check_plan import laid
from tangram.planner.legality.engine import HEADS as OF_HEADS
from tangram.planner.legality.engine import LAID, RULES, At, Facts, Rule, facts_of, holding, refusals
from tangram.planner.legality.exclusions import NO_DATA, NO_RING
from tangram.planner.legality.trainer_support import RULES as TRAINER
from tangram.planner.legality.trainer_support import SAID, UNSAID
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.plan_from_cluster import made
from tangram.planner.search.strategy import Choice, mesh_of
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tests.training.small import small_tables

ROOT = Path(__file__).parents[2]
TABLES: dict[str, tuple[Rule, ...]] = {
    "`rules.RULES`": RULES,
    "`rules.LAID`": LAID,
    "`trainer.SAID`": SAID,
    "`trainer.UNSAID`": UNSAID,
}
HEADS = ((4, 2), (6, 3), (4, 1), (2, 2))
LENGTHS = (24, 32)


@cache
def model(heads: int, kv_heads: int, length: int) -> tuple[Job, Outline, Counted]:
    tables = small_tables(Path("/nowhere"), data={"global_batch": 16, "sequence": length})
    own = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 4}
    change = {**tables["model"]["change"], **own}
    tables["model"]["change"] = change
    job = Job.model_validate({key: value for key, value in tables.items() if key not in ("mesh", "axes", "layouts")})
    config = read_source("qwen3-1m", None, {**change, "vocab_size": 258}).config
    return job, outline_of(config, "small"), Counted(job, config)


def numbers(draw: st.DrawFn, length: int) -> Grid:
    def size(*most: int) -> int:
        return draw(st.sampled_from(most))

    tensor, context, data = size(1, 2, 3, 4), size(1, 2, 3, 4), size(1, 2, 4)
    pipeline = size(1, 2, 4)
    schedule = size(*range(len(SCHEDULES))) if pipeline > 1 else 0
    virtual = {1: 1, 2: 2}.get(SCHEDULES[schedule].chunks, size(1, 2))
    return grid(
        batch=16, sequence=length, tensor=tensor, context=context, ulysses=size(1, context), data=data,
        pipeline=pipeline, schedule=schedule, virtual=virtual, micro=size(1, 2, 3, 4, 8),
        zero=size(0, 1) if data > 1 else 0, shard=data, expert_tensor=tensor,
        sequence_parallel=float(tensor > 1 and length % (tensor * context) == 0),
    )  # fmt: skip


@st.composite
def drawn(draw: st.DrawFn) -> tuple[tuple[int, int], int, Grid]:
    heads, length = draw(st.sampled_from(HEADS)), draw(st.sampled_from(LENGTHS))
    return heads, length, numbers(draw, length)


def as_choice(g: Grid) -> Choice:
    """As far as a plan is made of it, with no prediction."""
    at = {name: float(values[0]) for name, values in g.columns().items()}
    p, d, c, u, t = (int(at[name]) for name in ("pipeline", "data", "context", "ulysses", "tensor"))
    known: dict[str, Any] = {
        "mesh": mesh_of(p, d, c, u, t), "micro": int(at["micro"]), "virtual": int(at["virtual"]),
        "schedule": SCHEDULES[int(at["schedule"])].name if p > 1 else "", "zero": int(at["zero"]), "again": "none",
        "micros": int(g.micros[0]), "at": at,
    }  # fmt: skip
    one = object.__new__(Choice)
    for name, value in known.items():
        object.__setattr__(one, name, value)
    return one


def made_or_why(g: Grid, job: Job, counted: Counted) -> Plan | str:
    try:
        return made(as_choice(g), job, counted)
    except UserError as error:
        return str(error)


@given(drawn())
@settings(deadline=None, max_examples=50)
def test_the_tables_say_what_making_and_judging_a_plan_says(one: tuple[tuple[int, int], int, Grid]) -> None:
    agree(one)


def test_the_tables_say_so_of_heads_that_ranks_do_not_divide() -> None:
    for (heads, kv_heads), ranks in product(HEADS, (2, 3, 4)):
        agree(((heads, kv_heads), 24, grid(batch=16, sequence=24, tensor=ranks, expert_tensor=ranks)))


@pytest.mark.slow
@given(drawn())
@settings(deadline=None, max_examples=1500)
def test_the_tables_say_so_of_many(one: tuple[tuple[int, int], int, Grid]) -> None:
    agree(one)


def agree(one: tuple[tuple[int, int], int, Grid]) -> None:
    """Both ways: what all tables allow becomes a plan, and what the rules of all plans refuse does not."""
    heads, length, g = one
    job, outline, counted = model(*heads, length)
    facts = facts_of(outline)
    certain, all_of_them = refusals(facts, g, (*RULES, *SAID)), refusals(facts, g, (*RULES, *LAID, *TRAINER))
    plan = made_or_why(g, job, counted)
    if isinstance(plan, str):
        assert all_of_them, f"no table refuses it, but: {plan}"
        return
    assert not certain, f"a table refuses what became a plan: {certain[0]}"
    again = laid(plan, counted.model)
    assert again.grid.ranks[0] == g.ranks[0]
    assert not refusals(again.facts, again.grid, (*RULES, *SAID), again.names)


@given(drawn(), st.integers(0, len(RULES) + len(SAID) - 1))
@settings(deadline=None, max_examples=30)
def test_a_mask_and_its_sentences_are_one_verdict(one: tuple[tuple[int, int], int, Grid], at: int) -> None:
    heads, length, g = one
    facts = facts_of(model(*heads, length)[1])
    rules = (*RULES, *SAID)
    found = refusals(facts, g, rules)
    assert bool(holding(facts, g, rules)[0]) == (not found)
    assert bool(rules[at].holds(facts, g)[0]) == (rules[at].name not in [refusal.rule for refusal in found])
    assert all(refusal.reason and str(refusal).startswith(refusal.reason) for refusal in found)


def test_every_rule_has_a_name_of_its_own_and_a_row_in_the_docs() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for table, rules in TABLES.items():
        names = [rule.name for rule in rules]
        assert len({*names}) == len(names)
        for name in names:
            assert f"| {name} | {table} |" in page
    known = {rule.name for rules in TABLES.values() for rule in rules}
    assert {*re.findall(r"^\| ([^|`]+) \| `(?:rules|trainer)\.", page, re.MULTILINE)} == known


def test_rules_of_others_are_of_the_same_kind() -> None:
    outline = model(4, 2, 32)[1]
    some = [NO_DATA, NO_RING, *(rule for one in EXPORTS.values() for rule in one.able(outline).rules)]
    usual = {"batch": 16, "sequence": 32, "pipeline": 2, "schedule": 2, "recompute": 1, "recomputed": 0.5}
    axes = {"data": (1, 2), "context": (1, 2), "tensor": (1, 3), "expert": (1, 4), "expert_tensor": (1, 3)}
    ways = {"zero": (0, 1, 3), "virtual": (1, 2, 3), "shard": (1, 2), "ahead": (0, 1)}
    grids = [
        grid(**usual, **dict(zip((*axes, *ways), one, strict=True)))
        for one in itertools.product(*axes.values(), *ways.values())
    ]
    left = {rule.name: rule for rule in some}
    for g, facts in itertools.product(grids, (Facts(), Facts(layers=5, experts=8, kv_heads=4))):
        for name, rule in [*left.items()]:
            if found := refusals(facts, g, [rule]):
                assert found[0].reason
                del left[name]
    assert not left


def test_ranks_are_called_as_whoever_asks_calls_them() -> None:
    g = grid(batch=16, sequence=32, tensor=3, context=2, ulysses=2)
    facts = Facts(layers=4, heads=(4,), kv_heads=(2,))
    told = str(refusals(facts, g, OF_HEADS)[0])
    assert told == (
        "the 4 attention heads (num_attention_heads) do not divide by 6 TP ranks x ranks that exchange heads: the "
        "nearest sizes are 4 TP ranks x ranks that exchange heads, or 6 in their place"
    )
    named = str(refusals(facts, g, OF_HEADS, {"tensor": "tp", "ulysses": "cp"})[0])
    assert named == (
        "the 4 attention heads (num_attention_heads) do not divide by tp x cp=6: the nearest sizes are tp x cp=4, or 6 "
        "in their place"
    )
    long = str(refusals(Facts(), grid(batch=1, sequence=2**40, context=3), RULES)[0])  # at once, however many there are
    assert "the nearest sizes are 4 CP ranks, or 1099511627778 in their place" in long
    assert At({"tensor": 1, "ulysses": 1}).ranks("tensor", "ulysses") == "1 TP ranks"


def test_a_rule_that_is_planted_refuses_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search, a choice that becomes a plan, and a plan's file ask one table: a new row holds in all of them."""
    from tangram.planner.legality import check_plan as judging
    from tangram.planner.legality import check_plan as of_plans
    from tangram.planner.legality import engine as rules

    job, outline, counted = model(4, 2, 32)
    g = grid(batch=16, sequence=32, data=2, shard=2)
    plan = made(as_choice(g), job, counted)
    new = Rule("planted", lambda f, g: g.data == 1, lambda f, at: f"no {at.ranks('data')} today")
    assert not rules.reasons(outline, g)
    judging.legal(plan, counted.model)  # as it is
    monkeypatch.setattr(rules, "RULES", (*RULES, new))
    monkeypatch.setattr(of_plans, "RULES", (*RULES, new))
    assert rules.reasons(outline, g) == ["no 2 DP ranks today"]
    assert not rules.legal(outline, g).any()
    with pytest.raises(UserError, match="no dp=2 today"):
        judging.legal(plan, counted.model)
    with pytest.raises(UserError, match="no dp=2 today"):
        made(as_choice(g), job, counted)
    one = replace(g, data=np.array([1.0]), shard=np.array([1.0]))
    assert rules.legal(outline, one).all()
