"""The walls hold in Tangram, and each of them is seen to fall when a breach is planted."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from tests.house.walls import (
    ROOMS,
    documented_dependencies,
    documented_packages,
    findings,
    imported,
    modules,
    third_party,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dependencies.md"
DOCUMENTED = {"torch": {"layout", "hardware", "training"}, "lark": {"layout", "planner"}, "rich": {"layout", "cli"}}


def test_tangram_keeps_its_walls() -> None:
    assert findings(ROOT / "src" / "tangram", documented_dependencies(PAGE)) == []


def test_the_rooms_stand_in_the_order_that_the_page_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [room for room in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) if room != "errors"] == [
        room for room in reversed(ROOMS) if any((ROOT / "src" / "tangram" / room).glob("*.py"))
    ]


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_tests_and_benches_import_documented_libraries_only(folder: str) -> None:
    documented = documented_dependencies(PAGE)
    breaches = [
        f"{module.name}:{line} imports {top}"
        for module in modules(ROOT / folder)
        for line, top in third_party(list(imported(module)), {"tangram", "tests", "bench"})
        if folder not in documented.get(top, set())
    ]
    assert breaches == []


def declared() -> set[str]:
    """The packages that pyproject.toml asks for, extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return {re.split(r"[\[<>=~! ;]", one)[0] for one in (*project["dependencies"], *chain.from_iterable(extras))}


def test_every_dependency_has_a_row_and_every_row_a_dependency() -> None:
    assert declared() == documented_packages(PAGE)


def test_every_declared_version_is_pinned() -> None:
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert declared() <= {pin.lower() for pin in pins}


def plant(folder: Path, files: dict[str, str]) -> Path:
    """A package `tangram` with these files and no breach of its own."""
    package = folder / "tangram"
    for name, text in {"__init__.py": "", "errors.py": "class UserError(Exception): ...\n", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


SOUND = {
    "layout/__init__.py": "import torch\nfrom lark import Lark\nfrom tangram.errors import UserError\n",
    "hardware/host/workers.py": "import subprocess\nfrom tangram import layout\nsubprocess.run(['true'])\n",
    "training/loop.py": "import torch.distributed as dist\ndef f(t): dist.all_reduce(t); dist.init_process_group()\n",
    "cli/train.py": "import rich\ndef train():\n    from tangram.training import loop\n",
    "training/step.py": "from tangram.training.loop import f\nfrom tangram import __version__\n",
    "training/b/__init__.py": "",
    "training/d/__init__.py": "",
    "training/d/e.py": "from tangram.training.b import f\n",
    "training/b/f.py": "",
    "__main__.py": "from tangram.cli import train\n",
}

BREACHES = {
    "a room above": ("layout/a.py", "from tangram.training import loop\n", "training stands above layout"),
    "a room above, by name": ("hardware/a.py", "from tangram import planner\n", "planner stands above hardware"),
    "a room above, lazily": ("models/a.py", "def f():\n    import tangram.cli\n", "cli stands above models"),
    "a room above, for types": (
        "layout/a.py",
        "if TYPE_CHECKING:\n    from tangram import relayout\n",
        "relayout stands",
    ),
    "a room above, relatively": ("layout/a.py", "from ..training import loop\n", "training stands above layout"),
    "a room above, by import_module": (
        "layout/a.py",
        "import importlib\nimportlib.import_module('tangram.cli.train')\n",
        "cli stands above layout",
    ),
    "a room above, by __import__": ("layout/a.py", "__import__('tangram.cli')\n", "cli stands above layout"),
    "a computed name": ("layout/a.py", "import importlib\nimportlib.import_module(f'tangram.{x}')\n", "computed name"),
    "no such room": ("utils/a.py", "", "is no room"),
    "an import from no room": ("cli/a.py", "from tangram.utils import a\n", "in no room"),
    "errors that import a room": ("errors.py", "import tangram.layout\n", "lies below all rooms"),
    "an undocumented library": ("cli/a.py", "def f():\n    import requests\n", "requests, which has no row"),
    "a library of another room": ("training/a.py", "import lark\n", "does not name the room training"),
    "more than a minimal room needs": ("layout/a.py", "import rich\n", "layout must work without it"),
    "torch.distributed in layout": ("layout/a.py", "import torch.distributed.tensor\n", "no torch.distributed"),
    "torch.distributed in layout, by attribute": (
        "layout/a.py",
        "import torch\ntorch.distributed.x\n",
        "no torch.dist",
    ),
    "a file in layout": ("layout/a.py", "from pathlib import Path\n", "knows no files"),
    "open in layout": ("layout/a.py", "def f():\n    open('x')\n", "knows no files"),
    "a collective": ("hardware/a.py", "import torch.distributed as dist\ndist.all_reduce(1)\n", "uses a collective"),
    "a collective, imported": ("hardware/a.py", "from torch.distributed import broadcast as b\n", "uses a collective"),
    "a collective, in full": ("hardware/a.py", "import torch\nf = torch.distributed.isend\n", "uses a collective"),
    "a collective of a group": ("hardware/a.py", "def f(group): group.allreduce([1])\n", "uses a collective"),
    "a default group": (
        "hardware/a.py",
        "from torch import distributed as dist\ndist.init_process_group()\n",
        "uses a default process group",
    ),
    "a process": ("cli/a.py", "import subprocess\n", "uses a process"),
    "a process by os": ("cli/a.py", "import os\nos.fork()\n", "uses a process"),
    "a second parser": ("planner/a.py", "from lark import Lark\n", "uses a parser"),
    "a device's name": ("training/a.py", "x = 'cuda:0'\n", "one kind of accelerator"),
    "a device's module": ("training/a.py", "import torch\ntorch.cuda.synchronize()\n", "one kind of accelerator"),
    "packages of a room that import each other": (
        "training/b/c.py",
        "from tangram.training.d import e\n",
        "tangram.training.b:1 is imported by what it imports itself: tangram.training.d",
    ),
    "modules that import each other": (
        "training/loop.py",
        "def f():\n    from tangram.training import step\n",
        "tangram.training.loop:1 is imported by what it imports itself: tangram.training.step",
    ),
    "a long file": ("cli/a.py", "x = 1\n" * 401, "401 lines"),
}


def test_a_sound_package_has_no_findings(tmp_path: Path) -> None:
    assert findings(plant(tmp_path, SOUND), DOCUMENTED) == []


@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_breach_is_found(breach: str, tmp_path: Path) -> None:
    name, text, sentence = BREACHES[breach]
    found = findings(plant(tmp_path, {**SOUND, name: text}), DOCUMENTED)
    assert any(sentence in one for one in found), found


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    files = {**SOUND, **{f"training/many/m{i}.py": "" for i in range(17)}}
    assert "tangram.training.many:1 has 17 modules" in " ".join(findings(plant(tmp_path, files), DOCUMENTED))


def test_words_are_no_breach(tmp_path: Path) -> None:
    """Documentation may speak of devices, and a tensor has a gather of its own."""
    text = '"""Runs on cuda, too."""\nimport torch\ndef f(t): return t.gather(0, t), torch.scatter(t, 0, t, t)\n'
    assert findings(plant(tmp_path, {**SOUND, "training/a.py": text}), DOCUMENTED) == []
