"""Checkpoints as folders: each is written under a temporary name and committed by one rename.

    runs/checkpoint/
      step-00000100/                      the tensors, `manifest.json`, and `tangram.json`: the marker
      .step-00000200-1f0c.partial/        one under way, or what a run that died left of one

Files and folders are flushed to the disk before the rename, so whatever is killed, a folder without a dot in front of
its name is whole. The marker, written last, has the size of every file, the sha256 of the manifest and a checksum of
itself, and the manifest the checksum of every block: what was copied in part or has rotted is found, and a torn folder
is passed over.

Checkpoints are ordered by when they were committed, not by their step: of a run that goes on from an older checkpoint
the newest is the one that it wrote last.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.store import manifest as manifests
from tangram.checkpoint.store.manifest import FORMAT, Manifest, ManifestError, StoredFile
from tangram.errors import UserError
from tangram.models.building.directory import hub_hint

MARKER = "tangram.json"
MANIFEST = "manifest.json"
FOREIGN = (".distcp", ".safetensors", ".bin", ".pt", ".pth")
"""How files end that other programs write weights into."""
PARTIAL = ".partial"
LARGEST_MARKER = 1 << 26  # bytes


@dataclass(frozen=True)
class Marker:
    """What a checkpoint says of itself in a word: that it is committed, and what belongs to it."""

    id: str
    """Of the save."""
    serial: int
    """Counts the commits in a folder."""
    step: int
    created: str
    manifest: str
    """The sha256 of the manifest's bytes."""
    sizes: Mapping[str, int]
    """Of every file but the marker."""
    share: tuple[int, int] | None = None
    """Which of how many machines has written this: it is no checkpoint without what the others have."""
    here: frozenset[str] | None = None
    """The files that this folder has, where others are on other machines; None: all."""


# ---------------------------------------------------------------- reading


def read_marker(path: Path) -> Marker:
    """The marker of the checkpoint in the folder `path`, whose files are all there. Raises UserError when not so."""
    file = path / MARKER
    try:
        data = read_bounded(file, LARGEST_MARKER)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_absent(path)) from None
    except OSError as error:
        raise UserError(f'the {MARKER} of the checkpoint "{path}" cannot be read: {error}') from None
    marker = parse_marker(data, path)
    for name, size in marker.sizes.items():
        if marker.here is not None and name not in marker.here:
            continue
        try:
            found = _plain_size(path / name)
        except OSError as error:  # as of a name that is too long
            why = f'its file "{name}" cannot be looked at: {error.strerror}'
            raise UserError(f'the checkpoint "{path}" is not whole: {why}') from None
        if found != size:
            what = "is not there" if found is None else f"has {found} of {size} bytes"
            raise UserError(f'the checkpoint "{path}" is not whole: its file "{name}" {what}')
    return marker


def read_manifest(path: str | Path, marker: Marker | None = None) -> Manifest:
    """The manifest of the checkpoint in the folder `path`. Raises UserError when it is not the one committed.

    What is wrong with the checkpoint comes with the one to go back to, where there is one.
    """
    path = Path(path)
    try:
        return _manifest(path, marker or read_marker(path))
    except UserError as error:
        there = (path / MARKER).exists() or (path / MANIFEST).exists()
        raise UserError(f"{error}{older(path) if there else ''}") from None


def read_share(path: Path) -> Manifest:
    """What one machine has written of a checkpoint: the manifest of its pieces alone. Raises UserError."""
    return _manifest(path, read_marker(path), partly=True)


def files_here(path: Path) -> frozenset[str] | None:
    """The files that a checkpoint's folder has, where others are on other machines; None: all. Raises UserError."""
    return parse_marker(read_bounded(path / MARKER, LARGEST_MARKER), path).here


def _manifest(path: Path, marker: Marker, *, partly: bool = False) -> Manifest:
    if marker.share is not None and not partly:
        which = f"machine {marker.share[0]} of {marker.share[1]}"
        raise UserError(f'"{path}" is what {which} has written of a snapshot: without the others it is no checkpoint')
    try:
        data = read_bounded(path / MANIFEST, manifests.LARGEST)
    except OSError as error:
        raise UserError(f'the {MANIFEST} of the checkpoint "{path}" cannot be read: {error}') from None
    if hashlib.sha256(data).hexdigest() != marker.manifest:
        raise UserError(f'the {MANIFEST} of the checkpoint "{path}" is damaged: its bytes are not those written')
    try:
        found = manifests.parse(data, partly=partly)
    except ManifestError as error:
        raise UserError(f'the checkpoint "{path}" cannot be read: {error}') from None
    if found.id != marker.id or {name: file.size for name, file in found.files.items()} != {
        name: size for name, size in marker.sizes.items() if name != MANIFEST
    }:
        raise UserError(f'the checkpoint "{path}" is damaged: its {MARKER} and its {MANIFEST} are of two saves')
    return found


