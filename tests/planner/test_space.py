"""The joint space, its rules, and the search: what is legal, why not, and that nothing better is missed."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.hardware.catalogue.devices import device
from tangram.models.lora.outline import adapted
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.calibration import PARTS
from tangram.planner.cost.memory import floor_of, memory, needs
from tangram.planner.cost.step_time import scaled, seconds
from tangram.planner.legality.engine import LAID, RULES, legal, reasons
from tangram.planner.legality.enumerate import (
    NEVER_QUICKER,
    Able,
    Request,
    expanded,
    meshes,
    of_mesh,
    remade,
    scheduled,
)
from tangram.planner.search import branch_and_bound as searching
from tangram.planner.search.branch_and_bound import exhaustive, search, some_fits
from tangram.planner.search.evaluate import CutRequest
from tangram.planner.space.framework_profiles import framework, frameworks
from tangram.planner.space.grid import Grid, grid, joined
from tangram.planner.space.optimisers_and_offload import offloads_of
from tangram.planner.space.schedule_formulas import SCHEDULES, code
from tangram.planner.space.setting import Setting

DENSE = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(
    Dims(6, 512, 8, 32000, ffn=2048, experts=16, per_token=2, expert_ffn=512, shared_ffn=512, dense_layers=1), "mixed"
)
ADAPTED = adapted(DENSE, 8)
FEW = Able(uneven=1)
"""So that trying everything takes seconds."""
ABLE = {
    "": FEW,
    "recompute": replace(FEW, again=("none",)),
    "zero-3": replace(FEW, zero=(0, 1, 2), staged=(0, 1)),
    "zero": replace(FEW, zero=(0,), staged=(0,), again=("none", "norms and activations")),
}
"""Without some of what makes the rest smaller."""
ALL_AGAIN = {"": int(Group.BLOCK), "zero-3": int(Group.BLOCK), "recompute": 0, "zero": 0}
SETTING = Setting(device("h100"), framework("megatron-core"))
ALTERNATING = replace(MIXED, runs=tuple((MIXED.runs[at % 2][0], 1) for at in (0, 1, 1, 0, 1, 0)), name="alternating")
DRAWN = st.tuples(
    st.sampled_from([DENSE, MIXED, ADAPTED, ALTERNATING]),
    st.sampled_from([1, 2, 4, 8, 12, 16, 48]),
    st.sampled_from([16, 48, 96, 240]),
    st.sampled_from([512, 2048]),
)


WIDER = st.fixed_dictionaries({
    "node": st.sampled_from([0, 2, 4]),
    "optimisers": st.sampled_from([(0,), (0, 2), (2, 6), (1, 3)]),
    "offloads": st.sampled_from(["", "optimiser", "activations", "optimiser,parameters"]).map(offloads_of),
})  # fmt: skip
"""What may be used beside the usual; kinds of optimisers by their place."""


@pytest.fixture(autouse=True, scope="module")
def few_at_a_time() -> Iterator[None]:
    """So that a small space has several blocks, of which the last are not looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "BLOCK", 40)
        yield


def every(outline: Outline, request: Request) -> Grid:
    """All configurations of a space."""
    return joined([of_mesh(outline, request, mesh) for mesh in meshes(outline, request)])


@given(DRAWN)
@settings(deadline=None)
def test_all_of_a_space_is_legal_by_words_of_its_own(drawn: tuple[Outline, int, int, int]) -> None:
    outline, devices, batch, sequence = drawn
    request = Request(devices, batch, sequence)
    if not list(meshes(outline, request)):
        return
    g = every(outline, request)
    experts = max(block.experts for block, _ in outline.runs)
    for i in np.random.default_rng(0).permutation(len(g))[:40]:
        at = {name: values[i] for name, values in g.columns().items()}
        assert at["pipeline"] * at["data"] * at["context"] * at["tensor"] == devices
        assert outline.runs[0][0].scores[0].heads % at["tensor"] == 0
        assert batch % (at["data"] * at["micro"]) == 0
        assert at["context"] == 1 or sequence % (2 * at["context"]) == 0
        assert at["expert"] == 1 or experts % at["expert"] == 0
        assert (at["data"] * at["context"] * at["tensor"]) % (at["expert"] * at["expert_tensor"]) == 0
        assert at["pipeline"] * at["virtual"] <= outline.layers
        assert at["virtual"] == 1 or (batch / at["data"] / at["micro"]) % at["pipeline"] == 0


