"""Schedules as tables: those of torch action by action, tables that are wrong, and what a step of one takes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    _Action as TorchAction,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.pipelining.schedules import (
    _validate_schedule as torch_validates,  # pyright: ignore[reportPrivateUsage]
)

from tangram.errors import UserError
from tangram.schema.schedule_table import Action, Schedule, check, kept, parse, played, simulate, slots, text
from tangram.schema.schedules import MAKERS, forward_only, micros_unlike, read_table, schedule, stages_unlike
from tests.planner.torchs_schedules import torchs

NUMBERS = [
    (name, ranks, own, micros)
    for name, maker in MAKERS.items()
    for ranks in (1, 2, 3, 4)
    for own in ((1, 2, 3) if maker.own is None else (maker.own,))
    for micros in (1, 2, 3, 4, 5, 8, 9)
    if micros_unlike(name, ranks, micros) is None
]


@st.composite
def tables(draw: st.DrawFn) -> Schedule:
    """One of any name."""
    name, ranks, own, micros = draw(st.sampled_from(NUMBERS))
    return schedule(name, ranks, ranks * own, micros)


def test_every_table_is_torchs_action_by_action() -> None:
    assert len(NUMBERS) > 150
    for name, ranks, own, micros in NUMBERS:
        found = schedule(name, ranks, ranks * own, micros)
        assert [list(map(str, row)) for row in found.rows] == torchs(name, ranks, own, micros), (name, ranks, own)
        assert check(found) == []
        rows = {rank: [TorchAction.from_str(str(action)) for action in row] for rank, row in enumerate(found.rows)}
        assert torch_validates(cast(Any, rows), ranks, ranks * own, micros) == dict(enumerate(found.rank_of))


@given(tables())
def test_a_table_reads_back(table: Schedule) -> None:
    assert parse(text(table), "x") == table


def test_the_slots_of_a_table() -> None:
    assert text(schedule("1F1B", 2, 2, 2)) == "0F0,0F1,,,0B0,,,0B1,\n,1F0,1B0,,1F1,1B1,\n"
    assert text(schedule("InterleavedZeroBubble", 2, 2, 2)).splitlines()[1] == ",1F0,1I0,1F1,1I1,1W0,1W1"


@given(tables(), st.data())
def test_what_is_missing_or_double_is_named(table: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, table.ranks - 1))
    slot = data.draw(st.integers(0, len(table.rows[rank]) - 1))
    row = table.rows[rank]
    without = replace(table, rows=(*table.rows[:rank], row[:slot] + row[slot + 1 :], *table.rows[rank + 1 :]))
    action = row[slot]
    assert any(f"stage {action.stage} has" in one and f"micro-batch {action.micro}" in one for one in check(without))
    double = replace(table, rows=(*table.rows[:rank], (*row, action), *table.rows[rank + 1 :]))
    assert check(double) == [f"{action}, action {len(row)} of rank {rank}, is there twice: leave one out"]


@given(tables(), st.randoms(use_true_random=False))
def test_a_table_that_passes_the_check_runs_to_its_end(table: Schedule, dice: random.Random) -> None:
    """Rows in any order: either one is told what waits for what, or all actions begin after those they need."""
    rows = [list(row) for row in table.rows]
    for row in rows:
        for _ in range(dice.randint(0, 2)):
            i, j = dice.randrange(len(row)), dice.randrange(len(row))
            row[i], row[j] = row[j], row[i]
    mixed = replace(table, rows=tuple(map(tuple, rows)))
    began = {action: at for row in played(mixed) for at, action in row}
    if found := check(mixed):
        assert ", waits for " in found[0]
        assert len(began) < sum(map(len, rows))
        return
    assert len(began) == sum(map(len, rows))
    for action, at in began.items():
        before = [one for one in began if one.micro == action.micro and _needs(action, one)]
        assert all(began[one] + slots(one) <= at for one in before)


def _needs(action: Action, one: Action) -> bool:
    """The rules once more, in other words than the code has."""
    if one.kind == "F":
        return one.stage == action.stage - (action.kind == "F") and action.kind in "FBI"
    return (action.kind in "BI" and one.kind in "BI" and one.stage == action.stage + 1) or (
        action.kind == "W" and one.kind == "I" and one.stage == action.stage
    )


@pytest.mark.parametrize(("ranks", "micros"), [(1, 1), (2, 2), (2, 8), (4, 8), (5, 20)])
def test_what_the_textbooks_say_of_gpipe_and_1f1b(ranks: int, micros: int) -> None:
    """With stages alike a step takes M + P - 1 forwards and backwards; GPipe keeps M, 1F1B what is left of P."""
    for name in ("GPipe", "1F1B"):
        found = simulate(schedule(name, ranks, ranks, micros))
        assert found.seconds == 3 * (micros + ranks - 1)
        assert found.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))
        alive = [micros] * ranks if name == "GPipe" else [min(micros, ranks - stage) for stage in range(ranks)]
        assert list(found.alive) == alive


@pytest.mark.parametrize(
    ("name", "own", "bubble"),
    [
        ("Interleaved1F1B", 2, 9 / 57),  # (P - 1) / v of the 1F1B's waiting
        ("LoopedBFS", 2, 9 / 57),
        ("InterleavedZeroBubble", 1, 3 / 27),  # ZB-H1
        ("InterleavedZeroBubble", 2, 3 / 51),
        ("ZBVZeroBubble", 2, 3 / 51),
        ("DualPipeV", 2, 3 / 51),
    ],
)
def test_bubbles_of_four_ranks_and_eight_micro_batches(name: str, own: int, bubble: float) -> None:
    assert simulate(schedule(name, 4, 4 * own, 8)).bubble == pytest.approx(bubble)


@given(tables(), st.data())
def test_a_step_is_as_long_as_its_longest_chain_and_its_busiest_rank_at_least(
    table: Schedule, data: st.DataObject
) -> None:
    work = data.draw(st.lists(st.integers(0, 9).map(float), min_size=table.stages, max_size=table.stages))

    def seconds(action: Action) -> float:
        return slots(action) * work[action.stage]

    found = simulate(table, seconds)
    busy = [sum(map(seconds, row)) for row in table.rows]
    assert max([*busy, 2 * sum(work)]) <= found.seconds <= sum(busy)
    assert 0 <= found.bubble < 1
    doubled = simulate(table, lambda action: 2 * seconds(action))
    assert (doubled.seconds, doubled.alive) == (2 * found.seconds, found.alive)


@given(tables())
def test_what_a_rank_keeps_is_no_more_than_its_stages_keep(table: Schedule) -> None:
    alive = simulate(table).alive
    most = kept(table, [1.0] * table.stages)
    for rank in range(table.ranks):
        own = [alive[stage] for stage in table.stages_of(rank)]
        assert max(own) <= most[rank] <= sum(own)


def test_the_docs_say_what_is_simulated() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training-pipelines.md").read_text()
    for name, maker in MAKERS.items():
        own = maker.own or 2
        table = schedule(name, 4, 4 * own, 8)
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        wait, most = row.split(" | ")[3:]
        assert wait == f"{100 * simulate(table).bubble:.1f} %"
        assert most == f"{max(kept(table, [1 / own] * table.stages)):.1f} |"
    example = page.split("two micro-batches:\n\n```\n")[1].split("```")[0]
    assert (parse(example, "docs").ranks, parse(example, "docs").stages, parse(example, "docs").micros) == (2, 3, 2)


def test_an_evaluation_has_no_backward() -> None:
    table = forward_only((0, 1, 1, 0), 3)
    assert check(table, backward=False) == []
    assert check(table)[0] == "stage 0 has F of micro-batch 0: give it F and B, or F, I and W"


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n"


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(GOOD)
    found = read_table(str(path))
    assert (found.ranks, found.stages, found.micros, found.splits) == (2, 2, 2, True)
    assert parse("(0F0;0B0)OVERLAP_F_B\n", "x").rows == ((Action(0, "F", 0), Action(0, "B", 0)),)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "mine has no actions: give a row for each rank, with cells as 0F0 and 0B0"),
        (GOOD.replace("0F1", "0X1"), 'mine: "0X1", slot 1 of rank 0, is no action'),
        (GOOD.replace("0F1", "0SEND_F1"), 'mine: "0SEND_F1", slot 1 of rank 0, is no action'),
        (GOOD.replace("1F0", "7F0"), "mine has no action of stage 2, but of stage 7: number stages from 0"),
        (GOOD.replace("1W1", "0W1"), "mine: 0W1, action 4 of rank 1, is of a stage that rank 0 has: move it there"),
        (GOOD.replace(",1W1", ""), "mine: stage 1 has F and I of micro-batch 1: give it F and B, or F, I and W"),
        (
            GOOD.replace("0F0,0F1", "0B0,0F1,0F0").replace("0F0,0B0", "0F0"),
            "mine: 0B0, action 0 of rank 0, waits for 0F0",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "mine: 0B0, action 1 of rank 0, waits for 1B0, which rank 1 never comes",
        ),
        ("0F99999\n", "mine: stage 0 has nothing of micro-batch 0"),
    ],
)
def test_tables_that_are_wrong(table: str, said: str) -> None:
    with pytest.raises(UserError) as found:
        parse(table, "mine")
    assert str(found.value).startswith(said)


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"of pipeline\.table cannot be read"):
        read_table(str(tmp_path / "none.csv"))
    (tmp_path / "no-text").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"of pipeline\.table cannot be read"):
        read_table(str(tmp_path / "no-text"))


def test_numbers_that_a_schedule_does_not_take() -> None:
    assert stages_unlike("1F1B", 4, 8) == 'with the schedule "1F1B" each has one: give 4'
    assert (
        stages_unlike("LoopedBFS", 4, 7) == 'with the schedule "LoopedBFS" each rank has as many as the others: give 8'
    )
    with pytest.raises(UserError, match=r"3 stages for 2 ranks: .* give 4"):
        schedule("ZBVZeroBubble", 2, 3, 4)
    with pytest.raises(
        UserError, match=r'5 micro-batches: the schedule "Interleaved1F1B" takes 2 rounds of as many each'
    ):
        schedule("Interleaved1F1B", 2, 4, 5)
