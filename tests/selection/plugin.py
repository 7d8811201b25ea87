"""pytest's side of the selection: `--budget SECONDS` runs part of the tests, `--all` whatever was said before.

Without --budget pytest runs what it is told. Files that are not chosen are not even imported. Of pytest-xdist the
process that hands out the tests chooses, once, and its workers take over what it chose.
"""

import json
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.selection import history
from tests.selection.choose import Selection, choose, sample
from tests.selection.durations import TABLE, function, read_table
from tests.selection.graph import is_test, read_graph

START = 20.0
"""CPU seconds until workers import tests: to read the graph, and for three of them to load torch and Triton."""
IMPORT = 0.2
"""CPU seconds that three workers, each of which collects all tests that run, take to import a file."""

CHOSEN = pytest.StashKey[Selection]()


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "which tests run")
    group.addoption("--budget", type=float, metavar="SECONDS", help="run what a change touches and a turn of the rest")
    group.addoption("--sample", type=int, metavar="N", help="run so many of the tests, other ones with every commit")
    group.addoption("--all", action="store_true", help="run all tests, whatever --budget and --sample say")


def select(budget: float, root: Path = history.ROOT) -> Selection:
    """What is chosen of the tests in the repository at `root` as it stands now, for `budget` CPU seconds in all."""
    turn = history.turn(root)
    changed = history.changed(root, history.base(root))
    graph = read_graph(root, history.files(root))
    table = {name: replace(unit, cpu=unit.cpu + IMPORT) for name, unit in read_table(root / TABLE).items()}
    chosen = choose(graph, table, changed, turn, budget - START)
    return replace(chosen, seconds=chosen.seconds + START)


def configure(config: pytest.Config) -> None:
    """Choose, or take over what was chosen."""
    chosen: str | None = getattr(config, "workerinput", {}).get("selection")
    if chosen:
        config.stash[CHOSEN] = Selection(**json.loads(chosen))
    elif (budget := config.getoption("--budget")) and not config.getoption("--all"):
        if hasattr(config, "workerinput") or not history.is_repository(history.ROOT):
            return  # an unpacked archive has no commits: everything runs
        try:
            config.stash[CHOSEN] = select(budget)
        except (subprocess.CalledProcessError, ValueError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            raise pytest.UsageError(f"--budget: TANGRAM_BASE is a commit and TANGRAM_TURN a number; {said}") from error


class ForWorkers:
    """The hook of pytest-xdist, which is known only where that is loaded."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if CHOSEN in node.config.stash:
            node.workerinput["selection"] = json.dumps(vars(node.config.stash[CHOSEN]))


def header(config: pytest.Config) -> str | None:
    """What was chosen, in one line."""
    chosen = config.stash.get(CHOSEN, None)
    if chosen is None and config.getoption("--budget") and not config.getoption("--all"):
        return "selection: none, everything runs, for git knows no repository here"
    return chosen.sentence() if chosen else None


def ignores(path: Path, config: pytest.Config) -> bool | None:
    """True for a test file of which nothing was chosen."""
    chosen = config.stash.get(CHOSEN, None)
    if chosen is None or not path.is_relative_to(history.ROOT):
        return None
    file = path.relative_to(history.ROOT).as_posix()
    return True if is_test(file) and file not in chosen.files() else None


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of divided files only the chosen functions, of a sample its turn."""
    chosen, size, everything = config.stash.get(CHOSEN, None), config.getoption("--sample"), config.getoption("--all")
    kept = {item.nodeid for item in items if chosen is None or chosen.takes(item.nodeid, function(item.nodeid))}
    if size and size < len(kept) and not everything:
        marked = {item.nodeid: item.get_closest_marker("heavy") is not None for item in items if item.nodeid in kept}
        kept = sample(marked, size, history.turn(history.ROOT))
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    if chosen or everything:
        longest_first(items)


def longest_first(items: list[pytest.Item]) -> None:
    """By the files' seconds on the clock; each file's tests stay together and in their order."""
    seconds: dict[str, float] = defaultdict(float)
    for unit in read_table(history.ROOT / TABLE).values():
        seconds[unit.file] += unit.wall
    items.sort(key=lambda item: (-seconds.get(item.nodeid.partition("::")[0], 0.0), item.nodeid.partition("::")[0]))
