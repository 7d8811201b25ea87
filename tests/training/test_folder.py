"""One run, one folder: no run overwrites another, not even one that began at the same moment."""

from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.training.folder import run_folder


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text("seed = 1")
    return path


def test_two_runs_that_begin_together_get_two_folders(plan: Path) -> None:
    with run_folder(None, plan) as first, run_folder(None, plan) as second:
        assert [first, second] == [Path("runs/mine"), Path("runs/mine-2")]


def test_a_folder_asked_for_goes_to_one_run(plan: Path) -> None:
    out = Path("out")
    with run_folder(out, plan), pytest.raises(UserError, match="holds files already"), run_folder(out, plan):
        pass


def test_a_file_is_called_one(plan: Path) -> None:
    with pytest.raises(UserError, match=r'mine\.toml" is a file'), run_folder(plan, plan):
        pass


def test_a_run_that_leaves_nothing_gives_its_folder_back(plan: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="mend"), run_folder(None, plan) as folder:
            raise UserError("mend your plan")
        assert folder == Path("runs/mine")


def test_a_run_that_leaves_something_keeps_it_with_its_plan(plan: Path) -> None:
    with run_folder(None, plan) as folder:
        (folder / "checkpoint" / "part").touch()
    assert (folder / "plan.toml").read_text() == "seed = 1"
    with run_folder(None, plan) as folder:
        assert folder == Path("runs/mine-2")
