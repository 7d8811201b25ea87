"""One start of four ranks, one of two, of three and of one serve all tests: starting processes costs seconds each time.

What the ranks have measured is kept for the processes of pytest-xdist, of which the first does the work. Planted
mistakes have a start of their own, so that they can have another turn.
"""

import fcntl
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
from torch import nn

from tangram.errors import UserError
from tangram.training.data import BYTES, prepare
from tangram.training.parallel.apply import apply
from tangram.training.parallel.model import ParallelModel
from tangram.training.run.launch import Rank, run_ranks
from tests.training.oracle.cases import LONG, STEPS, Case, cases, write_models
from tests.training.oracle.mistakes import COMPARED, MISTAKES
from tests.training.oracle.mistakes_of_shards import REFUSED
from tests.training.oracle.own import own_model
from tests.training.oracle.ranks import Leg, run_case, run_leg, world_of
from tests.training.oracle.trace import Trace
from tests.training.small import write_text

T = TypeVar("T")

LEGS = ((4, "fsdp"), (2, "tensor over two"), (3, "fsdp over three"), (1, "one rank"))
PACE = 10
"""A run goes through these layouts: after so many steps each leg saves, and there the next one goes on."""


@dataclass(frozen=True)
class Work:
    """What one start of some ranks does."""

    cases: Mapping[str, Case]
    leg: Leg | None
    folder: Path


@dataclass(frozen=True)
class Done:
    """What came of it on one rank."""

    traces: Mapping[str, Trace]
    leg: Trace | None


def work(rank: Rank, todo: Work) -> Done:
    """The task of the ranks."""
    return Done(
        traces={name: run_case(rank, case, todo.folder / "cases") for name, case in todo.cases.items()},
        leg=None if todo.leg is None else run_leg(rank, todo.leg, leg_folder(todo.folder, rank.world)),
    )


@dataclass(frozen=True)
class Wrong:
    """What came of planted mistakes on one rank."""

    traces: Mapping[str, Trace]
    refusals: Mapping[str, str]


def go_wrong(rank: Rank, folder: Path) -> Wrong:
    """The task of the ranks that make mistakes."""
    everything = cases(folder / "text")
    return Wrong(
        traces={
            name: run_case(rank, everything[mistake.case], folder / "mistakes", mistake)
            for name, mistake in MISTAKES.items()
        },
        refusals=refusals(rank, everything, folder),
    )


def leg_folder(folder: Path, ranks: int) -> Path:
    return folder / f"leg-{ranks}"


def refusals(rank: Rank, everything: Mapping[str, Case], folder: Path) -> dict[str, str]:
    """What Tangram says to models that it must not train; every rank comes to the same end, so none is waited for."""

    def said(make: Callable[[], object]) -> str:
        try:
            make()
        except UserError as error:
            return str(error)
        return "nothing"

    case = everything["own module, values: fsdp"]
    world = world_of(case.plan, rank)

    def half_on_meta() -> ParallelModel:
        model = own_model(0)
        model.head = nn.Linear(12, 257, device="meta")
        return apply(model, case.plan, world)

    return {
        "other values": said(lambda: apply(own_model(rank.index // 3), case.plan, world)),
        "half on meta": said(half_on_meta),
        "whole over the update": said(lambda: run_case(rank, everything[REFUSED.case], folder / "whole", REFUSED)),
        "gradients compared": said(lambda: run_case(rank, everything[COMPARED.case], folder / "compared", COMPARED)),
    }


@dataclass(frozen=True)
class Measured:
    """What all ranks have measured, by the number of ranks that were started."""

    folder: Path
    done: Mapping[int, list[Done]]

    def traces(self, case: str) -> list[Trace]:
        """Those of all ranks."""
        return next([rank.traces[case] for rank in ranks] for ranks in self.done.values() if case in ranks[0].traces)


def measure(folder: Path, *, slow: bool = False) -> Measured:
    """Run all that the tests look at; `slow`: the legs for long, and the one case that they are compared with."""
    prepared(folder)
    everything = cases(folder / "text", slow=slow)
    if slow:
        everything["fsdp"] = replace(everything["fsdp"], until=STEPS)  # as far as the last leg goes
    wanted = {"fsdp"} if slow else everything.keys()
    done: dict[int, list[Done]] = {}
    start: Path | None = None
    for place, (ranks, leg) in enumerate(LEGS):
        begun, save_at = place * PACE, (place + 1) * PACE
        todo = Work(
            cases={name: case for name, case in everything.items() if case.ranks == ranks and name in wanted},
            leg=Leg(everything[leg], start, save_at, begun + (LONG if slow else 2 * PACE)),
            folder=folder,
        )
        done[ranks] = run_ranks(work, todo, world=ranks, on_event=print, device="cpu")
        start = leg_folder(folder, ranks) / f"step-{save_at:08}"
    return Measured(folder, done)


@dataclass(frozen=True)
class Planted:
    """What four ranks have measured of planted mistakes."""

    folder: Path
    done: list[Wrong]


def measure_mistakes(folder: Path) -> Planted:
    """Run every case in which a mistake is planted, with that."""
    prepared(folder)
    return Planted(folder, run_ranks(go_wrong, folder, world=4, on_event=print, device="cpu"))


def measure_one(folder: Path, name: str) -> tuple[Case, list[Trace]]:
    """One of the slow cases by itself: what all its ranks have measured."""
    prepared(folder)
    case = cases(folder / "text", slow=True)[name]
    todo = Work(cases={name: case}, leg=None, folder=folder)
    done = run_ranks(work, todo, world=case.ranks, on_event=print, device="cpu")
    return case, [rank.traces[name] for rank in done]


def prepared(folder: Path) -> None:
    """The text, its tokens, and the models' configurations."""
    text = write_text(folder / "text")
    write_models(folder)
    prepare(cases(text)["fsdp"].plan.data, BYTES, lambda event: None)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make` gives in a folder of this test run; of several processes that want it, one makes it."""
    base = factory.getbasetemp()
    shared = base.parent if "popen-" in base.name else base
    folder, kept = shared / name, shared / f"{name}.pickle"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            folder.mkdir()
            made = make(folder)
            kept.write_bytes(pickle.dumps(made))
            return made
    return pickle.loads(kept.read_bytes())
