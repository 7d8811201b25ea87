"""Tables of what each rank of a pipeline does in which order: written, read, checked and played through.

    F  the forward of a micro-batch through a stage       B  its whole backward
    I  the part of the backward that gives the gradient of what the stage took, which the stage before waits for
    W  the rest of it, the gradients of the stage's weights: it may come later, where a rank would wait

A table is an order for each rank; when an action begins follows from what it waits for, and from how long the others
take (`simulate`). The same tables are run by `training.parallel.schedule_runtime`. Loads no torch, so a plan is checked
at once.

The notation is that of torch.distributed.pipelining, "compute only": CSV with a row for each rank and a cell such as
`0F0`, `1I2`, `1W2` or `0B3` for each slot (stage, kind, micro-batch), empty where the rank waits.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tangram.errors import UserError

Kind = Literal["F", "B", "I", "W"]

_CELL = re.compile(r"(\d{1,5})([FBIW])(\d{1,5})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class Action:
    """What a stage does with a micro-batch."""

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """For each rank of a pipeline what it does, in order."""

    rows: tuple[Row, ...]
    rank_of: tuple[int, ...]
    """The rank that has each stage."""
    micros: int
    """How many micro-batches there are."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has."""
        return tuple(stage for stage, its in enumerate(self.rank_of) if its == rank)

    @property
    def splits(self) -> bool:
        """Whether a backward is done in two parts."""
        return any(action.kind == "W" for row in self.rows for action in row)


# ------------------------------------------------------------ written and read


def text(schedule: Schedule) -> str:
    """The table as CSV, with a slot of one length for each of F, I, W, and two for B."""
    rows: list[list[str]] = []
    for row in played(schedule):
        cells: list[str] = []
        for began, action in row:
            cells += [""] * (round(began) - len(cells))
            cells += [str(action), *([""] if action.kind == "B" else [])]
        rows.append(cells)
    return "".join(f"{','.join(cells)}\n" for cells in rows)


def parse(table: str, where: str) -> Schedule:
    """Read a table; `where` it is from, for what is said of it. Raises UserError for one that cannot run."""
    rows: list[Row] = []
    for number, cells in enumerate(csv.reader(io.StringIO(table))):
        rows.append(tuple(action for at, cell in enumerate(cells) for action in _cell(cell, number, at, where)))
    actions = [action for row in rows for action in row]
    if not actions:
        raise UserError(f"{where} has no actions: give a row for each rank, with cells as 0F0 and 0B0")
    found = Schedule(tuple(rows), tuple(_rank_of(rows, where)), max(action.micro for action in actions) + 1)
    if wrong := check(found):
        raise UserError(f"{where}: {wrong[0]}")
    return found


def _cell(cell: str, rank: int, slot: int, where: str) -> Iterator[Action]:
    pair = _PAIR.fullmatch(cell.strip())
    for word in pair[1].split(";") if pair else [cell.strip()] * bool(cell.strip()):
        if not (found := _CELL.fullmatch(word.strip())):
            raise UserError(
                f'{where}: "{cell.strip()}", slot {slot} of rank {rank}, is no action: write stage, F, B, I or W, and '
                "micro-batch, as in 0F0"
            )
        yield Action(int(found[1]), cast(Kind, found[2]), int(found[3]))


def _rank_of(rows: Sequence[Row], where: str) -> Iterator[int]:
    """The rank of each stage: that of its first forward."""
    first: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            first.setdefault(action.stage, rank)
    for stage in range(max(first) + 1):
        if stage not in first:
            raise UserError(f"{where} has no action of stage {stage}, but of stage {max(first)}: number stages from 0")
        yield first[stage]


# ------------------------------------------------------------ checked


def check(schedule: Schedule, *, backward: bool = True) -> list[str]:
    """What is wrong with a table, a sentence each; without `backward` there has to be none, as in an evaluation."""
    wrong: list[str] = []
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for slot, action in enumerate(row):
            place = f"{action}, action {slot} of rank {rank},"
            if not (action.stage < schedule.stages and action.micro < schedule.micros):
                wrong.append(
                    f"{place} is of no stage or micro-batch: there are {schedule.stages} and {schedule.micros}"
                )
            elif schedule.rank_of[action.stage] != rank:
                wrong.append(f"{place} is of a stage that rank {schedule.rank_of[action.stage]} has: move it there")
            elif action in seen:
                wrong.append(f"{place} is there twice: leave one out")
            seen[action] = (rank, slot)
    for stage in range(schedule.stages):
        for micro in range(schedule.micros):
            kinds = "".join(kind for kind in ("F", "B", "I", "W") if Action(stage, kind, micro) in seen)
            if kinds not in (("FB", "FIW") if backward else ("F",)):
                wanted = "F and B, or F, I and W" if backward else "F alone"
                wrong.append(
                    f"stage {stage} has {' and '.join(kinds) or 'nothing'} of micro-batch {micro}: give it {wanted}"
                )
    return wrong or _stuck(schedule)


