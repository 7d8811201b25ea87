"""The choice of tests, in a repository of a few files: what must run runs, and ten turns leave nothing out."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.selection import history, sections, status
from tests.selection.choose import CHANGED, EARLIER, NEAR, NEW, TURN, Selection, choose, sample
from tests.selection.cpu import tree_seconds
from tests.selection.durations import (
    TOGETHER,
    TURNS,
    WHOLE,
    Spent,
    Unit,
    function,
    make_table,
    read_record,
    read_table,
    write_table,
)
from tests.selection.graph import Graph, read_graph
from tests.selection.plugin import IMPORT, START, select

FILES = {
    "src/house/__init__.py": "",
    "src/house/low.py": "import json\n",
    "src/house/middle.py": "from house.low import nothing\n",
    "src/house/high.py": "def later():\n    from house import middle\n",
    "src/house/by_name.py": 'def command(name):\n    return import_module(f"house.cli.{name}")\n',
    "src/house/cli/__init__.py": "",
    "src/house/cli/plan.py": "",
    "src/house/tables/__init__.py": "",
    "src/house/tables/llama.toml": "",
    "docs/page.md": "",
    "examples/job.toml": "",
    "tests/conftest.py": "",
    "tests/low/conftest.py": "",
    "tests/low/test_low.py": "from house.low import a\ndef test_a(): ...\ndef test_b(): ...\n"
    "@pytest.mark.slow  # of a part of its own\ndef test_c(): ...\n",
    "tests/high/helper.py": "from house import high\n",
    "tests/high/test_high.py": "from tests.high.helper import x\ndef test_c(): ...\n",
    "tests/high/test_names.py": "import house.by_name\ndef test_d(): ...\n",
    "tests/high/test_tables.py": "import house.tables\ndef test_e(): ...\n",
    "tests/high/test_docs.py": 'PAGES = ROOT / "docs"\ndef test_f(): ...\n',
    "tests/high/test_examples.py": 'JOB = "examples/job.toml"\ndef test_g(): ...\n',
}
TESTS = sorted(file for file in FILES if "/test_" in file)
ALL = 1e9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.fixture
def graph(root: Path) -> Graph:
    return read_graph(root, FILES)


@pytest.fixture
def repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TANGRAM_BASE", "TANGRAM_TURN"):
        monkeypatch.delenv(name, raising=False)
    git(root, "init", "-q", "-b", "trunk")
    commit(root, 0)
    return root


def git(root: Path, *words: str) -> str:
    return history.git(root, "-c", "user.name=a", "-c", "user.email=a@b", *words)


def commit(root: Path, hour: int) -> None:
    """All that is there, at an hour of a day."""
    date = f"2026-01-01T{hour:02}:00:00Z"
    git(root, "add", "-A")
    words = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", f"at {hour}"]
    environment = {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date, "PATH": "/usr/bin:/bin:/usr/local/bin"}
    subprocess.run(["git", *words], cwd=root, env=environment, check=True)


def table(*, cpu: float = 1.0) -> dict[str, Unit]:
    """Every test file has a turn of its own, from 3 on."""
    return {file: Unit(file, 3 + place, cpu, cpu) for place, file in enumerate(TESTS)}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("src/house/low.py", {"tests/low/test_low.py": 1, "tests/high/test_high.py": 4}),  # middle, high, helper
        ("src/house/high.py", {"tests/high/test_high.py": 2}),
        ("tests/high/helper.py", {"tests/high/test_high.py": 1}),
        ("tests/low/conftest.py", {"tests/low/test_low.py": 1}),
        ("src/house/cli/plan.py", {"tests/high/test_names.py": 2}),
        ("src/house/tables/llama.toml", {"tests/high/test_tables.py": 2}),
        ("docs/page.md", {"tests/high/test_docs.py": 1}),
        ("examples/job.toml", {"tests/high/test_examples.py": 1}),
        ("tests/conftest.py", dict.fromkeys(TESTS, 1)),
        ("LICENSE", {}),
    ],
)
def test_a_changed_file_reaches_the_tests_that_lean_on_it(graph: Graph, changed: str, reached: dict[str, int]) -> None:
    steps = graph.distances({changed: 0})
    assert {file: step for file, step in steps.items() if file in TESTS} == reached


def test_every_package_on_the_way_counts(graph: Graph) -> None:
    steps = graph.distances({"src/house/__init__.py": 0})
    assert {"tests/low/test_low.py", "tests/high/test_high.py", "tests/high/test_tables.py"} <= steps.keys()


def test_a_change_runs_what_it_touches_the_nearest_first(graph: Graph) -> None:
    chosen = choose(graph, table(), {"src/house/low.py": 0}, turn=0, budget=2.0)
    assert chosen.units == {"tests/low/test_low.py": NEAR, "tests/high/test_high.py": NEAR}
    small = choose(graph, table(), {"src/house/low.py": 0}, turn=0, budget=1.5)
    assert small.units == {"tests/low/test_low.py": NEAR}
    assert small.left == 1
    assert "1 that lean on the change wait for their turn" in small.sentence()


def test_changed_tests_and_new_ones_run_whatever_the_budget(graph: Graph) -> None:
    known = {name: unit for name, unit in table().items() if name != "tests/high/test_docs.py"}
    changed = {"tests/low/test_low.py": 0, "tests/high/test_docs.py": 1}
    chosen = choose(graph, known, changed, turn=0, budget=0.0)
    assert chosen.units == {"tests/low/test_low.py": CHANGED, "tests/high/test_docs.py": NEW}


def test_what_the_table_does_not_know_costs_what_its_neighbours_do(graph: Graph) -> None:
    known = {name: unit for name, unit in table(cpu=4.0).items() if name != "tests/high/test_docs.py"}
    chosen = choose(graph, known, {"tests/high/test_docs.py": 0}, turn=0, budget=6.0)
    assert chosen.units == {"tests/high/test_docs.py": CHANGED}, "of 6 s it is taken to need 4, as one test beside it"
    assert chosen.seconds == 4.0
    two = {name: unit for name, unit in known.items() if "test_low" not in name}
    assert choose(graph, two, {"tests/low/test_low.py": 0}, turn=0, budget=0.0).seconds == 8.0, "it has two tests"


def test_unknown_ones_that_did_not_change_wait_for_a_turn_that_stays(graph: Graph) -> None:
    known = {TESTS[0]: Unit(TESTS[0], 3, 1.0, 1.0)}
    runs = [choose(graph, known, {}, turn=turn, budget=0.0) for turn in range(TURNS)]
    assert Counter(file for run in runs for file in run.units) == Counter(TESTS)
    assert [choose(graph, known, {}, turn=turn + TURNS, budget=0.0) for turn in range(TURNS)] == [
        replace(run, turn=run.turn + TURNS) for run in runs
    ]


def test_an_older_change_stands_behind_the_last_one(graph: Graph) -> None:
    changed = {"tests/low/test_low.py": 1, "tests/high/helper.py": 0}
    chosen = choose(graph, table(), changed, turn=0, budget=1.0)
    assert chosen.units == {"tests/high/test_high.py": NEAR}


def test_ten_turns_run_everything(graph: Graph) -> None:
    runs = [choose(graph, table(), {}, turn=turn, budget=0.0) for turn in range(87, 87 + TURNS)]
    assert Counter(file for run in runs for file in run.units) == Counter(TESTS)
    assert {reason for run in runs for reason in run.units.values()} == {TURN}


@pytest.mark.parametrize("at_once", range(1, 13))
def test_all_turns_come_however_many_commits_are_pushed_at_once(at_once: int) -> None:
    pushed = range(1009, 1009 + 35 * at_once, at_once)
    assert {history.turn_of(number) % TURNS for number in pushed} == {*range(TURNS)}


def test_what_is_left_of_the_budget_goes_to_the_turns_before(graph: Graph) -> None:
    chosen = choose(graph, table(), {}, turn=16, budget=2.0)
    assert chosen.units == {TESTS[3]: TURN, TESTS[2]: EARLIER}
    assert choose(graph, table(), {}, turn=16, budget=ALL).units.keys() == set(TESTS)


def test_of_a_divided_file_functions_run_by_themselves(graph: Graph) -> None:
    low = "tests/low/test_low.py"
    divided = {name: unit for name, unit in table().items() if name != low} | {
        f"{low}::test_a": Unit(f"{low}::test_a", 1, 9.0, 9.0)
    }
    chosen = choose(graph, divided, {}, turn=1, budget=0.0)
    assert chosen.units[f"{low}::test_a"] == TURN
    touched = choose(graph, divided, {low: 1}, turn=1, budget=0.0)
    assert touched.units == {f"{low}::test_a": TURN, f"{low}::test_b": NEW}
    assert chosen.takes(f"{low}::test_a[b::c]", function(f"{low}::test_a[b::c]"))
    assert not chosen.takes("tests/high/test_high.py::test_c", "tests/high/test_high.py::test_c")
    assert [choose(graph, divided, {}, turn, budget=0.0).units.get(f"{low}::test_b") for turn in range(TURNS)].count(
        TURN
    ) == 1
    kept = Selection(**json.loads(json.dumps(vars(chosen))))
    assert kept == chosen, "what workers take over is the same"


@pytest.mark.parametrize("test", ["t.py::test_a", "t.py::test_a[x]", "t.py::TestIt::test_a[x::y[0]]"])
def test_the_function_of_a_test(test: str) -> None:
    assert function(test) == "t.py::test_a"


def test_units_keep_their_turn_and_new_ones_get_the_lightest(tmp_path: Path) -> None:
    before = {f"old{n}.py": Unit(f"old{n}.py", n, 2.0, 3.0) for n in range(TURNS) if n != 6}
    made = {unit.name: unit for unit in make_table([Spent("old3.py::t", 9.0, 9.0, 0.0)], before)}
    assert made["old3.py"] == Unit("old3.py", 3, 9.0, 9.0)
    assert made.keys() == before.keys(), "rows of files that did not run stay"
    assert make_table([Spent("new.py::t", 1.0, 1.0, 0.0)], before)[-1] == Unit("new.py", 6, 1.0, 1.0)
    write_table(tmp_path / "table", made.values())
    assert read_table(tmp_path / "table") == made


def test_files_with_a_long_fixture_in_common_have_one_turn() -> None:
    oracle = [Spent(f"{name}.py::t", 20.0, 1.0, 0.0) for name in TOGETHER]
    others = [Spent(f"tests/training/test_{n}.py::t", 20.0, 1.0, 0.0) for n in range(9)]
    units = make_table([*oracle, *others], {})
    assert len({unit.turn for unit in units if unit.name.startswith(TOGETHER)}) == 1
    assert len({unit.turn for unit in units}) == TURNS


def test_long_files_are_divided_unless_their_tests_have_much_in_common() -> None:
    rows = [Spent("long.py::test_a[1]", 10.0, 1.0, 0.0), Spent("long.py::test_a[2]", 10.0, 1.0, 0.0)]
    rows.append(Spent("long.py::test_b", 10.0, 1.0, 0.0))
    assert {unit.name: unit.cpu for unit in make_table(rows, {})} == {"long.py::test_a": 20.0, "long.py::test_b": 10.0}
    shared = [Spent("long.py::test_a", 30.0, 1.0, 20.0), Spent("long.py::test_b", 1.0, 1.0, 0.0)]
    assert [unit.name for unit in make_table(shared, {})] == ["long.py"]
    lazily = [Spent(f"{WHOLE[0]}::test_a", 40.0, 1.0, 0.0), Spent(f"{WHOLE[0]}::test_b", 1.0, 1.0, 0.0)]
    assert [unit.name for unit in make_table(lazily, {})] == [WHOLE[0]]


def test_files_that_are_never_divided_exist() -> None:
    assert all((history.ROOT / file).is_file() for file in WHOLE)


def test_a_sample_of_each_turn_and_in_the_end_all() -> None:
    tests = {f"t{n}": n % 4 == 0 for n in range(40)}
    runs = [sample(tests, 8, turn) for turn in range(50, 60)]
    assert {len(run) for run in runs} == {8}
    assert set[str]().union(*runs) == tests.keys()
    assert sum(map(len, runs[:4])) == len(set[str]().union(*runs[:4])), "nothing comes twice before all others came"
    assert all(sum(tests[t] for t in run) == 1 for run in runs), "heavy ones come a third as often"


def test_since_when_there_is_a_change(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = git(repository, "rev-parse", "HEAD")
    (repository / "src/house/middle.py").write_text("x = 1\n")
    commit(repository, 8)
    (repository / "src/house/high.py").write_text("x = 1\n")
    commit(repository, 9)
    assert history.base(repository) == first, "the commits of the last six hours"
    (repository / "tests/low/test_new.py").write_text("")
    files = history.changed(repository, first)
    assert files == {"src/house/middle.py": 1, "src/house/high.py": 0, "tests/low/test_new.py": 0}
    assert (history.turn(repository), len(history.main_line(repository))) == (3, 3)
    git(repository, "branch", "main", first)
    assert history.base(repository) == first, "where the branch left the main one"
    monkeypatch.setenv("TANGRAM_BASE", first)
    assert history.changed(repository, first) == dict.fromkeys(files, 0), "what is said to be the change is all of it"
    monkeypatch.setenv("TANGRAM_BASE", "HEAD")
    monkeypatch.setenv("TANGRAM_TURN", "17")
    assert (history.base(repository), history.turn(repository)) == ("HEAD", 17)


def test_merges_count_as_one_commit(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "side")
    commit(repository, 1)
    commit(repository, 2)
    git(repository, "checkout", "-q", "trunk")
    git(repository, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert history.turn(repository) == 2


def test_a_clone_without_history_goes_by_days(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    commit(repository, 1)
    clone = tmp_path_factory.mktemp("shallow")
    git(clone, "clone", "-q", "--depth", "1", f"file://{repository}", ".")
    assert history.turn(clone) == 20454  # days up to the first of January 2026
    assert history.is_repository(clone)
    assert not history.is_repository(clone / "src")


def test_the_whole_choice_in_a_repository(repository: Path) -> None:
    write_table(repository / "tests/durations.tsv", table().values())
    commit(repository, 1)
    commit(repository, 20)
    (repository / "src/house/high.py").write_text("x = 2\n")
    one = 1.0 + IMPORT
    chosen = select(START + one, repository)
    assert chosen.units == {TESTS[0]: TURN}, "turn 3: its file costs all of the budget"
    assert chosen.seconds == pytest.approx(START + one)
    assert select(START + 1.9 * one, repository).units == chosen.units, "what imports take is part of it"
    assert select(START + 2.1 * one, repository).units == {TESTS[0]: TURN, "tests/high/test_high.py": NEAR}


def test_a_base_that_is_no_commit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-m", "pytest", "--budget", "1", "-p", "no:xdist", "tests/selection/planted.py"]
    monkeypatch.setenv("TANGRAM_BASE", "nowhere")
    ran = subprocess.run(words, cwd=history.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TANGRAM_BASE is a commit" in ran.stderr
    assert "nowhere" in ran.stderr


def test_a_process_and_its_children_are_counted() -> None:
    script = "import os, time\nif os.fork(): time.sleep(600)\nwhile True: pass"  # its child alone works
    busy = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        while tree_seconds(busy.pid) < 0.3:
            assert busy.poll() is None
    finally:
        os.killpg(busy.pid, signal.SIGKILL)
        busy.wait()


def test_sections_run_when_their_rooms_change_and_in_turn() -> None:
    turns = [{section.name for section in sections.due([], turn)} for turn in range(10)]
    assert set().union(*turns) == {section.name for section in sections.SECTIONS}
    assert max(len(turn) for turn in turns) <= 5, "no commit has all of them"
    quiet = next(turn for turn in range(10) if "kernels" not in turns[turn])
    assert "kernels" in {section.name for section in sections.due(["src/tangram/kernels/flash/x.py"], quiet)}
    assert len(sections.due(["constraints.txt"], quiet)) == len(sections.SECTIONS)


def test_sections_are_targets_of_the_makefile_and_their_paths_exist() -> None:
    makefile = (history.ROOT / "Makefile").read_text()
    for section in sections.SECTIONS:
        assert f"\n{section.name}:" in makefile
        assert all(list(history.ROOT.glob(f"{path}*")) for path in section.paths)


def test_the_page_says_of_each_section_when_it_runs() -> None:
    page = (history.ROOT / "docs/testing.md").read_text()
    rows = {
        name.strip(): every
        for names, every in re.findall(r"^\| ([a-z, ]+) \|.*\|([^|]*)\|$", page, re.MULTILINE)
        for name in names.split(",")
    }
    for section in sections.SECTIONS:
        words = "commit" if section.every == sections.ALWAYS else f"{section.every}"
        assert rows[section.name].strip().startswith(words), section
    named = re.findall(r"`make ([a-z-]+)", page)
    makefile = (history.ROOT / "Makefile").read_text()
    assert {name for name in named if f"\n{name}:" not in makefile} == set()


def test_the_report_says_what_has_waited_longest() -> None:
    line = [history.Commit(number, f"c{number}", "2026-01-01") for number in range(25, 16, -1)]
    lines = status.table_of(line, Counter(dict.fromkeys(range(TURNS), 4)), 2)
    assert lines[1].split() == ["never", "yet", "4", "units", "of", "turn", "3"]
    assert lines[-1].endswith("2 units whose cost is a guess (`make durations` measures them)")
    assert any(line.split() == ["2026-01-01", "c25", "0", "4", "units", "of", "turn", "1"] for line in lines)
    assert any(line.split() == ["2026-01-01", "c19", "6", "4", "units", "of", "turn", "2"] for line in lines)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a worker of pytest-xdist says of a test that fails, and the file with the seconds of all tests."""
    record = tmp_path_factory.mktemp("planted") / "seconds.tsv"
    words = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "-p", "tests.selection.cpu"]
    words += ["--record", str(record), "tests/selection/planted.py"]
    ran = subprocess.run(words, cwd=history.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout
    return ran.stdout, record


def test_a_failing_test_shows_what_a_user_would_see(planted: tuple[str, Path]) -> None:
    assert "what a user sees: stdout, read 1" in planted[0]
    assert "error: the table is upside down" in planted[0]
    assert "1 failed, 1 passed" in planted[0]


def test_a_record_is_written_test_by_test_and_makes_a_table(planted: tuple[str, Path]) -> None:
    rows = read_record(planted[1])
    test = "tests/selection/planted.py"
    assert [row.test for row in rows] == [f"{test}::test_it_fails", f"{test}::test_it_does_not"]
    assert all(row.cpu >= row.setup >= 0 for row in rows)
    assert rows[0].cpu < 1.0, "what the collection takes is no cost of the first test"
    assert rows[0].cpu + rows[0].wall > 0
    assert rows[1].cpu >= 0.5, "what is left by a process that has ended counts"
    assert [unit.name for unit in make_table(rows, {})] == [test]
