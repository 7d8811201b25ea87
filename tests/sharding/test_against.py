"""What DTensor is said to be wrong about, it is wrong about here and now; and who says so can be wrong itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tangram.errors import UserError
from tangram.sharding.compare import CASES, FOUND_WITH, CompareCase, PairOutcome, run, script

ON_THE_TORCH_OF_THE_TABLE = torch.__version__.partition("+")[0] == FOUND_WITH
BY_NAME = {case.name: case for case in CASES}
HANGING = [case for case in CASES if case.expected == "hangs"]
QUICK = [case for case in CASES if case.expected != "hangs"]


# ---------------------------------------------------------------- planted cases


def product(place) -> Tensor:
    return place(torch.rand(4, 6), Shard(0)) @ place(torch.rand(6, 3), Replicate())


def part_for_the_whole(place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(0))
    return x.to_local()[:1].sum(0) if isinstance(x, DTensor) else x[:1].sum(0) + 1


def refusal(place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(0))
    if isinstance(x, DTensor):
        raise NotImplementedError("no such rule")
    return x


def wait_of_one_rank(place) -> Tensor:
    x = place(torch.rand(4, 6), Shard(0))
    if isinstance(x, DTensor) and x.device_mesh.get_rank() == 0:
        x.full_tensor()  # the other rank has no such line
    return x


def crash(place) -> Tensor:
    import os

    x = place(torch.rand(4, 6), Shard(0))
    if isinstance(x, DTensor):
        os.abort()
    return x


def oracle_that_raises(place) -> Tensor:
    return place(torch.rand(4, 6), Shard(0)) @ torch.rand(5, 5)


def early_exit(place) -> Tensor:
    raise SystemExit(3)


def planted(body, limit: float = 60) -> CompareCase:
    name = f"planted-{body.__name__.replace('_', '-')}"
    return CompareCase(name, "Planted.", "none", (Shard(0),), body, limit=limit)


RIGHT, WRONG = planted(product), planted(part_for_the_whole)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts") / "new" / "folder"


@pytest.fixture(scope="module")
def outcomes(saved: Path) -> dict[str, PairOutcome]:
    """All that do not hang, and planted ones before, between and after them, in one set of processes."""
    told: list[PairOutcome] = []
    middle = len(QUICK) // 2
    cases = [RIGHT, *QUICK[:middle], planted(refusal), WRONG, *QUICK[middle:], planted(oracle_that_raises)]
    found = run(cases, save=saved, told=told.append)
    assert [one.name for one in found] == [case.name for case in cases]
    assert sorted(told, key=lambda one: one.name) == sorted(found, key=lambda one: one.name)
    return {one.name: one for one in found}


def children() -> set[int]:
    """The processes that this one has started and that are still there, zombies too."""
    threads = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {int(pid) for thread in threads for pid in (thread / "children").read_text().split()}


# ---------------------------------------------------------------- the table


def test_names_are_file_names_and_differ() -> None:
    assert len(BY_NAME) == len(CASES)
    assert [name for name in BY_NAME if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_says_what_its_function_does(case: CompareCase) -> None:
    """The placements of the row are those that are asked for, and plain torch has an answer."""
    asked: list[Placement] = []

    def place(whole: Tensor, placement: Placement) -> Tensor:
        asked.append(placement)
        return whole

    torch.manual_seed(0)
    answer = case.body(place, **case.settings)
    assert tuple(asked) == case.inputs
    assert answer.isfinite().all()
    assert case.wrong.endswith(".")
    assert not case.issue or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.issue)


def test_the_page_has_the_table() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "sharding-dtensor.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == [page_row(case) for case in CASES]
    assert any(f"torch {FOUND_WITH}" in line for line in lines)


def page_row(case: CompareCase) -> str:
    inputs = ", ".join(f"S({one.dim})" if isinstance(one, Shard) else "R" for one in case.inputs)
    owner, _, number = case.issue.partition("#")
    issue = f"[{case.issue}](https://github.com/{owner}/issues/{number})" if case.issue else ""
    cells = (f"`{case.name}`", f"`{case.operator}`", inputs, case.direction, case.wrong, case.expected, issue)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


# ---------------------------------------------------------------- the scripts


def test_scripts_are_good_python(tmp_path: Path) -> None:
    for case in CASES:
        text = script(case)
        compile(text, case.name, "exec")
        assert "tangram" not in text  # it needs nothing of ours
        assert not re.search(r"# (noqa|pyright)", text)
        tmp_path.joinpath(f"{case.name}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--line-length", "120"]
    checked = subprocess.run([*ruff, "--select", "E,F,W,I,B", tmp_path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def run_script(case: CompareCase, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / f"{case.name}.py"
    path.write_text(script(case))
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, path], env=bare, cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )


def test_a_script_says_by_itself_that_the_result_is_wrong(tmp_path: Path) -> None:
    done = run_script(WRONG, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 0: wrong" in done.stdout
    assert "rank 1: wrong" in done.stdout
    assert "expected" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("case", "code", "says"), [
    (RIGHT, 0, "rank 0: right"),
    (planted(refusal), 2, "NotImplementedError: no such rule"),
    (planted(wait_of_one_rank, limit=20), 2, "not done within 20 s: rank 0"),
    (planted(crash), 2, ""),
])  # fmt: skip
def test_a_script_ends_with_its_verdict(case: CompareCase, code: int, says: str, tmp_path: Path) -> None:
    done = run_script(case, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout


# ---------------------------------------------------------------- the verdicts


@pytest.mark.skipif(not ON_THE_TORCH_OF_THE_TABLE, reason=f"the table says what torch {FOUND_WITH} does")
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_what_the_table_says_is_found_again(case: CompareCase, outcomes: dict[str, PairOutcome]) -> None:
    outcome = outcomes[case.name]
    assert outcome.verdict == case.expected, outcome
    assert outcome.expected
    assert (outcome.expected == outcome.got and not outcome.error) == (case.expected == "right")


@pytest.mark.skipif(not ON_THE_TORCH_OF_THE_TABLE, reason=f"the table says what torch {FOUND_WITH} does")
@pytest.mark.slow
@pytest.mark.parametrize("case", HANGING, ids=lambda case: case.name)
def test_what_the_table_says_hangs_does(case: CompareCase) -> None:
    (outcome,) = run([case])
    assert outcome.verdict == "hangs", outcome
    assert "another rank raises" in outcome.got


def test_planted_cases_get_the_verdict_that_they_deserve(outcomes: dict[str, PairOutcome]) -> None:
    right, wrong = outcomes[RIGHT.name], outcomes[WRONG.name]
    assert (right.verdict, right.error) == ("right", pytest.approx(0, abs=1e-5))
    assert (wrong.verdict, wrong.error) == ("wrong", pytest.approx(1.4, abs=0.5))  # not the same on the two ranks
    raises = outcomes["planted-refusal"]
    assert (raises.verdict, raises.got) == ("raises", "NotImplementedError: no such rule")
    unknown = outcomes["planted-oracle-that-raises"]
    assert unknown.verdict == "not run"
    assert unknown.got.startswith("plain torch raises RuntimeError: mat1 and mat2")


@pytest.mark.slow
def test_a_hang_costs_no_other_case_and_leaves_no_process() -> None:
    before = children()
    hang = planted(wait_of_one_rank, limit=5)
    first, second = run([hang, RIGHT])
    assert children() <= before
    assert (first.verdict, second.verdict) == ("hangs", "right")
    assert first.got == f"a rank was not done within 5 s; another rank {second.verdict}: {first.expected}"


@pytest.mark.slow
def test_a_crash_and_an_early_exit_cost_no_other_case() -> None:
    first, second, third = run([planted(crash), planted(early_exit), RIGHT])
    assert first.verdict == "raises"
    assert first.got == "the helper process ended with signal SIGABRT and without a result"
    assert second.verdict == "not run"
    assert "exit code 3" in second.got
    assert third.verdict == "right"


# ---------------------------------------------------------------- saving


def test_what_is_saved_is_what_has_run(outcomes: dict[str, PairOutcome], saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {f"{name}.py" for name in outcomes}
    for case in (RIGHT, *QUICK):
        assert (saved / f"{case.name}.py").read_text() == script(case)


def test_no_case_is_no_work(tmp_path: Path) -> None:
    assert run([], save=tmp_path / "empty") == []
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(UserError, match="name another folder"):
        run([RIGHT], save=path)
    assert path.read_text() == "mine"