def _stuck(schedule: Schedule) -> list[str]:
    """The first action that never begins, because each waits for another."""
    began = played(schedule)
    gives = _backwards(schedule)
    done = {action for row in began for _, action in row}
    for rank, (row, its) in enumerate(zip(schedule.rows, began, strict=True)):
        if len(its) < len(row):
            action = row[len(its)]
            missing = next(one for one in _waits_for(action, gives) if one not in done)
            where = schedule.rank_of[missing.stage]
            order = "which comes later" if where == rank else f"which rank {where} never comes to"
            return [f"{action}, action {len(its)} of rank {rank}, waits for {missing}, {order}: change the order"]
    return []


def _backwards(schedule: Schedule) -> dict[tuple[int, int], Action]:
    """By stage and micro-batch, what gives the gradient of what the stage took."""
    return {(one.stage, one.micro): one for row in schedule.rows for one in row if one.kind in ("B", "I")}


def _waits_for(action: Action, gives: Mapping[tuple[int, int], Action]) -> Iterator[Action]:
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        if stage:
            yield Action(stage - 1, "F", micro)
    elif action.kind == "W":
        yield Action(stage, "I", micro)
    else:
        yield Action(stage, "F", micro)
        if (stage + 1, micro) in gives:
            yield gives[stage + 1, micro]


# ------------------------------------------------------------ played through


def slots(action: Action) -> float:
    """One for each of F, I and W, so two for B."""
    return 2.0 if action.kind == "B" else 1.0


def played(schedule: Schedule, seconds: Callable[[Action], float] = slots) -> list[list[tuple[float, Action]]]:
    """For each rank when each action begins, as far as it comes; what moves between ranks takes no time."""
    rows = ran(schedule, lambda action, start: start + seconds(action))
    return [[(start, action) for start, _, action in row] for row in rows]


def ran(
    schedule: Schedule, until: Callable[[Action, float], float], sent: float = 0.0
) -> list[list[tuple[float, float, Action]]]:
    """For each rank when each action begins and ends, as far as it comes. `until`: when an action ends that can begin
    from some time on, called for each rank's in their order; `sent`: seconds from rank to rank."""
    gives = _backwards(schedule)
    ended: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    began: list[list[tuple[float, float, Action]]] = [[] for _ in schedule.rows]

    def ready(one: Action, rank: int) -> float | None:
        at = ended.get(one)
        return at if at is None or schedule.rank_of[one.stage] == rank else at + sent

    goes_on = True
    while goes_on:
        goes_on = False
        for rank, row in enumerate(schedule.rows):
            for action in row[len(began[rank]) :]:
                needs = [ready(one, rank) for one in _waits_for(action, gives)]
                if None in needs:
                    break
                start = max([free[rank], *(at for at in needs if at is not None)])
                free[rank] = ended[action] = until(action, start)
                began[rank].append((start, free[rank], action))
                goes_on = True
    return began


_KEEPS: Mapping[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
"""How many micro-batches more a stage keeps after an action. From the forward on until the backward is done, of one in
two parts until the second."""


@dataclass(frozen=True)
class SimulatedStep:
    """A step as it would run."""

    seconds: float
    """From the first action to the end of the last."""
    bubble: float
    """The share of the ranks' time in which they wait."""
    alive: tuple[int, ...]
    """For each stage the most micro-batches whose activations it keeps at a time."""


def simulate(schedule: Schedule, seconds: Callable[[Action], float] = slots) -> SimulatedStep:
    """Play a table that is right (`check`) through, with what each action takes, B as I and W together."""
    began = played(schedule, seconds)
    total = max(at + seconds(action) for row in began for at, action in row)
    busy = sum(seconds(action) for row in schedule.rows for action in row)
    alive = [0] * schedule.stages
    now = [0] * schedule.stages
    for row in schedule.rows:
        for action in row:
            now[action.stage] += _KEEPS[action.kind]
            alive[action.stage] = max(alive[action.stage], now[action.stage])
    return SimulatedStep(total, 1 - busy / (schedule.ranks * total) if total else 0.0, tuple(alive))


def kept(schedule: Schedule, sizes: Sequence[float]) -> list[float]:
    """The most that each rank keeps at a time, of stages that keep these sizes of a micro-batch."""
    most: list[float] = []
    for row in schedule.rows:
        now = peak = 0.0
        for action in row:
            now += _KEEPS[action.kind] * sizes[action.stage]
            peak = max(peak, now)
        most.append(peak)
    return most
