"""A job on fewer ranks, where there are not as many devices on the nodes that are left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.resilience import fewer
from tangram.resilience.fewer import with_room
from tangram.schema.plan import Plan
from tangram.training.run.rank import RankJob
from tangram.training.step.loop import StepCosts
from tests.training.small import small_plan


def job(folder: Path, ranks: int, batch: int) -> RankJob:
    changes: dict[str, Any] = {"mesh": f"dp={ranks}"}
    plan = small_plan(folder / "text.txt", **changes, data={"global_batch": batch, "micro_batch": 1})
    return RankJob(plan, folder, "", StepCosts())


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all numbers of ranks that divide the batch; what the planner has, `test_supervise.py` runs."""

    def plan_for(plan: Plan, ranks: int) -> Plan | None:
        return None if 24 % ranks else plan.model_copy(update={"mesh": f"dp={ranks}"})

    monkeypatch.setattr(fewer, "plan_for", plan_for)


def nodes(*room: int | None) -> Any:
    def words(here: int | None) -> list[int | None]:
        return [*room]

    return SimpleNamespace(words=words, count=len(room))


@pytest.mark.parametrize(
    ("ranks", "room", "left"),
    [
        (4, (2,), 2),  # 3 would divide the batch, too, and there are no devices for so many
        (4, (4,), 4),
        (4, (None,), 4),  # a CPU takes any number
        (8, (4,), 4),  # of two nodes one is left
        (8, (4, 4), 8),
        (8, (2, 2, 2), 6),
        (8, (4, 2), 4),  # each node has as many
        (8, (4, 4, 4), 6),  # 8 ranks do not divide among three
        (8, (None, None, None), 6),
    ],
)
def test_as_many_ranks_go_on_as_there_are_devices_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, room: tuple[int | None, ...], left: int
) -> None:
    monkeypatch.setattr(fewer, "room_for_ranks", lambda _: room[0])  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    notes: list[Any] = []
    here = None if len(room) == 1 else nodes(*room)
    found = with_room(job(tmp_path, ranks, 24), 1, here, notes.append)
    assert found.plan.ranks == left
    assert len(notes) == (left != ranks)
    assert found.plan.data.global_batch == 24
    assert with_room(job(tmp_path, ranks, 24), None, here, notes.append).plan.ranks == ranks, "only where it may"


def test_too_few_devices_say_how_many_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewer, "room_for_ranks", lambda _: 2)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    with pytest.raises(UserError, match=r"8 ranks, and this machine has room for 2; .* with --min-ranks 2 it could go"):
        with_room(job(tmp_path, 8, 24), 4, None, print)
