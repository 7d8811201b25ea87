"""The examples of checkpoints without `tangram train`, run as their docstrings say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> list[tuple[int, float]]:
    """The steps and losses that an example prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [
        (int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss (\S+)", done.stdout, re.MULTILINE)
    ]


def test_plain_torch_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    def torchrun(ranks: int) -> list[tuple[int, float]]:
        example = ("examples/checkpoint_plain.py", str(tmp_path / "run"))
        return run("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *example)

    first, second = torchrun(2), torchrun(1)
    assert [step for step, _ in first + second] == [10, 20, 30, 40, 50, 60, 70, 80]
    losses = [loss for _, loss in first + second]
    assert losses == sorted(losses, reverse=True)  # also over the border
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000070", "step-00000080"]


@pytest.mark.slow  # a section of the CI runs it each time: make peers
def test_hugging_faces_trainer_goes_on(tmp_path: Path) -> None:
    ((step, first),) = run("examples/checkpoint_trainer.py", str(tmp_path / "run"))
    ((later, second),) = run("examples/checkpoint_trainer.py", str(tmp_path / "run"))
    assert (step, later) == (20, 40)
    assert second < first
