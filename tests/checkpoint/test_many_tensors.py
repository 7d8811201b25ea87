"""Work in proportion to the number of tensors: lines of Python that are run are counted, at N tensors and at 4 N.

Time would say the same later and less surely. A reader in which each tensor looks at all others is seen by the count.
"""

import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.checkpoint.conversion.convert import IDENTITY, config_of, restructure
from tangram.checkpoint.conversion.find_mapping import choose
from tangram.checkpoint.conversion.new_tensors import steps_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.inspect import diff, tree, verify
from tangram.checkpoint.store import commits
from tests.checkpoint import zero

FEW, MANY = 48, 192
MOST = 4.5
"""Times as many lines for four times the tensors: 16 where each looks at all, and less than 4 where it is even."""


def lines_of(work: Callable[[], object]) -> int:
    """How many lines are run, in all threads that the work starts."""
    count = 0

    def seen(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return seen

    before = sys.gettrace()
    threading.settrace(seen)
    sys.settrace(seen)
    try:
        work()
    finally:
        sys.settrace(before)
        threading.settrace(before)  # pyright: ignore[reportArgumentType]
    return count


def grows(work: Callable[[int], object]) -> float:
    """How many times the lines of a work at FEW are those at MANY. It has been done once before, for what is cached."""
    work(FEW)
    few = lines_of(lambda: work(FEW))
    return lines_of(lambda: work(MANY)) / few


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of torch.save, of FEW and of MANY tensors and their optimiser's states, and a mixture's."""
    root = tmp_path_factory.mktemp("many")
    for n in (FEW, MANY):
        params = {f"layers.{i // 4}.p{i % 4}.weight": torch.full((2,), float(i)) for i in range(n)}
        state = {i: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)} for i in range(n)}
        groups = [{"lr": 1e-3, "params": list(range(n)), "param_names": list(params)}]
        torch.save({"model": params, "optimizer": {"state": state, "param_groups": groups}}, root / f"{n}.pt")
    return root


def into(root: Path, source: str, n: int, to: str, states: bool = True) -> Path:
    """Convert the checkpoint of n tensors, whose name is `source`, to a new directory."""
    opened = open_any(root / source.format(n))
    name = f"{n}-{len(list(root.iterdir()))}"
    chosen = choose(opened, to, config_of(opened.small), text=IDENTITY, states=states)
    steps_of(chosen.bound, dict(chosen.bound.target.specs))
    restructure(chosen.source, chosen.bound, root / name, to)
    return root / name


@pytest.fixture(scope="module")
def made(root: Path) -> Path:
    """The same in every format."""
    for n in (FEW, MANY):
        for to in ("hf", "torch_dist", "dcp", "tangram", "paddle"):
            into(root, "{}.pt", n, to, states=to != "paddle").rename(root / f"{to}-{n}")
    return root


@pytest.mark.parametrize("to", ["hf", "torch_dist", "dcp", "tangram", "paddle"])
def test_writing(root: Path, to: str) -> None:
    assert grows(lambda n: into(root, "{}.pt", n, to, states=to != "paddle")) < MOST


@pytest.mark.parametrize("source", ["hf", "torch_dist", "dcp", "tangram", "paddle"])
def test_reading(made: Path, source: str) -> None:
    assert grows(lambda n: into(made, source + "-{}", n, "dcp")) < MOST


def test_deepspeed(root: Path) -> None:
    for n in (FEW, MANY):
        params = {f"p.{i}.weight": torch.full((2,), float(i)) for i in range(n)}
        zero.save(zero.Run(2, 2, [params]), root / f"zero-{n}")
    assert grows(lambda n: into(root, "zero-{}", n, "dcp")) < MOST


def test_comparing(made: Path) -> None:
    def work(n: int) -> None:
        a, b = open_any(made / f"dcp-{n}"), open_any(made / f"tangram-{n}")
        assert diff.compare_across(*diff.seen_as(a, b, None)).same

    assert grows(work) < MOST


def test_verifying_and_inspecting(made: Path) -> None:
    def work(n: int) -> None:
        assert verify.verify(made / f"tangram-{n}").sound
        tree.tree(tree.chosen(commits.read_manifest(made / f"tangram-{n}"), "*"))

    assert grows(work) < MOST


def test_a_look_at_all_for_each_is_seen(root: Path) -> None:
    """Planted: a reader that goes through all pieces to find one."""

    def slow(opened: OpenCheckpoint) -> OpenCheckpoint:
        def read(place: Hashable, name: str) -> Tensor:
            for piece in opened.pieces:
                if piece.tensor == name:
                    return opened.read(piece.place, name)
            raise AssertionError(name)

        return replace(opened, read=read)

    def work(n: int) -> None:
        opened = slow(open_any(root / f"{n}.pt"))
        chosen = choose(opened, "dcp", None)
        restructure(chosen.source, chosen.bound, root / f"slow-{n}-{len(list(root.iterdir()))}", "dcp")

    assert grows(work) > MOST
