"""docs/checkpoint.md is true: its Python runs, its commands print what the page shows, but for figures and times."""

import re
import runpy
from pathlib import Path

import pytest

from tangram.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"
COMMAND = "$ tangram "


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def said(console: str) -> list[tuple[list[str], str]]:
    """The commands of a block, and what it shows of each."""
    parts = re.split(rf"^{re.escape(COMMAND)}(.*)\n", console, flags=re.MULTILINE)
    return [(command.split(), shown) for command, shown in zip(parts[1::2], parts[2::2], strict=True)]


def words(text: str) -> list[str]:
    """Without what differs from run to run: ids, times, values, rates and the widths of columns."""
    text = re.sub(r"\b[0-9a-f]{12,32}\b|\d{4}-\d\d-\d\dT[\d:+]+", "ID", text)
    return re.sub(r"-?\d[\d,.]*(e-?\d+)?( [KMG]?B/s)?", "N", text).split()


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text("\n".join(blocks("python")))
    runpy.run_path(str(tmp_path / "page.py"))
    commands = [item for block in blocks("console") for item in said(block)]
    assert {command[1] for command, _ in commands} == {"inspect", "verify", "diff", "convert", "prune"}
    for command, shown in commands:
        assert main(command) in (0, 1)
        assert words(capsys.readouterr().out) == words(shown), command


def test_another_answer_would_be_noticed() -> None:
    assert words("runs/step-1: sound, 3 tensors, 1.2 GB/s") == words("runs/step-2:  sound, 4 tensors, 300 MB/s")
    assert words("sound") != words("damaged")
