"""The command line as a user meets it: real processes, exit codes, and what is on stdout and stderr."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tangram

ROOT = Path(__file__).parents[2]


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tangram", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def sentence(answer: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a refusal: exit code 2, nothing on stdout, one line on stderr, no stack trace."""
    assert answer.returncode == 2, answer
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert answer.stderr.startswith("error: ")
    return answer.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with benches of its own."""
    (tmp_path / "src" / "tangram").mkdir(parents=True)
    (tmp_path / "src" / "tangram" / "__init__.py").write_text("")
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "__init__.py").write_text("")
    (bench / "good.py").write_text(
        '"""Two figures.\n\nMore words."""\n'
        "from tangram.hardware.measuring.measure import Row\n"
        "def rows(quick):\n"
        "    yield Row('copy', 's', ours=3.0, peers={'numpy': 2.0}, limit=1.5, target_ratio=1.5)\n"
        "    yield Row('parse', 'us', ours=3.0 if quick else 4.0)\n"
    )
    (bench / "threads.py").write_text(
        '"""Counts."""\nimport threading\nfrom tangram.hardware.measuring.measure import Row\n'
        "def rows(quick):\n    yield Row('threads', '', ours=threading.active_count())\n"
    )
    (bench / "wrong.py").write_text('"""Raises."""\ndef rows(quick):\n    raise KeyError("ours")\n')
    return tmp_path


def test_help_lists_every_command() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    assert all(command in answer.stdout for command in ("train", "doctor", "bench"))
    assert run().stdout == answer.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["bench"]])
def test_help_and_the_list_of_benches_import_no_heavy_library(arguments: list[str]) -> None:
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    code = f"import sys, tangram.cli; tangram.cli.main({arguments}); print({heavy})"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    assert run("--version").stdout == f"tangram {tangram.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bnch"], "'bench'"),
        (["doctor", "--jsn"], "--jsn"),
        (["bench", "--quick", "layuot"], "there is no bench 'layuot'"),
    ],
)
def test_a_slip_is_answered_with_one_sentence(arguments: list[str], words: str) -> None:
    assert words in sentence(run(*arguments))


def test_doctor_as_json() -> None:
    answer = run("doctor", "--json", "--quick")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert set(report) == {"versions", "machine", "checks", "works"}
    assert report["works"] is True
    assert report["versions"]["tangram"] == tangram.__version__
    assert report["machine"]["cores"] > 0
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses["all-reduce of 2 processes over gloo"] == "ok"
    assert statuses["bf16 matmul on cpu"] == "ok"


@pytest.mark.slow
def test_doctor_compiles() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses["torch.compile on cpu"] in ("ok", "missing")


def test_benches_are_listed_with_their_first_line(checkout: Path) -> None:
    answer = run("bench", "--json", folder=checkout)
    assert json.loads(answer.stdout) == {"good": "Two figures.", "threads": "Counts.", "wrong": "Raises."}
    assert "good     Two figures." in run("bench", folder=checkout).stdout


def test_options_reach_the_bench_that_has_them(checkout: Path) -> None:
    (checkout / "bench" / "sized.py").write_text(
        '"""Sizes."""\nfrom tangram.hardware.measuring.measure import Row\n'
        "def rows(quick, *, size=1.0, only=()):\n    yield Row(' '.join(only), 'GB', ours=size)\n"
    )
    answer = run("bench", "sized", "--json", "--size", "0.5", "--only", "one", "--only", "two", folder=checkout)
    assert [(row["figure"], row["ours"]) for row in json.loads(answer.stdout)["rows"]] == [("one two", 0.5)]
    assert "has no option --repeats" in sentence(run("bench", "sized", "--repeats", "3", folder=checkout))


def test_a_bench_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "theirs.py").write_text('"""Theirs."""\n')
    assert "theirs" not in run("bench", folder=tmp_path).stdout


def test_a_bench_as_json_has_these_keys_and_no_others(checkout: Path) -> None:
    inner = checkout / "src" / "tangram"
    answer = run("bench", "good", "--json", folder=inner)
    report = json.loads(answer.stdout)
    assert set(report) == {"bench", "machine", "versions", "rows"}
    copy, parse = report["rows"]
    assert copy == {
        "figure": "copy",
        "unit": "s",
        "ours": 3.0,
        "peers": {"numpy": 2.0},
        "limit": 1.5,
        "ratio": 2.0,
        "target": 2.25,
        "met": False,
    }
    assert (parse["ours"], parse["ratio"], parse["target"], parse["met"]) == (4.0, None, None, None)
    assert answer.returncode == 0


def test_a_bench_as_table(checkout: Path) -> None:
    answer = run("bench", "good", "--quick", folder=checkout)
    assert answer.returncode == 0
    assert answer.stdout.splitlines()[2].split() == ["copy", "s", "3", "numpy", "2", "1.5", "2", "2.25", "no"]


def test_nothing_runs_beside_a_bench_not_even_on_a_terminal(checkout: Path) -> None:
    """A spinner that turns in a thread takes the interpreter from what is measured."""
    ours, terminal = os.openpty()
    command = [sys.executable, "-m", "tangram", "bench", "threads", "--json"]
    answer = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, stderr=terminal, text=True, check=True)
    told = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(terminal)
    assert told.split() == ["threads:", "threads", "done"]
    assert json.loads(answer.stdout)["rows"][0]["ours"] == 1


def test_the_nearest_bench_is_named(checkout: Path) -> None:
    assert "did you mean 'good'?" in sentence(run("bench", "goood", folder=checkout))
    assert "known benches: good, threads, wrong" in sentence(run("bench", "xyz", folder=checkout))


def test_a_fault_of_ours_keeps_its_stack_trace(checkout: Path) -> None:
    answer = run("bench", "wrong", folder=checkout)
    assert answer.returncode == 1
    assert "Traceback" in answer.stderr
    assert "KeyError: 'ours'" in answer.stderr


def test_an_interrupt_is_one_word(checkout: Path) -> None:
    (checkout / "bench" / "stopped.py").write_text('"""Stops."""\ndef rows(quick):\n    raise KeyboardInterrupt\n')
    answer = run("bench", "stopped", folder=checkout)
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("arguments", ["--help", "bench", "bench --json"])
@pytest.mark.parametrize("buffered", ["", "-u"])
def test_a_reader_that_goes_away_is_no_stack_trace(arguments: str, buffered: str) -> None:
    command = f"set -o pipefail; (sleep 0.5; {sys.executable} {buffered} -m tangram {arguments}) | true"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    answer = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (1, "")