def read_bounded(file: Path, largest: int) -> bytes:
    """The bytes of a plain file of at most so many. Raises OSError, UserError for what is larger or no plain file."""
    size = _plain_size(file)
    if size is None:
        raise (
            FileNotFoundError(2, "No such file", str(file))
            if not file.exists()
            else UserError(f'"{file}" is no plain file')
        )
    if size > largest:
        raise UserError(f'"{file}" has {size} bytes; more than {largest} are not read')
    return file.read_bytes()


def _plain_size(file: Path) -> int | None:
    """The size of a plain file, None for what is none: a link would lead out of the checkpoint."""
    try:
        found = os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _absent(path: Path) -> str:
    if not path.exists():
        return f'there is no checkpoint "{path}"{hub_hint(path)}'
    if path.is_dir() and (found := committed(path)):
        return f'"{path}" holds several checkpoints, give one of them: the newest is "{found[-1][0]}"'
    if not (path / MANIFEST).exists() and any(file.suffix in FOREIGN for file in (path, *path.glob("*"))):
        new = f"`tangram checkpoint convert {path} NEW --to tangram`"
        return f'"{path}" is no checkpoint of Tangram (it has no {MARKER}): of another program\'s, {new} makes one'
    return f'"{path}" is not a whole checkpoint: it has no {MARKER}, which is written last'


@lru_cache(16)
def parse_marker(data: bytes, path: Path) -> Marker:
    """The marker of the checkpoint `path` that these bytes say. Raises UserError when they are not those written."""
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f'the {MARKER} of the checkpoint "{path}" cannot be read: {error}') from None
    known: dict[str, Any] = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
    if known.get("format") != FORMAT:
        raise UserError(f'the checkpoint "{path}" has the format {known.get("format")}; this version reads {FORMAT}')
    if data != marker_text({key: value for key, value in known.items() if key != "crc32"}):
        raise UserError(f'the {MARKER} of the checkpoint "{path}" is damaged: its bytes are not those written')
    try:
        sizes = {str(name): int(size) for name, size in known["sizes"].items()}
        if any(Path(name).name != name for name in sizes) or MANIFEST not in sizes:
            raise ValueError("a file's name leads out of the folder, or there is no manifest")
        return Marker(
            id=str(known["id"]),
            serial=int(known["serial"]),
            step=int(known["step"]),
            created=str(known["created"]),
            manifest=str(known["manifest"]),
            sizes=sizes,
            share=(int(known["share"][0]), int(known["share"][1])) if "share" in known else None,
            here=frozenset(map(str, known["here"])) if "here" in known else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f'the {MARKER} of the checkpoint "{path}" is damaged: {error!r}') from None


def marker_text(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a marker with these fields, closed by a checksum of them: there is one way to write it."""
    return json.dumps({**fields, "crc32": f"{zlib.crc32(json.dumps(fields).encode()):08x}"}, indent=1).encode()


def committed(folder: Path) -> list[tuple[Path, Marker]]:
    """The whole checkpoints in a folder, in the order in which they were committed.

    Torn ones are passed over, and links: they lead out of the folder, or to a checkpoint that is there already.
    """
    found: list[tuple[Path, Marker]] = []
    for path in folder.glob("*"):
        if not path.name.startswith(".") and not path.is_symlink() and (path / MARKER).is_file():
            with contextlib.suppress(UserError):  # it is torn, as no commit of ours leaves it
                found.append((path, read_marker(path)))
    return sorted(found, key=lambda item: (item[1].serial, item[0].name))


def newest(folder: str | Path) -> Path | None:
    """The checkpoint that was committed last, of those in a folder that are whole."""
    found = committed(Path(folder))
    return found[-1][0] if found else None


def newest_files(folder: Path) -> tuple[Path, Mapping[str, StoredFile]]:
    """The newest whole checkpoint in a folder, and its files, each with the id of the save that wrote it; the folder
    and none where there is no such checkpoint."""
    with contextlib.suppress(UserError):
        if (path := newest(folder)) is not None:
            manifest = read_manifest(path)
            return path, {n: replace(file, save=file.save or manifest.id) for n, file in manifest.files.items()}
    return folder, {}


def older(path: Path) -> str:
    """The whole checkpoint that was committed before this one, as the end of a sentence; nothing without one.

    Where its own marker no longer says when it was committed, the newest of the others. Only markers are read.
    """
    others = [(other, marker) for other, marker in committed(path.parent) if other.name != path.name]
    try:
        here = parse_marker(read_bounded(path / MARKER, LARGEST_MARKER), path).serial
    except (UserError, OSError):
        return f'; one that is whole is "{others[-1][0]}"' if others else ""
    before = [other for other, marker in others if marker.serial < here]
    return f'; the one before it is "{before[-1]}"' if before else ""


# ---------------------------------------------------------------- writing


def partial_path(path: Path, save_id: str) -> Path:
    """The folder beside `path` in which it is written."""
    return path.with_name(f".{path.name}-{save_id[:12]}{PARTIAL}")


def begin(path: Path, save_id: str, *, anew: bool = False) -> Path:
    """A new folder for the checkpoint that will be `path`; `anew`: in place of what one who died at it has left.

    Raises OSError as the file system does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path, save_id)
    if anew:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def free_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step goes: never over one that is good, of a run that went back, say."""
    return unused(folder / f"step-{step:08d}")


def unused(path: Path) -> Path:
    """The path, or with a number where there is one already."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def closing_path(partial: Path) -> Path:
    """What a folder under way is called once all have written: who still comes with a word finds no folder for it."""
    return partial.with_name(f"{partial.name.removesuffix(PARTIAL)}.closing{PARTIAL}")


