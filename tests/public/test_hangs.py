"""Loops that hang or die as people have reported, over gloo under `tracing.record`: the report names the culprit.

pytorch/pytorch#196968             a rank raises while its peer waits, and is missing from what is dumped
alan-turing-institute/autocast#386 one rank alone saves, which ends in a barrier that pairs with one of the others
microsoft/PyMarlin#80              a rank has fewer batches than the others
k2-fsa/snowfall#152                the same under DDP, whose reduction waits in the backward
huggingface/accelerate#157         one rank alone evaluates, and its calls pair with those of the others' training
pytorch/torchtitan#1618            under FSDP ranks have different numbers of validation batches
huggingface/trl#7310               ranks gather the metrics that each has seen, and one has seen another
NVIDIA/Megatron-LM#4910            of a save some ranks gather where others add up
modelscope/ms-swift#9188           the first rank goes on saving alone, and then gathers from ranks that have ended
bo-ke/llm-internal-medicine#45     a rank without metrics returns before it gathers those of all
JIA-Lab-research/LongLoRA#45       the first rank prepares the data for longer than the others wait for it
hiyouga/LlamaFactory#2424          the same, and whoever started the ranks ends it once the others have failed
pytorch/pytorch#97191              a rank adds up more elements than the others
NVIDIA/apex#18                     ranks go through the types of their gradients in unlike orders
sgl-project/sglang#33289           ranks decide by themselves: some gather, and one broadcasts
meta-pytorch/torchrec#4149         ranks call over two groups in unlike orders
huggingface/transformers#48569     the first rank saves alone, and each tensor-parallel weight is gathered for that
intelligent-machine-learning/dlrover#1749 a run that began anew is taken for one that still saves, as the one before did

The loops are written here; torch's own timeout ends them, and the report is asked for afterwards.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tangram import tracing
from tangram.errors import UserError
from tangram.tracing.finding import Finding
from tangram.tracing.show.report import report
from tests.ranks import start_failing

Step = Callable[[int, int], None]
STEPS, ODD = 6, 4
WAITS, PREPARES = 4, 6
"""Seconds."""


def _plain(rank: int, step: int) -> None:
    dist.all_reduce(torch.ones(64))


def raises(rank: int, step: int) -> None:
    if rank == 1 and step == ODD:
        raise ValueError("a bad sample")
    _plain(rank, step)


def killed(rank: int, step: int) -> None:
    if rank == 1 and step == ODD:
        os.kill(os.getpid(), signal.SIGKILL)
    _plain(rank, step)


def saves_alone(rank: int, step: int) -> None:
    _plain(rank, step)
    if rank == 0 and step == ODD:
        dist.barrier()
    dist.barrier()


def fewer(rank: int, step: int) -> None:
    _plain(rank, step)


def evaluates_alone(rank: int, step: int) -> None:
    _plain(rank, step)
    if rank == 2 and step == ODD:
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(8))


def never_alike(rank: int, step: int) -> None:
    """No two steps are equal, so nothing is learned of them."""
    dist.all_reduce(torch.ones(8 + step))
    if not (rank == 1 and step == ODD):
        dist.all_reduce(torch.ones(64 + step))
    dist.all_reduce(torch.ones(256 + step))


def gathers_what_it_has(rank: int, step: int) -> None:
    _plain(rank, step)
    names = ["loss"] if rank or step != ODD else ["format", "loss"]
    for _ in names:
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(1))  # pyright: ignore[reportDeprecated]


def gathers_or_adds(rank: int, step: int) -> None:
    _plain(rank, step)
    if step == ODD and rank == 2:
        dist.all_reduce(torch.ones(8))
    elif step == ODD:
        dist.all_gather(list(torch.empty(3, 8)), torch.ones(8))
    dist.barrier()


def saves_last(rank: int, step: int) -> None:
    _plain(rank, step)
    if rank == 0 and step == STEPS:
        dist.all_gather_object([None] * 3, {"config": 1})


def gathers_unless_empty(rank: int, step: int) -> None:
    _plain(rank, step)
    if rank != 2 or step < ODD:
        dist.all_gather_object([None] * 3, {"norm": 1})


def more_elements(rank: int, step: int) -> None:
    dist.all_reduce(torch.ones(2_000_000 if rank == 0 else 1_000_000))


def types_in_turn(rank: int, step: int) -> None:
    for dtype in (torch.float32, torch.bfloat16)[:: 1 if rank == 2 else -1]:
        dist.all_reduce(torch.ones(4000, dtype=dtype))


def gathers_or_broadcasts(rank: int, step: int) -> None:
    if rank == 1 and step == ODD:
        dist.broadcast(torch.ones(64), 0)
    else:
        dist.all_gather(list(torch.empty(3, 64)), torch.ones(64))


def over_two_groups(rank: int) -> Step:
    rows, columns = dist.new_group([0, 1]), dist.new_group([1, 2])

    def step(own: int, number: int) -> None:
        groups = [(rows, (0, 1)), (columns, (1, 2))]
        for group, ranks in groups[:: -1 if own == 1 and number == ODD else 1]:
            if own in ranks:
                dist.all_reduce(torch.ones(8), group=group)

    return step


def prepares(rank: int) -> Step:
    if rank == 0:
        time.sleep(PREPARES)
    dist.barrier()
    return _plain


def prepares_until_ended(rank: int) -> Step:
    if rank == 0:
        time.sleep(PREPARES)
        os.kill(os.getpid(), signal.SIGKILL)
    return prepares(rank)


def fsdp(rank: int) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in (*model, model):
        fully_shard(part)

    def step(own: int, number: int) -> None:
        model(torch.ones(4, 8)).sum().backward()
        if number == ODD:
            with torch.no_grad():
                for _ in range(2 if own == 1 else 3):
                    model(torch.ones(4, 8))

    return step


def tensor_parallel(rank: int) -> Step:
    weight = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (3,)), [Shard(0)])

    def step(own: int, number: int) -> None:
        _plain(own, number)
        if own == 0 and number == ODD:
            weight.full_tensor()

    return step


def ddp(rank: int) -> Step:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))

    def step(own: int, number: int) -> None:
        model(torch.ones(4, 8)).sum().backward()

    return step


MADE = (ddp, fsdp, tensor_parallel, over_two_groups, prepares, prepares_until_ended)
"""What makes its step once there are ranks."""


def run(rank: int, world: int, folder: Path, what: Any) -> None:
    """The loop of a rank; its process ends at once, as torch may hang where it frees what has failed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    with suppress(RuntimeError, ValueError), tracing.record(folder / "trace", mesh=f"dp={world}") as recording:
        store = f"file://{folder}/store"
        limit = timedelta(seconds=WAITS)
        dist.init_process_group(recording.backend, init_method=store, rank=rank, world_size=world, timeout=limit)
        step: Step = what(rank) if what in MADE else what
        for number in range(1, (ODD if rank == 1 and what in (fewer, ddp) else STEPS) + 1):
            recording.step(number)
            step(rank, number)
    os._exit(0)


