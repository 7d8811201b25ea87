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
from collections.abc import Callable, Generator
from pathlib import Path, PurePosixPath

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.store.commits import appearing
from tangram.checkpoint.store.objects import ObjectStore, is_remote, store_of
from tangram.errors import UserError

WHOLE = 16 << 20
"""Files of at most so many bytes are fetched whole, and all that hold no tensors."""
DATA = (".safetensors", ".distcp", ".bin", ".pt", ".pth", ".ckpt")
PIECE = 4 << 20
"""Bytes that are fetched together."""
HEAD = 8
LAST = ("model.safetensors.index.json", ".metadata", "metadata.json", "manifest.json", "tangram.json")
"""The files by which readers know a checkpoint, in the order in which they are sent."""


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
