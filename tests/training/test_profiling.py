"""`--profile` leaves files and says nothing."""

import subprocess
import sys
from pathlib import Path

STEPS = """
import sys
from pathlib import Path
import torch
from tangram.training.observe.profiling import profiled
before = torch.ones(1000)
with profiled(Path(sys.argv[1]), 3, torch.device("cpu")) as step:
    for _ in range(8):
        before = torch.ones(2) + 1
        step()
        before = torch.ones(1000)
"""


def test_files_and_no_noise(tmp_path: Path) -> None:
    """The profiler of torch writes to stderr, under the live line, unless it is told not to."""
    ran = subprocess.run([sys.executable, "-c", STEPS, tmp_path], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
    assert "aten::add" in (tmp_path / "operators-rank3.txt").read_text()
    assert (tmp_path / "trace-rank3.json").is_file()