def found(folder: Path, what: Any, world: int = 3) -> list[Finding]:
    """What the report on such a run says, but for who is slow."""
    start_failing(run, world, folder, what, ranks=world)
    return [one for one in report(folder / "trace").findings if one.kind != "slow"]


def test_a_rank_that_raises_while_others_wait_is_named_with_the_error(tmp_path: Path) -> None:
    """pytorch/pytorch#196968"""
    (one,) = found(tmp_path, raises)
    assert (one.kind, one.ranks, one.step) == ("absent", (1,), ODD)
    assert "has failed of ValueError" in one.text


def test_a_rank_that_was_killed_is_named_once_the_run_is_over(tmp_path: Path) -> None:
    (one,) = found(tmp_path, killed)
    assert (one.kind, one.ranks, one.step) == ("died", (1,), ODD)


@pytest.mark.parametrize(("what", "odd"), [(saves_alone, 0), (evaluates_alone, 2)])
def test_a_rank_that_alone_calls_a_collective_is_named(what: Step, odd: int, tmp_path: Path) -> None:
    """alan-turing-institute/autocast#386, huggingface/accelerate#157"""
    first = found(tmp_path, what)[0]
    assert (first.ranks, first.step) == ((odd,), ODD)
    assert first.kind in ("extra", "unlike", "mis-sized")


@pytest.mark.parametrize("what", [fewer, ddp], ids=["own", "ddp"])
def test_a_rank_with_fewer_batches_is_named(what: Any, tmp_path: Path) -> None:
    """microsoft/PyMarlin#80, k2-fsa/snowfall#152"""
    first = found(tmp_path, what)[0]
    assert (first.kind, first.ranks) == ("absent", (1,))
    assert f"has come to its end after step {ODD}" in first.text


