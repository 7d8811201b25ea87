"""Runs that were cut off as people have reported, and what the next start took for the newest state.

tdrussell/diffusion-pipe#159    the power went off: the newest folders are there, and every file in them is empty
KempnerInstitute/KempnerForge#177 a save that was cut off has the highest number, and a resume dies of it each time
KempnerInstitute/KempnerForge#102 what is called the newest was still being written when the one before was removed
"""

import os
import signal
from pathlib import Path

import pytest
import torch

from tangram.checkpoint import About, load, save
from tangram.checkpoint.saving.async_saver import AsyncSaver, Settings
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.store.commits import newest
from tangram.relayout.exchange.peers import Peers
from tangram.training.observe.events import Note
from tangram.training.run.resume import newest_good


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.arange(300.0) + step}}


def same(path: Path, step: int) -> None:
    """Loaded bit for bit."""
    found = {"model": {"w": torch.zeros(300)}}
    load(found, path)
    assert torch.equal(found["model"]["w"], state(step)["model"]["w"])


@pytest.mark.parametrize("emptied", ["*", "*.safetensors", "tangram.json", "manifest.json"])
def test_folders_whose_files_are_empty_are_passed_over_by_name(tmp_path: Path, emptied: str) -> None:
    folder, told = tmp_path / "checkpoint", list[object]()
    for step in (418, 420, 422):
        save(state(step), folder / f"step-{step:08d}", about=About(step=step))
    for step in (420, 422):
        for file in (folder / f"step-{step:08d}").glob(emptied):
            file.write_bytes(b"")
    found = newest_good(tmp_path, told.append)
    assert found is not None
    same(found, 418)
    texts = [note.text for note in told if isinstance(note, Note)]
    assert [any(f"step-00000{step}" in text for text in texts) for step in (420, 422)] == [True, True], texts


def test_a_save_that_was_cut_off_is_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(state(7), folder / "step-00000007", about=About(step=7))
    for left in (".step-00000009-0123456789ab.partial", "step-00000009"):  # ours, and as others leave it
        (folder / left).mkdir()
        (folder / left / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 100)
    found = newest_good(tmp_path, lambda event: None)
    assert found is not None
    assert found == newest(folder)
    same(found, 7)


def test_the_one_before_stays_until_the_next_is_whole(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path / "runs", Peers(), Settings(keep=("last=1",)))
    for step in (1, 2):
        if step == 2:  # its storage stands still
            assert saver.pid is not None
            os.kill(saver.pid, signal.SIGSTOP)
        saver.save(describe(state(step)), About(step))
        saver.fence()
        if step == 2:
            before = newest(tmp_path / "runs")
            assert before is not None
            assert saver.busy
            same(before, 1)
            os.kill(saver.pid or 0, signal.SIGCONT)
        saver.wait()
    assert [one.reason for one in saver.close()] == ["", ""]
    found = newest(tmp_path / "runs")
    assert found is not None
    same(found, 2)
    assert [path.name for path in (tmp_path / "runs").glob("step-*")] == ["step-00000002"]
