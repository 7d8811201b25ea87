"""The mutants fit the source as it is now: each text occurs exactly once. `run.py` is the run itself."""

from pathlib import Path

from tests.mutants.run import ROOT, TABLES, misfits, tables


def test_every_mutant_fits() -> None:
    assert misfits(tables(TABLES)) == []


def test_every_mutant_names_tests_that_exist() -> None:
    named = {t.split("::")[0] for m in tables(TABLES) for t in m.tests}
    assert named
    assert all(Path(ROOT, name).is_file() for name in named)
