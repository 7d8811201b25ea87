"""Several types that products may be computed in, searched together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tangram.__main__ import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.calibration import published
from tangram.planner.report.report import Shown
from tangram.planner.search.by_precision import ranked
from tangram.planner.search.explain import StrategyRequest, explain
from tangram.planner.search.objectives import Terms
from tangram.planner.search.pareto import fronts
from tangram.planner.search.query import ask_of, plan, requested
from tangram.planner.search.strategy import Ask, limit_of

CLUSTER = builtin("h100-8x8")
MODEL = decoder(Dims(12, 2048, 16, 32000, ffn=8192, kv_heads=4), "small")
ASK = Ask(48 * 2048, 2048, framework="megatron-core", devices=8, most=6, others=("fp8",))


@pytest.mark.parametrize("memory", [0.0, 9e9])
def test_together_they_are_ranked_as_apart(memory: float) -> None:
    ask = replace(ASK, memory=memory)
    assert [one.precision for one in ask.each()] == ["bf16", "fp8"]

    def quickest(one: Ask) -> list[float]:
        request, limit = requested(CLUSTER, one), limit_of(CLUSTER, one)
        found = ranked(MODEL, CLUSTER, one, request, limit, 40, published())
        return [choice.step for choice in found.choices]

    apart = sorted(step for one in ask.each() for step in quickest(one))
    assert quickest(ask) == apart[:40]
    shown = [one.step for one in plan(MODEL, CLUSTER, ask, what_if=False).choices]
    assert shown[0] == apart[0]
    assert shown == sorted(shown)
    assert len(shown) == 6


def test_rows_are_of_several_meshes_and_not_of_one_with_other_virtual_stages() -> None:
    large = decoder(Dims(80, 8192, 64, 128256, ffn=28672, kv_heads=8), "as llama-3-70b")
    rows = plan(large, CLUSTER, Ask(2**22, 8192, devices=64, most=8), what_if=False).choices
    assert len({one.mesh for one in rows}) >= 7
    assert len(rows) == 8


def test_where_nothing_fits_the_smallest_is_of_any_type() -> None:
    apart = [plan(MODEL, CLUSTER, replace(one, memory=2e9), what_if=False) for one in ASK.each()]
    found = plan(MODEL, CLUSTER, replace(ASK, memory=2e9))
    assert not found.choices
    assert found.smallest.memory == min(one.smallest.memory for one in apart)
    assert found.enough == min(plan(MODEL, CLUSTER, replace(one, memory=2e9)).enough for one in ASK.each())


def test_what_a_choice_has_is_what_it_is_shown_with() -> None:
    for ask in ASK.each():
        found = plan(MODEL, CLUSTER, ask, what_if=False)
        one = found.choices[0]
        assert one.precision == ask.precision
        assert ASK.of(one) == ask
        assert Shown(replace(found, ask=ASK), CLUSTER).setting().precision == ask.precision


def test_the_front_of_both_is_that_of_all() -> None:
    terms = Terms(ASK.tokens)
    apart = [one for ask in ASK.each() for one in fronts(MODEL, CLUSTER, ask, terms).memory]
    both = fronts(MODEL, CLUSTER, ASK, terms).memory
    assert {one.precision for one in both} <= {"bf16", "fp8"}
    assert all(not any(b.step <= a.step and b.memory < a.memory for b in apart) for a in both)
    assert min(one.step for one in apart) == both[0].step


def test_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_of("4M", 8192, "bf16, fp8,bf16", "tangram", "", 0.0, 8).others == ("fp8",)
    with pytest.raises(UserError, match='no precision "fp7"'):
        ask_of("4M", 8192, "bf16,fp7", "tangram", "", 0.0, 8)
    with pytest.raises(UserError, match="explain looks at one strategy: give one --precision"):
        explain(MODEL, CLUSTER, ASK, StrategyRequest("dp=8"))
    said = ("plan", "llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8", "--precision", "bf16,fp8", "--json")
    assert main([*said, "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ask"]["precisions"] == ["bf16", "fp8"]
    assert found["choices"][0]["precision"] == "fp8"
