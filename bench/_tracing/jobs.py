"""A job of 2 to 8 ranks over dp and tp, small, without a model of transformers; one rank does something wrong.

Its step is that of a trainer: a layer's partial sums over tp in the forward, gradients over dp in the backward, one
number over all ranks at the end. `FAULTS` are what can go wrong, by name; each does its harm in one place.
"""

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tangram.tracing.files.format import GRADIENT_NOT_FINITE, LOSS_NOT_FINITE, Phase
from tangram.tracing.weights import WeightGroup
from tangram.training.run.launch import Rank

WIDTH, LAYERS = 32, 3
EVALUATES, SAVES = 5, 7
SLOW = {"slow": "computes", "clock-skew": "computes", "starved": "starved", "slow-data": "waits", "slow-disk": "waits"}
"""Faults of which a rank is slow, and a finding's cause."""
PAUSE, BUSY = 1.6, 0.5
"""Seconds for which a process is stopped that goes on; in "pause-wait" others take the latter before that step's calls,
and it is stopped while it waits for them."""


@dataclass(frozen=True)
class Case:
    """What goes wrong, where."""

    fault: str = ""
    rank: int = 0
    step: int = 0
    layer: int = 0
    steps: int = 14
    seconds: float = 0.03
    """How much slower a slow rank is."""
    varied: bool = False
    """Whether rows are as long as each step needs."""
    compiled: bool = False
    dp: int = 2
    tp: int = 2

    @property
    def blamed(self) -> tuple[int, ...]:
        """Whose fault it is: of a link over dp, of all the ranks on it."""
        link = tuple(range(self.rank % self.tp, self.ranks, self.tp))
        return link if self.fault == "slow-link" else (self.rank,)

    @property
    def ranks(self) -> int:
        """How many."""
        return self.dp * self.tp

    @property
    def mesh(self) -> str:
        """In the notation."""
        return f"dp={self.dp} tp={self.tp}"


class Block(nn.Module):
    """A linear layer whose results ranks of tp add up."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group = nn.Linear(WIDTH, WIDTH), group

    def forward(self, x: Tensor, fault: str = "") -> Tensor:
        if fault == "nan":
            x = x.index_fill(0, torch.tensor(3), math.nan)
        x = self.linear(x)
        if fault == "pause":
            stop_for_a_while(0.0)
        if fault in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "sleep":
            time.sleep(600)
        elif fault == "stuck":  # within one call of C code
            sum(itertools.repeat(0))
        if fault != "skip":
            dist.all_reduce(x, group=self.group)
        if fault == "extra":
            dist.all_reduce(x, group=self.group)
        return x


def stop_for_a_while(after: float) -> None:
    """Have another process stop this one and let it go on, `after` seconds from now; at once it is to stop itself."""
    stop = f"kill -STOP {os.getpid()}; " if after else ""
    subprocess.Popen(["/bin/sh", "-c", f"sleep {after}; {stop}sleep {PAUSE}; kill -CONT {os.getpid()}"])


def _block(group: dist.ProcessGroup, *, compiled: bool) -> Block:
    block = Block(group)
    if compiled:
        block.compile(backend="aot_eager")
    return block


class LateWork(dist.Work):
    """A call over a link that is slow."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        super().__init__()
        self.work, self.seconds = work, seconds

    def wait(self, timeout: timedelta = timedelta(minutes=5)) -> bool:
        """Later than the call itself."""
        done = self.work.wait(timeout)
        time.sleep(self.seconds)
        return done


def slow_down(group: Any, seconds: float) -> None:
    """Have every all-reduce of a recorded group take longer on this rank."""
    real = cast("Callable[..., Any]", type(group).allreduce)

    def allreduce(*given: Any) -> Any:
        recorded = real(group, *given)
        recorded._work = LateWork(recorded._work, seconds)
        return recorded

    group.allreduce = allreduce


def grad_sum(group: dist.ProcessGroup, fault: str, wrong: dist.ProcessGroup) -> None:
    """Over the ranks of dp."""
    grad = torch.zeros(WIDTH, WIDTH + 8 if fault == "size" else WIDTH, dtype=torch.int32 if fault == "dtype" else None)
    if fault == "group":
        dist.all_reduce(grad, group=wrong)
    elif fault != "skip-grad":
        dist.all_reduce(grad, group=group)


def train(rank: Rank, case: Case) -> int:
    """The task of a rank: how many steps it has done."""
    mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(0)
    blocks = [_block(tp, compiled=case.compiled) for _ in range(LAYERS)]
    net = nn.ModuleList(blocks)
    trace = rank.trace
    trace.label([net])
    trace.weights([WeightGroup(str(at), ("tp",), lambda own=one: [*own.parameters()]) for at, one in enumerate(blocks)])
    hogs: list[subprocess.Popen[bytes]] = []
    for step in range(1, case.steps + 1):
        trace.step(step, 8 + step if case.varied else 0)
        mine = rank.index in case.blamed
        if mine and case.fault == "slow-link" and step == case.step:
            slow_down(dp, case.seconds)
        here = case.fault if mine and step == case.step else ""
        slow = case.fault if mine and step >= case.step else ""
        if here == "bit-flip":
            with torch.no_grad():
                blocks[case.layer].linear.weight.view(torch.int32)[3, 5] ^= 1 << 20
        if here == "starved":
            hogs.append(starve())
        if case.fault == "pause-wait" and step == case.step:
            stop_for_a_while(BUSY / 2) if mine else time.sleep(BUSY)
        if slow == "slow-data":
            time.sleep(case.seconds)
        loss = _step(blocks, dp, torch.randn(8 + step * case.varied, WIDTH), case, rank, here, slow)
        if case.fault == "nan" and step >= case.step:  # the gradients of others are sums with it
            trace.not_finite(GRADIENT_NOT_FINITE | (0 if math.isfinite(loss) else LOSS_NOT_FINITE))
        trace.phase(Phase.OTHER)
        if step == EVALUATES:
            trace.phase(Phase.EVALUATION)
            for _ in range(2):
                dist.all_reduce(torch.zeros(3))
        if step == SAVES:
            trace.phase(Phase.CHECKPOINT)
            dist.barrier()
            time.sleep(0.05)
    for hog in hogs:
        hog.kill()
    return case.steps


def starve() -> subprocess.Popen[bytes]:
    """Have another process take the CPU of this thread, until it is killed or this process is gone."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    hog = subprocess.Popen([sys.executable, "-c", "import os\nup = os.getppid()\nwhile os.getppid() == up: pass"])
    os.nice(19)
    return hog


def _computes(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _step(blocks: list[Block], dp: dist.ProcessGroup, x: Tensor, case: Case, rank: Rank, here: str, slow: str) -> float:
    """A number that both ranks of tp have alike, as a loss is."""
    trace = rank.trace
    trace.phase(Phase.FORWARD)
    if slow == "slow-disk":
        time.sleep(case.seconds)
    if case.fault in SLOW:
        _computes(case.seconds if slow in ("slow", "clock-skew") else case.seconds / 20)
    for at, block in enumerate(blocks):
        x = block(x, here if at == case.layer else "")
    trace.phase(Phase.BACKWARD)
    if here == "reorder":
        dist.all_reduce(torch.zeros(2))
    for at in range(len(blocks)):
        grad_sum(dp, here if at == case.layer else "", blocks[0].group)
    trace.phase(Phase.OPTIMISER)
    if here != "reorder":
        dist.all_reduce(torch.zeros(2))
    return float(x.detach().sum())
