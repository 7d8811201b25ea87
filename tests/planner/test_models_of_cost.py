"""The models of memory and of time: exact where they can be, monotone where they must be, near published runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._planner import memories
from bench._planner.predict import predictable, runs
from bench._planner.rows import Case, cases, read
from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, Group, decoder
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.setting import Setting

ROOT = Path(__file__).parents[2]
LLAMA = outlined("llama-3-8b")
MIXED = decoder(Dims(8, 1024, 16, 32000, ffn=4096, experts=16, per_token=2, expert_ffn=1024, dense_layers=2), "mixed")
SETTING = Setting(device("h100"), framework("megatron-core"))


@pytest.fixture(scope="module")
def published() -> list[Case]:
    """All published runs that can be predicted."""
    return list(cases(read(ROOT / "data" / "published" / "runs.csv")))


def one(**given: Any) -> Grid:
    """A grid of one configuration."""
    return grid(**{"batch": 64, "sequence": 4096, **given})


# ---------------------------------------------------------------- memory


def test_states_are_counted_to_the_byte() -> None:
    whole = memory(LLAMA, one(), SETTING).first
    numbers = LLAMA.numbers - LLAMA.hidden  # the last norm is no block's
    assert whole.parameters[0] == 2 * numbers
    assert whole.gradients[0] == 4 * numbers
    assert whole.optimiser[0] == 12 * numbers
    over = memory(LLAMA, one(data=8, zero=1), SETTING).first
    assert (over.parameters[0], over.optimiser[0]) == (2 * numbers, 12 * numbers / 8)
    fsdp = memory(LLAMA, one(data=8, zero=3), Setting(None, framework("torchtitan"))).first
    assert fsdp.parameters[0] + fsdp.gradients[0] + fsdp.optimiser[0] == 16 * numbers / 8
    alone = memory(LLAMA, one(), replace(SETTING, precision="fp32")).first
    assert (alone.parameters[0], alone.optimiser[0]) == (4 * numbers, 8 * numbers)
    split = memory(LLAMA, one(pipeline=4, tensor=2), SETTING)
    blocks = sum(8 * (block.numbers.tensor / 2 + block.numbers.replicated) for block, _ in LLAMA.runs)
    assert split.first.parameters[0] == 2 * (blocks + LLAMA.vocab * LLAMA.hidden / 2) == split.last.parameters[0]


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    plain = memory(LLAMA, one(pipeline=[4, 4, 4], batch=[64, 64, 2]), SETTING)
    each = memory(LLAMA, one(), SETTING).first.activations[0] / 4
    assert plain.first.activations == pytest.approx([4 * each, 4 * each, 2 * each])
    assert plain.last.activations == pytest.approx([each] * 3)
    chunks = memory(LLAMA, one(pipeline=4, virtual=4), SETTING).first.activations[0]
    assert chunks == pytest.approx((2 * 3 + 3 * 4 + 1) / 4 * each)  # Megatron's warm-up and one more


RATIO = st.sampled_from([1, 2, 4, 8])


@given(
    tensor=RATIO, pipeline=st.sampled_from([1, 2, 4]), data=RATIO, context=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]), zero=st.integers(0, 2), outline=st.sampled_from([LLAMA, MIXED]),
)  # fmt: skip
@settings(deadline=None)
def test_more_ranks_and_more_again_never_need_more(
    tensor: int, pipeline: int, data: int, context: int, micro: int, zero: int, outline: Any
) -> None:
    def need(**changes: Any) -> float:
        numbers = {
            "tensor": tensor, "pipeline": pipeline, "data": data, "context": context, "micro": micro, "zero": zero,
            "sequence_parallel": 1, "batch": 512,
        }  # fmt: skip
        return float(memory(outline, one(**{**numbers, **changes}), SETTING).reserved[0])  # without communicators

    now = need()
    assert need(tensor=2 * tensor) <= now
    assert need(context=2 * context) <= now
    assert need(zero=min(zero + 1, 2)) <= now
    assert need(micro=2 * micro) >= now
    assert need(data=2 * data) <= now
    assert need(recompute=int(Group.BLOCK)) <= need(recompute=int(Group.BLOCK), recomputed=0.5) <= now * (1 + 1e-9)


def test_peaks_of_published_runs_are_near(published: list[Case]) -> None:
    near = {"simumax_b200": 0.03, "korthikanti22_f1": 0.05}
    for source, most in near.items():
        off = [
            abs(memories.predicted(case) / memories.GIB / float(case.row["mem_gib"]) - 1)
            for case in published
            if case.source == source and case.row["mem_gib"]
        ]
        assert len(off) >= 8
        assert np.median(off) <= most, source
    golden = [
        abs(memories.predicted(case) / memories.GIB / float(case.row["mem_gib"]) - 1)
        for case in published
        if case.source == "mcore_golden" and case.row["mem_gib"]
    ]
    assert np.median(golden) <= 0.06


def test_swapped_published_rows_are_seen(published: list[Case]) -> None:
    some = [case for case in published if case.source == "simumax_b200" and case.row["mem_gib"]]
    right = [float(case.row["mem_gib"]) for case in some]
    off = [
        memories.predicted(case) / memories.GIB / measured - 1 for case, measured in zip(some, right[::-1], strict=True)
    ]
    assert np.median(np.abs(off)) > 0.1


# ---------------------------------------------------------------- time


def test_parts_are_all_of_the_step_and_arrays_are_single_calls() -> None:
    g = grid(
        batch=128, sequence=4096, tensor=[1, 2, 8, 4], sequence_parallel=[0, 1, 1, 1], pipeline=[1, 2, 4, 2],
        virtual=[1, 1, 2, 1], data=[8, 2, 1, 4], context=[1, 2, 1, 1], zero=[3, 1, 1, 0], micro=[1, 2, 1, 1],
        recompute=[0, 31, 5, 2],
    )  # fmt: skip
    found = seconds(LLAMA, g, SETTING)
    assert sum(part for part in found.parts().values()) == pytest.approx(found.step)
    assert all((np.asarray(part) >= -1e-12).all() for part in found.parts().values())
    alone = [float(seconds(LLAMA, g.take(slice(i, i + 1)), SETTING).step[0]) for i in range(len(g))]
    assert found.step == pytest.approx(alone)


def test_equal_stages_fill_and_drain_as_played_event_by_event() -> None:
    """The closed form beside the simulator of schedules, for stages of one length (forward 1, backward 2)."""
    from tangram.planner.cost.step_time import pipeline_seconds
    from tangram.schema.schedule_table import simulate
    from tangram.schema.schedules import schedule

    headless = decoder(Dims(8, 1024, 16, 1, ffn=4096), "headless")
    for stages, micros in ((2, 4), (4, 8), (8, 8)):
        g = one(pipeline=stages, batch=micros)
        played = simulate(schedule("1F1B", stages, stages, micros))
        each = 3.0  # of a stage, as the simulator counts: forward 1, backward 2
        closed = pipeline_seconds(headless, g, np.array([each * stages]), np.zeros(1))[0]
        assert closed == pytest.approx(played.seconds)


@given(
    tensor=st.sampled_from([1, 2, 4]), data=RATIO, micro=st.sampled_from([1, 2, 4]),
    outline=st.sampled_from([LLAMA, MIXED]),
)  # fmt: skip
@settings(deadline=None)
def test_work_only_adds(tensor: int, data: int, micro: int, outline: Any) -> None:
    def step(setting: Setting = SETTING, **changes: Any) -> float:
        numbers = {"tensor": tensor, "data": data, "micro": micro, "batch": 256, "zero": 1, "sequence_parallel": 1}
        return float(seconds(outline, one(**{**numbers, **changes}), setting).step[0])

    now = step()
    assert step(batch=512) >= now
    assert step(sequence=8192) > now
    assert step(recompute=int(Group.BLOCK)) > now
    assert step(zero=3) >= now * (1 - 1e-12)
    slow = Setting(device("h100"), framework("megatron-core"), nic=1e9)
    assert step(slow) >= now * (1 - 1e-12)
    assert step(Setting(device("a100"), framework("megatron-core"))) > now


def test_published_steps_are_near_with_nothing_learned(published: list[Case]) -> None:
    """Golden errors: curves of kernels alone, no run was fitted."""
    timed = predictable(published)
    said = runs(timed)
    for source, most in {"dgxc": 0.16, "nemo_docs": 0.1, "vtrain_multi": 0.1, "narayanan21_t1": 0.1}.items():
        off = [
            abs(run.predicted / case.step - 1) for case, run in zip(timed, said, strict=True) if case.source == source
        ]
        assert np.median(off) <= most, source
