"""What is recomputed: names, shares of blocks, and the least share that fits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, Group, decoder
from tangram.planner.cost.calibration import PARTS
from tangram.planner.cost.memory import memory, needs
from tangram.planner.cost.step_time import seconds
from tangram.planner.legality.enumerate import Able, Request, meshes, of_mesh
from tangram.planner.search.branch_and_bound import search
from tangram.planner.search.evaluate import CutRequest
from tangram.planner.search.explain import StrategyRequest, laid_out
from tangram.planner.search.strategy import Ask
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, grid, joined
from tangram.planner.space.optimisers_and_offload import offloads_of
from tangram.planner.space.recompute import (
    ALL_BLOCKS,
    EXPLAINED,
    NOTHING,
    SOME,
    Ladder,
    again_name,
    again_of,
    fitted,
    is_free,
    spread,
)
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting

SETTING = Setting(device("h100"), framework("megatron-core"))
DENSE = decoder(Dims(11, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(Dims(13, 512, 8, 32000, ffn=512, experts=32, per_token=4, expert_ffn=1024, dense_layers=3), "mixed")
MODELS = (DENSE, MIXED)
SCALES = st.none() | st.fixed_dictionaries({name: st.floats(0.3, 3.0) for name in PARTS})
LADDERS = st.sampled_from([Ladder(), Ladder(with_all=False), Ladder((0.0, 0.25, 0.5, 1.0)), Ladder((0.0, 1.0)), None])


@cache
def space(at: int) -> Grid:
    request = Request(8, 32, 1024, schedules=tuple(one.name for one in SCHEDULES),
                      offloads=offloads_of("optimiser,activations"))  # fmt: skip
    return joined([of_mesh(MODELS[at], request, mesh) for mesh in meshes(MODELS[at], request)])


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_name_says_its_share(part: int, of: int) -> None:
    share = min(part, of) / of
    groups, back = again_of(again_name(int(Group.BLOCK), share))
    assert (groups, back) == (Group.BLOCK, pytest.approx(share))


def test_names_of_sets_and_ends_are_read_back() -> None:
    for name, group in EXPLAINED.items():
        assert again_of(name) == (group, 1.0)
        assert again_name(int(group), 1.0) == name
    assert again_name(*map(int, again_of(NOTHING))) == NOTHING
    assert again_name(int(Group.BLOCK), 1.0) == ALL_BLOCKS


@pytest.mark.parametrize("name", ["0 of 8 layers", "9 of 8 layers", "half", "3 of 0 layers", "", "-1 of 8 layers"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="what is recomputed is one of none, 3 of 8 layers"):
        again_of(name)


@given(st.integers(1, 30), st.integers(1, 12), st.data())
def test_blocks_are_spread_evenly(blocks: int, n: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, n))
    found = spread(blocks, count / n)
    for first in range(blocks - n + 1):
        assert sum(first <= at < first + n for at in found) == count
    assert found[:1] == ([0] if count else [])


@given(st.integers(0, 1), LADDERS, st.floats(0, 1), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_the_least_share_that_fits_is_that_of_trying_one_after_the_other(
    at: int, ladder: Ladder | None, room: float, seed: int
) -> None:
    outline, every = MODELS[at], space(at)
    g = every.take(np.random.default_rng(seed).choice(len(every), 80, replace=False))
    limit = float(np.quantile(memory(outline, g, SETTING).device, room))
    found, need = fitted(outline, g, ladder, limit, lambda g: needs(outline, g, SETTING))
    assert need.tolist() == needs(outline, found, SETTING).tolist()
    for i in range(len(g)):
        one = g.take(slice(i, i + 1))
        rows = one if ladder is None else ladder.all_of(outline, one, is_free(one))
        each = needs(outline, rows, SETTING)
        first = int(np.argmax(each <= limit)) if (each <= limit).any() else len(rows) - 1
        assert (found.recompute[i], found.recomputed[i]) == (rows.recompute[first], rows.recomputed[first])


@given(st.integers(0, 1), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=15)
def test_more_blocks_computed_again_need_no_more(at: int, seed: int) -> None:
    """What the least share rests on. From none to some more may be needed: what one block makes again is beside it."""
    outline, every, ladder = MODELS[at], space(at), Ladder()
    g = every.take((every.recompute == 0) & is_free(every))
    g = g.take(np.random.default_rng(seed).choice(len(g), 60, replace=False))
    last = ladder.last(outline, g)
    for below in range(1, int(last.max())):
        some = g.take(last > below)
        less, more = (ladder.with_shares(outline, some, np.full(len(some), at)) for at in (below, below + 1))
        assert ladder.at(outline, more).tolist() == [below + 1] * len(some)
        assert (needs(outline, more, SETTING) <= needs(outline, less, SETTING) * (1 + 1e-9)).all()


@given(st.integers(0, 1), st.floats(0, 1), SCALES, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=15)
def test_no_greater_share_that_fits_is_quicker(
    at: int, room: float, scales: dict[str, float] | None, seed: int
) -> None:
    """Of the closed form itself, but for a ten-thousandth: schedules that fill their waits are not quite convex in the
    share. What learned corrections make of it, that more work takes less, recomputes nothing."""
    outline, every, ladder = MODELS[at], space(at), Ladder()
    g = every.take(np.random.default_rng(seed).choice(len(every), 40, replace=False))
    limit = float(np.quantile(memory(outline, g, SETTING).device, room))
    corrected = CutRequest(outline, SETTING, limit, scales, Able(uneven=0)).evaluated(g)[0]
    found, step, _ = CutRequest(outline, SETTING, limit, None, Able(uneven=0)).evaluated(g)
    assert (corrected.recompute == found.recompute).all()
    assert (corrected.recomputed == found.recomputed).all()
    few = is_free(g) & np.isfinite(step)
    found, step, last = found.take(few), step[few], ladder.last(outline, g.take(few))
    for number in range(int(last.max(initial=0)) + 1):
        rows = ladder.with_shares(outline, found, np.minimum(number, last))
        fits = needs(outline, rows, SETTING) <= limit
        assert (seconds(outline, rows, SETTING).step[fits] >= step[fits] * 0.9999).all()


def test_with_less_memory_more_blocks_are_computed_again() -> None:
    """One device, so that nothing else can give: the share rises block by block."""
    able = Able(again=(NOTHING, SOME, ALL_BLOCKS), uneven=0)
    request = Request(1, 16, 2048, most_micro=8, able=able)
    one = grid(batch=16, sequence=2048, micro=8)
    most, least = (float(needs(DENSE, Ladder().with_shares(DENSE, one, np.array([n])), SETTING)[0]) for n in (1, 11))
    shares: list[float] = []
    for limit in np.linspace(most, least, 9):
        g = search(DENSE, request, SETTING, float(limit), 40).grid
        row = g.take(g.micro == 8)
        shares.append(float(row.recomputed[0] if row.recompute[0] else 0))
    assert shares == sorted(shares)
    assert len(set(shares)) == 9
    assert {round(11 * share, 6) % 1 for share in shares} == {0}


def test_ladders_of_names() -> None:
    assert Ladder.of(("norms and activations",), None) is None
    assert Ladder.of((NOTHING, SOME), None) == Ladder(None, with_all=False)
    assert Ladder.of((NOTHING, ALL_BLOCKS), None) == Ladder((0.0, 1.0))
    assert Ladder.of((NOTHING, SOME, ALL_BLOCKS), (0.5, 0.25)) == Ladder((0.0, 0.25, 0.5, 1.0))


@pytest.mark.parametrize(("name", "means"), [("torchtitan", "every second matmul"), ("megatron-core", "selective")])
def test_selective_means_what_the_framework_means_by_it(name: str, means: str) -> None:
    """torchtitan's was taken for Megatron's of the attention core, which is nothing where attention is one kernel."""
    ask = Ask(8 * 4096, 4096, framework=name, devices=8)
    told, taken = (laid_out(builtin("h100x8"), ask, StrategyRequest("dp=8", again=one)) for one in ("selective", means))
    assert told.recompute == taken.recompute == [int(EXPLAINED[means])]
