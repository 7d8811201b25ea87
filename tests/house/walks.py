"""How far a call walks through the house: which files it crosses, and how often it climbs into a higher package.

    python -m tests.house.walks        # every named walk: its files, its climbs

Counted on the real run with `sys.setprofile`, threads included. Code that runs while a module is imported is no part of
a walk, nor is what a decorator or a dataclass makes without a file of its own.
"""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.house.walls import ROOMS, imported, modules

PACKAGE = Path(__file__).parents[2] / "src/tangram"


@dataclass(frozen=True)
class Walk:
    """What a call crossed."""

    files: tuple[str, ...]
    """By their paths below the package, in the order in which they were first entered."""
    climbs: tuple[str, ...]
    """Each call from a file into one of a higher package, as `a.py -> b.py`, once."""


def walk(call: Callable[[], object]) -> Walk:
    """What a call crosses of the package, on all threads that begin meanwhile."""
    files: dict[str, None] = {}
    climbs: dict[str, None] = {}
    importing = threading.local()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_name == "<module>" and event in ("call", "return"):
            importing.depth = getattr(importing, "depth", 0) + (1 if event == "call" else -1)
        if event != "call" or getattr(importing, "depth", 0):
            return
        file = _file(frame.f_code.co_filename)
        if file in (None, "lazy.py"):  # which imports what is asked for first
            return
        files[file] = None
        caller = _caller(frame)
        if caller is not None and _is_above(_module(file), _module(caller)):
            climbs[f"{caller} -> {file}"] = None

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Walk(tuple(files), tuple(climbs))


def _caller(frame: FrameType) -> str | None:
    """The file of the package from which a frame was called, by way of whatever library."""
    above = frame.f_back
    while above is not None:
        if (file := _file(above.f_code.co_filename)) is not None:
            return file
        above = above.f_back
    return None


@lru_cache(None)
def _file(name: str) -> str | None:
    path = Path(name)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def _module(file: str) -> str:
    parts = Path("tangram", file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@lru_cache(None)
def _packages() -> Mapping[str, tuple[str, frozenset[str]]]:
    """Of each module its package, and the packages of its room that this one imports, by way of others too."""
    house = modules(PACKAGE)
    homes = {module.name: module.package for module in house}
    uses: dict[str, set[str]] = {package: set() for package in homes.values()}
    for module in house:
        for _, name in imported(module):
            while name and name not in homes:
                name = name.rpartition(".")[0]
            if name and homes[name] != module.package and name.split(".")[1:2] == [module.room]:
                uses[module.package].add(homes[name])
    reached = {package: frozenset(_reached(package, uses)) for package in uses}
    return {name: (package, reached[package]) for name, package in homes.items()}


def _reached(package: str, uses: Mapping[str, set[str]]) -> Iterator[str]:
    seen, left = {package}, list(uses[package])
    while left:
        if (one := left.pop()) not in seen:
            seen.add(one)
            left += uses[one]
            yield one


@lru_cache(None)
def _is_above(callee: str, caller: str) -> bool:
    """Whether a module stands in a higher room than another, or in a package that imports that of the other."""
    rooms = [name.split(".")[1] if "." in name else "" for name in (callee, caller)]
    if rooms[0] == rooms[1]:
        return _packages()[caller][0] in _packages()[callee][1]
    order: list[str] = list(ROOMS)
    return all(room in order for room in rooms) and order.index(rooms[0]) > order.index(rooms[1])


# ---------------------------------------------------------------- the named walks


def save_a_state() -> object:
    """A small model of plain torch and its optimiser to their files."""
    import torch

    from tangram.checkpoint import save

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    state = {"model": model, "optim": optimiser, "progress": {"step": 1}}
    with tempfile.TemporaryDirectory() as folder:
        return save(state, Path(folder, "step-1"))


def make_a_plan() -> None:
    """The quickstart's job, a file, to the plan that `tangram train` runs for two processes."""
    from tangram.schema.files import load
    from tangram.training.trials.local_plans import plans_of

    assert plans_of(load(PACKAGE.parents[1] / "examples/quickstart/job.toml"), 2).ranked[0].plan is not None


@dataclass(frozen=True)
class Named:
    """A walk that is counted, and how far it may go."""

    call: Callable[[], object]
    files: int
    """At most."""
    climbs: int


WALKS: Mapping[str, Named] = {
    "a state to its file": Named(save_a_state, files=18, climbs=0),
    "a job to its plan": Named(make_a_plan, files=82, climbs=3),  # six ask a model of packing
}
"""By what walks where."""


def main() -> None:
    """Print every named walk: how many files, how many climbs, and which."""
    for name, named in WALKS.items():
        found = walk(named.call)
        print(f"{name}: {len(found.files)} files (at most {named.files}), {len(found.climbs)} climbs ({named.climbs})")
        for line in (*found.files, *(f"climbs {climb}" for climb in found.climbs)):
            print(f"  {line}")


if __name__ == "__main__":
    main()
