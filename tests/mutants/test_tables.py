"""The mutants fit the source as it is now: each text occurs exactly once. `run.py` is the run itself."""

import time
from pathlib import Path

from tests.mutants.run import ROOT, TABLES, misfits, run_all, tables, touched


def test_every_mutant_fits() -> None:
    assert misfits(tables(TABLES)) == []


def test_every_mutant_names_tests_that_exist() -> None:
    named = {t.split("::")[0] for m in tables(TABLES) for t in m.tests}
    assert named
    assert all(Path(ROOT, name).is_file() for name in named)


def test_ten_turns_run_every_mutant_and_a_changed_file_runs_its_own() -> None:
    every = tables(TABLES)
    turns = [touched(every, set(), turn) for turn in range(7, 17)]
    assert sorted(m.name for turn in turns for m in turn) == sorted(m.name for m in every)
    changed = {m.name for m in every if m.file == "relayout/mapping/cells.py"}
    assert changed
    first = [m.name for m in touched(every, {"src/tangram/relayout/mapping/cells.py"}, 0)]
    assert {*first[: len(changed)]} == changed


def test_where_time_is_short_other_mutants_have_it_ten_turns_later() -> None:
    one, other = (touched(tables(TABLES), set(), turn) for turn in (7, 17))
    assert {m.name for m in one} == {m.name for m in other}
    assert one[0] != other[0]
    assert run_all(one, 1, time.monotonic()) == (0, len(one))
