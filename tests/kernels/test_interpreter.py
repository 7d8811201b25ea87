"""Triton is loaded under its interpreter, whatever pytest is told to look at first."""

import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def test_tritons_own_functions_run_under_its_interpreter() -> None:
    from triton.language import standard

    assert type(standard.sum).__name__ == "InterpretedFunction"


def test_a_conftest_that_loads_triton_may_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest loads the conftest.py of folders that it is told of before it is configured."""
    monkeypatch.delenv("TRITON_INTERPRET")
    root = Path(__file__).parents[2]
    own = f"tests/kernels/test_interpreter.py::{test_tritons_own_functions_run_under_its_interpreter.__name__}"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*words, "tests/training/conftest.py", own], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "1 passed" in ran.stdout
