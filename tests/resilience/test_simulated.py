"""Snapshots are committed by several writers, brought to the disk and pruned, and everybody can be killed anywhere.

Under any interleaving: what has the name of a checkpoint is whole; what was told to be saved can be gone on from, or
something newer; and nobody waits for ever.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving import writer_process
from tangram.checkpoint.saving.rank_files import share_fields
from tangram.checkpoint.saving.snapshot import RankShare, Snapshot, share
from tangram.checkpoint.saving.writer_process import Order, SaveWriter
from tangram.checkpoint.state.entries import StateEntry
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.tiers import promote as promoting
from tangram.checkpoint.tiers.promote import pin, promote
from tangram.errors import UserError
from tangram.hardware.host.hostmemory import Shared
from tangram.layout import Region
from tangram.relayout import TensorSpec
from tangram.resilience import tiers as tiers_module
from tangram.resilience.tiers import Tiers
from tests.resilience.simulator import Simulation

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Who is killed leaves folders open that it was listing."""
WRITERS = 3
LATE = 0.8
STEPS = 2
ROWS = 2


class Post:
    """Words of how saves ended, from the first rank to the writers of the others: each comes late, twice, in another
    order or never, as drawn."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._under_way: dict[int, list[dict[str, Any]]] = {index: [] for index in range(1, WRITERS)}

    def send(self, done: dict[str, Any]) -> None:
        verdict = {"id": done["done"], "path": done["path"], "reason": done["reason"]}
        for waiting in self._under_way.values():
            waiting += [{"verdict": verdict}] * self._draw.choice((0, 1, 1, 2))

    def receive(self, index: int) -> tuple[dict[str, Any], list[int]] | None:
        waiting = self._under_way.get(index, [])
        if not waiting or self._draw.random() < LATE:
            return None
        return waiting.pop(self._draw.randrange(len(waiting))), []


class Ranks:
    """The writers of three ranks, each with its rows of one tensor; the values are the step."""

    def __init__(self, tiers: Tiers, attempt: int, simulation: Simulation, post: Post | None = None) -> None:
        folder = tiers.attempt(attempt)
        assert folder is not None
        self.folder, self.said = folder, dict[int, list[dict[str, Any]]]()
        self._simulation, self._post = simulation, post

    def writer(self, index: int, first: int) -> None:
        """The life of one: saves step after step."""
        said = self.said[index] = []
        post, simulation = self._post, self._simulation

        class Channel:
            def send(self, message: dict[str, Any], files: list[int] | None = None) -> None:
                said.append(message)
                if post is not None and index == 0 and "done" in message:
                    post.send(message)

            def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], list[int]] | None:
                simulation.receive(seconds)
                return None if post is None else post.receive(index)

        writer = SaveWriter(Channel())  # pyright: ignore[reportArgumentType]
        for step in range(first, first + STEPS):
            own, memory = self._copied(index, step)
            writer.hear({"share": share_fields(own, index, WRITERS)}, [])
            writer._files.memory = memory  # pyright: ignore[reportPrivateUsage]
            order = Order(
                id=f"{step:032x}",
                path=str(self.folder / f"step-{step:08d}"),
                step=step,
                retries=1,
                pause=0.1,
                limit=0.5,
                keep=("last=2",),
                digests=False,
            )
            writer.hear({"save": vars(order)}, [])

    def _copied(self, index: int, step: int) -> tuple[RankShare, np.ndarray[Any, Any]]:
        local = torch.full((ROWS, 4), float(step))
        region = Region.box((index * ROWS, 0), (ROWS, 4))
        spec = TensorSpec((ROWS * WRITERS, 4), "float32")
        own = share([StateEntry("model.w", spec, region, local, (index,))], index, WRITERS)
        memory = Shared(own.places.size)
        Snapshot().run(own, memory)
        values = memory.bytes.copy()
        memory.close()
        return own, values

    def committed(self) -> int:
        """The newest step of which a writer has told that it is saved."""
        told = [m["path"] for said in self.said.values() for m in said if m.get("done") and m["path"]]
        return max((int(Path(path).name.split("-")[1]) for path in told), default=0)


def promoter(tiers: Tiers, folder: Path, simulation: Simulation) -> set[int]:
    """Brings what it sees to the disk; the steps that are there by its own word."""
    found, seen = set[int](), set[str]()
    for _ in range(25):
        simulation.sleep(0.02)
        for path, marker in commits.committed(folder):
            if marker.id in seen:
                continue
            seen.add(marker.id)
            try:
                promote(pin(path), tiers.disk)
                found.add(marker.step)
                retention.prune(retention.plan(tiers.disk, retention.parse(["last=2"])))
            except (OSError, UserError):  # replaced by newer ones before it was pinned
                continue
    return found


def value(path: Path) -> float:
    state = {"model": {"w": torch.zeros(ROWS * WRITERS, 4)}}
    load(state, path)
    (one,) = set(state["model"]["w"].flatten().tolist())
    return one


def check(tiers: Tiers) -> int:
    """That all that is seen is whole, with the values of its step; the newest step."""
    found = [value(path) for path in tiers.newest_first()]
    for folder in (*tiers.attempts(), tiers.disk):
        for path in folder.glob("step-*"):
            assert value(path) == commits.read_marker(path).step
    return int(max(found, default=0))


def once(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch, **killed: Any) -> tuple[Simulation, int]:
    """Save and promote, be killed, recover, go on; how many steps it took, and the newest one before."""
    root.mkdir(exist_ok=True)
    tiers = Tiers(root / "memory", root / "disk")
    simulation = Simulation(root, seed, **killed)
    for module in (writer_process, tiers_module):
        monkeypatch.setattr(module, "time", simulation)
    ranks = Ranks(tiers, 1, simulation)
    acts: dict[str, Any] = {f"writer {i}": (lambda i=i: ranks.writer(i, 1)) for i in range(WRITERS)}
    acts["promoter"] = lambda: promoter(tiers, ranks.folder, simulation)
    ended = simulation.run(acts)
    for actor in ended.values():
        assert actor.error is None, (seed, actor.name, actor.error)
    newest = check(tiers)
    assert newest >= ranks.committed(), f"seed {seed}: a committed step is lost"
    durable = ended["promoter"].result
    assert not durable or newest >= max(durable)  # pyright: ignore[reportArgumentType]
    again = Simulation(root, seed + 1)
    for module in (writer_process, tiers_module):
        monkeypatch.setattr(module, "time", again)
    tiers.settle()
    after = Ranks(tiers, 2, again)
    again.run({f"writer {i}": (lambda i=i: after.writer(i, newest + 1)) for i in range(WRITERS)})
    assert check(tiers) == newest + STEPS, f"seed {seed}: it does not go on"
    return simulation, newest


def test_undisturbed_all_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, newest = once(tmp_path / "a", 0, monkeypatch)
    assert newest == STEPS
    two, _ = once(tmp_path / "b", 0, monkeypatch)
    assert one.steps == two.steps, "a seed is an interleaving"


@pytest.mark.parametrize("seed", range(8))
def test_words_between_ranks_come_late_twice_disordered_or_never(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, simulation, post = Tiers(tmp_path / "memory", tmp_path / "disk"), Simulation(tmp_path, seed), Post(seed)
    monkeypatch.setattr(writer_process, "time", simulation)
    ranks = Ranks(tiers, 1, simulation, post)
    ended = simulation.run({f"writer {i}": (lambda i=i: ranks.writer(i, 1)) for i in range(WRITERS)})
    assert [actor.error for actor in ended.values()] == [None] * WRITERS
    assert check(tiers) == STEPS, "each save is committed, whatever is heard of others"
    for said in ranks.said.values():
        assert [(m["done"], Path(m["path"]).name) for m in said if "done" in m] == [
            (f"{step:032x}", f"step-{step:08d}") for step in range(1, STEPS + 1)
        ]


@pytest.mark.parametrize("seed", range(5))
def test_the_machine_stops_at_any_moment(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was flushed is there: memory of the machine lives on, as after all processes are killed."""
    once(tmp_path, seed, monkeypatch, kill_all_at=5 + 61 * seed)


@pytest.mark.parametrize("seed", range(4))
def test_one_is_killed_at_any_operation(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who = (*(f"writer {i}" for i in range(WRITERS)), "promoter")[seed % (WRITERS + 1)]
    once(tmp_path, 100 + seed, monkeypatch, kill={who: 3 + 7 * seed})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many_moments(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(25):
        seed = 1000 + 25 * part + number
        once(tmp_path / f"{number}", seed, monkeypatch, kill_all_at=2 + 3 * (25 * part + number))


def test_a_commit_that_names_before_it_writes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator finds a fault: a promotion that renames first and copies then."""

    def careless(path: Path, folder: Path) -> Path:
        marker = commits.read_marker(path)
        target = folder / f"step-{marker.step:08d}"
        target.mkdir(parents=True)
        for name in ("tangram.json", "manifest.json", *commits.read_manifest(path).files):
            (target / name).write_bytes((path / name).read_bytes())
        return target

    monkeypatch.setattr(f"{__name__}.promote", careless)
    with pytest.raises((AssertionError, UserError)):  # noqa: PT012  at one moment or another
        for seed in range(12):
            once(tmp_path / f"{seed}", seed, monkeypatch, kill={"promoter": 20 + 4 * seed})
    assert promoting.promote is not careless
