"""What the ranks do: eight processes are one team of eight, then two teams of four, then four of two.

Starting a process takes seconds, so the same eight serve all cells: when the cells of one size are done, every team
leaves its process group and smaller teams make theirs; so does a team of which a rank has failed. The plain runs are
trained first, one process each, so that every rank compares its own trace and no gradient is sent.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]

from bench._matrix.cells import Name
from tangram.schema.plan import Plan
from tangram.training.data import step_batches
from tangram.training.mesh.world import World, axes_of, make_world
from tangram.training.observe.events import StepDone
from tangram.training.parallel.model import ParallelModel
from tangram.training.run.launch import Rank, first_line
from tangram.training.state.checkpointer import Checkpointer, JobState
from tangram.training.step import loop
from tangram.training.trials.dry_run_counts import Tally
from tests.training.oracle.cases import Case
from tests.training.oracle.compare import findings, worst
from tests.training.oracle.plain import corpus_of, plain_run
from tests.training.oracle.ranks import Keeper, Setting, built
from tests.training.oracle.trace import Trace

WORLD = 8
SIZES = (8, 4, 2)
PATIENCE = timedelta(seconds=90)
"""Of ranks for one that does not come, before the cell has failed."""
LONGER = 4 * PATIENCE
"""Of a rank that has failed, until the others have found that out and come to a new team."""
Plant = Callable[[Setting], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Run:
    """One cell that is run: a plan, perhaps with a mistake planted."""

    name: Name
    plan: Plan
    oracle: str
    """The plain run that it is compared with."""
    until: int
    plant: Plant | None = None
    measured: bool = False
    """Whether its memory is counted, too, in one more step."""


@dataclass(frozen=True)
class Todo:
    """What one start of the processes does."""

    runs: Sequence[Run]
    oracles: Mapping[str, Plan]
    """Plans of which only the job counts, by the name of the plain run."""
    folder: Path


@dataclass(frozen=True)
class Found:
    """What one rank found of a cell."""

    wrong: tuple[str, ...] = ()
    """Sentences of what differs from the plain run by more than the bounds; the error that ended it."""
    apart: float = 0.0
    """The largest relative difference of a loss, a gradient or a value."""
    gradients: frozenset[str] = frozenset()
    """The parameters whose gradients this rank has compared."""
    losses: tuple[float, ...] = ()
    step_s: float = 0.0
    """The median of the steps in which nothing is captured; of rank 0 only."""
    peak: int = 0
    """Bytes in use at the highest moment of a step, if they were counted."""
    failed: bool = False
    ended: float = 0.0
    """When it failed, in seconds since the epoch: others fail because the first has."""


@dataclass
class _Team:
    """The ranks that run a cell together."""

    rank: Rank
    store: Path
    made: int = 0
    worlds: dict[object, World] = field(default_factory=dict[object, World])

    def regroup(self) -> None:
        """Leave the default process group, and make one of this team.

        Nobody may hold the groups of before: only then are connections closed, and who waits for this rank is told.
        """
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which holds meshes, and takes one of the same ranks for the same groups
        self.worlds.clear()
        gc.collect()
        store = dist.FileStore(f"{self.store}-{self.made}", self.rank.world)
        store.set(f"here {self.rank.index}", "")
        store.wait([f"here {index}" for index in range(self.rank.world)], LONGER)
        dist.init_process_group("gloo", store=store, rank=self.rank.index, world_size=self.rank.world, timeout=PATIENCE)
        dist.barrier()  # who has nothing more to do ends, and others may still be at it
        self.made += 1

    def world(self, plan: Plan) -> World:
        """Plans of one mesh whose axes have one meaning share the groups."""
        key = (plan.mesh, axes_of(plan))
        if key not in self.worlds:
            group = dist.group.WORLD
            assert group is not None
            world = self.worlds[key] = make_world(plan, self.rank.index, self.rank.device, group)
            for axis in world.devices.mesh_dim_names or ():
                _set_pg_timeout(PATIENCE, world.devices.get_group(axis))  # a group's own is half an hour
        return self.worlds[key]


def work(rank: Rank, todo: Todo) -> dict[int, Found]:
    """The task of the ranks: what this one found, by the number of the run."""
    # That gathering one parameter over two axes takes two collectives is no news: only what is compared is gathered so.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for place, (name, plan) in enumerate(todo.oracles.items()):
        if place % rank.world == rank.index:
            trace = plain_run(Case(name, plan, until=plan.run.steps))
            (todo.folder / name).write_bytes(pickle.dumps(trace))
    dist.barrier()
    found: dict[int, Found] = {}
    for size in SIZES:
        own = [number for number, run in enumerate(todo.runs) if run.plan.ranks == size]
        if not own:
            continue
        number, mine = divmod(rank.index, size)
        team = _Team(replace(rank, index=mine, world=size), todo.folder / f"team-{size}-{number}")
        team.regroup()
        for place in own[number :: WORLD // size]:
            found[place] = _safely(team, todo.runs[place], todo.folder)
            if mine == 0:
                model, line = todo.runs[place].name
                rank.emit(f"{model}, {line}: {'; '.join(found[place].wrong) or 'the same'}")
    return found


def _safely(team: _Team, run: Run, folder: Path) -> Found:
    """What came of a run; after a failure of any rank the team is a new one."""
    try:
        found = _compared(team, run, folder)
        dist.barrier()
    except Exception as error:  # noqa: BLE001  whatever ends a cell is what the matrix has to say of it
        found = Found(wrong=(first_line(error),), failed=True, ended=time.time())
    if found.failed:  # not above, where the error still holds all that the run has made
        team.regroup()
    return found


def _compared(team: _Team, run: Run, folder: Path) -> Found:
    right: Trace = _until(pickle.loads((folder / run.oracle).read_bytes()), run.until)
    setting = Setting(run.plan, team.world(run.plan))
    keeper = Keeper()
    clock: list[float] = []

    def emit(event: object) -> None:
        keeper.emit(event)
        if isinstance(event, StepDone):
            clock.append(event.seconds)

    def after_step() -> None:
        for tell in setting.stepped:
            tell(state.model)
        keeper.after_step()

    case = Case(" ".join(run.name), run.plan, until=run.until, ranks=team.rank.world)
    last = team.rank.world - 1
    hooks = loop.Hooks(emit, lambda: team.rank.index == last and keeper.step + 1 == run.until, after_step)
    with contextlib.nullcontext() if run.plant is None else run.plant(setting):
        model, state = built(case, setting, run.plan.seed)
        keeper.watch(model)
        checkpointer = Checkpointer(folder / "runs", setting.plan, setting.world)  # saves nothing
        corpus = corpus_of(run.plan.data)
        keeper.losses += loop.train_steps(model, state, corpus, checkpointer, hooks).losses
        checkpointer.close()
    ours = keeper.trace()
    names = {step: frozenset(own) for step, own in ours.values.items()}
    own = _of_names(right, frozenset[str]().union(*names.values()))
    return Found(
        wrong=tuple(findings(ours, own)),
        apart=worst(ours, own),
        gradients=frozenset(next(iter(ours.gradients.values()))),
        losses=ours.losses,
        step_s=_median(clock),
        peak=_peak(replace(model, plan=run.plan), state) if run.measured else 0,
    )


def _median(clock: Sequence[float]) -> float:
    """Seconds of a step: of those before which nothing was captured, as it is after steps 1 and 5."""
    steps = [b - a for step, (a, b) in enumerate(itertools.pairwise(clock), 2) if step not in (2, 6)]
    return statistics.median(steps) if steps else 0.0


def _peak(model: ParallelModel, state: JobState) -> int:
    """Bytes of tensors in use at the highest moment of one more step."""
    plan, world = model.plan, model.world
    batches = step_batches(
        corpus_of(plan.data),
        plan.data,
        seed=plan.seed,
        first_sample=0,
        index=world.data_index,
        size=world.data_size,
        micro_steps=plan.micro_steps,
        device=world.device,
    )
    assert state.optimiser is not None
    state.optimiser.zero_grad()
    with Tally() as tally:
        states = [x for own in state.optimiser.state.values() for x in own.values() if isinstance(x, Tensor)]
        lasting: list[Tensor] = [*state.model.parameters(), *state.model.buffers(), *states]
        tally.watch([x.to_local() if isinstance(x, DTensor) else x for x in lasting])
        tally.begin()
        loop.train_step(model, state.optimiser, batches, lr=1e-3)
        return tally.step.peak


def _until(trace: Trace, until: int) -> Trace:
    """The begin of a longer run."""
    return replace(
        trace,
        losses=trace.losses[:until],
        gradients={step: own for step, own in trace.gradients.items() if step <= until},
        values={step: own for step, own in trace.values.items() if step <= until},
    )


def _of_names(trace: Trace, names: frozenset[str]) -> Trace:
    """What a stage of a pipeline has of it; whether all stages together have all is asked afterwards."""
    return replace(
        trace,
        gradients={step: {n: x for n, x in own.items() if n in names} for step, own in trace.gradients.items()},
        values={step: {n: x for n, x in own.items() if n in names} for step, own in trace.values.items()},
    )
