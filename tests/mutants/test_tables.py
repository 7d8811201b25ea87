"""The mutants fit the source as it is now: each text occurs exactly once. `run.py` is the run itself."""

from pathlib import Path

from tests.mutants.run import ROOT, TABLES, misfits, tables, touched


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
    assert changed <= {m.name for m in touched(every, {"src/tangram/relayout/mapping/cells.py"}, 0)}
