"""Memory over time: what is played action by action has its peak where the closed form says, and as high."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.memory import memory
from tangram.planner.cost.memory_timeline import PARTS, Footprint, footprints
from tangram.planner.cost.timeline import play
from tangram.planner.legality.enumerate import Request, meshes, of_mesh
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, grid, joined
from tangram.planner.space.layers_per_stage import dealt, fewer, filled, sizes
from tangram.planner.space.optimisers_and_offload import offloads_of
from tangram.planner.space.schedule_formulas import SCHEDULES
from tangram.planner.space.setting import Setting

ALIKE = decoder(Dims(16, 2048, 16, 32000, ffn=8192, kv_heads=4), "alike")
MIXED = decoder(
    Dims(6, 512, 8, 32000, ffn=2048, experts=16, per_token=2, expert_ffn=512, shared_ffn=512, dense_layers=1), "mixed"
)
HEAVY = decoder(Dims(16, 512, 8, 32000, ffn=512, experts=32, per_token=4, expert_ffn=1024, dense_layers=3), "heavy")
FRAMEWORKS = ("tangram", "megatron-core", "fsdp")


def setting(name: str) -> Setting:
    return Setting(device("h100"), framework(name))


@cache
def every(at: int) -> Grid:
    """All legal configurations of one of the models over 16 ranks."""
    outline = (ALIKE, MIXED, HEAVY)[at]
    request = Request(16, 64, 2048, schedules=tuple(one.name for one in SCHEDULES))
    return joined([of_mesh(outline, request, mesh) for mesh in meshes(outline, request)])


def of(outline: Outline, one: Grid, name: str) -> list[Footprint]:
    found = setting(name)
    return footprints(outline, one, found, play(outline, one, found))


@given(
    st.integers(0, 2), st.floats(0, 0.999999), st.sampled_from(FRAMEWORKS), st.sampled_from([0, 0, 1, 2, 3, 5]),
    st.sampled_from([0, 0, 1, 2, 4]), st.sampled_from([0, 0, *offloads_of("optimiser,parameters,activations")]),
)  # fmt: skip
@settings(deadline=None, max_examples=250)
def test_the_peak_is_that_of_the_closed_form(
    at: int, share: float, name: str, ahead: int, behind: int, bits: int
) -> None:
    outline, g = (ALIKE, MIXED, HEAVY)[at], every(at)
    g = g.take(g.pipeline > 1)
    one = g.take(slice(place := int(share * len(g)), place + 1))
    cut = replace(one, ahead=np.full(1, float(ahead)), behind=np.full(1, float(behind)))
    if filled(outline.layers, cut)[0]:
        one = cut
    one = replace(one, offload=np.array([bits]))
    peak = max(part.peak for part in of(outline, one, name))
    need = float(memory(outline, one, setting(name)).device[0])
    schedule = SCHEDULES[int(one.schedule[0])].name
    chunks = int(one.pipeline[0] * one.virtual[0])
    if schedule == "ZBVZeroBubble" and one.micros[0] < 2 * one.pipeline[0]:
        assert peak <= need * 1.15  # a pipeline that is not filled; the closed form takes it as full
    elif schedule in ("ZBVZeroBubble", "DualPipeV") and (
        one.ahead[0] or one.behind[0] or outline.layers % chunks or len(outline.runs) > 1
    ):  # chunks unlike each other: the closed form takes their mean: a sixth too little with two layers more ahead
        assert need * 0.85 <= peak <= need * 1.2
    elif schedule == "InterleavedZeroBubble" and one.virtual[0] > 1:
        assert need * 0.9 <= peak <= need * (1 + 1e-9)  # which virtual stage the loss is beside is not known
    else:
        assert peak == pytest.approx(need, rel=1e-9)


@given(st.integers(1, 16), st.integers(2, 4), st.sampled_from([0, 1, 3]), st.data())
@settings(deadline=None)
def test_blocks_of_a_rank_are_those_of_its_chunks(ranks: int, own: int, code: int, data: st.DataObject) -> None:
    own = 1 if code == 0 else 2 if code == 3 else own
    assume(ranks > 1 or code == 0)
    layers = data.draw(st.integers(max(ranks * own, 2), 5 * ranks * own + 2))
    small = data.draw(st.integers(1, layers - 1))
    ahead, behind = (data.draw(st.integers(0, 5)) if ranks > 1 else 0 for _ in range(2))
    outline = decoder(Dims(layers, 64, 4, 100, ffn=64, experts=4, per_token=2, expert_ffn=64, dense_layers=small))
    given = {"pipeline": ranks, "virtual": own, "schedule": code, "ahead": ahead, "behind": behind}
    one = grid(batch=4 * ranks, sequence=64, **given)
    blocks = sizes(layers, ranks * own, ahead, behind)
    assume(min(blocks) > 0)
    rank_of = play(outline, one, setting("tangram")).rank_of
    slots = np.array_split(np.arange(-ahead, layers + behind), ranks * own)  # those of nothing are left out
    chunks = [slot[(slot >= 0) & (slot < layers)] for slot in slots]
    assert [len(chunk) for chunk in chunks] == blocks
    for rank in range(ranks):
        its = np.concatenate([chunk for chunk, where in zip(chunks, rank_of, strict=True) if where == rank])
        (dense,), (mixed,) = dealt(outline, one, np.full(1, float(rank)))
        assert (dense, mixed) == (int((its < small).sum()), int((its >= small).sum()))


def test_many_runs_are_dealt_as_each_configuration_by_itself() -> None:
    """Of layers of two kinds in turn; configurations that are cut alike are counted once, each rank its own."""
    small, large = (decoder(Dims(1, 64, 4, 99, ffn=ffn)).runs[0][0] for ffn in (64, 256))
    outline = replace(decoder(Dims(8, 64, 4, 99, ffn=64)), runs=((small, 1), (large, 2)) * 2 + ((small, 2),))
    ways = [(2, 1, 0), (2, 2, 1), (4, 2, 1), (4, 1, 0), (2, 2, 1)]
    g = grid(
        batch=8, sequence=64, pipeline=[p for p, _, _ in ways for _ in range(2)], micro=[1.0, 2.0] * len(ways),
        virtual=[v for _, v, _ in ways for _ in range(2)], schedule=[s for *_, s in ways for _ in range(2)],
        ahead=[0.0, 0, 1, 0, 0, 0, 1, 1, 1, 0],
    )  # fmt: skip
    for place in (np.zeros(len(g)), g.pipeline - 1, np.arange(len(g)) % 2.0):
        together = dealt(outline, g, place)
        alone = [dealt(outline, g.take(slice(i, i + 1)), place[i : i + 1]) for i in range(len(g))]
        assert [run.tolist() for run in together] == [[float(one[at][0]) for one in alone] for at in range(5)]


def test_a_first_rank_with_fewer_blocks_needs_less_until_the_second_needs_most() -> None:
    """16 blocks on four ranks: of the first what it keeps of four micro-batches, of the others of three and fewer."""
    found = setting("megatron-core")
    cuts = [grid(batch=32, sequence=4096, pipeline=4, ahead=ahead) for ahead in (0, 1, 4)]
    peaks = [[part.peak for part in footprints(ALIKE, one, found, play(ALIKE, one, found))] for one in cuts]
    assert [sizes(16, 4, ahead, 0) for ahead in (0, 1, 4)] == [[4, 4, 4, 4], [4, 4, 4, 4], [1, 5, 5, 5]]
    assert peaks[0] == peaks[1]
    assert int(np.argmax(peaks[0])) == 0
    assert int(np.argmax(peaks[2])) == 1
    assert peaks[2][0] < peaks[0][0]
    for one, most in zip(cuts, peaks, strict=True):
        assert float(memory(ALIKE, one, found).device[0]) == pytest.approx(max(most))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12), st.integers(0, 12))
def test_sizes_of_chunks_say_how_they_were_cut(blocks: int, chunks: int, ahead: int, behind: int) -> None:
    found = sizes(blocks, chunks, ahead, behind)
    assert sum(found) == blocks
    assume(min(found) > 0)
    said = fewer(found)
    assert said is not None
    assert said <= (ahead, behind) or sum(said) <= ahead + behind
    assert sizes(blocks, chunks, *said) == found
    assert chunks < 4 or fewer([*found[:-2], found[-2] + 5, found[-1]]) is None


def test_a_mixtures_second_stage_may_need_most() -> None:
    """Of DeepSeek-V3 the first stage has the dense blocks: what the first and the last need is far too little."""
    model, found = outlined("deepseek-v3"), setting("megatron-core")
    one = grid(batch=2048, sequence=4096, pipeline=16, data=16, expert=16, zero=1)
    peaks = [part.peak for part in footprints(model, one, found, play(model, one, found))]
    need = memory(model, one, found)
    assert int(np.argmax(peaks)) == 1
    assert float(need.device[0]) == pytest.approx(max(peaks))
    ends = replace(need, between=())
    assert float(ends.device[0]) < 0.8 * max(peaks)


def test_parts_are_those_of_the_closed_form_and_come_back_to_nothing() -> None:
    one = grid(batch=32, sequence=4096, pipeline=4, data=4, zero=3)
    for name in FRAMEWORKS:
        first = of(ALIKE, one, name)[0]
        assert tuple(first.parts) == PARTS
        held = memory(ALIKE, one, setting(name)).worst.parts()
        most = first.at_peak
        for part in ("parameters", "gradients", "optimiser", "activations"):
            assert most[part] == pytest.approx(float(held[part][0]))
        assert sum(most[part] for part in ("logits", "again", "gathered", "workspace")) == pytest.approx(
            float(held["passing"][0])
        )
        assert first.parts["activations"][-1] <= 1e-6 * most["activations"]
        assert (np.diff(first.at) >= 0).all()


def test_what_is_kept_grows_with_every_forward_and_falls_with_every_backward() -> None:
    one = grid(batch=8, sequence=4096, pipeline=2)
    found = setting("megatron-core")
    played = play(ALIKE, one, found)
    for part, row in zip(footprints(ALIKE, one, found, played), played.rows, strict=True):
        kept = np.diff(part.parts["activations"])
        each = kept[kept > 0].min()
        kinds = [action.kind for _, _, action in row]
        assert kept[0::2][: len(row)] == pytest.approx([each if kind == "F" else 0 for kind in kinds])
        assert kept[1::2][: len(row)] == pytest.approx([-each if kind == "B" else 0 for kind in kinds])


def test_recomputation_moves_bytes_from_what_is_kept_to_what_comes_and_goes() -> None:
    plain, again = (grid(batch=32, sequence=4096, pipeline=4, recompute=group) for group in (0, 31))
    before, after = (of(ALIKE, one, "megatron-core")[0] for one in (plain, again))
    assert after.at_peak["activations"] < 0.2 * before.at_peak["activations"]
    assert after.at_peak["again"] > before.at_peak["again"]
    assert after.peak < before.peak


def test_the_last_stage_has_the_logits() -> None:
    parts = of(ALIKE, grid(batch=32, sequence=4096, pipeline=4), "megatron-core")
    assert [bool(part.parts["logits"].any()) for part in parts] == [False, False, False, True]
