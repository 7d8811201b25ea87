"""A plain loop over torch's own DDP, as people write it, under `tracing.record`."""

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from tangram import tracing
from tangram.errors import UserError
from tangram.tracing.files.format import Phase
from tangram.tracing.files.ring import TraceFiles
from tangram.tracing.recorder import Recorder
from tangram.tracing.settings import TraceSettings, fresh_folder
from tangram.tracing.show.report import report
from tangram.tracing.watch import Watch
from tests.ranks import start, start_failing

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


def _over_a_mesh(rank: int, folder: Path, sizes: tuple[int, int], mesh: str) -> None:
    """Over both axes of a mesh in each step; the last rank is killed in one."""
    torch.set_num_threads(1)
    world = math.prod(sizes)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    with suppress(RuntimeError), tracing.record(folder / "trace", mesh=mesh) as recording:
        dist.init_process_group(recording.backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
        devices = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for step in range(1, STEPS + 1):
            recording.step(step)
            dist.all_reduce(torch.ones(4), group=devices.get_group("tp"))
            if rank == world - 1 and step == LATE:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(8), group=devices.get_group("dp"))
    os._exit(0)


@pytest.mark.parametrize(("sizes", "mesh"), [((2, 2), ""), ((2, 1), "dp=2 tp=1"), ((2, 1), "")], ids=str)
def test_groups_side_by_side_have_one_name(sizes: tuple[int, int], mesh: str, tmp_path: Path) -> None:
    """Without a mesh, or over an axis of size 1, each had torch's own name: ranks seemed to call other things."""
    start_failing(_over_a_mesh, tmp_path, sizes, mesh, ranks=math.prod(sizes))
    made = report(tmp_path / "trace")
    assert (made.findings[0].kind, made.findings[0].ranks) == ("died", (math.prod(sizes) - 1,)), made.findings
    if sizes == (2, 2):
        assert made.findings[0].axes == "2 ranks in steps of 2"


def _stages(rank: int, folder: Path, mesh: str, killed: bool) -> None:
    """A pipeline of torch's own, whose second stage has more to do."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with suppress(RuntimeError), tracing.record(folder / "trace", mesh=mesh) as recording:
        dist.init_process_group(recording.backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(2 + 10 * rank)])
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda x, y: (x - y).square().mean())
        for step in range(1, STEPS + 1):
            recording.step(step)
            if killed and rank == 1 and step == LATE:
                os.kill(os.getpid(), signal.SIGKILL)
            schedule.step(*([torch.ones(256, 128)] * (rank == 0)), **({"target": torch.ones(256, 128)} if rank else {}))
    os._exit(0)


@pytest.mark.parametrize("mesh", ["pp=2", ""])
@pytest.mark.parametrize("killed", [False, True])
def test_stages_of_a_pipeline_are_not_held_against_each_other(mesh: str, killed: bool, tmp_path: Path) -> None:
    """The one with more layers was slow, and where it had died both were said to call unlike collectives."""
    start_failing(_stages, tmp_path, mesh, killed, ranks=2)
    found = report(tmp_path / "trace").findings
    assert [(one.kind, one.ranks) for one in found] == ([("died", (1,))] if killed else []), found


def _two_groups(rank: int, folder: Path) -> None:
    """As of a program that has another group for its objects; rank 1 does not come to its second call there."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    with suppress(RuntimeError), tracing.record(folder / "trace", mesh="dp=3") as recording:
        store, limit = f"file://{folder}/store", timedelta(seconds=4)
        dist.init_process_group(recording.backend, init_method=store, rank=rank, world_size=3, timeout=limit)
        other = dist.new_group(backend=recording.backend, timeout=limit)
        for step in range(1, STEPS + 1):
            recording.step(step)
            dist.all_reduce(torch.ones(4))
            if step % 4 == 1:
                if rank == 1 and step == 5:
                    raise RuntimeError("a bad sample")
                dist.all_reduce(torch.ones(8), group=other)
    os._exit(0)


def test_a_rank_that_others_wait_for_in_a_second_group_of_the_same_ranks_is_named(tmp_path: Path) -> None:
    """The calls of the first group were counted as some of the second, so that it seemed to have joined."""
    start_failing(_two_groups, tmp_path, ranks=3)
    first = report(tmp_path / "trace").findings[0]
    assert (first.kind, first.ranks, first.step) == ("absent", (1,), 5), first


@pytest.mark.parametrize(
    ("mesh", "words"), [("dp=4", 'the mesh "dp=4" has 4 ranks, and there are 1'), ("dp:4", "dp:4")]
)
def test_a_mesh_that_is_not_this_runs_is_refused(mesh: str, words: str, tmp_path: Path) -> None:
    """Groups were called by axes that they are not of."""
    with pytest.raises(UserError, match=words), tracing.record(tmp_path / "trace", mesh):
        pass
