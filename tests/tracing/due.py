"""Ranks that train the oracle's cases for some steps, each call held against the plan, with a mistake or without."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from tangram.relayout.collectives import one_collective
from tangram.tracing.files.format import Phase
from tangram.tracing.groups import axes_of_ranks
from tangram.tracing.planned import PlannedCalls, planned_words
from tangram.tracing.reading import read_rank
from tangram.tracing.recorder import Recorder
from tangram.tracing.settings import TraceSettings
from tangram.tracing.weights import sums_of
from tangram.training.mesh import tensor_parallel
from tangram.training.parallel import data_parallel, fsdp
from tangram.training.parallel.due_calls import due_calls, due_in_forwards
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import weight_groups
from tangram.training.state.checkpointer import Checkpointer
from tangram.training.step import loop
from tests.training.oracle.cases import Case
from tests.training.oracle.plain import corpus_of
from tests.training.oracle.ranks import Setting, built, dealt, swapped, world_of

STEPS = 3


@dataclass(frozen=True)
class Held:
    """What came of a case on a rank."""

    planned: tuple[str, ...]
    deviations: tuple[str, ...]
    weights: Mapping[tuple[object, ...], int]
    """By layer and place among the ranks that hold unlike parts of it: the sum of its bits at the end."""


@dataclass(frozen=True)
class Work:
    """Of one start of ranks."""

    cases: Mapping[str, Case]
    mistakes: Mapping[str, tuple[str, str]]
    """By name: the case, and which of `MISTAKES`."""
    folder: Path


def hold(rank: Rank, work: Work) -> dict[str, Held]:
    """The task of a rank."""
    found = {name: held(rank, case, work.folder) for name, case in work.cases.items()}
    for name, (case, mistake) in work.mistakes.items():
        with MISTAKES[mistake](rank):
            found[name] = held(rank, work.cases[case], work.folder)
    return found


def held(rank: Rank, case: Case, folder: Path) -> Held:
    """Train a case for some steps."""
    trace = rank.trace
    assert isinstance(trace, Recorder)
    setting = Setting(case.plan, world_of(case.plan, rank))
    ring = folder / "trace" / f"rank-{rank.index:05d}.ring"
    so_far = read_rank(ring)
    before, mesh = len(so_far.deviations), case.plan.mesh
    # One start of ranks serves many meshes, so groups are called by the axes of each anew.
    for number, group in so_far.groups.items():
        cast(Any, trace)._groups[number] = axes_of_ranks(mesh, group["ranks"]) or str(group["name"])
    with dealt(case):
        model, state = built(case, setting, case.plan.seed)
        planned: PlannedCalls = due_calls(model)
        trace.label(part.module for part in model.parts)
        program = due_in_forwards(model)
        trace.expect(planned, program)
        groups = weight_groups(model)
        trace.weights(groups)
        plan = model.plan.model_copy(update={"run": model.plan.run.model_copy(update={"steps": STEPS})})
        checkpointer = Checkpointer(folder / "checkpoints", setting.plan, setting.world)
        hooks = loop.Hooks(lambda event: None, lambda: False, lambda: None, save_every=0)
        model = replace(model, trace=trace, plan=plan)
        loop.train_steps(model, state, corpus_of(plan.data), checkpointer, hooks)
        checkpointer.close()
    trace.step(1)  # ends the last one
    trace.phase(loop.Phase.OTHER)
    dist.barrier()
    texts = [str(one["text"]) for one in read_rank(ring).deviations[before:]]
    at = model.world.mesh.coords(rank.index)
    sums = zip(groups, sums_of(groups), strict=True)
    weights = {(group.layer, *(at[axis] for axis in group.axes)): total for group, total in sums}
    return Held(tuple(planned_words(planned, program.axes)), tuple(texts), weights)


def all_held(work: Work, world: int) -> list[dict[str, Held]]:
    """Of each rank, by case."""
    settings = TraceSettings(work.folder / "trace", mesh="", hang_seconds=60, digest_steps=1)
    return run_ranks(hold, work, world=world, on_event=lambda event: None, device="cpu", trace=settings)


# ------------------------------------------------------------ mistakes that all ranks make alike


@contextlib.contextmanager
def _a_layer_outside_of_fsdp(rank: Rank) -> Iterator[None]:
    real: Callable[..., Any] = fsdp.shard

    def shard(model: Any, blocks: Any, *more: Any) -> Any:
        return real(model, [*blocks][1:], *more)

    from tangram.training.parallel import apply

    with swapped(apply, "shard", shard):
        yield


@contextlib.contextmanager
def _a_bucket_not_summed(rank: Rank) -> Iterator[None]:
    real = data_parallel.Bucket.start

    def start(self: data_parallel.Bucket, group: dist.ProcessGroup) -> None:
        single = [dist.new_group([one]) for one in range(rank.world)] if len(self.parameters) > 1 else []
        real(self, cast(dist.ProcessGroup, single[rank.index]) if single else group)

    with swapped(data_parallel.Bucket, "start", start):
        yield


@contextlib.contextmanager
def _reduced_each_time(rank: Rank) -> Iterator[None]:
    def before(self: data_parallel.Replicas, last: bool) -> None:
        cast(Any, self)._sums = True

    with swapped(data_parallel.Replicas, "before", before):
        yield


@contextlib.contextmanager
def _norms_of_a_rank_alone(rank: Rank) -> Iterator[None]:
    def alone(group: Any, values: Any) -> list[float]:
        return cast("list[float]", values.tolist())

    with swapped(loop, "sum_over", alone):
        yield


@contextlib.contextmanager
def _not_moved(rank: Rank, backward: bool) -> Iterator[None]:
    """The second sum over tp of every forward, or of every backward, is left out on all ranks: each takes its own."""
    real, count = one_collective._moved, {"at": 0}  # pyright: ignore[reportPrivateUsage]
    forward = tensor_parallel.DerivedModel._begin  # pyright: ignore[reportPrivateUsage]

    def moved(x: Tensor, source: Any, target: Any, group: dist.ProcessGroup) -> Tensor:
        within = cast(Any, rank.trace)._phase is (Phase.BACKWARD if backward else Phase.FORWARD)
        count["at"] += within and source.kind == "sum"
        left = within and source.kind == "sum" and count["at"] == 2
        return real(x, one_collective.RankPlacement("several") if left else source, target, group)

    def begin(self: Any, *given: Any) -> Any:
        count["at"] = 0
        return forward(self, *given)

    with swapped(one_collective, "_moved", moved), swapped(tensor_parallel.DerivedModel, "_begin", begin):
        yield


MISTAKES: Mapping[str, Callable[[Rank], contextlib.AbstractContextManager[None]]] = {
    "a layer outside of FSDP": _a_layer_outside_of_fsdp,
    "a bucket not summed": _a_bucket_not_summed,
    "reduced each time": _reduced_each_time,
    "norms of a rank alone": _norms_of_a_rank_alone,
    "not moved in the forward": lambda rank: _not_moved(rank, backward=False),
    "not moved in the backward": lambda rank: _not_moved(rank, backward=True),
}
