"""The README's shape, and the tutorial as somebody types it: its blocks in their order, in an empty folder."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.doc_blocks import ROOT, blocks_of, commands_of
from tests.house.test_doc_blocks import expected
from tests.house.test_front_door import FACES

README = ROOT / "README.md"
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("[0-9]-*.md"))


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 120] == []


def test_the_page_of_the_api_has_every_face() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rooms = (*FACES[1:], "training.data")
    assert [room for room in rooms if f"\n::: tangram.{room}\n" not in page] == []


def typed(page: Path, folder: Path) -> list[str]:
    """Do what a page says, in a folder; what does not print as shown, as sentences.

    A block whose first line is `# NAME.toml` is a file; `$ tangram ...` is run; Python runs, each page's blocks in one
    program; an `output` block shows what the Python before it prints.
    """
    wrong: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    for block in blocks_of(page):
        if block.language == "toml":
            (folder / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
        elif block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.chdir(folder):
                exec(compile(block.text, str(block), "exec"), names)  # noqa: S102  the page's own
            printed = out.getvalue()
        elif block.language == "output":
            wrong += [] if expected(block.text, printed) else [f"{block} shows something else than {printed}"]
        for command in commands_of(block) if not block.language else ():
            call = [sys.executable, "-m", "tangram", *command.arguments]
            ran = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if ran.returncode or not expected(command.shown, ran.stdout):
                wrong.append(f"{block} shows something else than {ran.stdout}{ran.stderr}")
    return wrong


def test_the_tutorial_has_six_pages() -> None:
    assert [page.name[0] for page in TUTORIAL] == ["1", "2", "3", "4", "5", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages: later ones go on with what the first have made."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.mark.slow
def test_the_pages_are_true_as_typed(folder: Path) -> None:
    assert [mistake for page in TUTORIAL for mistake in typed(page, folder)] == []


def test_another_output_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```output\n2\n```\n\n```\n$ tangram --version\n0\n```\n")
    one, other = typed(page, tmp_path)
    assert "page.md:5" in one
    assert "page.md:9" in other