def test_no_configuration_comes_twice_and_none_is_forgotten() -> None:
    request = Request(8, 16, 512)
    g = every(DENSE, request)
    rows = list(zip(*(values.tolist() for values in g.columns().values()), strict=True))
    assert len(set(rows)) == len(rows)
    axes = zip(g.pipeline.tolist(), g.tensor.tolist(), g.context.tolist(), g.data.tolist(), strict=True)
    found = set(axes)
    tried = {
        (p, t, c, d)
        for p in range(1, 9) for t in range(1, 9) for c in range(1, 9) for d in range(1, 9)
        if p * t * c * d == 8
    }  # fmt: skip
    assert found == tried


def test_experts_have_as_many_tensor_ranks_as_divide_those_of_the_others() -> None:
    mesh = (1, 4, 1, 4, 1)
    g = of_mesh(MIXED, Request(16, 96, 2048), mesh)
    found = set(zip(g.expert.tolist(), g.expert_tensor.tolist(), strict=True))
    assert found == {(expert, over) for over in (1, 2, 4) for expert in (1, 2, 4, 8, 16) if expert * over <= 16}
    assert set(g.expert_tensor[g.expert == 16].tolist()) == {1}
    assert (of_mesh(DENSE, Request(16, 96, 2048), mesh).expert == 1).all()


def test_every_schedule_has_each_number_of_chunks_that_it_takes() -> None:
    request = Request(4, 16, 512, schedules=tuple(one.name for one in SCHEDULES))
    g = of_mesh(DENSE, request, (4, 1, 1, 1, 1))
    found = {one.name: {*map(int, g.virtual[g.schedule == code])} for code, one in enumerate(SCHEDULES)}
    assert found == {
        "1F1B": {1}, "Interleaved1F1B": {2, 3}, "InterleavedZeroBubble": {1, 2, 3}, "ZBVZeroBubble": {2},
        "DualPipeV": {2},
    }  # fmt: skip
    assert legal(DENSE, grid(batch=16, sequence=512, pipeline=4, schedule=2, virtual=1)).all()
    assert not legal(DENSE, grid(batch=16, sequence=512, pipeline=4, schedule=1, virtual=1)).any()


