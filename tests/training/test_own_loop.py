"""The example of a training loop of one's own, run as its docstring says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(folder: Path) -> list[float]:
    """The losses that it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "examples/own_loop.py", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


def test_it_learns_saves_and_goes_on_where_it_was(tmp_path: Path) -> None:
    losses = run(tmp_path)
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000040", "step-00000060"]
    shutil.rmtree(tmp_path / "step-00000060")
    assert run(tmp_path) == losses[2:]  # from step 40 on, the same numbers
