"""One pass over the files of a checkpoint: what is wrong with them, as values.

Threads share the blocks; each has memory for one, so memory does not grow with the checkpoint. Reads go around the page
cache where the file system lets them: what counts is what the disk has, and a job beside it keeps its cache.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangram.checkpoint.loading.block_threads import WorkQueue, in_threads
from tangram.checkpoint.loading.page_memory import DirectFile, pages
from tangram.checkpoint.saving.file_layout import Outgoing, add_sums, parts, stored_images
from tangram.checkpoint.store import digest, safetensors_header
from tangram.checkpoint.store.commits import MANIFEST, MARKER
from tangram.checkpoint.store.digest import Bytes, Sums
from tangram.checkpoint.store.manifest import BLOCK, DTYPES, Manifest, ManifestError, checksum
from tangram.checkpoint.store.safetensors_header import PAGE

THREADS = max(4, min(16, os.cpu_count() or 1))
"""That read and sum blocks: some wait for the disk while the others compute."""
DATA = ".safetensors"
SAVE = "tangram_save"

OnBytes = Callable[[int], None]
"""Is called, from any thread, with how many more bytes have been read."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """marker, manifest, missing, link, size, extra, unreadable, header, block or digest."""
    text: str
    """A sentence for people."""
    file: str = ""
    start: int | None = None
    """The bytes of the file that it concerns, `start <= i < stop`; None for the whole file."""
    stop: int | None = None
    tensors: tuple[str, ...] = ()
    """That have bytes there."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "kind": self.kind,
            "text": self.text,
            "file": self.file,
            "bytes": None if self.start is None else [self.start, self.stop],
            "tensors": list(self.tensors),
        }


