"""A plain loop over torch's own DDP, as people write it, under `tracing.record`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tangram import tracing
from tangram.tracing.files.format import Phase
from tangram.tracing.files.ring import TraceFiles
from tangram.tracing.recorder import Recorder
from tangram.tracing.settings import TraceSettings, fresh_folder
from tangram.tracing.show.report import report
from tangram.tracing.watch import Watch
from tests.ranks import start

RUN = b"r" * 16
STEPS, LATE, SECONDS = 16, 6, 0.06


def _loop(rank: int, folder: Path, compiled: bool) -> None:
    """Rank 1 is slow from a step on. The end is one by hand: torch may hang where it frees DDP's reducer."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with tracing.record(folder / "trace", mesh="dp=2") as recording:
        dist.init_process_group(recording.backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=None if compiled else 0.02
        )
        run = torch.compile(model, backend="eager") if compiled else model
        optimiser = torch.optim.AdamW(model.parameters())
        for step in range(1, STEPS + 1):
            recording.step(step)
            if rank == 1 and step >= LATE and not compiled:
                time.sleep(SECONDS)
            run(torch.ones(4, 64)).mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        recording.step(STEPS + 1)
        dist.barrier()
    os._exit(0)


def test_a_slow_rank_of_ddp_is_named_and_others_are_seen_to_wait(tmp_path: Path) -> None:
    """DDP waits for futures, in C++: no wait was seen, and so a rank that waited had been at work itself."""
    start(_loop, tmp_path, False, ranks=2)
    (slow,) = report(tmp_path / "trace").findings
    assert (slow.kind, slow.ranks) == ("slow", (1,))
    assert "since step 6" in slow.text


@pytest.mark.slow
def test_a_compiled_ddp_model_trains_under_record(tmp_path: Path) -> None:
    start(_loop, tmp_path, True, ranks=2)
    assert not report(tmp_path / "trace").findings


def _uneven(rank: int, folder: Path) -> None:
    """A log every fourth step, a smaller last batch, a call after the loop."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with tracing.record(folder / "trace", mesh="dp=2") as recording:
        dist.init_process_group(recording.backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
        for step in range(1, STEPS + 1):
            recording.step(step)
            dist.all_reduce(torch.ones(3 if step % 8 == 0 else 4))
            if step % 4 == 0:
                dist.all_reduce(torch.ones(1))
        dist.barrier()
    os._exit(0)


def test_what_all_ranks_do_alike_is_no_deviation_of_learned_steps(tmp_path: Path) -> None:
    start(_uneven, tmp_path, ranks=2)
    assert all(trace.deviations for trace in tracing.read(tmp_path / "trace"))
    assert not report(tmp_path / "trace").findings


def _step(recorder: Recorder, step: int, sizes: Sequence[int]) -> None:
    recorder.step(step)
    recorder.phase(Phase.FORWARD)
    for size in sizes:
        number = recorder.enter(0, 0, size, torch.float32, -1)
        recorder.waited(number, 0, 0, recorder.waits(number))


@pytest.mark.parametrize(("second", "odd"), [([64, 8], ()), ([64], (0,))])
def test_a_deviation_is_told_of_once_it_is_known_that_peers_do_not_share_it(
    second: list[int], odd: tuple[int, ...], tmp_path: Path
) -> None:
    """Rank 0 calls more than is due in step 6; until rank 1 has come so far nobody knows whether it does so, too."""
    folder = fresh_folder(tmp_path)
    ranks = [Recorder(TraceFiles(folder, RUN, i, 2), {"mesh": "dp=2", "stages": []}) for i in range(2)]
    assert [one.group("0", "dp", [0, 1]) for one in ranks] == [0, 0]
    watch = Watch(TraceSettings(folder, RUN, "dp=2"))
    for step in range(1, 6):
        for one in ranks:
            _step(one, step, [64])
    for one, sizes in zip(ranks, ([64, 8], second), strict=True):
        assert watch.look()[0] == []
        _step(one, 6, sizes)
    assert watch.look()[0] == []
    for one in ranks:
        _step(one, 7, [64])
    assert [(one.kind, one.ranks, one.step) for one in watch.look()[0]] == ([("extra", odd, 6)] if odd else [])
    assert watch.look()[0] == []
