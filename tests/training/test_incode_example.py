"""The example of layouts in a model's own code, as a user runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_says_what_it_should() -> None:
    ran = subprocess.run([sys.executable, ROOT / "examples" / "in_code.py"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "h lies as _=4 _=16 _=128/tp and y as _=4 _=16 _=32 sum:tp",
        "both give the same gradients: True",
        "the loss of one process, on every rank and in both ways: True",
    ]
