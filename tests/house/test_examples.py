"""What the pages show is what happens: every Python example in the documentation is run."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if ">>> " in p.read_text()]


def failures(page: Path) -> int:
    """How many examples of a page print something else than the page says."""
    return doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE).failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_true(page: Path) -> None:
    assert failures(page) == 0


def test_the_pages_with_examples_are_found() -> None:
    assert {"notation.md", "relayout.md", "README.md"} <= {p.name for p in PAGES}


def test_a_false_example_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n>>> 1 + 1\n3\n\n```\n")
    assert failures(page) == 1


def test_the_spine_as_a_user_would_run_it() -> None:
    ran = subprocess.run([sys.executable, ROOT / "examples" / "qkv.py"], capture_output=True, text=True, check=True)
    *ranks, fused, back = ran.stdout.splitlines()
    assert len(ranks) == 8
    assert (fused, back) == ("fused as torch.cat would: True", "back bit for bit: True")
