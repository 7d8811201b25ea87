"""A run that is saved and goes on, at the same layout or another, is the run that was not interrupted."""

import pytest

from tests.training.oracle.cases import LONG, Case
from tests.training.oracle.test_strategies import real_rows
from tests.training.oracle.trace import Trace
from tests.training.oracle.warm import LEGS, PACE, Measured, measure, once


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
