"""Plant mistakes in the algebra, one at a time, and count those that the tests find.

    python tests/mutants/run.py [--only NAME ...] [--table layout] [--sample N --seed S | --touched] [--jobs 2]

Each mutant is a copy of src with one text replaced; its tests run there with a time limit. Before that the tests must
pass on an unchanged copy, and every text must occur exactly once. Exit status 1 when a mutant survives. With --seconds
none begins after that time: those of changed files come first, and what had no time is counted.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.selection import history  # noqa: E402
from tests.selection.durations import TURNS  # noqa: E402

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

TABLES = (
    "layout",
    "relayout",
    "exchange",
    "sequences",
    "distill",
    "bases",
    "memory",
    "nodes",
    "watch",
    "models",
    "loops",
    "conversion",
)
LIMIT = 60
"""Seconds for the tests of one mutant, or three times what they take unchanged where that is longer; one that takes
longer counts as found (it does not end)."""
UNCHANGED = 300
"""Seconds for the tests of a file without any mutant, on a machine that is busy."""


def tables(names: Sequence[str]) -> list[Mutant]:
    """The mutants of some tables, checked to have names of their own."""
    out = [m for name in names for m in importlib.import_module(f"tests.mutants.{name}").MUTANTS]
    twice = {m.name for m in out if sum(n.name == m.name for n in out) > 1}
    if twice:
        raise SystemExit(f"two mutants have one name: {', '.join(sorted(twice))}")
    return out


def misfits(mutants: Sequence[Mutant]) -> list[str]:
    """A sentence for each mutant whose old text does not occur exactly once, or that changes nothing."""
    out: list[str] = []
    for m in mutants:
        count = (ROOT / "src/tangram" / m.file).read_text().count(m.old)
        if count != 1 or m.old == m.new:
            out.append(f"{m.name}: its text occurs {count} times in {m.file}" if count != 1 else f"{m.name}: no change")
    return out


def touched(mutants: Sequence[Mutant], changed: Set[str], turn: int) -> list[Mutant]:
    """Those whose file or first tests have changed, and then every tenth of all, so that ten turns run each of them.

    The tenth begins elsewhere in each ten turns: where time is short, other ones have it.
    """
    first = [m for m in mutants if f"src/tangram/{m.file}" in changed or m.tests[0].partition("::")[0] in changed]
    tenth = [m for place, m in enumerate(mutants) if place % TURNS == turn % TURNS]
    begin = turn // TURNS * 7 % len(tenth) if tenth else 0
    return list(dict.fromkeys([*first, *tenth[begin:], *tenth[:begin]]))


def copy(source: Path, mutant: Mutant | None) -> None:
    """A copy of src in `source`, with the mutant's text replaced."""
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant:
        path = source / "tangram" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))


def run_tests(source: Path, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
    """pytest's exit status on the copy in `source`, None when it ran past `limit` seconds, and what it printed."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests/mutants")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "mutants",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
        "MUTANT_SOURCE": str(source),
    }
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "quick"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    log = source.parent / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the tests' own processes, too
                process.wait()
    return code, log.read_text(errors="replace")  # what a mistake prints may be no text


def verdict(mutant: Mutant, seconds_unchanged: Mapping[str, float]) -> tuple[bool, str]:
    """Whether the tests find the mutant, and a line that says by which test."""
    limit = max(LIMIT, 3 * sum(seconds_unchanged[file] for file in files_of(mutant)))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder, "src")
        copy(source, mutant)
        code, log = run_tests(source, mutant.tests, limit)
    seconds = f"{time.monotonic() - began:.0f} s"
    if code == 0:
        return False, f"SURVIVED  {mutant.name} ({seconds}): {mutant.why}"
    if code is None:
        return True, f"killed    {mutant.name} ({seconds}) by the time limit"
    if code < 0 and -code != signal.SIGKILL:  # which the kernel sends where memory runs out
        return True, f"killed    {mutant.name} ({seconds}) by {signal.Signals(-code).name}, which ended its tests"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    if code not in (1, 2) or not found:
        raise SystemExit(f"{mutant.name}: pytest ended with status {code}\n{log}")
    return True, f"killed    {mutant.name} ({seconds}) by {found[1].removeprefix('tests/')}"


def files_of(mutant: Mutant) -> set[str]:
    """The files of a mutant's tests."""
    return {test.split("::")[0] for test in mutant.tests}


def check_unchanged(file: str, tests: Set[str]) -> float:
    """The seconds that mutants' tests of a file take on an unchanged copy, where they pass, else no kill means
    anything."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder, "src")
        copy(source, None)
        code, log = run_tests(source, sorted(tests), UNCHANGED)
    if code != 0:
        raise SystemExit(f"{file}: fails without any mutant (status {code})\n{log}")
    return time.monotonic() - began


def run_all(mutants: Sequence[Mutant], jobs: int, until: float) -> tuple[int, int]:
    """How many are killed, and how many had no time: none begins after `until`. Mutants of one file's tests go
    together, in the order of the first of each."""
    by_files: dict[frozenset[str], list[Mutant]] = {}
    for mutant in mutants:
        by_files.setdefault(frozenset(files_of(mutant)), []).append(mutant)

    def run(group: Sequence[Mutant]) -> list[bool]:
        if time.monotonic() > until:
            return []
        tests = {test for mutant in group for test in mutant.tests}
        seconds = {
            file: check_unchanged(file, {test for test in tests if test.split("::")[0] == file})
            for file in files_of(group[0])
        }
        dead: list[bool] = []
        for mutant in group:
            if time.monotonic() > until:
                break
            killed, line = verdict(mutant, seconds)
            print(line, flush=True)
            dead.append(killed)
        return dead

    with ThreadPoolExecutor(jobs) as pool:
        ran = [killed for group in pool.map(run, by_files.values()) for killed in group]
    return sum(ran), len(mutants) - len(ran)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--table", nargs="+", choices=TABLES, default=TABLES, help="the mutants of these tables")
    parser.add_argument("--sample", type=int, metavar="N", help="that many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--touched", action="store_true", help="those of changed files, and a tenth of the others in turn"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="none begins after that time")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    return parser.parse_args()


def main() -> int:
    """Run the mutants that were asked for and print the score."""
    args = arguments()
    mutants = tables(args.table)
    if args.only:
        unknown = sorted(set(args.only) - {m.name for m in mutants})
        if unknown:
            raise SystemExit(f"no mutant is called {', '.join(unknown)}")
        mutants = [m for m in mutants if m.name in args.only]
    if args.sample is not None:
        mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
    if args.touched and history.is_repository(ROOT):
        changed = history.changed(ROOT, history.base(ROOT))
        mutants = touched(mutants, {file for file, age in changed.items() if not age}, history.turn(ROOT))
    wrong = misfits(mutants)
    if wrong:
        raise SystemExit("\n".join(wrong))
    killed, left = run_all(mutants, args.jobs, time.monotonic() + args.seconds)
    print(f"{killed} of {len(mutants) - left} killed" + (f"; {left} had no time" if left else ""))
    return int(killed < len(mutants) - left)


if __name__ == "__main__":
    sys.exit(main())
