"""Verify a checkpoint: read every byte of it once, and say all that is wrong, not only the first thing.

    marker       its own checksum; step, id and sizes are those of the manifest
    manifest     the sha256 in the marker; every number in range; the pieces of each tensor cover it exactly
    files        all there with their sizes, no links, and none that does not belong
    headers      of the safetensors files: the same names, types, shapes and places, and the id of this save
    blocks       the checksum of each 4 MiB
    digests      of each tensor, from all its pieces

What is wrong comes back as values, so that a program can act on it. The reading is done in `scan`.

Threads share the blocks; each has memory for one, so memory does not grow with the checkpoint. Reads go around the page
cache where the file system lets them: what counts is what the disk has, and a job beside it keeps its cache.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangram.checkpoint.loading.block_source import WorkQueue, in_threads
from tangram.checkpoint.loading.page_memory import DirectFile, pages
from tangram.checkpoint.saving.file_layout import Outgoing, add_sums, parts, stored_images
from tangram.checkpoint.store import commits, digest, safetensors_header
from tangram.checkpoint.store import manifest as manifests
from tangram.checkpoint.store.commits import MANIFEST, MARKER, Marker
from tangram.checkpoint.store.digest import Bytes, Sums
from tangram.checkpoint.store.manifest import BLOCK, DTYPES, Manifest, ManifestError, StoredFile, checksum
from tangram.checkpoint.store.safetensors_header import PAGE
from tangram.errors import UserError
from tangram.models.building.directory import hub_hint

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


@dataclass(frozen=True)
class VerifyReport:
    """What was verified, and all that is wrong."""

    path: Path
    id: str
    step: int
    files: int
    tensors: int
    nbytes: int
    """Read."""
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "sound": self.sound,
            "id": self.id,
            "step": self.step,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "findings": [finding.as_json() for finding in self.findings],
        }


def verify(path: Path, on_bytes: OnBytes | None = None, threads: int = THREADS) -> VerifyReport:
    """Read the whole checkpoint `path`. Raises UserError where there is none of this format, and for nothing else."""
    begin = time.perf_counter()
    marker, manifest, findings = _described(path)
    if manifest is None:  # only the marker knows the files
        sizes = marker.sizes.items() if marker else ()
        files = {name: StoredFile(size, ()) for name, size in sizes if name != MANIFEST}
        scan = Scan(path, Manifest("", 0, "", {}, files))
        findings += scan.presence() if marker else []
        done = 0
    else:
        scan = Scan(path, manifest)
        findings += scan.presence() + scan.headers()
        done = scan.read(on_bytes or (lambda count: None), threads)
        findings += [*scan.damaged, *scan.digests()]
    of = manifest or marker
    findings.sort(key=lambda f: (f.file not in (MARKER, MANIFEST), f.file, f.start or 0, f.kind))
    return VerifyReport(
        path=path,
        id=of.id if of else "",
        step=of.step if of else 0,
        files=len(scan.manifest.files),
        tensors=len(scan.manifest.tensors),
        nbytes=done,
        seconds=time.perf_counter() - begin,
        findings=tuple(findings),
    )


def size_of(path: Path) -> int:
    """The bytes that `verify` will read, as the marker says; 0 where it cannot be read."""
    with contextlib.suppress(UserError, OSError):
        marker = commits.parse_marker(commits.read_bounded(path / MARKER, commits.LARGEST_MARKER), path)
        return sum(size for name, size in marker.sizes.items() if name != MANIFEST)
    return 0


def checkpoints_in(path: Path) -> list[Path]:
    """`path` itself where it is a checkpoint, else those in the folder, oldest commit first; damaged ones too.

    Raises UserError where there is none.
    """
    if (path / MARKER).exists() or (path / MANIFEST).exists():
        return [path]
    if not path.is_dir():
        raise UserError(f'there is no checkpoint "{path}"{hub_hint(path)}')
    found = [
        inner
        for inner in path.iterdir()
        if not inner.name.startswith(".") and not inner.is_symlink() and (inner / MARKER).exists()
    ]
    if not found:
        raise UserError(f'"{path}" is no checkpoint and holds none: no folder in it has a {MARKER}')
    serials = {inner: marker.serial for inner, marker in commits.committed(path)}
    return sorted(found, key=lambda inner: (serials.get(inner, 0), inner.name))


def newest_sound(path: Path, on_bytes: OnBytes | None = None, passed: tuple[Path, ...] = ()) -> Path | None:
    """The newest checkpoint beside `path` that is older than it and sound, None where there is none.

    Each that comes into question is read until one is sound. Where `path` itself says no longer how old it is, all
    others count as older. `passed`: those known to be damaged.
    """
    known = commits.committed(path.resolve().parent)
    own = next((marker.serial for other, marker in known if other.name == path.resolve().name), None)
    for other, marker in reversed(known):
        skipped = other.name == path.resolve().name or other.is_symlink() or any(other.samefile(p) for p in passed)
        if not skipped and (own is None or marker.serial < own) and verify(other, on_bytes).sound:
            return path.parent / other.name
    return None


# ---------------------------------------------------------------- marker and manifest


def _described(path: Path) -> tuple[Marker | None, Manifest | None, list[Finding]]:
    """What the marker and the manifest say, each as far as it can be read, and what is wrong with them."""
    findings: list[Finding] = []
    marker: Marker | None = None
    manifest: Manifest | None = None
    data = b""
    try:
        marker = commits.parse_marker(commits.read_bounded(path / MARKER, commits.LARGEST_MARKER), path)
    except FileNotFoundError:
        findings.append(Finding("missing", "the marker, which is written last, is not there", MARKER))
    except (UserError, OSError) as error:
        findings.append(Finding("marker", str(error), MARKER))
    try:
        data = commits.read_bounded(path / MANIFEST, manifests.LARGEST)
        manifest = manifests.parse(data)
    except FileNotFoundError:
        findings.append(Finding("missing", "the manifest is not there", MANIFEST))
    except (UserError, OSError) as error:
        findings.append(Finding("manifest", str(error), MANIFEST))
    if marker is None and manifest is None and "missing" in [finding.kind for finding in findings]:
        there = next((finding.text for finding in findings if finding.kind == "marker"), "")
        raise UserError(there or f'"{path}" is no checkpoint: it has no {MARKER} that can be read')
    if marker is not None and data and hashlib.sha256(data).hexdigest() != marker.manifest:
        findings.append(Finding("manifest", f"its sha256 is not the one that {MARKER} has", MANIFEST))
    if marker is not None and manifest is not None:
        findings += _between(marker, manifest)
    return marker, manifest, findings


def _between(marker: Marker, manifest: Manifest) -> Iterator[Finding]:
    for key in ("id", "step", "created"):
        said, meant = getattr(marker, key), getattr(manifest, key)
        if said != meant:
            yield Finding("marker", f"{MARKER} says {key} {said!r}, the manifest {meant!r}", MARKER)
    sizes = {name: file.size for name, file in manifest.files.items()}
    if sizes != {name: size for name, size in marker.sizes.items() if name != MANIFEST}:
        yield Finding("marker", f"{MARKER} and the manifest do not name the same files with the same sizes", MARKER)