@pytest.mark.parametrize("world", [3, 2])
def test_a_skipped_call_of_steps_that_are_never_alike_is_named_by_its_line(world: int, tmp_path: Path) -> None:
    first = found(tmp_path, never_alike, world)[0]
    assert (first.kind, first.ranks, first.step) == ("skipped", (1,), ODD)
    assert first.line == f"public/test_hangs.py:{_line('dist.all_reduce(torch.ones(64 + step))')}"


def _line(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(("what", "odd", "kind"), [(gathers_what_it_has, 0, "extra"), (saves_last, 0, "extra")])
def test_a_rank_that_gathers_alone_is_named_with_its_line(what: Step, odd: int, kind: str, tmp_path: Path) -> None:
    """huggingface/trl#7310, of which torch calls the function by a deprecated name; modelscope/ms-swift#9188"""
    first = found(tmp_path, what)[0]
    assert (first.kind, first.ranks, first.step) == (kind, (odd,), ODD if what is gathers_what_it_has else STEPS)
    assert "public/test_hangs.py:" in first.text


def test_a_rank_that_saves_tensor_parallel_weights_alone_is_named(tmp_path: Path) -> None:
    """huggingface/transformers#48569"""
    first = found(tmp_path, tensor_parallel)[0]
    assert (first.kind, first.ranks, first.step) == ("extra", (0,), ODD)
    assert f"all-gather over dp (public/test_hangs.py:{_line('weight.full_tensor()')})" in first.text


def _dies_in_a_save(rank: int, world: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    with tracing.record(folder / "trace", mesh=f"dp={world}") as recording:
        recording.step(ODD)
        recording.trace.phase(tracing.Phase.CHECKPOINT)
        os._exit(0)


def test_a_save_in_which_a_run_died_says_nothing_of_the_next_one(tmp_path: Path) -> None:
    """intelligent-machine-learning/dlrover#1749. Nor do ranks that the next one does not have."""
    start_failing(_dies_in_a_save, 3, tmp_path, ranks=3)
    assert found(tmp_path, _plain) == []
    (tmp_path / "store").unlink(missing_ok=True)
    with pytest.raises(UserError, match="has traces of 2 runs, as of ranks"):
        found(tmp_path, _plain, world=2)


def test_a_rank_without_metrics_is_named(tmp_path: Path) -> None:
    """bo-ke/llm-internal-medicine#45"""
    first = found(tmp_path, gathers_unless_empty)[0]
    assert (first.kind, first.ranks, first.step) == ("skipped", (2,), ODD)


def test_of_two_kinds_of_calls_at_one_place_both_are_told(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#4910"""
    first, second = found(tmp_path, gathers_or_adds)[:2]
    assert {first.ranks: "all-gather" in first.text, second.ranks: "all-reduce" in second.text} == {
        (0, 1): True,
        (2,): True,
    }


def test_different_numbers_of_validation_batches_under_fsdp_are_seen(tmp_path: Path) -> None:
    """pytorch/torchtitan#1618"""
    first = found(tmp_path, fsdp)[0]
    assert (first.kind, first.ranks, first.step) == ("unlike", (1,), ODD)
    assert "all-gather" in first.text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            prepares,
            r"came to barrier over dp \(.*\) \d\.\d s after the others, who had given up: until then it was in start$",
        ),
        (prepares_until_ended, r"has not joined .* barrier .*: it was in start, and was ended after they had failed$"),
    ],
    ids=["late", "ended"],
)
def test_a_rank_for_whom_others_have_waited_in_vain_is_named(what: Any, words: str, tmp_path: Path) -> None:
    """JIA-Lab-research/LongLoRA#45, hiyouga/LlamaFactory#2424"""
    (one,) = found(tmp_path, what)
    assert (one.kind, one.ranks, one.step, one.axes) == ("absent", (0,), 0, "dp")
    assert re.search(words, one.text), one.text


@pytest.mark.parametrize(
    ("what", "odd", "kind", "step"),
    [
        (more_elements, 0, "unlike", 1),
        (types_in_turn, 2, "unlike", 1),
        (gathers_or_broadcasts, 1, "extra", ODD),
        (over_two_groups, 1, "reordered", ODD),
    ],
)
def test_a_rank_that_calls_otherwise_is_named(what: Any, odd: int, kind: str, step: int, tmp_path: Path) -> None:
    """pytorch/pytorch#97191, NVIDIA/apex#18, sgl-project/sglang#33289, meta-pytorch/torchrec#4149"""
    first = found(tmp_path, what)[0]
    assert (first.kind, first.ranks, first.step) == (kind, (odd,), step)
