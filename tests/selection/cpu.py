"""CPU seconds of each test, its processes included: `-p tests.selection.cpu --record FILE`.

tests/selection/durations.py makes the table of it that the selection reads. A test pays for what it is the first to
need: a fixture of its file or of the session counts for the test that began it.
"""

import ctypes
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import cast

import pytest

TICK = 1 / os.sysconf("SC_CLK_TCK")
STAT_TIMES = slice(11, 15)
"""Of /proc/PID/stat behind the name: user, system, and both of the children that were waited for."""


def tree_seconds(pid: int) -> float:
    """CPU seconds so far of a process, of its living descendants, and of all that these have waited for."""
    seconds, open_ids = 0.0, [pid]
    while open_ids:
        process = Path("/proc", str(open_ids.pop()))
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            children = [path.read_text().split() for path in (process / "task").glob("*/children")]
        except OSError:
            continue  # it has ended; its parent counts it
        seconds += sum(map(int, fields[STAT_TIMES])) * TICK
        open_ids += [int(child) for row in children for child in row]
    return seconds


def adopt_orphans() -> None:
    """Have what descendants leave behind become children of this process, also once it has ended: so it is counted.

    A program that is started leaves the process that its ranks are forked from, which takes as long as itself.
    """
    if sys.platform == "linux":
        child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(child_subreaper, 1, 0, 0, 0)


class Recorder:
    """Measures in the process that runs tests; the one that collects their reports adds up and writes.

    It writes after each test, so that a run that is broken off leaves what it has measured.
    """

    def __init__(self, file: Path, *, worker: bool) -> None:
        self.file, self.worker = file, worker
        if not worker:
            file.write_text("")
        self.rows: dict[str, list[float]] = {}
        adopt_orphans()
        self.before = tree_seconds(os.getpid()), time.monotonic()

    def pytest_collection_finish(self) -> None:
        """What imports took is no cost of the test that happens to be first."""
        self.before = tree_seconds(os.getpid()), time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = tree_seconds(os.getpid()), time.monotonic()
        spent = [round(a - b, 3) for a, b in zip(now, self.before, strict=True)]
        self.before = now
        report.user_properties.append((f"spent {call.when}", spent))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.rows.setdefault(report.nodeid, [0.0, 0.0, 0.0])
        for name, spent in report.user_properties:
            if name == f"spent {report.when}":
                cpu, wall = cast("list[float]", spent)
                row[0] += cpu
                row[1] += wall
                row[2] += cpu if report.when == "setup" else 0
        if report.when == "teardown" and not self.worker:
            row = self.rows.pop(report.nodeid)
            with self.file.open("a") as out:
                out.write("\t".join([*(f"{seconds:.2f}" for seconds in row), report.nodeid]) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write the seconds of each test (CPU, wall) to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file:
        config.pluginmanager.register(Recorder(Path(file), worker=hasattr(config, "workerinput")), "cpu recorder")