@dataclass
class Scan:
    """One pass over the files of a checkpoint. Threads share `sums` and `damaged` under the lock."""

    path: Path
    manifest: Manifest
    sums: dict[str, Sums] = field(default_factory=dict[str, Sums])
    damaged: list[Finding] = field(default_factory=list[Finding])
    unsure: set[str] = field(default_factory=set[str])
    """Tensors whose bytes could not all be read or have a wrong checksum: their digest says nothing new."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._images = stored_images(self.manifest)
        self._open: dict[str, DirectFile] = {}
        self._done = 0
        """Bytes that were read."""
        self._there: dict[str, int] = {}
        """Bytes of each plain file that is there, as far as the manifest wants them."""

    def _finding(self, kind: str, text: str, file: str, start: int = 0, stop: int | None = None) -> Finding:
        stop = self.manifest.files[file].size if stop is None else stop
        names = tuple(dict.fromkeys(placed.piece.name for placed, _, _ in parts(self._images[file], start, stop)))
        self.unsure.update(names)
        return Finding(kind, text, file, start, stop, names)

    def presence(self) -> list[Finding]:
        """That all files are there and no others."""
        found: list[Finding] = []
        for name, file in self.manifest.files.items():
            whole = self.path / name
            try:
                size = whole.lstat().st_size
            except FileNotFoundError:
                found.append(self._finding("missing", f"{name} is not there", name))
                continue
            if whole.is_symlink() or not whole.is_file():
                found.append(self._finding("link", f"{name} is a link or no plain file; it is not followed", name))
                continue
            self._there[name] = min(size, file.size)
            if size < file.size:
                said = f"{name} is cut off: it has {size:,} of {file.size:,} bytes"
                found.append(self._finding("size", said, name, size // BLOCK * BLOCK, file.size))
                self._there[name] = size // BLOCK * BLOCK
            elif size > file.size:
                said = f"{name} has {size:,} bytes, {size - file.size:,} more than were written"
                found.append(Finding("size", said, name, file.size, size))
        known = {MARKER, MANIFEST, *self.manifest.files}
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in known)
        return found + [Finding("extra", f"{name} does not belong to the checkpoint", name) for name in others]

    def headers(self) -> list[Finding]:
        """That the safetensors headers say what the manifest says."""
        found: list[Finding] = []
        for name in self._there:
            if not name.endswith(DATA):
                continue
            try:
                wrong = self._header(name)
            except (ManifestError, OSError) as error:
                wrong = str(error)
            if wrong:
                found.append(Finding("header", wrong, name))
        return found

    def _header(self, name: str) -> str:
        """What is wrong with the header of a file, nothing where it is right."""
        size = self._there[name]
        with (self.path / name).open("rb") as stream:
            head = stream.read(8)
            head += stream.read(safetensors_header.header_length(head, size, name))
        slots, metadata = safetensors_header.parse(head, self.manifest.files[name].size, name)
        meant_id = self.manifest.files[name].save or self.manifest.id
        if metadata.get(SAVE) != meant_id:
            return f"{name} is of another save: {metadata.get(SAVE, 'none')!r}, not {meant_id!r}"
        said = {slot.name: (slot.dtype, slot.shape, slot.offset) for slot in slots}
        meant = {one.piece.key: (*_stored(one.piece), one.offset) for one in self._images[name].placed}
        for key, place in meant.items():
            if said.get(key) != place:
                return f"the header of {name} has {key} as {said.get(key)}, the manifest as {place}"
        others = [slot.name for slot in slots if slot.name not in meant]
        return f"the header of {name} has {others[0]}, which is not in the manifest" if others else ""

    def read(self, on_bytes: OnBytes, threads: int) -> int:
        """Sum all blocks. Returns how many bytes were read."""
        jobs = WorkQueue([(n, start) for n, size in self._there.items() for start in range(0, size, BLOCK)])
        try:
            in_threads(lambda: self._reader(jobs, on_bytes), threads)
        finally:
            for file in self._open.values():
                file.close()
        return self._done

    def _reader(self, jobs: WorkQueue[tuple[str, int]], on_bytes: OnBytes) -> Callable[[], bool]:
        room = pages(BLOCK)

        def step() -> bool:
            job = jobs.take()
            if job is None:
                return False
            name, start = job
            length = min(BLOCK, self.manifest.files[name].size - start)
            try:
                if self._file(name).read(start, room[: -(-length // PAGE) * PAGE]) < length:
                    raise OSError(5, "it ends too early")
            except OSError as error:
                why = f"{name} cannot be read: {error.strerror or error}"
                with self._lock:
                    self.damaged.append(self._finding("unreadable", why, name, start, start + length))
                return True
            self._block(name, start, room[:length])
            on_bytes(length)
            return True

        return step

    def _file(self, name: str) -> DirectFile:
        with self._lock:
            if name not in self._open:
                self._open[name] = DirectFile(self.path / name)
            return self._open[name]

    def _block(self, name: str, start: int, data: Bytes) -> None:
        stop = start + len(data)
        right = checksum(data.data) == self.manifest.files[name].sums[start // BLOCK]
        sums: dict[str, Sums] = {}
        if right:
            add_sums(self._images[name], start, data, sums)
        with self._lock:
            self._done += len(data)
            if not right:
                said = f"bytes {start:,} to {stop:,} of {name} are not those that were written"
                self.damaged.append(self._finding("block", said, name, start, stop))
            for tensor, some in sums.items():
                self.sums[tensor] = digest.add(self.sums.get(tensor, digest.NOTHING), some)

    def digests(self) -> Iterator[Finding]:
        """Tensors whose elements are not those that were saved, though every block is what was written."""
        for name, tensor in self.manifest.tensors.items():
            own = digest.digest(tensor.spec.dtype, tensor.spec.shape, self.sums.get(name, digest.NOTHING))
            if tensor.digest and name not in self.unsure and own != tensor.digest:
                yield Finding("digest", f"{name} has the digest {own}, the manifest {tensor.digest}", tensors=(name,))


def _stored(piece: Outgoing) -> tuple[str, tuple[int, ...]]:
    """Type and shape by which a header names a piece."""
    dtype = piece.spec.dtype
    return (
        (dtype, piece.shape) if dtype in safetensors_header.NAMES else ("uint8", (piece.region.size * DTYPES[dtype],))
    )
