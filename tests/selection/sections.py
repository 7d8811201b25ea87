"""Which parts of the CI run beside the tests: those whose rooms a change touches, and the others in turn.

    python -m tests.selection.sections [--all]    # prints their names in the order in which they run

`make test-status` says when each had its last turn.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from tests.selection import history


@dataclass(frozen=True)
class Section:
    """A target of the Makefile. It runs when a file below `paths` has changed, and every `every`-th commit.

    `offset` spreads the turns, so that no commit has all of them.
    """

    name: str
    every: int
    offset: int
    paths: tuple[str, ...]


def rooms(*names: str) -> tuple[str, ...]:
    return tuple(f"{top}/{name}/" for name in names for top in ("src/tangram", "tests"))


ALWAYS = 1
SECTIONS = (
    Section("slow", ALWAYS, 0, ()),
    Section("matrix", 2, 0, (*rooms("training"), "tests/matrix/", "bench/matrix.py", "bench/_matrix/")),
    Section("peers", 5, 1, (*rooms("models"), "src/tangram/checkpoint/formats/", "tests/checkpoint/test_megatron.py")),
    Section("kernels", 5, 3, rooms("kernels")),
    Section("interop", 10, 5, ("tests/interop/", "src/tangram/planner/exports/", "src/tangram/sharding/compare/")),
    Section("rules", 5, 2, rooms("sharding")),
    Section("mutants", ALWAYS, 0, ()),
    Section("bench", 10, 7, ("bench/",)),
    Section("train", ALWAYS, 0, ()),
)


def due(changed: Iterable[str], number: int) -> list[Section]:
    """What runs at a commit of this number for a change of these files: all, if they pin the versions."""
    changed = list(changed)
    if "constraints.txt" in changed:
        return list(SECTIONS)
    return [
        section
        for section in SECTIONS
        if number % section.every == section.offset or any(file.startswith(section.paths) for file in changed)
    ]


def main(words: list[str]) -> None:
    root = history.ROOT
    chosen: Iterable[Section] = SECTIONS
    if "--all" not in words and history.is_repository(root):
        latest = [file for file, age in history.changed(root, history.base(root)).items() if not age]
        chosen = due(latest, history.number_of(root))
    print(" ".join(section.name for section in chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