REFUSED = {
    "layers of the first and the last virtual stage": (
        {"pipeline": 4, "ahead": 6},
        "6 and 0 layers fewer of the first and the last of 4 virtual stages leave less than none to one of them, of "
        "12 layers",
    ),
    "heads": (
        {"tensor": 3},
        "the 16 attention heads (num_attention_heads) do not divide by 3 TP ranks: the nearest sizes are 4 "
        "TP ranks, or 18 in their place",
    ),
    "stages": ({"pipeline": 8, "virtual": 2, "batch": 16}, "8 stages of 2 virtual stages are more than the 12 layers"),
    "virtual stages": (
        {"pipeline": 4, "virtual": 2, "batch": 6},
        "interleaved virtual stages need micro-batches that 4 stages divide",
    ),
    "batch": ({"data": 3, "batch": 16}, "3 DP ranks of micro-batches of 1 do not divide 16 samples"),
    "tokens": ({"context": 3}, "3 CP ranks do not cut 512 tokens into twice as many parts"),
    "experts": ({"expert": 4, "data": 4}, "there are 4 EP ranks, and the model has no experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_has_its_reason(name: str) -> None:
    changes, said = REFUSED[name]
    g = grid(**{"batch": 48, "sequence": 512, **changes})
    assert not legal(DENSE, g)[0]
    assert said in reasons(DENSE, g)
    assert name in {rule.name for rule in (*RULES, *LAID)}
    assert reasons(DENSE, grid(batch=48, sequence=512)) == []


SCALES = st.none() | st.fixed_dictionaries({name: st.floats(0.3, 3.0) for name in PARTS})


@given(DRAWN, WIDER, st.floats(0.2, 4.0), st.integers(1, 12), SCALES)
@settings(deadline=None, max_examples=12)
def test_the_search_finds_what_trying_everything_finds(
    drawn: tuple[Outline, int, int, int], wider: dict[str, Any], room: float, most: int, scales: dict[str, float] | None
) -> None:
    outline, devices, batch, sequence = drawn
    devices = min(devices, 16)  # there is more to try
    request = Request(devices, batch, sequence, schedules=tuple(one.name for one in SCHEDULES), able=FEW, **wider)
    if not list(meshes(outline, request)):
        with pytest.raises(UserError, match="have no legal layout"):
            search(outline, request, SETTING, 80e9)
        return
    limit = 3e9 + room * 2e9
    found = search(outline, request, SETTING, limit, most, scales)
    all_of_them = exhaustive(outline, request, SETTING, limit, most, scales)
    assert found.step.tolist() == all_of_them.step.tolist()
    assert (found.memory <= limit).all()
    if not len(found.step):
        assert found.smallest_memory == pytest.approx(all_of_them.smallest_memory)
        assert found.smallest_memory > limit


def test_bounds_that_are_none_lose_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: the branch of the best is said to be long, and the comparison above would show it."""
    request = Request(16, 96, 2048, able=FEW)
    right = exhaustive(MIXED, request, SETTING, 6e9, 1)
    least = searching.least_of

    def longer(
        outline: Outline, rows: Grid, setting: Setting, scales: None, **how: bool
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        of_best = np.ones(len(rows), dtype=bool)
        for name in ("pipeline", "tensor", "context", "ulysses"):
            of_best &= getattr(rows, name) == getattr(right.grid, name)[0]
        return least(outline, rows, setting, scales, **how) * np.where(of_best, 10, 1)

    monkeypatch.setattr(searching, "least_of", longer)
    assert search(MIXED, request, SETTING, 6e9, 1).step[0] > right.step[0]


def test_what_is_wrongly_called_hopeless_loses_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: nothing is said to fit that has the stages of the best."""
    request = Request(16, 96, 2048, able=FEW)
    right = exhaustive(MIXED, request, SETTING, 3.6e9, 8)

    def like_the_best(_: Any, g: Grid) -> Any:
        return g.pipeline == right.grid.pipeline[0]

    monkeypatch.setattr(searching, "hopeless", like_the_best)
    assert search(MIXED, request, SETTING, 3.6e9, 8).step.tolist() != right.step.tolist()


@given(DRAWN, WIDER, SCALES)
@settings(deadline=None, max_examples=20)
def test_no_configuration_of_a_branch_is_below_its_bound(
    drawn: tuple[Outline, int, int, int], wider: dict[str, Any], scales: dict[str, float] | None
) -> None:
    outline, devices, batch, sequence = drawn
    devices = min(devices, 16)
    request = Request(devices, batch, sequence, schedules=tuple(one.name for one in SCHEDULES), **wider)
    for mesh in meshes(outline, request):
        bound = of_mesh(outline, request, mesh, bound=True)
        if not len(bound):
            continue
        (least,) = searching.bounds_of(outline, bound, [len(bound)], SETTING, scales)
        steps = scaled(seconds(outline, of_mesh(outline, request, mesh), SETTING), scales)
        assert steps.min() >= least * (1 - 1e-12)


def test_launches_that_a_longer_exchange_hides_are_in_the_bound() -> None:
    """With launches multiplied by more than exchanges of experts, ranks that lie worse for these may be quicker."""
    scales = dict.fromkeys(PARTS, 1.0) | {"launch": 2.2, "expert": 0.5}
    request = Request(16, 16, 512, schedules=tuple(one.name for one in SCHEDULES), node=4)
    bound = of_mesh(MIXED, request, (2, 2, 1, 4, 1), bound=True)
    steps = scaled(seconds(MIXED, of_mesh(MIXED, request, (2, 2, 1, 4, 1)), SETTING), scales)
    assert steps.min() >= searching.bounds_of(MIXED, bound, [len(bound)], SETTING, scales)[0] * (1 - 1e-12)


def laid_out(outline: Outline, request: Request, branches: Grid) -> Grid:
    """As the search does."""
    return expanded(outline, request, remade(outline, request, scheduled(request, branches)))


@given(DRAWN, WIDER, st.sampled_from(["", "recompute", "zero-3", "zero"]))
@settings(deadline=None, max_examples=8)
def test_no_configuration_of_a_branch_needs_less_than_its_floor(
    drawn: tuple[Outline, int, int, int], wider: dict[str, Any], less: str
) -> None:
    outline, devices, batch, sequence = drawn
    schedules = tuple(one.name for one in SCHEDULES)
    request = Request(min(devices, 8), batch, sequence, schedules=schedules, able=ABLE[less], **wider)
    rows = [of_mesh(outline, request, mesh, bound=True) for mesh in meshes(outline, request)]
    if not any(map(len, rows)):
        return
    branches = joined(rows)
    floors = searching.floors(CutRequest(outline, SETTING, 80e9, None, request.able), request, branches)
    of_branch = dict(zip(kept_by(branches), floors.tolist(), strict=True))
    assert len(of_branch) == len(branches)
    g = laid_out(outline, request, branches)
    g = joined([g, *(replace(g, ahead=g.ahead + 1, behind=g.behind + more) for more in (0, 1))])
    g = replace(g, recompute=np.where(g.recompute == 0, ALL_AGAIN[less], g.recompute))
    need = needs(outline, g, SETTING)
    assert (need >= [of_branch[key] for key in kept_by(g)]).all()
    own = floor_of(outline, replace(g, ahead=0 * g.ahead, behind=0 * g.behind), SETTING, 1)
    assert (need >= own).all()
    assert less or (own > [of_branch[key] for key in kept_by(g)]).any()  # it says more


def kept_by(g: Grid) -> list[tuple[float, ...]]:
    """What all configurations of a branch have in common, by the schedule that is the quickest of its kind."""
    quickest = {code(name): code(quick) for name, quick in NEVER_QUICKER.items()}
    names = ("pipeline", "tensor", "context", "data", "ulysses", "expert", "expert_tensor", "micro")
    schedules = [quickest.get(one, one) for one in g.schedule.tolist()]
    return list(zip(*(getattr(g, name).tolist() for name in names), schedules, strict=True))


@given(DRAWN, WIDER, st.sampled_from(["", "recompute", "zero-3", "zero"]))
@settings(deadline=None, max_examples=8)
def test_what_is_said_to_need_least_and_whether_anything_fits_is_so(
    drawn: tuple[Outline, int, int, int], wider: dict[str, Any], less: str
) -> None:
    outline, devices, batch, sequence = drawn
    request = Request(min(devices, 8), batch, sequence, able=ABLE[less], **wider)
    if not list(meshes(outline, request)):
        return
    least = exhaustive(outline, request, SETTING, 1e9).smallest_memory
    assert search(outline, request, SETTING, 1e9).smallest_memory == least
    fit = len(exhaustive(outline, request, SETTING, least * 0.98).step) > 0  # cut unevenly, maybe
    assert some_fits(outline, request, SETTING, least * 0.98) == fit
    assert some_fits(outline, request, SETTING, least)


@given(DRAWN, WIDER)
@settings(deadline=None, max_examples=6)
def test_a_bounds_rows_make_all_of_a_mesh(drawn: tuple[Outline, int, int, int], wider: dict[str, Any]) -> None:
    """What the search lays out of its branches is what the space has, each once."""
    outline, devices, batch, sequence = drawn
    request = Request(min(devices, 8), batch, sequence, schedules=tuple(one.name for one in SCHEDULES), **wider)
    for mesh in meshes(outline, request):
        rows = [
            of_mesh(outline, request, mesh),
            laid_out(outline, request, of_mesh(outline, request, mesh, bound=True)),
        ]
        whole, made = (sorted(zip(*(v.tolist() for v in g.columns().values()), strict=True)) for g in rows)
        assert whole == made


@given(DRAWN)
@settings(deadline=None)
def test_what_is_left_out_is_never_better(drawn: tuple[Outline, int, int, int]) -> None:
    """TP ranks that do not divide the tokens between their products: slower or as slow, larger or as large."""
    outline, devices, batch, sequence = drawn
    request = Request(devices, batch, sequence)
    for mesh in meshes(outline, request):
        g = of_mesh(outline, request, mesh)
        if not len(g) or g.sequence_parallel[0] == 0:
            continue
        whole = replace(g, sequence_parallel=np.zeros(len(g)))
        assert (seconds(outline, whole, SETTING).step >= seconds(outline, g, SETTING).step * (1 - 1e-12)).all()
        assert (memory(outline, whole, SETTING).device >= memory(outline, g, SETTING).device * (1 - 1e-12)).all()


def test_a_sequence_that_tensor_ranks_do_not_divide_is_planned_without() -> None:
    g = of_mesh(DENSE, Request(16, 16, 1000), (1, 16, 1, 1, 1))
    assert len(g)
    assert not g.sequence_parallel.any()


def test_deepseek_on_many_devices_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "BLOCK", 2048)
    found = search(outlined("deepseek-v3"), Request(256, 2048, 4096), SETTING, 75e9, 3)
    assert len(found.step) == 3
    assert (np.diff(found.step) >= 0).all()


def test_bad_numbers_of_a_grid() -> None:
    with pytest.raises(UserError, match="tensor is 0 in a configuration: it is at least 1"):
        grid(batch=1, sequence=1, tensor=[1, 0])
    with pytest.raises(UserError, match="a grid has no tensors"):
        grid(batch=1, sequence=1, tensors=1)
    assert math.isclose(grid(batch=10, sequence=1, data=4).micros[0], 3)


def test_frameworks_are_found_by_name_and_date() -> None:
    assert framework("Megatron-LM", "2021-04").name == "megatron-2021"
    assert framework("Megatron-LM", "2024-01").name == "megatron"
    assert framework("torchtitan", "2024-12").name == "torchtitan-2024"
    assert framework("torchtitan").name == "torchtitan"
    assert framework("NeMo/Megatron").name == "nemo"
    with pytest.raises(UserError, match="there is no framework 'torchtian' \\(did you mean 'torchtitan'\\?\\)"):
        framework("torchtian")
    assert all(one.launch >= 0 and 0 <= one.overlap_tensor <= 1 for one in frameworks())
