"""How far a job is from its plan: measured on the run itself, and held."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.house import walks
from tests.house.walks import WALKS, walk, within

MOST = {"a job to its plan": (81, 28, 5)}
"""Files that are crossed, those of the walk's own rooms, and climbs: more of any is a detour."""


@pytest.mark.parametrize("name", WALKS)
def test_no_walk_gets_longer(name: str) -> None:
    measure, rooms = WALKS[name]
    files, climbs = measure()
    most, own, climbed = MOST[name]
    assert len(files) <= most, files
    assert len(within(files, rooms)) <= own, within(files, rooms)
    assert len(climbs) <= climbed, climbs


def test_files_and_climbs_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of planted files: down is a crossing, up through a callback a climb, once each; imports are neither."""
    sources = {
        "layout/low.py": "def back(call):\n    return [call() for _ in range(3)]",
        "planner/high.py": "def begin(back):\n    return back(again)\n\ndef again():\n    return 1\n\nagain()",
    }
    modules: list[Any] = []
    for file, text in sources.items():
        path = tmp_path / file
        path.parent.mkdir()
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    low, high = modules
    monkeypatch.setattr(walks, "SOURCE", str(tmp_path))
    files, climbs = walk(lambda: high.begin(low.back))
    assert files == ["planner/high.py", "layout/low.py"]
    assert climbs == [("layout/low.py", "planner/high.py")]
