"""A directory that is there whole or not at all: written under a hidden name, and renamed when all is on the disk."""

import contextlib
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path

from tangram.checkpoint.store import commits
from tangram.errors import UserError


@contextlib.contextmanager
def appearing(target: Path, nbytes: int) -> Generator[Path]:
    """A folder to write into, that becomes `target` by one rename where all goes well, and is removed otherwise.

    Raises UserError where the target is there already, or the disk has less room than `nbytes`.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f'"{target}" is there already: give the name of a new directory')
    partial = target.with_name(f".{target.name}-{secrets.token_hex(6)}{commits.PARTIAL}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(target.parent)
        if disk.total and disk.free < nbytes:
            raise UserError(f'"{target.parent}" has room for {disk.free:,} bytes, and {nbytes:,} are to be written')
        partial.mkdir()
    except OSError as error:  # a file in the place of a folder, no right to write, a file system that is no disk
        why = "it is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise UserError(f'no directory can be made in "{target.parent}" ({why}): give another place') from None
    try:
        yield partial
        commits.flush_folder(partial)
        if target.exists():
            raise UserError(f'"{target}" has appeared meanwhile: give the name of a new directory')
        partial.rename(target)
        commits.flush_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
