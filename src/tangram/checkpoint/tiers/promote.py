"""Bring a committed checkpoint from one folder into another, as from memory to a disk, proved on the way.

What is copied is compared with the checksums that its writer took, block by block, so that memory that has rotted
never becomes what a run goes back to. It is committed as any other: by one rename, after all of it is on the disk.
"""

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.saving.file_layout import Image, add_sums, stored_images
from tangram.checkpoint.saving.rank_parts import PartTensors, RankPart, leave_part, with_digests, with_small_files
from tangram.checkpoint.saving.snapshot import with_id
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.digest import Sums
from tangram.checkpoint.store.manifest import BLOCK, Manifest, StoredFile, checksum

PINNED = ".pinned"
IDLE = 600.0
"""Seconds: what is under way changes more often, as that of a writer which outlives its run."""


def pin(path: Path) -> Path:
    """The same files under a name of their own beside the checkpoint `path`, so that no retention takes them away.

    Nothing is copied. Raises OSError where the file system has no second names, or the checkpoint is gone.
    """
    pinned = path.with_name(f"{PINNED}-{path.name}")
    link_files(path, pinned)
    return pinned


def link_files(path: Path, folder: Path) -> None:
    """Make a folder of the same files under second names. Raises OSError where one is gone; nothing is left then."""
    folder.mkdir()
    try:
        for file in path.iterdir():
            os.link(file, folder / file.name)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def promote(path: Path, folder: Path) -> Path:
    """Copy the checkpoint `path` into `folder` and commit it there; its path.

    One at a time copies into a folder; what one that was killed has left there goes. Raises DamagedError where its
    bytes are not those that were written, UserError where it is not whole, OSError as the disk does. Nothing is left of
    a copy that fails.
    """
    marker = commits.read_marker(path)
    manifest = commits.read_manifest(path, marker)
    commits.sweep(folder, IDLE)
    target = commits.free_path(folder, marker.step)
    partial = commits.begin(target, marker.id, anew=True)
    digested = all(tensor.digest for tensor in manifest.tensors.values())
    try:
        manifest, sums = copy_files(path, manifest, partial, digested=digested)
        if not digested:
            manifest = with_small_files(partial, with_digests(manifest, sums), {})
        commits.commit(partial, target, manifest)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
        raise
    return target


def copy_share(path: Path, partial: Path, number: int) -> Manifest:
    """Copy what one of several machines has written into the folder of a checkpoint under way, as its part.

    Raises as `promote` does; whoever has the others commits it. Returns what it is.
    """
    manifest = commits.read_share(path)
    tensors = PartTensors(manifest.tensors)
    manifest, sums = copy_files(path, manifest, partial, digested=False)
    leave_part(partial, number, RankPart(manifest.files, tensors, sums, manifest.objects))
    return manifest


def copy_files(path: Path, manifest: Manifest, partial: Path, *, digested: bool) -> tuple[Manifest, dict[str, Sums]]:
    """Copy the files of a manifest and prove them; the manifest of the copies, and what their tensors sum to, unless
    they have digests.

    What the newest checkpoint beside has, too, gets a second name.
    """
    there, earlier = commits.newest_files(partial.parent)
    images, sums, files = {} if digested else stored_images(manifest), dict[str, Sums](), dict(manifest.files)
    for name, stored in manifest.files.items():
        own, known = replace(stored, save=stored.save or manifest.id), earlier.get(name)
        shared = known is not None and _alike(path / name, own, known) and _linked(there / name, partial / name)
        _copy(path / name, None if shared else partial / name, stored, images.get(name), sums)
        if known is not None and shared and known != own:
            files[name] = known
    return replace(manifest, files=files), sums


def _alike(file: Path, own: StoredFile, known: StoredFile) -> bool:
    """Whether a file has the bytes of another one, but for the id of its save: ranks that are started again write what
    is frozen anew."""
    if known == own:
        return True
    if (known.size, known.sums[1:]) != (own.size, own.sums[1:]) or len(known.save) != len(own.save):
        return False
    with file.open("rb") as reading:
        first = reading.read(BLOCK)
    of_other = with_id(first, own.save, known.save)
    return of_other != first and checksum(of_other) == known.sums[0]


def _linked(file: Path, name: Path) -> bool:
    """Give a file a second name, where the file system has those."""
    with contextlib.suppress(OSError):
        os.link(file, name)
        return True
    return False


def _copy(source: Path, target: Path | None, stored: StoredFile, image: Image | None, sums: dict[str, Sums]) -> None:
    """`target`: None to prove the file alone. `image`: of a file whose tensors have no digests yet; what they sum to is
    added to `sums`."""
    room = bytearray(min(BLOCK, stored.size))
    with source.open("rb") as reading, contextlib.ExitStack() as opened:
        writing = None if target is None else opened.enter_context(target.open("xb"))
        for block, expected in enumerate(stored.sums):
            data = memoryview(room)[: reading.readinto(room)]
            if checksum(data) != expected:
                where = f"from {block * BLOCK} to {block * BLOCK + len(data)}"
                raise DamagedError(
                    f'the checkpoint "{source.parent}" is damaged: its file "{source.name}" has other bytes {where} '
                    "than were written"
                )
            if image is not None:
                add_sums(image, block * BLOCK, np.frombuffer(data, np.uint8), sums)
            if writing is not None:
                writing.write(data)
        if writing is not None:
            writing.flush()
            os.fsync(writing.fileno())
