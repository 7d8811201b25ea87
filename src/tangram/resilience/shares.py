"""Snapshots that stay where they were written: a share on each node, found again, put together, brought to the disk.

    node 0   attempt-2/step-7   share 0 of 2      held/ID-1   share 1 of 2, a copy
    node 1   attempt-2/step-7   share 1 of 2      held/ID-0   share 0 of 2, a copy

Every node says which shares it has. A snapshot of which all shares are somewhere can be gone on from: each node makes a
checkpoint of the manifests of all shares and of the files that it has itself (hard links: nothing is copied), and
loading reads each block where it is (`checkpoint.loading.assign_blocks`). That the shares cover the state is proved as
for any manifest, when they are put together.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tangram.checkpoint.saving.rank_parts import (
    About,
    PartTensors,
    RankPart,
    complete_parts,
    finish,
    merged,
)
from tangram.checkpoint.store import commits, manifest
from tangram.checkpoint.store.manifest import Manifest
from tangram.checkpoint.tiers.promote import copy_share
from tangram.errors import UserError, sentence
from tangram.resilience.nodes import Nodes
from tangram.resilience.tiers import HELD, RESUME, Tiers, newest_first


@dataclass(frozen=True, order=True)
class Share:
    """What one node has written of a snapshot."""

    created: str
    step: int
    id: str
    number: int
    of: int

    @property
    def name(self) -> str:
        return f"{self.id}-{self.number}"


@dataclass(frozen=True)
class _Snapshot:
    """One that all nodes know of."""

    created: str
    step: int
    id: str
    holders: tuple[int, ...]
    """For each share a node that has it; of a checkpoint on the disk none."""
    path: Path | None


def shares_here(tiers: Tiers) -> dict[Share, Path]:
    found: dict[Share, Path] = {}
    for folder in (*tiers.attempts(), *tiers.folders(HELD)):
        for path, marker in commits.committed(folder):
            if marker.share is not None:
                found.setdefault(Share(marker.created, marker.step, marker.id, *marker.share), path)
    return found


def newest(nodes: Nodes, tiers: Tiers, bad: Iterable[str], attempt: int) -> Path | None:
    """What all nodes can go on from: the snapshot or checkpoint that was written last; its path here. For all at once.

    `bad`: ids of those that are not to be taken.
    """
    here = shares_here(tiers)
    everywhere = [one for one in _everywhere(nodes, here, tiers) if one.id not in bad]
    near = {one.id for one in everywhere if one.path is None}
    found = [one for one in everywhere if one.path is None or one.id not in near]
    if not found or found[0].path is not None:
        return found[0].path if found else None
    first = found[0]
    mine = {share: path for share, path in here.items() if share.id == first.id}
    texts = {
        share.number: (path / commits.MANIFEST).read_bytes()
        for share, path in mine.items()
        if first.holders[share.number] == nodes.index
    }
    every = {number: text for word in nodes.words(texts) for number, text in word.items()}
    parts = [manifest.parse(every[number], partly=True) for number in range(len(first.holders))]
    path = _together(first, parts, mine.values(), tiers.folder(f"{RESUME}-{attempt}"))
    nodes.words("")  # all have it
    return path


def to_disk(nodes: Nodes, tiers: Tiers, tell: Callable[[int, Path], None]) -> None:
    """Bring the newest snapshot to the disk, where it is newer than what is there, and forget those in memory. For all
    at once; `tell` is told of it on the first. Raises UserError, on all, where the disk takes none: they stay."""
    here = shares_here(tiers)
    found = _everywhere(nodes, here, tiers)
    if found and found[0].id not in {one.id for one in found if one.path is not None}:
        first = found[0]
        target = nodes.words(commits.free_path(tiers.disk, first.step) if nodes.index == 0 else Path())[0]
        partial = commits.partial_path(target, first.id)
        if error := nodes.words(_begun(target, first.id) if nodes.index == 0 else "")[0]:
            raise UserError(f'the state in memory could not be brought to "{tiers.disk}": {error}: make room there')
        mine = [one for one in here.items() if one[0].id == first.id and first.holders[one[0].number] == nodes.index]
        words = nodes.words(_copied(mine, partial))
        error = next((error for error, _ in words if error), "")
        if nodes.index == 0:
            about = About(first.step, "".join(mesh for _, mesh in words), created=first.created)
            if error := error or committed(partial, target, len(first.holders), first.id, about):
                shutil.rmtree(partial, ignore_errors=True)
            else:
                tell(first.step, target)
        if error := nodes.words(error)[0]:
            raise UserError(f'the state in memory could not be brought to "{tiers.disk}": {error}: make room there')
    tiers.forget()


def _begun(target: Path, save_id: str) -> str:
    """Make the folder of a checkpoint; why that was not possible, as a sentence."""
    try:
        commits.begin(target, save_id, anew=True)
    except OSError as error:
        return sentence(error)
    return ""


def committed(partial: Path, target: Path, count: int, save_id: str, about: About) -> str:
    """Make the parts of all nodes a checkpoint; why that was not possible, as a sentence."""
    try:
        parts = complete_parts(partial, range(count))
        if parts is None:
            return "a node has left no part"
        finish(partial, target, count, save_id, about, parts)
    except (OSError, UserError) as error:
        return sentence(error)
    return ""


def _copied(shares: Iterable[tuple[Share, Path]], partial: Path) -> tuple[str, str]:
    """Why shares could not be copied, and the mesh that the first of all is of."""
    mesh = ""
    try:
        for share, path in shares:
            found = copy_share(path, partial, share.number)
            mesh = found.mesh if share.number == 0 else mesh
    except (OSError, UserError) as error:
        return sentence(error), ""
    return "", mesh


def _everywhere(nodes: Nodes, here: dict[Share, Path], tiers: Tiers) -> list[_Snapshot]:
    """What is whole, of all nodes together, the newest first. Alike on all."""
    disk = [(marker, path) for path, marker in commits.committed(tiers.disk)] if nodes.index == 0 else []
    words = nodes.words((sorted(here), [(one.created, one.step, one.id, path) for one, path in disk]))
    holders: dict[str, dict[Share, int]] = {}
    for node, (shares, _) in enumerate(words):
        for share in shares:
            holders.setdefault(share.id, {}).setdefault(share, node)
    memory = sorted(_complete(holders), key=lambda one: (one.step, one.created))
    there = [_Snapshot(created, step, save_id, (), path) for created, step, save_id, path in words[0][1]]
    return newest_first(memory, there, lambda one: one)


def _complete(holders: dict[str, dict[Share, int]]) -> Iterator[_Snapshot]:
    for save_id, shares in holders.items():
        by_number = {share.number: (share, node) for share, node in shares.items()}
        first = next(iter(shares))
        if by_number.keys() == set(range(first.of)):
            held = tuple(by_number[number][1] for number in range(first.of))
            yield _Snapshot(by_number[0][0].created, first.step, save_id, held, None)


def _together(first: _Snapshot, parts: Sequence[Manifest], mine: Iterable[Path], folder: Path) -> Path:
    """The checkpoint that these shares are, with the files that are here."""
    found = merged(
        [RankPart(part.files, PartTensors(part.tensors), None, part.objects) for part in parts],
        id=first.id,
        step=first.step,
        created=first.created,
        mesh=parts[0].mesh,
    )
    path = folder / f"step-{first.step:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    partial = commits.begin(path, first.id)
    for share in mine:
        for name in found.files:
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.link(share / name, partial / name)
    here = [name for name in found.files if (partial / name).exists()]
    commits.commit(partial, path, found, here=here)
    return path
