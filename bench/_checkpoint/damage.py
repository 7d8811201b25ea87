"""Damage done to a checkpoint's files, and who notices when it is loaded.

Noticed is a load that is refused; a load that gives the right values all the same has come to no harm, so both count.
What is left is silent: other values than were saved, and not a word. Every case is on the files as they were; only its
bytes are put back afterwards.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench._checkpoint import disk, peers
from bench._checkpoint.peers import Contender
from bench._checkpoint.state import State, fill, make, wrong
from tangram.checkpoint.inspect.verify import verify
from tangram.errors import UserError
from tangram.relayout.exchange.peers import Peers
from tangram.training.run.launch import Rank

KINDS = ("1 bit flipped", "4 KiB of zeros", "cut short", "a file of another step", "torn overwrite")
ZEROS = 4096
SEED = 11


@dataclass(frozen=True)
class Task:
    """What is saved and then damaged."""

    folder: str
    name: str
    nbytes: float
    count: int
    """Cases of each kind; half as many of cuts and torn overwrites."""


@dataclass
class Counts:
    """By kind: (noticed or harmless, all)."""

    loads: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    verifies: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """The same by `verify`, which only ours has."""


def prepare(rank: Rank, task: Task) -> None:
    """Save the states of two steps, on all ranks."""
    state = make(task.nbytes, init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp",)), "rows")
    (contender,) = peers.contenders([task.name])
    for step in (1, 2):
        fill(state, step)
        contender.save(state, _path(task, step))
        Peers(dist.group.WORLD).wait()


def count(rank: Rank, task: Task) -> Counts:
    """Damage the first of the two, case by case, and load it in one process."""
    state = make(task.nbytes, init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp",)), "rows")
    (contender,) = peers.contenders([task.name])
    here = _path(task, 1)
    if not _noticed(contender, state, here, right=True):
        raise RuntimeError(f"{task.name} does not load what is whole")
    if task.name != "ours":
        _quiet()
    counts = Counts()
    draw = random.Random(SEED)
    for kind in KINDS:
        for damage in _cases(kind, task, contender, draw):
            file, data = damage
            before = file.read_bytes()
            file.write_bytes(data)
            try:
                noticed = _noticed(contender, state, here)
                _add(counts.loads, kind, noticed)
                if task.name == "ours":
                    _add(counts.verifies, kind, _found(here))
            finally:
                file.write_bytes(before)
    if not _noticed(contender, state, here, right=True):
        raise RuntimeError("what was put back is not what was there")
    shutil.rmtree(here.parent)
    return counts


def _quiet() -> None:
    """Let peers complain to nobody: each damaged file is worth a page of traces to some."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, 2)
    os.close(nobody)


def _path(task: Task, step: int) -> Path:
    return Path(task.folder, f"damage-{task.name}", f"step-{step}")


def _add(table: dict[str, tuple[int, int]], kind: str, noticed: bool) -> None:
    some, of = table.get(kind, (0, 0))
    table[kind] = some + noticed, of + 1


def _noticed(contender: Contender, state: State, path: Path, right: bool = False) -> bool:
    """Whether a load is refused, or its values are right; with `right`, only the second."""
    state.memory[:] = 0
    try:
        found = contender.load(state, path)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001  however a peer says it: DCP's own is no Exception
        return not right
    return not wrong(found, 1)


def _found(path: Path) -> bool:
    try:
        return not verify(path).sound
    except UserError:
        return True


# ---------------------------------------------------------------- the cases


def _cases(kind: str, task: Task, contender: Contender, draw: random.Random) -> Iterator[tuple[Path, bytes]]:
    """Files with what they are to hold."""
    files = disk.files_of(_path(task, 1))
    makers: dict[str, Callable[[], Iterator[tuple[Path, bytes]]]] = {
        "1 bit flipped": lambda: (_flipped(_drawn(files, draw), draw) for _ in range(task.count)),
        "4 KiB of zeros": lambda: (_zeroed(_drawn(_large(files), draw), draw) for _ in range(task.count)),
        "cut short": lambda: (_cut(_drawn(files, draw), draw) for _ in range(task.count // 2)),
        "a file of another step": lambda: _exchanged(task, contender),
        "torn overwrite": lambda: _torn(task, draw),
    }
    return makers[kind]()


def _drawn(files: list[Path], draw: random.Random) -> Path:
    """A file, the larger the likelier."""
    return draw.choices(files, [file.stat().st_size for file in files])[0]


def _large(files: list[Path]) -> list[Path]:
    return [file for file in files if file.stat().st_size >= 2 * ZEROS]


def _flipped(file: Path, draw: random.Random) -> tuple[Path, bytes]:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return file, bytes(data)


def _zeroed(file: Path, draw: random.Random) -> tuple[Path, bytes]:
    data = bytearray(file.read_bytes())
    while True:
        start = draw.randrange(len(data) // ZEROS) * ZEROS
        if any(data[start : start + ZEROS]):
            data[start : start + ZEROS] = bytes(ZEROS)
            return file, bytes(data)


def _cut(file: Path, draw: random.Random) -> tuple[Path, bytes]:
    data = file.read_bytes()
    return file, data[: draw.randrange(len(data))]


def _exchanged(task: Task, contender: Contender) -> Iterator[tuple[Path, bytes]]:
    """Each file, from the second step; of a format of one file that would only be the other checkpoint."""
    if contender.linked:
        for file, other in _pairs(task):
            yield file, other.read_bytes()


def _torn(task: Task, draw: random.Random) -> Iterator[tuple[Path, bytes]]:
    """The second step written over the first up to some page."""
    pairs = _pairs(task)
    for _ in range(task.count // 2 if pairs else 0):
        file, other = draw.choices(pairs, [pair[0].stat().st_size for pair in pairs])[0]
        data, new = file.read_bytes(), other.read_bytes()
        at = draw.randrange(1, len(data) // ZEROS) * ZEROS
        yield file, new[:at] + data[at:]


def _pairs(task: Task) -> list[tuple[Path, Path]]:
    """Files that differ between the two steps, under the same name; not those of a few bytes, as dates."""
    one, two = _path(task, 1), _path(task, 2)
    pairs = [(file, two / file.relative_to(one)) for file in _large(disk.files_of(one))]
    return [(file, other) for file, other in pairs if other.exists() and file.read_bytes() != other.read_bytes()]
