"""The table of what tests cost, and whose turn in the rotation each is: tests/durations.tsv.

A row is a unit: a test file, or one function of a file that is long and whose tests need little in common. Units keep
their turn when the table is made anew (`make durations`), new ones get the one that has the least to do; so ten
consecutive turns run all of them whatever the table said in between.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = "tests/durations.tsv"
TURNS = 10
LONG = 25.0
"""CPU seconds from which on a file is divided into its functions,"""
IN_COMMON = 0.3
"""if its fixtures take no more than this part of them."""

WHOLE = ("tests/training/test_tuning.py",)
"""Files that are not: the first of their tests starts, outside of fixtures, what the others look at too."""

TOGETHER = tuple(f"tests/training/oracle/test_{name}" for name in ("golden", "resume", "strategies"))
"""What ranks measure for all of these files takes longer than the files do: they have one turn."""


@dataclass(frozen=True)
class Unit:
    """A file or `file::function`: its turn (0 to 9), CPU seconds of all its processes, and seconds on the clock."""

    name: str
    turn: int
    cpu: float
    wall: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


@dataclass(frozen=True)
class Spent:
    """What one test took: CPU seconds, seconds on the clock, and how many of the first went into fixtures."""

    test: str
    cpu: float
    wall: float
    setup: float


def read_table(path: Path) -> dict[str, Unit]:
    """The units by name; none where the table does not exist."""
    if not path.exists():
        return {}
    rows = [line.split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name: Unit(name, int(turn), float(cpu), float(wall)) for turn, cpu, wall, name in rows}


def write_table(path: Path, units: Iterable[Unit]) -> None:
    """By name, so that two changes of the table seldom meet."""
    rows = [f"{u.turn}\t{u.cpu:.1f}\t{u.wall:.1f}\t{u.name}\n" for u in sorted(units, key=lambda u: u.name)]
    path.write_text("# turn\tCPU s\twall s\tunit: made by `make durations`, read by tests/selection\n" + "".join(rows))


def make_table(tests: Iterable[Spent], before: Mapping[str, Unit]) -> list[Unit]:
    """The units of the tests that were run and the rows of other files; who had a turn before keeps it."""
    files: dict[str, list[Spent]] = defaultdict(list)
    for test in tests:
        files[test.test.partition("::")[0]].append(test)
    units = [unit for unit in before.values() if unit.file not in files]
    load = [sum(unit.cpu for unit in units if unit.turn == turn) for turn in range(TURNS)]
    costs = [unit for file, rows in files.items() for unit in _units(file, rows)]
    for name, cpu, wall in sorted(costs, key=lambda cost: (cost[0] not in before, -cost[1], cost[0])):
        turn = before[name].turn if name in before else _lightest(load, name, units)
        load[turn] += max(cpu, 0.01)
        units.append(Unit(name, turn, cpu, wall))
    return units


def read_record(path: Path) -> list[Spent]:
    """What `--record` has written: of each test CPU seconds, seconds on the clock, those of its fixtures, its id."""
    rows = [line.split("\t", 3) for line in path.read_text().splitlines()]
    return [Spent(test, float(cpu), float(wall), float(setup)) for cpu, wall, setup, test in rows]


def _lightest(load: Sequence[float], name: str, units: Iterable[Unit]) -> int:
    """The turn with least to do, or that of those whose fixture the unit shares."""
    lightest = load.index(min(load))
    if not name.startswith(TOGETHER):
        return lightest
    return next((unit.turn for unit in units if unit.name.startswith(TOGETHER)), lightest)


def function(test: str) -> str:
    """The unit of a test in a divided file, by its id."""
    file, _, rest = test.partition("::")
    return f"{file}::{rest.partition('[')[0].rpartition('::')[2] or rest.partition('[')[0]}"


def _units(file: str, rows: list[Spent]) -> list[tuple[str, float, float]]:
    cpu, setup = sum(row.cpu for row in rows), sum(row.setup for row in rows)
    if cpu < LONG or setup > IN_COMMON * cpu or file in WHOLE:
        return [(file, cpu, sum(row.wall for row in rows))]
    parts: dict[str, list[Spent]] = defaultdict(list)
    for row in rows:
        parts[function(row.test)].append(row)
    return [(name, sum(row.cpu for row in part), sum(row.wall for row in part)) for name, part in parts.items()]


def main(record: str, *, everything: bool) -> None:
    """Make the table anew. `everything`: all usual tests were run, so other test files have none and cost nothing."""
    root = Path(__file__).parents[2]
    tests = read_record(Path(record))
    if everything:
        files = {test.test.partition("::")[0] for test in tests}
        there = {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
        tests += [Spent(f"{file}::", 0.0, 0.0, 0.0) for file in sorted(there - files)]
    units = make_table(tests, read_table(root / TABLE))
    write_table(root / TABLE, [unit for unit in units if (root / unit.file).exists()])


if __name__ == "__main__":
    main(sys.argv[1], everything="--everything" in sys.argv)
