"""An operator of one's own from the command line: discovered, proved, and refuted with a script that shows it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.cli import main
from tangram.sharding.ops import rule_table
from tangram.sharding.ops.rule_table import parse_lines
from tangram.sharding.proof.counterexample import script, smallest
from tangram.sharding.proof.execute import Failure
from tangram.sharding.proof.prove import trials
from tests.sharding.test_proof import RIGHT, WRONG

SAMPLES = """
import torch

@torch.library.custom_op("tangram_own::outer", mutates_args=())
def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum(1)[:, None] * y

def calls():
    yield torch.randn(4, 3), torch.randn(5)
    yield (torch.randn(3, 6),), {"y": torch.randn(7)}

def summed():
    yield (torch.randn(3, 6),)

def several():
    return {"tangram_own::outer": list(calls()), "aten::sum": list(summed())}
"""
FOOLISH = """
def raises():
    raise ValueError("no more\\nof that")

def numbers():
    return [3]

def too_few():
    yield ()

def of_another():
    return {"tangram_own::inner": [()]}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of an author."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(SAMPLES)
    return path


def test_discovered_proved_and_refuted(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["tangram_own::outer", "--samples", f"{own}:calls"]
    assert main(["shard", "discover", *given]) == 0
    line = capsys.readouterr().out.strip()
    assert line == "tangram_own.outer : a b, c -> a c sum:b ; each(0 1)"
    rules = own.with_name("own.rules")
    rules.write_text(line)
    assert main(["shard", "check", *given, "--rules", str(rules), "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["operators"]
    assert verdict["kind"] == "proved"
    assert verdict["factors"] == 3
    rules.write_text("tangram_own.outer : a b, c -> a c max:b")
    assert main(["shard", "check", *given, "--rules", str(rules), "--save", str(own.parent / "wrong")]) == 1
    assert "tangram_own.outer: refuted" in capsys.readouterr().out
    (saved,) = (own.parent / "wrong").iterdir()
    ended = subprocess.run([sys.executable, str(saved)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "ranks [0, 1] should have" in ended.stdout


def test_samples_of_several_operators(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--rules` takes, discovery and the proof take, too."""
    given = ["--samples", f"{own}:several"]
    assert main(["shard", "discover", "tangram_own::outer", *given]) == 0
    line = capsys.readouterr().out
    assert line == "tangram_own.outer : a b, c -> a c sum:b ; each(0 1)\n"
    own.with_name("own.rules").write_text(line)
    assert (
        main(["shard", "check", "tangram_own::outer", "sum", *given, "--rules", str(own.with_name("own.rules"))]) == 0
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tangram_own::absent"], "torch has no operator tangram_own::absent: import what defines it"),
        (["tangram_own::absent", "--import", "no_such_module"], "--import no_such_module: No module named"),
        (["sum", "--samples", "absent.py:calls"], "--samples absent.py:calls: give FILE.py:function"),
        (["sum", "--samples", "own.py:others"], "own.py has no function others"),
        (["no_such"], "torch has no operator aten.no_such"),
        (
            ["aten.sofmax.int"],
            'aten.sofmax.int; those of others are called namespace::name; did you mean "aten::softmax"?',
        ),
        (["tangram::relaout"], 'did you mean "tangram::relayout"?'),
        (["sum", "--import", "broken"], "--import broken: SyntaxError: '(' was never closed"),
        (["sum", "--samples", "broken.py:calls"], "broken.py does not run: SyntaxError: '(' was never closed"),
        (["sum", "--samples", "own.py:raises"], "the samples of aten::sum cannot be made: ValueError: no more"),
        (["sum", "--samples", "own.py:numbers"], "a sample of aten::sum is int: give tuples of arguments"),
        (["sum", "--samples", "own.py:too_few"], "does not run"),
        (["sum", "--samples", "own.py:of_another"], "there is no sample of aten::sum, but of tangram_own.inner"),
    ],
)
def test_mistakes_are_one_sentence(
    own: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    own.with_name("broken.py").write_text("def calls(")
    own.write_text(SAMPLES + FOOLISH)
    assert main(["shard", "discover", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (b"tangram_own.outer : a b, c -> a [", r"own.rules, line 1, column 33: '[' is not understood here"),
        (b"\xff\xfe", "own.rules cannot be read: they are not UTF-8 text"),
    ],
)
def test_rules_that_cannot_be_read_are_one_sentence(
    own: Path, rules: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own.with_name("own.rules")
    file.write_bytes(rules)
    assert main(["shard", "check", "sum", "--samples", f"{own}:summed", "--rules", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_script_shows_what_is_wrong_and_nothing_where_all_is_right(tmp_path: Path) -> None:
    """In one interpreter, since torch takes seconds to load: each script is run with what it ends in noted."""
    sources: dict[str, tuple[str, bool]] = {}
    for name in ("a scan that is cut", "a loss that forgets its share", "a bias that is added by all"):
        line, sample, _ = WRONG[name]
        trial = smallest(rule_table.builtin().with_lines(parse_lines(line)), [RIGHT[sample]()])
        assert trial is not None
        assert trial.mesh.size <= 3
        sources[name] = script(trial), True
    for name in ("mm", "bias added once", "mean of uneven parts", "words", "loss"):
        every = [t for t in trials(rule_table.builtin(), [RIGHT[name]()]) if t.cuts and t.mesh.size == 3]
        for where in ("output 0", "gradient of input 0"):
            trial = replace(every[-1 if name == "mm" else 0], failure=Failure("", "", where, "planted"))
            sources[f"{name}, {where}"] = script(trial), False
    for number, (source, _) in enumerate(sources.values()):
        (tmp_path / f"{number}.py").write_text(source)
    (tmp_path / "run.py").write_text(
        f"import runpy\nfor n in range({len(sources)}):\n    try: runpy.run_path(f'{{n}}.py')\n"
        "    except SystemExit as end: print('ended', n, end.code)"
    )
    ended = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    codes = [line.split()[2] for line in ended.stdout.splitlines() if line.startswith("ended")]
    assert dict(zip(sources, codes, strict=True)) == {name: str(wrong) for name, (_, wrong) in sources.items()}
