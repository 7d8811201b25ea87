"""Bring a committed checkpoint from one folder into another, as from memory to a disk, proved on the way.

What is copied is compared with the checksums that its writer took, block by block, so that memory that has rotted
never becomes what a run goes back to. It is committed as any other: by one rename, after all of it is on the disk.
"""

import contextlib
import os
import shutil
from pathlib import Path

from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.manifest import BLOCK, StoredFile, checksum

__all__ = ["pin", "promote"]

PINNED = ".pinned"


def pin(path: Path) -> Path:
    """The same files under a name of their own beside the checkpoint `path`, so that no retention takes them away.

    Nothing is copied. Raises OSError where the file system has no second names, or the checkpoint is gone.
    """
    pinned = path.with_name(f"{PINNED}-{path.name}")
    pinned.mkdir()
    try:
        for file in path.iterdir():
            os.link(file, pinned / file.name)
    except OSError:
        shutil.rmtree(pinned, ignore_errors=True)
        raise
    return pinned


def promote(path: Path, folder: Path) -> Path:
    """Copy the checkpoint `path` into `folder` and commit it there; its path.

    Raises DamagedError where its bytes are not those that were written, UserError where it is not whole, OSError as
    the disk does. Nothing is left of a copy that fails.
    """
    marker = commits.read_marker(path)
    manifest = commits.read_manifest(path, marker)
    target = commits.free_path(folder, marker.step)
    partial = commits.begin(target, marker.id)
    try:
        for name, stored in manifest.files.items():
            _copy(path / name, partial / name, stored)
        commits.commit(partial, target, manifest)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
        raise
    return target


def _copy(source: Path, target: Path, stored: StoredFile) -> None:
    with source.open("rb") as reading, target.open("xb") as writing:
        for block, expected in enumerate(stored.sums):
            data = reading.read(BLOCK)
            if checksum(data) != expected:
                where = f"from {block * BLOCK} to {block * BLOCK + len(data)}"
                raise DamagedError(
                    f'the checkpoint "{source.parent}" is damaged: its file "{source.name}" has other bytes {where} '
                    "than were written"
                )
            writing.write(data)
        writing.flush()
        os.fsync(writing.fileno())
