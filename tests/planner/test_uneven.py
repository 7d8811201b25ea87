"""Cuts of blocks into chunks that are chosen: the quickest that fits, as trying every cut finds it."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.calibration import PARTS
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import scaled, seconds
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.search import evaluate as wanting
from tangram.planner.search import uneven_stages
from tangram.planner.search.branch_and_bound import least_of, search
from tangram.planner.search.evaluate import CutRequest, some_blocks
from tangram.planner.search.uneven_stages import Best, all_cuts, best_cuts, hopeless
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, joined
from tangram.planner.space.optimisers_and_offload import offloads_of
from tangram.planner.space.recompute import ALL_BLOCKS, NOTHING, SETS, SOME
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting

SETTING = Setting(device("h100"), framework("megatron-core"))
ALIKE = decoder(Dims(11, 1024, 16, 32000, ffn=4096, kv_heads=4), "alike")
HEADED = decoder(Dims(12, 512, 8, 250_000, ffn=2048), "headed")
MIXED = decoder(Dims(13, 512, 8, 32000, ffn=512, experts=32, per_token=4, expert_ffn=1024, dense_layers=3), "mixed")
MODELS = (ALIKE, HEADED, MIXED)
SCALES = st.none() | st.fixed_dictionaries({name: st.floats(0.3, 3.0) for name in PARTS})


@cache
def pipelines(at: int) -> Grid:
    """Configurations with stages of one of the models over 8 ranks."""
    request = Request(8, 32, 1024, schedules=tuple(one.name for one in SCHEDULES))
    every = joined([of_mesh(MODELS[at], request, mesh) for mesh in meshes(MODELS[at], request)])
    return every.take(every.pipeline > 1)


def both(
    at: int, limit: float, most: int, scales: dict[str, float] | None, rows: Grid
) -> tuple[Best, Best, CutRequest]:
    wanted = CutRequest(MODELS[at], SETTING, limit, scales, Able(uneven=most))
    return all_cuts(wanted, *wanted.tried(rows)), best_cuts(wanted, *wanted.evaluated(rows)), wanted


@given(st.integers(0, 2), st.floats(0, 1), st.integers(0, 6), SCALES, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_the_best_cut_is_that_of_trying_all(
    at: int, room: float, most: int, scales: dict[str, float] | None, seed: int
) -> None:
    g = pipelines(at)
    rows = g.take(np.random.default_rng(seed).choice(len(g), 60, replace=False))
    needs = memory(MODELS[at], rows, SETTING).device
    limit = float(np.quantile(needs, room))
    tried, found, _ = both(at, limit, most, scales, rows)
    np.testing.assert_allclose(found.step, tried.step, rtol=1e-12)  # sums in another order
    fits = np.isfinite(found.step)
    assert (found.need[fits] <= limit).all()
    assert (memory(MODELS[at], found.grid, SETTING).device[fits] <= limit).all()
    assert (np.maximum(found.grid.ahead, found.grid.behind) <= most).all()


@pytest.mark.parametrize("at", range(3))
def test_few_of_the_cuts_are_looked_at_and_many_help(at: int) -> None:
    """Of some the even cut does not fit and another does, of some it fits and another is quicker."""
    g = pipelines(at)
    limit = float(np.quantile(memory(MODELS[at], g, SETTING).device, 0.3))
    tried, found, wanted = both(at, limit, 3, None, g)
    _, even, _ = wanted.evaluated(g)
    assert found.step.tolist() == tried.step.tolist()
    assert found.looked < 0.4 * tried.looked
    assert (np.isinf(even) & np.isfinite(found.step)).any()
    assert (np.isfinite(even) & (found.step < even)).any()


@pytest.mark.parametrize(
    ("module", "name"), [(uneven_stages, "_never"), (wanting, "some_blocks")], ids=["never", "some"]
)
def test_a_wrong_step_loses_the_best(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted mistakes: a rank between is always said to be too full; cuts without blocks are taken."""
    g, wrong = pipelines(2), name == "_never"
    limit = float(np.quantile(memory(MIXED, g, SETTING).device, 0.3))
    right = both(2, limit, 6, None, g)[1]

    def always(_: Any, g: Grid) -> Any:
        return np.ones(len(g), dtype=bool)

    monkeypatch.setattr(module, name, always)
    changed = both(2, limit, 6, None, g)[1]
    assert (changed.step > right.step).any() if wrong else (changed.step < right.step).any()


@cache
def layouts(at: int) -> Grid:
    """With stages and without, of any kind of optimiser and with what may be offloaded to the host."""
    request = Request(8, 32, 1024, schedules=tuple(one.name for one in SCHEDULES), node=4, optimisers=(0, 2),
                      offloads=offloads_of("optimiser,activations"))  # fmt: skip
    return joined([of_mesh(MODELS[at], request, mesh) for mesh in meshes(MODELS[at], request)])


AGAIN = ((NOTHING, *SETS, SOME, ALL_BLOCKS), (NOTHING, SOME), (NOTHING, *SETS), (ALL_BLOCKS,))


@given(st.integers(0, 2), st.floats(0, 1), st.sampled_from(AGAIN), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_what_is_hopeless_does_not_fit_by_any_cut(at: int, room: float, again: tuple[str, ...], seed: int) -> None:
    g = layouts(at)
    rows = g.take(np.random.default_rng(seed).choice(len(g), 60, replace=False))
    limit = float(np.quantile(memory(MODELS[at], rows, SETTING).device, room))
    wanted = CutRequest(MODELS[at], SETTING, limit, None, Able(uneven=3, again=again))
    tried = all_cuts(wanted, *wanted.tried(wanted.least_again(rows)))
    assert not (hopeless(wanted, rows) & np.isfinite(tried.step)).any()


@pytest.mark.parametrize("at", range(3))
def test_much_of_what_does_not_fit_is_hopeless(at: int) -> None:
    g = layouts(at).take(slice(None, None, 40))
    limit = float(np.quantile(memory(MODELS[at], g, SETTING).device, 0.05))
    wanted = CutRequest(MODELS[at], SETTING, limit, None, Able(uneven=1))
    none = ~np.isfinite(all_cuts(wanted, *wanted.tried(wanted.least_again(g))).step)
    assert (hopeless(wanted, g) & none).sum() > 0.2 * none.sum()


@given(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6), SCALES)
@settings(deadline=None, max_examples=30)
def test_no_cut_is_below_the_bound(at: int, ahead: int, behind: int, scales: dict[str, float] | None) -> None:
    g = pipelines(at)
    cut = uneven_stages._cut(g, np.full(len(g), ahead), np.full(len(g), behind))  # pyright: ignore[reportPrivateUsage]
    some = some_blocks(MODELS[at], cut)
    parts = seconds(MODELS[at], cut.take(some), SETTING)
    least = least_of(MODELS[at], g.take(some), SETTING, scales)
    assert (scaled(parts, scales) >= least * (1 - 1e-12)).all()


def test_a_search_with_uneven_stages_is_never_slower() -> None:
    steps: list[float] = []
    for most in (0, 2, 4):
        request = Request(8, 32, 1024, able=Able(uneven=most))
        steps.append(float(search(HEADED, request, SETTING, 4.2e9, 1).step[0]))
    assert steps == sorted(steps, reverse=True)
