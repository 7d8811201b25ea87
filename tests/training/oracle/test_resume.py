"""A run that is saved and goes on, at the same layout or another, is the run that was not interrupted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tangram.training.run.launch import run_ranks
from tests.training.oracle.cases import LONG, SHORT, Case, cases
from tests.training.oracle.test_strategies import ALL, real_rows
from tests.training.oracle.trace import Trace
from tests.training.oracle.warm import LEGS, PACE, Measured, Work, measure, once, prepared, work

RESUMED = tuple(name for name, case in ALL.items() if case.resume_at)


def legs(measured: Measured) -> dict[int, list[Trace]]:
    """The traces of all ranks of each leg, by their number."""
    return {ranks: [rank.leg for rank in done if rank.leg is not None] for ranks, done in measured.done.items()}


def test_the_same_layout_goes_on_bit_for_bit(measured: Measured) -> None:
    whole = measured.traces("fsdp")[0].losses
    for trace in legs(measured)[4]:
        assert len(trace.losses) == 2 * PACE
        assert trace.losses == whole[: 2 * PACE]


@pytest.mark.parametrize("case", ["resumed: fsdp", "resumed: tensor inside fsdp"])
def test_the_resumed_cases_have_loaded_a_checkpoint(case: str, measured: Measured, everything: dict[str, Case]) -> None:
    assert everything[case].resume_at
    assert len(list((measured.folder / "cases").glob("resumed*/step-*"))) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_every_strategy_goes_on_bit_for_bit_at_its_own_layout(name: str, tmp_path: Path) -> None:
    prepared(tmp_path)
    case = cases(tmp_path / "text", slow=True)[name]
    both = {name: case, "uninterrupted": replace(case, name="uninterrupted", resume_at=0)}
    for rank in run_ranks(work, Work(both, None, tmp_path), world=case.ranks, on_event=print, device="cpu"):
        went_on, whole = rank.traces[name], rank.traces["uninterrupted"]
        assert len(whole.losses) >= SHORT > case.resume_at > 0
        assert went_on.losses == whole.losses
        assert went_on.values.keys() == whole.values.keys() > {5, 20}
        for step, values in whole.values.items():
            assert values.keys() == went_on.values[step].keys()
            assert [key for key, value in values.items() if not np.array_equal(value, went_on.values[step][key])] == []


def test_other_layouts_go_on_as_if_nothing_had_happened(measured: Measured) -> None:
    whole = measured.traces("fsdp")[0].losses
    for place, (ranks, _) in enumerate(LEGS):
        for trace in legs(measured)[ranks]:
            assert len(trace.losses) == 20
            assert trace.losses == pytest.approx(whole[place * PACE : place * PACE + 20], rel=1e-5)


@pytest.mark.slow
def test_other_layouts_go_on_for_long(tmp_path_factory: pytest.TempPathFactory) -> None:
    long_measured = once(tmp_path_factory, "oracle-long", lambda folder: measure(folder, slow=True))
    whole = long_measured.traces("fsdp")[0].losses
    for place, (ranks, _) in enumerate(LEGS):
        for trace in legs(long_measured)[ranks]:
            right = whole[place * PACE : place * PACE + LONG]
            assert len(trace.losses) == len(right) == LONG
            assert trace.losses[:20] == pytest.approx(right[:20], rel=1e-5)
            assert trace.losses == pytest.approx(right, rel=1e-4)


def test_no_sample_is_repeated_or_skipped_over_four_two_three_ranks_and_one(
    measured: Measured, everything: dict[str, Case]
) -> None:
    from tangram.training.data import sample_ids
    from tests.training.oracle.plain import corpus_of, whole_batch

    plan = everything["fsdp"].plan
    for place, (ranks, _) in enumerate(LEGS):
        for step in range(PACE):
            dealt = [trace.seen[step] for trace in legs(measured)[ranks]]
            distinct = dict.fromkeys(tuple(row for row in rows if real_rows((row,))) for rows in dealt)
            seen = [row for rows in distinct for row in rows]  # tensor-parallel ranks see the same rows
            right = whole_batch(plan, place * PACE + step).inputs_BS
            assert seen == [tuple(row) for row in right.tolist()]
    corpus = corpus_of(plan.data)
    windows = corpus.training[0].windows(plan.data.sequence)
    ids = sample_ids(corpus, plan.data, plan.seed, 0, len(LEGS) * PACE * plan.data.global_batch)
    assert len(ids) > windows
    assert len(set(ids[:windows])) == windows  # every sample once, before any comes again
