"""Which units run: what changed, what is new, those whose turn it is, and by nearness to the change what else fits.

The first three always run. What leans on a change runs from the nearest to the farthest until the budget of CPU
seconds is spent; what is left of it goes to the turns before, which nobody ran where several commits came at once.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tests.selection.durations import TURNS, Unit
from tests.selection.graph import Graph, is_test

CHANGED, NEW, TURN, NEAR, EARLIER = "changed", "new", "turn", "near", "earlier turns"


@dataclass(frozen=True)
class Selection:
    """`units`: files and `file::function`, each with the reason. `total`: how many there are in all."""

    units: Mapping[str, str]
    turn: int
    total: int
    seconds: float
    left: int
    """So many units lean on the change and do not run for want of budget."""

    def files(self) -> set[str]:
        return {name.partition("::")[0] for name in self.units}

    def takes(self, test: str, function: str) -> bool:
        """Whether a test of this id runs."""
        return test.partition("::")[0] in self.units or function in self.units

    def sentence(self) -> str:
        count = Counter(self.units.values())
        parts = [f"{count[reason]} {reason}" for reason in (CHANGED, NEW, NEAR, EARLIER) if count[reason]]
        parts.insert(0, f"{count[TURN]} by turn {self.turn % TURNS} of 0-{TURNS - 1}")
        rest = f"; {self.left} that lean on the change wait for their turn" if self.left else ""
        return (
            f"selection: {len(self.units)} of {self.total} units ({', '.join(parts)}), about {self.seconds:.0f} CPU s"
            f"{rest}; all: --all"
        )


def units_of(graph: Graph, table: Mapping[str, Unit]) -> dict[str, Unit]:
    """All units that there are now. What the table does not know is taken to cost what its neighbours do."""
    divided = {unit.file for unit in table.values() if "::" in unit.name}
    out: dict[str, Unit] = {}
    for file in sorted(file for file in graph.leans if is_test(file)):
        names = {f"{file}::{name}" for name in graph.functions[file]} if file in divided else {file}
        out |= {name: table[name] if name in table else _guess(name, graph, table) for name in sorted(names)}
    return out


def _guess(name: str, graph: Graph, table: Mapping[str, Unit]) -> Unit:
    """A unit that was never measured: the mean of a test function nearby, and a turn that follows from its name."""
    file, _, function = name.partition("::")
    for nearby in (file, file.rpartition("/")[0] + "/", ""):
        known = [unit for unit in table.values() if unit.name.startswith(nearby) and unit.file in graph.functions]
        functions = sum(1 if "::" in unit.name else len(graph.functions[unit.file]) for unit in known)
        if functions:
            count = 1 if function else len(graph.functions[file])
            cpu, wall = (
                sum(times) * count / functions for times in zip(*((u.cpu, u.wall) for u in known), strict=True)
            )
            return Unit(name, int(_mixed(name), 16) % TURNS, cpu, wall)
    return Unit(name, int(_mixed(name), 16) % TURNS, 0.0, 0.0)


def choose(graph: Graph, table: Mapping[str, Unit], changed: Mapping[str, int], turn: int, budget: float) -> Selection:
    """The selection at a turn; `changed`: files by the age of their change, 0 the latest; `budget` in CPU seconds."""
    units = units_of(graph, table)
    steps = graph.distances(changed)
    rooms = {_room(file) for file, age in changed.items() if not age}
    reasons: dict[str, str] = {}
    for name, unit in units.items():
        file = name.partition("::")[0]
        if changed.get(file) == 0:
            reasons[name] = CHANGED
        elif name not in table and file in changed:
            reasons[name] = NEW
        elif unit.turn == turn % TURNS:
            reasons[name] = TURN
    spent = sum(units[name].cpu for name in reasons)

    def nearness(unit: Unit) -> tuple[object, ...]:
        return steps[unit.file], _room(unit.file) not in rooms, unit.cpu, unit.name

    def age(unit: Unit) -> tuple[object, ...]:
        return (turn - unit.turn) % TURNS, unit.cpu, unit.name

    near = sorted((unit for unit in units.values() if unit.file in steps), key=nearness)
    for reason, order in ((NEAR, near), (EARLIER, sorted(units.values(), key=age))):
        for unit in order:
            if unit.name not in reasons and spent + unit.cpu <= budget:
                reasons[unit.name] = reason
                spent += unit.cpu
    left = sum(unit.name not in reasons for unit in near)
    return Selection(reasons, turn, len(units), spent, left)


def sample(tests: Mapping[str, bool], size: int, turn: int) -> set[str]:
    """So many of the tests at a turn, and of consecutive turns one after the other until all have run.

    `tests` says of each by its id whether it is heavy: those come to their turn a third as often.
    """
    heavy, light = (sorted((t for t in tests if tests[t] == kind), key=_mixed) for kind in (True, False))
    few = max(-(-size * len(heavy) // (3 * len(tests))), size - len(light))
    return {*_piece(heavy, few, turn), *_piece(light, size - few, turn)}


def _piece(tests: Sequence[str], size: int, turn: int) -> Iterator[str]:
    """The tests of a turn, which begins where the turn before ended."""
    return (tests[(turn * size + place) % len(tests)] for place in range(min(size, len(tests))))


def _mixed(test: str) -> str:
    """An order in which tests of one file do not follow one another."""
    return hashlib.sha256(test.encode()).hexdigest()


def _room(file: str) -> str:
    """`planner` of src/tangram/planner/local/rank.py and of tests/planner/test_rank.py."""
    parts = PurePosixPath(file).parts
    return parts[2] if parts[:2] == ("src", "tangram") else parts[1] if len(parts) > 1 else ""
