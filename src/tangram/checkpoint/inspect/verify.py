"""Verify a checkpoint: read every byte of it once, and say all that is wrong, not only the first thing.

    marker       its own checksum; step, id and sizes are those of the manifest
    manifest     the sha256 in the marker; every number in range; the pieces of each tensor cover it exactly
    files        all there with their sizes, no links, and none that does not belong
    headers      of the safetensors files: the same names, types, shapes and places, and the id of this save
    blocks       the checksum of each 4 MiB
    digests      of each tensor, from all its pieces

What is wrong comes back as values, so that a program can act on it. The reading is done in `scan`.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.checkpoint.inspect.scan import THREADS, Finding, OnBytes, Scan
from tangram.checkpoint.store import commits
from tangram.checkpoint.store import manifest as manifests
from tangram.checkpoint.store.commits import MANIFEST, MARKER, Marker
from tangram.checkpoint.store.manifest import Manifest, StoredFile
from tangram.errors import UserError


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
        """Whether nothing is wrong."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """For programs."""
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
        raise UserError(f'there is no checkpoint "{path}"')
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
