"""Checkpoints on object stores (`s3://`, `gs://`, `az://`, `http://`), by obstore.

    reading    a skeleton on the local disk: indexes whole, large data files as holes of their size, into which those
               bytes are fetched that somebody looks at; what was used is let go
    writing    a folder on the local disk whose data files are sent once they are whole, and removed; the files that
               make it a checkpoint go last, and where anything fails, what was sent is deleted

So formats know files only, and a conversion needs room for one data file and its buffers, whatever the size.

Trade-off: an object store has no rename. Who looks at the target meanwhile sees data files without an index; a process
that is killed leaves those, and no reader takes them for a checkpoint.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.store.commits import appearing
from tangram.errors import UserError

WHOLE = 16 << 20
"""Files of at most so many bytes are fetched whole, and all that hold no tensors."""
DATA = (".safetensors", ".distcp", ".bin", ".pt", ".pth", ".ckpt")
PIECE = 4 << 20
"""Bytes that are fetched together."""
HEAD = 8
LAST = ("model.safetensors.index.json", ".metadata", "metadata.json", "manifest.json", "tangram.json")
"""The files by which readers know a checkpoint, in the order in which they are sent."""
MISSING = "needs the extra `remote`: pip install 'tangram-train[remote]'"


def is_remote(place: str) -> bool:
    """Whether it is the address of an object store, and no path."""
    return "://" in place


@dataclass(frozen=True)
class ObjectStore:
    """A prefix of an object store."""

    address: str
    store: Any

    def sizes(self) -> dict[str, int]:
        """The bytes of each object below, by name."""
        import obstore

        with self._said("looked at"):
            rows: list[Any] = [row for some in obstore.list(self.store) for row in some]
        return {str(row["path"]): int(row["size"]) for row in rows}

    def ranges(self, name: str, starts: Sequence[int], stops: Sequence[int]) -> list[Any]:
        """Bytes of an object, as buffers; several requests at once."""
        import obstore

        with self._said(f"read ({name})"):
            return list(obstore.get_ranges(self.store, name, starts=starts, ends=stops)) if starts else []

    def put(self, name: str, file: Path) -> None:
        """Send a file, in parts where it is large."""
        import obstore

        with self._said(f"written ({name})"), file.open("rb") as stream:
            obstore.put(self.store, name, stream)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        import obstore

        if names:
            with self._said("cleaned up"):
                obstore.delete(self.store, list(names))

    @contextlib.contextmanager
    def _said(self, what: str) -> Generator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f'"{self.address}" cannot be {what}: {first[:300]}') from None


def store_of(address: str) -> ObjectStore:
    """The store of an address, with the credentials of the environment. Raises UserError for one that is none."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise UserError(f'"{address}" {MISSING}') from None
    try:
        return ObjectStore(address, from_url(address.rstrip("/")))
    except Exception as error:  # noqa: BLE001  each kind of store refuses in its own way
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f'"{address}" is no address of an object store that is known: {first[:300]}') from None


# ---------------------------------------------------------------- reading


class RemoteMaps(Maps):
    """Files of a skeleton, filled where they are looked at."""

    def __init__(self, folder: Path, store: ObjectStore, large: dict[str, int], front: str = "") -> None:
        """`front`: what stands before the names of files in the store."""
        super().__init__(folder)
        self._store, self._large, self._front = store, large, front
        self._there: dict[str, set[int]] = {}
        self.fetched = 0
        """Bytes so far, small files not counted."""

    def below(self, folder: Path) -> Maps:
        """The files of a folder inside, fetched as these are."""
        if folder == self.folder:
            return self
        front = f"{folder.relative_to(self.folder).as_posix()}/"
        inside = {name.removeprefix(front): size for name, size in self._large.items() if name.startswith(front)}
        return RemoteMaps(folder, self._store, inside, self._front + front)

    def ensure(self, file: str, start: int, stop: int) -> None:
        """Fetch what is not there yet of these bytes, in whole pieces."""
        size = self._large.get(file)
        if size is None or stop <= start:
            return
        there = self._there.setdefault(file, set())
        wanted = [i for i in range(start // PIECE, -(-min(stop, size) // PIECE)) if i not in there]
        starts = [i * PIECE for i in wanted]
        stops = [min(at + PIECE, size) for at in starts]
        found = self._store.ranges(self._front + file, starts, stops)
        with (self.folder / file).open("r+b") as out:
            for at, end, data in zip(starts, stops, found, strict=True):
                if memoryview(data).nbytes != end - at:
                    raise UserError(f'"{self._store.address}" has changed while it was read: {file} is shorter')
                os.pwrite(out.fileno(), data, at)
                self.fetched += end - at
        there.update(wanted)

    def release(self) -> None:
        """Let go of what was fetched: holes again."""
        super().release()
        for file in [file for file, some in self._there.items() if some]:
            os.truncate(self.folder / file, 0)
            os.truncate(self.folder / file, self._large[file])
        self._there.clear()


@contextlib.contextmanager
def opening(place: str) -> Generator[OpenCheckpoint]:
    """A checkpoint at a path or an address. Raises UserError as `open_any` does, and where the store refuses."""
    if not is_remote(place):
        yield open_any(Path(place))
        return
    store = store_of(place)
    sizes = store.sizes()
    if not sizes:
        raise UserError(f'"{place}" is not there, or empty')
    with tempfile.TemporaryDirectory(prefix="tangram-") as made:
        folder = Path(made) / (PurePosixPath(place.split("://", 1)[1]).name or "checkpoint")
        folder.mkdir()
        large = {name: size for name, size in sizes.items() if size > WHOLE and name.endswith(DATA)}
        for name, size in sizes.items():
            if ".." in PurePosixPath(name).parts:
                raise UserError(f'"{place}" has an object with the name {name!r}')
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                if name in large:
                    out.truncate(size)
                elif size:
                    out.write(store.ranges(name, [0], [size])[0])
        maps = RemoteMaps(folder, store, large)
        for name in large:  # headers of safetensors are read by that library, from the file
            if name.endswith(".safetensors"):
                maps.ensure(name, 0, HEAD)
                with (folder / name).open("rb") as stream:
                    maps.ensure(name, 0, HEAD + int.from_bytes(stream.read(HEAD), "little"))
        yield open_any(folder, maps)


# ---------------------------------------------------------------- writing


@contextlib.contextmanager
def placing(place: str, nbytes: int) -> Generator[tuple[Path, Callable[[str], None]]]:
    """A folder to write a checkpoint into, and who is told of each data file that is whole. It is there at the end.

    Raises UserError where something is there already.
    """
    if not is_remote(place):
        with appearing(Path(place), nbytes) as folder:
            yield folder, lambda name: None
        return
    store = store_of(place)
    if store.sizes():
        raise UserError(f'"{place}" is there already: give the name of a new one')
    sent: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tangram-") as made:
        folder = Path(made) / "out"
        folder.mkdir()

        def done(name: str) -> None:
            sent.append(name)
            store.put(name, folder / name)
            (folder / name).unlink()

        try:
            yield folder, done
            left = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
            for name in sorted(left, key=lambda one: LAST.index(one) if one in LAST else -1):
                done(name)
        except BaseException:
            with contextlib.suppress(UserError):  # the first error is the one to tell
                store.delete(sent)
            raise