def sweep(folder: Path, idle: float = 0.0, but: Collection[Path] = ()) -> None:
    """Remove what dead runs left: folders under way in which nothing has changed for `idle` seconds.

    Writers that outlive their run may still be at it, so 0 is only for who knows that there are none. `but`: those that
    stay in any case.
    """
    for orphan in folder.glob(f".*{PARTIAL}"):
        if orphan in but or orphan.is_symlink():  # a link leads to what is not ours
            continue
        try:
            last = max(path.stat().st_mtime for path in (orphan, *orphan.iterdir()))
        except OSError:  # it goes on, or another removes it
            continue
        if time.time() - last >= idle:
            shutil.rmtree(orphan, ignore_errors=True)


def commit(partial: Path, path: Path, manifest: Manifest, serial: int = 1, **scattered: Any) -> None:
    """Make what is under way the checkpoint `path`: afterwards it is whole, whatever happens; before, it is none.

    All files that the manifest names are on the disk already. `serial`: the least that it gets. `scattered`: the
    marker's `share` or `here`. Raises FileExistsError where there is one already.
    """
    seal(partial, manifest, serial, **scattered)
    if path.exists():  # never over one that is good
        raise FileExistsError(17, "there is a checkpoint already", str(path))
    partial.rename(path)
    flush_folder(path.parent)


def seal(
    partial: Path,
    manifest: Manifest,
    serial: int = 1,
    *,
    share: tuple[int, int] | None = None,
    here: Collection[str] | None = None,
) -> None:
    """Write the manifest and the marker of what is under way: all but its name."""
    data = manifests.to_json(manifest).encode()
    write_file(partial / MANIFEST, data)
    marker = {
        "format": FORMAT,
        "id": manifest.id,
        "serial": max(serial, next_serial(partial.parent)),
        "step": manifest.step,
        "created": manifest.created,
        "manifest": hashlib.sha256(data).hexdigest(),
        "sizes": {MANIFEST: len(data)} | {name: file.size for name, file in manifest.files.items()},
    }
    marker |= {} if share is None else {"share": list(share)}
    marker |= {} if here is None else {"here": [MANIFEST, *here]}
    write_file(partial / MARKER, marker_text(marker))
    flush_folder(partial)


def write_file(file: Path, data: bytes) -> None:
    """Write a new small file, and wait until it is on the disk."""
    with file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint. It first loses its name, so that none is ever seen half gone."""
    gone = path.with_name(f".{path.name}-{secrets.token_hex(4)}{PARTIAL}")
    path.rename(gone)
    shutil.rmtree(gone)


def next_serial(folder: Path) -> int:
    found = committed(folder)
    return found[-1][1].serial + 1 if found else 1


@contextlib.contextmanager
def appearing(target: Path, nbytes: int) -> Generator[Path]:
    """A folder to write into, that becomes `target` by one rename where all goes well, and is removed otherwise.

    Raises UserError where the target is there already, or the disk has less room than `nbytes`.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f'"{target}" is there already: give the name of a new directory')
    partial = target.with_name(f".{target.name}-{secrets.token_hex(6)}{PARTIAL}")
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
        flush_folder(partial)
        if target.exists():
            raise UserError(f'"{target}" has appeared meanwhile: give the name of a new directory')
        partial.rename(target)
        flush_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
