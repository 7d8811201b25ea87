"""What the ranks of `policies` have measured."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tangram.training.data import BYTES, prepare
from tangram.training.run.launch import run_ranks
from tests.training.oracle.warm import once
from tests.training.policies import Found, two_ranks
from tests.training.small import small_plan, write_text


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Found]]:
    """What each of the ranks has found, by the name of the task."""

    def make(folder: Path) -> list[Mapping[str, Found]]:
        prepare(small_plan(write_text(folder / "text")).data, BYTES, lambda event: None)
        return run_ranks(two_ranks, folder, world=2, on_event=print, device="cpu")

    return once(tmp_path_factory, "policies", make)
