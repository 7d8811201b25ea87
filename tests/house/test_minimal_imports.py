"""`tangram.layout` and `tangram.relayout` are useful by themselves: they import with torch, numpy and lark alone."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house.walls import MINIMAL

ROOT = Path(__file__).parents[2]

# Run in a fresh interpreter: import a module with every third-party module blocked but the given ones; print what came.
BLOCKED = """
import importlib, json, sys

module, allowed = sys.argv[1], set(json.loads(sys.argv[2]))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in allowed:
            return None
        raise ModuleNotFoundError(f"{top} is blocked", name=name)  # as if it were not installed: torch tries some

sys.meta_path.insert(0, Blocker())
importlib.import_module(module)
print(json.dumps(sorted(name for name in sys.modules if "." not in name or name.startswith("tangram."))))
"""


def closure(libraries: set[str]) -> set[str]:
    """The modules of these packages and of all that they need by their own metadata."""
    wanted, seen = list(libraries), set[str]()
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        for line in requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return {
        module
        for module, packages in packages_distributions().items()
        if any(package.lower().replace("_", "-") in seen for package in packages)
    }


def import_alone(module: str, libraries: set[str], path: Path = ROOT / "src") -> subprocess.CompletedProcess[str]:
    allowed = json.dumps(sorted({"tangram", *closure(libraries)}))
    command = [sys.executable, "-W", "error::ImportWarning", "-c", BLOCKED, module, allowed]
    environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("room", ["layout", "relayout"])
def test_the_room_imports_with_its_libraries_alone(room: str) -> None:
    answer = import_alone(f"tangram.{room}", MINIMAL[room])
    assert answer.returncode == 0, answer.stderr
    came = set(json.loads(answer.stdout))
    assert f"tangram.{room}" in came
    above = {name for name in came if name.startswith("tangram.")}
    assert not [name for name in above if name.split(".")[1] in {"training", "cli", "models", "checkpoint"}], above


def test_the_package_itself_imports_nothing() -> None:
    answer = import_alone("tangram", set())
    assert answer.returncode == 0, answer.stderr
    assert "torch" not in json.loads(answer.stdout)


def test_a_library_too_many_is_found(tmp_path: Path) -> None:
    package = tmp_path / "tangram"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layout.py").write_text("import numpy\nimport rich\n")
    assert importlib.util.find_spec("rich") is not None, "the planted library must be there to be blocked"
    answer = import_alone("tangram.layout", MINIMAL["layout"], tmp_path)
    assert answer.returncode != 0
    assert "rich is blocked" in answer.stderr


def test_what_ranks_are_forked_from_runs_no_operators() -> None:
    """Proofs load torch's database of operators, which computes: of a process whose OpenMP has threads a fork computes
    nothing, but waits for them for ever.
    """
    code = (
        "import sys, tangram.training.run.rank\n"
        "proofs = ('tangram.sharding.proof', 'torch.testing._internal.opinfo')\n"
        "assert not [m for m in sys.modules if m.startswith(proofs)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_ranks_are_forked_from_starts_before_the_command_loads_torch() -> None:
    """Both take seconds for it, and did so one after the other."""
    code = (
        "import os, sys, tangram.cli.train, tangram.cli\n"
        "tangram.cli.train.make_ready = lambda: os._exit(40 + ('torch' in sys.modules))\n"
        "tangram.cli.main(['train', 'examples/quickstart/job.toml'])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 40


def test_what_writes_a_rank_s_files_imports_no_dtensors() -> None:
    """Every rank has such a process: 1.2 s of CPU and 40 MB each that it would never use."""
    code = (
        "import sys, tangram.checkpoint.saving.writer_process\n"
        "print([m for m in sys.modules if m in ('sympy', 'torch.distributed.tensor', 'torch._dynamo')])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"
