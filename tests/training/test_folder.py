"""One run, one folder: no run overwrites another, not even one that began at the same moment."""

from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.training.run.run_folder import alone, folder_to_resume, replace_plan, run_folder, run_name

PLAN = "seed = 1"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_runs_that_begin_together_get_two_folders() -> None:
    with run_folder(None, "mine", PLAN) as first, run_folder(None, "mine", PLAN) as second:
        assert [first, second] == [Path("runs/mine"), Path("runs/mine-2")]


def test_a_folder_asked_for_goes_to_one_run() -> None:
    out = Path("out")
    with (
        run_folder(out, "mine", PLAN) as folder,
        pytest.raises(UserError, match='another process is training in "out": wait for its end'),
        run_folder(out, "mine", PLAN),
    ):
        pass
    (folder / "summary.json").touch()
    with pytest.raises(UserError, match="holds files already"), run_folder(out, "mine", PLAN):
        pass


def test_a_file_is_called_one() -> None:
    Path("mine.toml").write_text(PLAN)
    with pytest.raises(UserError, match=r'mine\.toml" is a file'), run_folder(Path("mine.toml"), "mine", PLAN):
        pass


def test_a_run_that_leaves_nothing_gives_its_folder_back() -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="mend"), run_folder(None, "mine", PLAN) as folder:
            raise UserError("mend your plan")
        assert folder == Path("runs/mine")


def test_a_run_that_leaves_something_keeps_it_with_its_plan() -> None:
    with run_folder(None, "mine", PLAN) as folder:
        (folder / "summary.json").touch()
    assert (folder / "plan.toml").read_text() == PLAN
    with run_folder(None, "mine", PLAN) as folder:
        assert folder == Path("runs/mine-2")


def test_the_name_of_a_run_is_the_plans_or_its_folders() -> None:
    names = [run_name(Path(path)) for path in ("a/quickstart/job.toml", "a/quickstart/plan.toml", "a/big.toml")]
    assert names == ["quickstart", "quickstart", "big"]


def test_the_last_run_of_a_name_is_resumed_and_keeps_the_plan_before() -> None:
    for folder in ("runs/mine", "runs/mine-2", "runs/other"):
        Path(folder).mkdir(parents=True)
        Path(folder, "plan.toml").write_text(PLAN)
    folder = Path("runs/mine-2")
    assert folder_to_resume(None, "mine") == folder
    replace_plan(folder, PLAN)
    assert [path.name for path in folder.iterdir()] == ["plan.toml"]
    for seed in (2, 3):
        replace_plan(folder, f"seed = {seed}")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "plan.toml": "seed = 3",
        "plan-1.toml": "seed = 1",
        "plan-2.toml": "seed = 2",
    }


def test_where_there_is_no_run_yet_one_begins() -> None:
    Path("empty/deep").mkdir(parents=True)
    assert [folder_to_resume(Path(out), None) for out in ("nowhere", "empty")] == [None, None]
    assert folder_to_resume(None, "mine") is None


def test_what_is_no_folder_of_a_run_is_not_resumed() -> None:
    with pytest.raises(UserError, match="--out"):
        folder_to_resume(None, None)
    Path("photos").mkdir()
    Path("photos/me.png").touch()
    with pytest.raises(UserError, match=r'no run to resume in "photos": it holds files, but no run'):
        folder_to_resume(Path("photos"), "mine")
    with pytest.raises(UserError, match="is a file"):
        folder_to_resume(Path("photos/me.png"), "mine")
    Path("photos/checkpoint").mkdir()
    assert folder_to_resume(Path("photos"), "mine") == Path("photos")


def test_nobody_goes_on_in_a_folder_in_which_a_run_still_trains(tmp_path: Path) -> None:
    with (
        run_folder(tmp_path / "out", "mine", PLAN) as folder,
        pytest.raises(UserError, match="another process is training in"),
        alone(folder),
    ):
        pass
    with alone(folder), pytest.raises(UserError, match="another process is training in"), alone(folder):
        pass
    with alone(folder):
        pass
