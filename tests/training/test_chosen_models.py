"""A chosen plan on real processes: written as marks, derived from these, run; loss and gradients are those of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from tangram.hardware.catalogue.cluster import builtin
from tangram.layout import Mesh
from tangram.sharding.choose.choose import choose, kept
from tangram.sharding.choose.costs import Training, costs
from tangram.sharding.choose.export_marks import as_marks
from tangram.sharding.choose.options import options
from tangram.sharding.choose.search import search
from tangram.sharding.derive.explain.show import total
from tangram.sharding.derive.of_model import graph_of
from tangram.sharding.derive.problem.folding import fold
from tangram.sharding.ops.rule_table import builtin as rules
from tangram.training.mesh.tensor_parallel import without_memory
from tangram.training.run.launch import run_ranks
from tests.training.derived_models import MISTAKES, Ran, Work, inputs_of, model_of, run_all
from tests.training.oracle.warm import once as run_once

H100 = builtin("h100-8x8")
QUICK = replace(H100, links=tuple(replace(link, latency=0.0, hop=0.0) for link in H100.links))
"""Small models have collectives as large ones have: none is too short to be worth its start."""
UNCUT = "gradients of gathered parameters are not summed"


@dataclass(frozen=True)
class Case:
    """What is chosen, and for how much memory: of the least that there is, so much more; None: as much as it likes."""

    kind: str
    mesh: str
    room: float | None = None
    mistake: str = ""


TWO = (Case("llama", "dp=2"), Case("qwen3", "dp=2", 1.05), Case("qwen3", "dp=2", 1.05, UNCUT))
FOUR = tuple(Case(kind, "dp=2 tp=2", room) for kind in ("llama", "qwen3") for room in (None, 1.05))
EXPERTS = (*(Case("qwen3_moe", "ep=2", room) for room in (None, 1.1)), Case("deepseek_v3", "ep=2"))


@dataclass(frozen=True)
class Told:
    """What was chosen, before it was run."""

    work: Work
    received: float
    """Bytes of a rank."""
    gathered: bool
    """Whether parameters are kept in parts."""


def told(case: Case) -> Told:
    found = chosen(replace(case, mistake=""))
    return replace(found, work=replace(found.work, mistake=case.mistake))


@cache
def chosen(case: Case) -> Told:
    graph = graph_of(without_memory(model_of(case.kind)), inputs_of(case.kind), torch.float32)
    mesh, limit = Mesh.parse(case.mesh), None
    if case.room is not None:
        both = costs(options(fold(graph, rules()), mesh, ()), QUICK, Training())
        limit = case.room * search(both, 1.0, 10.0).smallest
    plan = choose(graph, mesh, QUICK, memory_limit=limit, gap=0.1).plan
    marks = as_marks(plan, QUICK, memory_limit=limit).marks
    assert 0 < len(marks) <= 8
    work = Work(case.kind, case.mesh, tuple(map(str, marks)), plans="none", leaves=True)
    return Told(work, total(plan), bool(kept(plan)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Told, list[Ran]]]:
    known: dict[str, list[tuple[Told, list[Ran]]]] = {}
    sets = {"two": (TWO, 2), "four": (FOUR, 4), "experts": (EXPERTS, 2)}

    def make(cases: tuple[Case, ...], world: int) -> list[tuple[Told, list[Ran]]]:
        found = [told(case) for case in cases]
        works = [one.work for one in found]
        ranks = run_ranks(run_all, works, world=world, on_event=lambda _: None, device="cpu")
        return [(one, [own[i] for own in ranks]) for i, one in enumerate(found)]

    def find(case: Case) -> tuple[Told, list[Ran]]:
        name = next(name for name, (cases, _) in sets.items() if case in cases)
        if name not in known:
            known[name] = run_once(tmp_path_factory, f"chosen-{name}", lambda _: make(*sets[name]))
        return known[name][sets[name][0].index(case)]

    return find


def is_right(case: Case, ran: Callable[[Case], tuple[Told, list[Ran]]]) -> None:
    """Gradients of one process, by the very plan that was chosen: with parameters in parts where room is short."""
    found, ranks = ran(case)
    assert [(r.where, r.worst, r.loss) for r in ranks if max(r.worst, r.loss) > 1e-5] == []
    assert [r.received for r in ranks] == pytest.approx([found.received] * len(ranks))
    assert found.received > 0
    assert found.gathered or case.room is None


@pytest.mark.parametrize("case", [case for case in TWO if not case.mistake], ids=str)
def test_a_chosen_plan_has_the_gradients_of_one_process(
    ran: Callable[[Case], tuple[Told, list[Ran]]], case: Case
) -> None:
    is_right(case, ran)


def test_a_planted_mistake_is_seen(ran: Callable[[Case], tuple[Told, list[Ran]]]) -> None:
    assert UNCUT in MISTAKES
    (case,) = (case for case in TWO if case.mistake)
    assert max(r.worst for r in ran(case)[1]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FOUR, *EXPERTS], ids=str)
def test_over_two_axes_and_of_experts(ran: Callable[[Case], tuple[Told, list[Ran]]], case: Case) -> None:
    is_right(case, ran)
