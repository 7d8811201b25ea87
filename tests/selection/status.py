"""What has not run since when: `make test-status`. It follows from git's history and the table of durations alone.

Counted are the turns of the commits on the main line since the table is there. Changes bring further runs, which are
not counted; so what is said here is the latest that it can be.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence

from tests.selection import history
from tests.selection.choose import units_of
from tests.selection.durations import TABLE, TURNS, read_table
from tests.selection.graph import read_graph
from tests.selection.history import Commit
from tests.selection.sections import SECTIONS


def last(line: Sequence[Commit], every: int, turn: int, of: Callable[[int], int] = int) -> Commit | None:
    """The latest commit of a line (the latest first) whose turn it was, by what its number stands for."""
    return next((commit for commit in line if of(commit.number) % every == turn), None)


def table_of(line: Sequence[Commit], units: Counter[int], new: int) -> list[str]:
    """The lines of the report: what had its turn longest ago comes first. `units`: how many have a turn."""
    head = line[0].number if line else 0
    rows = [
        (last(line, TURNS, turn, history.turn_of), f"{count} units of turn {turn}") for turn, count in units.items()
    ]
    rows += [(last(line, s.every, s.offset), f"make {s.name}") for s in SECTIONS]
    rows.sort(key=lambda row: row[0].number if row[0] else 0)
    out = [f"{'last turn':12}{'commit':12}{'commits ago':14}what"]
    for commit, what in rows:
        when = f"{commit.day:12}{commit.name:12}{head - commit.number:<14}" if commit else f"{'never yet':38}"
        out.append(when + what)
    if new:
        out.append(f"{'in their turn':38}{new} units whose cost is a guess (`make durations` measures them)")
    return out


def main() -> int:
    root = history.ROOT
    if not history.is_repository(root):
        print("This is no clone of the repository: it has no commits to tell the turns by.")
        return 1
    table = read_table(root / TABLE)
    units = units_of(read_graph(root, history.files(root)), table)
    added = history.git(root, "log", "--first-parent", "--diff-filter=A", "--format=%H", "--", TABLE).split("\n")[-1]
    line = history.main_line(root, f"{added}^") if added else []
    turns = Counter(unit.turn for unit in units.values())
    print("\n".join(table_of(line, turns, len(units.keys() - table.keys()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
