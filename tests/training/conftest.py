"""One warm start of two ranks serves every test that needs ranks: starting processes costs seconds each time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tangram.planner.plan import Plan
from tests.training.small import SMALL_MODEL, WORLD, small_plan, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def warm(text: Path, tmp_path_factory: pytest.TempPathFactory) -> "Warm":
    from tangram.training.launch import run_ranks
    from tests.training.ranks import Work, do_work

    folder = tmp_path_factory.mktemp("checkpoints")
    plan = small_plan(text)
    tied = small_plan(text, model={"change": {**SMALL_MODEL, "tie_word_embeddings": True}})
    work = Work(plan, tied, folder / "plain", folder / "tied", folder / "hurried")
    events: list[object] = []
    measured = run_ranks(do_work, work, world=WORLD, on_event=events.append, device="cpu")
    return Warm(plan, tied, work.checkpoint, work.tied_checkpoint, measured, events)


@dataclass(frozen=True)
class Warm:
    """What the warm ranks were told and what they measured."""

    plan: Plan
    tied: Plan
    checkpoint: Path
    tied_checkpoint: Path
    measured: "Sequence[Measured]"  # noqa: F821  imported where it is needed, as it loads transformers
    events: Sequence[object]
