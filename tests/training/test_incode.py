"""Marks in code on real processes: functions, a module with marks, and models, each as one process has it.

Both ways, operators derived as they run and the captured graph, give the same layouts where marks stand, and equal loss
and gradients; planted mistakes are seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.training.run.launch import run_ranks
from tests.training.incode_tasks import FEW, LAYOUTS, MISTAKES, WEIGHTS, All, Ran, Works, run_all, run_models
from tests.training.oracle.warm import once as run_once

BOUND = 1e-5
"""Of a gradient, relative: sums in another order, through two layers."""
WAYS = ("as it runs", "captured")
QUICK: Works = {"llama": ("llama", "tp=2", ())}
KINDS = ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "vit", "dit", "own", "written")
OTHERS: Works = {kind: (kind, "tp=2", ()) for kind in KINDS}
FOUR: Works = {
    "llama over two axes": ("llama", "dp=2 tp=2", ("{model.embed_tokens,model.norm}: b/dp s h",)),
    "deepseek_v3 over four": ("deepseek_v3", "tp=4", ()),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[All]:
    def run(_: Path) -> list[All]:
        return run_ranks(run_all, QUICK, world=2, on_event=lambda _: None, device="cpu")

    return run_once(tmp_path_factory, "incode", run)


Models = dict[str, list[dict[str, Ran]]]


@pytest.fixture(scope="module")
def once() -> Callable[[str], Models]:
    known: dict[str, Models] = {}
    sets = {"others": (OTHERS, 2), "four": (FOUR, 4)}

    def find(name: str) -> Models:
        if name not in known:
            works, world = sets[name]
            ranks = run_ranks(run_models, works, world=world, on_event=lambda _: None, device="cpu")
            known[name] = {work: [own[work] for own in ranks] for work in works}
        return known[name]

    return find


def _is_right(ran: list[dict[str, Ran]]) -> None:
    for way in WAYS:
        assert [(r[way].where, r[way].worst) for r in ran if max(r[way].worst, r[way].loss) > BOUND] == [], way
    assert [own[WAYS[0]].layouts for own in ran] == [own[WAYS[1]].layouts for own in ran]


def test_functions_give_what_they_give_on_one_process(ran: list[All]) -> None:
    lost = tuple(f"written through a view, {lies}," for lies in ("a b c/tp", "a b c sum:tp"))  # a view has to move
    for own in ran:
        found = own.wrong[""]
        assert [one for one in found if not one.startswith(lost)] == []
        assert len(found) == 2 * len(WEIGHTS)
        assert all(re.search("writes into a tensor that (shares memory|has to lie)", one) for one in found)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_functions_are_seen(ran: list[All], mistake: str) -> None:
    found = {one.partition(",")[0] for one in ran[1].wrong[mistake]}
    assert found & {name.partition(",")[0] for name in FEW}
    assert len(ran[1].wrong[mistake]) < len(FEW) * len(LAYOUTS) * len(WEIGHTS) * 3  # what needs no moves stays right


def test_both_ways_give_the_layouts_of_the_marks_and_equal_gradients(ran: list[All]) -> None:
    _is_right([own.marked[""] for own in ran])
    (layouts,) = {way: own for way, own in ran[0].marked[""].items() if way == "captured"}.values()
    assert len(layouts.layouts) == 7  # five calls, and a module that keeps a mark in each of two blocks


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(ran: list[All], mistake: str) -> None:
    found = [own.marked[mistake]["as it runs"] for own in ran]
    assert max(max(r.worst, r.loss) for r in found) > 50 * BOUND


def test_a_model_that_knows_nothing_of_marks(ran: list[All]) -> None:
    _is_right([own.models["llama"] for own in ran])


REFUSED = {
    "head.wait: v/tp h": "names no tensor of the model; the nearest is head.weight",
    "head.weight: v/cp h": "does not fit head.weight: .* names the axis cp, which is none of the mesh",
    "head.weight: (5 v/tp) h": "does not fit head.weight",
    "ids_BS: b/tp s": "a mark cuts ids_BS over tp, but every rank has all of what a model is given",
    "head.weight: v h/tp": r"incode_tasks\.py:\d+\)` and `head.weight: v h/tp` contradict each other on head.weight",
    "head.weight: v h sum:tp": "makes head.weight a pending sum, which no parameter is",
    "blocks.0.up.weight: f/tp h k": "does not fit blocks.0.up.weight",
    "outside": "this rank has parts of the model: run it in the context that `eager` has given",
    "nested": "another model runs as its operators are derived: one at a time",
    "written": "a forward writes into head.weight, which is trained: write into it after the optimiser's step instead",
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_said_in_one_sentence(ran: list[All], name: str) -> None:
    for own in ran:
        assert re.search(REFUSED[name], own.refused[name]), own.refused[name]
        assert "\n" not in own.refused[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(once: Callable[[str], Models], name: str) -> None:
    _is_right(once("others")[name])
    assert bool(once("others")[name][0]["captured"].layouts) == (name not in ("own", "written"))  # only weights there


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(once: Callable[[str], Models], name: str) -> None:
    _is_right(once("four")[name])
