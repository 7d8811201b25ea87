"""A test that fails and one that does not; pytest collects them only where it is told to."""

import subprocess
import sys
import time

import pytest

IMPORT = 1.0
"""CPU seconds that whoever imports this pays."""

begin = time.process_time()
while time.process_time() < begin + IMPORT:
    pass


def test_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    print("a table")
    print("error: the table is upside down", file=sys.stderr)
    assert capsys.readouterr().err == ""


ORPHAN = 0.5
"""CPU seconds of a process whose parent has ended."""


def test_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    code = f"import os, time\nif not os.fork():\n    while time.process_time() < {ORPHAN}: pass"
    subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True)  # until its output ends
    print("a secret")
    assert capsys.readouterr().out == "a secret\n"
