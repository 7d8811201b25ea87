"""Checkpoints as folders: one each, written under a temporary name and committed by one rename.

    checkpoint/
      step-00000100/                the tensors, and `tangram.json`: the marker, written last
      .step-00000200-a1b2.partial/  one under way, or what a run that died left of one

Files and folders are flushed to the disk before the rename, so whatever is killed, every `step-...` is whole. The
marker has the size of every file and the checksum of every piece: what was copied in part or has rotted is found, and a
torn folder is passed over by `newest`.

Checkpoints are ordered by when they were committed, not by their step: of a run that goes on from an older checkpoint
the newest is the one that it wrote last.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tangram.errors import UserError
from tangram.relayout import TensorSpec

MARKER = "tangram.json"
FORMAT = 1
BLOCK = 1 << 24  # bytes that are read at once to be checked


@dataclass(frozen=True)
class FileMark:
    """How many bytes a file has, and the crc32 of each of its pieces by their offset."""

    size: int
    sums: Mapping[int, int]


@dataclass(frozen=True)
class Marker:
    """What a checkpoint says of itself."""

    serial: int
    """Counts the commits in a folder."""
    progress: Mapping[str, float]
    """How far training was: steps, samples, tokens, seconds."""
    about: Mapping[str, Any]
    """What made it: model, plan, versions; anything that JSON can say."""
    digest: str
    """Of the names, dtypes and shapes of its tensors."""
    frozen: tuple[str, ...] = ()
    """The parameters that were not trained, which have no optimiser state."""
    files: Mapping[str, FileMark] = field(default_factory=dict[str, FileMark])


def digest(specs: Mapping[str, TensorSpec]) -> str:
    """A fingerprint of which tensors there are."""
    rows = [[name, spec.dtype, list(spec.shape)] for name, spec in sorted(specs.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


# ---------------------------------------------------------------- reading


def read_marker(path: Path) -> Marker:
    """The marker of the checkpoint in the folder `path`, whose files are all there. Raises UserError when not so."""
    try:
        fields = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_absent(path)) from None
    except (OSError, ValueError) as error:
        raise UserError(f'the {MARKER} of the checkpoint "{path}" cannot be read: {error}') from None
    marker = _parse(fields, path)
    for name, mark in marker.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != mark.size:
            found = "is not there" if size is None else f"has {size} of {mark.size} bytes"
            raise UserError(f'the checkpoint "{path}" is not whole: its file "{name}" {found}')
    return marker


def _absent(path: Path) -> str:
    if not path.exists():
        return f'there is no checkpoint "{path}"'
    if path.is_dir() and whole(path):
        return f'"{path}" holds several checkpoints, give one of them: the newest is "{whole(path)[-1][0]}"'
    return f'"{path}" is not a whole checkpoint: it has no {MARKER}, which is written last'


def _parse(fields: Any, path: Path) -> Marker:
    known: dict[str, Any] = cast(dict[str, Any], fields) if isinstance(fields, dict) else {}
    if known.get("format") != FORMAT:
        raise UserError(f'the checkpoint "{path}" has the format {known.get("format")}; this version reads {FORMAT}')
    try:
        files = {
            str(name): FileMark(int(mark["size"]), {int(at): int(crc) for at, crc in mark["sums"].items()})
            for name, mark in known["files"].items()
        }
        return Marker(
            serial=int(known["serial"]),
            progress={str(key): _number(value) for key, value in known["progress"].items()},
            about=dict(known["about"]),
            digest=str(known["digest"]),
            frozen=tuple(str(name) for name in known["frozen"]),
            files=files,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'the {MARKER} of the checkpoint "{path}" is damaged: {error!r}') from None


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


def whole(folder: Path) -> list[tuple[Path, Marker]]:
    """The whole checkpoints in a folder, in the order in which they were committed; torn ones are passed over."""
    found: list[tuple[Path, Marker]] = []
    for path in folder.glob("step-*"):
        with contextlib.suppress(UserError):  # it is torn, as no commit of ours leaves it
            found.append((path, read_marker(path)))
    return sorted(found, key=lambda item: (item[1].serial, item[0].name))


def newest(folder: Path) -> Path | None:
    """The checkpoint that was committed last, of those in a folder that are whole."""
    found = whole(folder)
    return found[-1][0] if found else None


def damaged(path: Path, marker: Marker) -> str | None:
    """The first file of a checkpoint whose bytes are not those that were written; None if there is none. Reads all."""
    for name, mark in marker.files.items():
        starts = sorted(mark.sums)
        with (path / name).open("rb") as stream:
            for start, stop in zip(starts, [*starts[1:], mark.size], strict=True):
                stream.seek(start)
                crc, left = 0, stop - start
                while data := stream.read(min(BLOCK, left)):
                    crc, left = zlib.crc32(data, crc), left - len(data)
                if crc != mark.sums[start]:
                    return name
    return None


# ---------------------------------------------------------------- writing


def begin(folder: Path, step: int) -> Path:
    """A new folder for one that is under way. What dead runs left is removed: one run at a time writes here."""
    folder.mkdir(parents=True, exist_ok=True)
    for orphan in folder.glob(".step-*.partial"):
        shutil.rmtree(orphan, ignore_errors=True)
    partial = folder / f".step-{step:08d}-{secrets.token_hex(4)}.partial"
    partial.mkdir()
    return partial


def commit(partial: Path, step: int, marker: Marker) -> Path:
    """Make what is under way a checkpoint: afterwards it is whole, whatever happens; before, it is none."""
    folder = partial.parent
    files = {name: {"size": mark.size, "sums": dict(mark.sums)} for name, mark in marker.files.items()}
    fields = {"format": FORMAT, **vars(marker), "files": files}
    with (partial / MARKER).open("x", encoding="utf-8") as stream:
        json.dump(fields, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    flush_folder(partial)
    path = folder / f"step-{step:08d}"
    again = 1
    while path.exists():  # never over one that is good: of a run that went back, say
        again += 1
        path = folder / f"step-{step:08d}-{again}"
    partial.rename(path)
    flush_folder(folder)
    return path


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all but the checkpoints committed last. Each first loses its name, so that none is ever seen half gone."""
    for path, _ in whole(folder)[:-keep]:
        gone = folder / f".{path.name}-{secrets.token_hex(4)}.partial"
        path.rename(gone)
        shutil.rmtree(gone)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(partial: Path) -> None:
    """Remove what did not become a checkpoint, as far as that goes; the next `begin` tries again."""
    shutil.rmtree(partial, ignore_errors=True)


def next_serial(folder: Path) -> int:
    """The number of the next commit."""
    found = whole(folder)
    return found[-1][1].serial + 1 if found else 1
