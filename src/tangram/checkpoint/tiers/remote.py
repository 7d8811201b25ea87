"""Checkpoints in an object store: sent while training goes on, fetched where a run goes on with another disk.

    s3://bucket/run/step-00000100/manifest.json, the data, ..., tangram.json

The marker goes last, and without it nothing is a checkpoint; it goes first where one is removed. What
somebody who died had sent of one is gone on from: objects appear whole, so one of the right size is there. Every block
is compared with its checksum as it is sent and as it is fetched.

Who sends has the prefix for itself, as a run has its folder: an object `owner.json` says who. It is looked at before
each checkpoint, so a run whose place another has taken (with --resume) sends and removes nothing more.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.store import commits, retention
from tangram.checkpoint.store import manifest as manifests
from tangram.checkpoint.store.commits import MANIFEST, MARKER, Marker
from tangram.checkpoint.store.manifest import BLOCK, StoredFile, checksum
from tangram.checkpoint.store.objects import ObjectStore
from tangram.errors import UserError

OWNER = "owner.json"

AT_ONCE = 4
"""Blocks that are asked for together."""
LEVELS = 2
"""A folder and a file."""


def committed_in(store: ObjectStore) -> list[tuple[str, Marker]]:
    """The whole checkpoints in a store, in the order of their commits. Raises UserError as the store refuses."""
    return _committed(store, _folders(store))


def torn_in(store: ObjectStore) -> list[str]:
    """Why those that were committed last are no longer whole: in a sentence each what is missing."""
    folders = _folders(store)
    last = max((marker.serial for _, marker in _committed(store, folders)), default=0)
    return [
        f'{name} of {store.address} is passed over: its object "{lacking[0]}" is not as it was written, or not there'
        for name, marker in _marked(store, folders)
        if marker.serial > last and (lacking := _lacking(marker, folders[name]))
    ]


def _committed(store: ObjectStore, folders: Mapping[str, Mapping[str, int]]) -> list[tuple[str, Marker]]:
    found = [(name, marker) for name, marker in _marked(store, folders) if not _lacking(marker, folders[name])]
    return sorted(found, key=lambda one: (one[1].serial, one[1].created, one[0]))


def _marked(store: ObjectStore, folders: Mapping[str, Mapping[str, int]]) -> Generator[tuple[str, Marker]]:
    for name, sizes in folders.items():
        if sizes.get(MARKER, commits.LARGEST_MARKER + 1) > commits.LARGEST_MARKER:
            continue
        data = store.get(f"{name}/{MARKER}")
        with contextlib.suppress(UserError):  # another format's, or cut off by hand: no checkpoint of ours
            yield name, commits.parse_marker(data, Path(name))


def _lacking(marker: Marker, sizes: Mapping[str, int]) -> list[str]:
    return [file for file, size in marker.sizes.items() if sizes.get(file) != size]


def _folders(store: ObjectStore) -> dict[str, dict[str, int]]:
    """The sizes of the objects by folder and name."""
    found: dict[str, dict[str, int]] = {}
    for name, size in store.sizes().items():
        parts = PurePosixPath(name).parts
        if len(parts) == LEVELS:
            found.setdefault(parts[0], {})[parts[1]] = size
    return found


# ---------------------------------------------------------------- who sends


@dataclass(frozen=True)
class Owner:
    """The run that has a prefix for itself."""

    run: str
    """Drawn when its folder was made."""
    host: str
    since: str
    """As ISO 8601 has it."""

    def __str__(self) -> str:
        return f"another run, begun on {self.host} at {self.since}"


def owner_of(store: ObjectStore) -> Owner | None:
    """The run that sends to a store. Raises UserError as the store refuses."""
    if OWNER not in store.sizes():
        return None
    with contextlib.suppress(ValueError, TypeError):
        return Owner(**json.loads(store.get(OWNER)))
    return Owner("", "an unknown machine", "an unknown time")


def take(store: ObjectStore, run: str, *, over: bool) -> None:
    """Have a run be the one that sends; `over`: also where another was. Raises UserError where another is."""
    owner = Owner(run, platform.node(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    data = json.dumps(asdict(owner)).encode()
    if over:
        store.send(OWNER, [data])
    elif not store.create(OWNER, data):
        refuse_other_owner(store, run)


def refuse_other_owner(store: ObjectStore, run: str) -> None:
    """Raise UserError where another run sends to a store; be the one that does where none is."""
    owner = owner_of(store)
    if owner is None:
        take(store, run, over=False)
    elif owner.run != run:
        raise UserError(f'"{store.address}" belongs to {owner}: each run needs an address of its own')


# ---------------------------------------------------------------- sending


def upload(path: Path, store: ObjectStore) -> str:
    """Send the checkpoint `path`; its name in the store, which may have it already.

    Raises DamagedError where its bytes are not those that were written, UserError as the store refuses, OSError as the
    disk does. What was sent by then stays, for the next attempt.
    """
    marker = commits.read_marker(path)
    manifest = commits.read_manifest(path, marker)
    folders = _folders(store)
    for name, there in _committed(store, folders):
        if there.id == marker.id:
            return name
    text = (path / MANIFEST).read_bytes()
    name = _name(store, folders, marker, text)
    sizes = folders.get(name, {})
    if MANIFEST not in sizes:  # first, so that an attempt to come knows what this one is of
        store.send(f"{name}/{MANIFEST}", [text])
    for file, stored in manifest.files.items():
        if sizes.get(file) != stored.size:
            _send(path / file, f"{name}/{file}", stored, store)
    store.send(f"{name}/{MARKER}", [(path / MARKER).read_bytes()])
    return name


def _name(store: ObjectStore, folders: Mapping[str, Mapping[str, int]], marker: Marker, text: bytes) -> str:
    """Never one that is another checkpoint's; that of an attempt before, if it was at the same."""
    step, again = f"step-{marker.step:08d}", 1
    name = step
    while name in folders:
        sizes = folders[name]
        unfinished = MARKER not in sizes and sizes.get(MANIFEST) == len(text)
        if unfinished and store.get(f"{name}/{MANIFEST}") == text:
            break
        again += 1
        name = f"{step}-{again}"
    return name


def _send(file: Path, name: str, stored: StoredFile, store: ObjectStore) -> None:
    problem: list[BaseException] = []

    def blocks() -> Generator[bytes]:
        try:
            with file.open("rb") as reading:
                for block, expected in enumerate(stored.sums):
                    data = reading.read(BLOCK)
                    _refuse_other(data, expected, f"{file}", block)
                    yield data
        except BaseException as error:
            problem.append(error)
            raise

    try:
        store.send(name, blocks())
    except Exception:
        if problem:  # which the store tells in words of its own
            raise problem[0] from None
        raise


def _refuse_other(data: bytes | memoryview, expected: int, file: str, block: int) -> None:
    if checksum(data) != expected:
        where = f"from {block * BLOCK} to {block * BLOCK + len(data)}"
        raise DamagedError(f'"{file}" is damaged: it has other bytes {where} than were written')


# ---------------------------------------------------------------- fetching


def download(store: ObjectStore, name: str, marker: Marker, folder: Path) -> tuple[Path, str]:
    """Fetch a checkpoint into a folder of checkpoints and commit it there; its path, and how much of it was fetched.

    Where the folder has the same checkpoint, which is damaged or torn, the blocks of it that are sound are taken, and
    what is fetched takes its place. Raises DamagedError where the store's bytes are not those that were written,
    UserError where some are gone, StoreError as the store refuses, OSError as the disk does. Nothing is left of what
    fails.
    """
    place = f"{store.address.rstrip('/')}/{name}"
    text = store.get(f"{name}/{MANIFEST}")
    if hashlib.sha256(text).hexdigest() != marker.manifest:
        raise DamagedError(f'"{place}/{MANIFEST}" is damaged: its bytes are not those written')
    manifest = manifests.parse(text)
    near = _same(folder, marker)
    target = near or commits.free_path(folder, marker.step)
    partial, fetched = commits.begin(target, marker.id, anew=True), 0
    try:
        for file, stored in manifest.files.items():
            fetched += _fetch(store, f"{name}/{file}", stored, partial / file, target / file)
        if near is not None:
            commits.remove(near)
        commits.commit(partial, target, manifest, marker.serial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target, f"{fetched} of {sum(len(stored.sums) for stored in manifest.files.values())} blocks"


def _same(folder: Path, marker: Marker) -> Path | None:
    """What a folder has of a checkpoint."""
    for path in folder.glob("step-*"):
        with contextlib.suppress(UserError, OSError):
            if commits.parse_marker(commits.read_bounded(path / MARKER, commits.LARGEST_MARKER), path).id == marker.id:
                return path
    return None


def _fetch(store: ObjectStore, name: str, stored: StoredFile, target: Path, near: Path) -> int:
    """Write a file of the blocks that are sound in `near`, which may not be there, and of the store's; how many those
    are."""
    fetched = 0
    with target.open("xb") as writing:
        for first in range(0, len(stored.sums), AT_ONCE):
            blocks = range(first, min(first + AT_ONCE, len(stored.sums)))
            data: dict[int, Any] = {block: _read(near, block * BLOCK, stored.size) for block in blocks}
            damaged = [block for block in blocks if checksum(data[block]) != stored.sums[block]]
            starts = [block * BLOCK for block in damaged]
            stops = [min(start + BLOCK, stored.size) for start in starts]
            for block, found in zip(damaged, store.ranges(name, starts, stops), strict=True):
                data[block] = memoryview(found)
                _refuse_other(data[block], stored.sums[block], f"{store.address.rstrip('/')}/{name}", block)
            for block in blocks:
                writing.write(data[block])
            fetched += len(damaged)
        writing.flush()
        os.fsync(writing.fileno())
    return fetched


def _read(file: Path, start: int, size: int) -> bytes:
    """A block of a file; nothing where it cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as reading:
        reading.seek(start)
        return reading.read(min(BLOCK, size - start))
    return b""


# ---------------------------------------------------------------- removing


def prune(store: ObjectStore, rules: tuple[str, ...]) -> None:
    """Remove what no rule keeps (`tangram.checkpoint.store.retention`), and what of others was sent in part.

    Only for who sends, between two. Raises UserError as the store refuses.
    """
    folders, policy = _folders(store), retention.parse(rules)
    found = _committed(store, folders)
    candidates = [
        retention.Candidate(
            Path(name),
            marker.serial,
            marker.step,
            datetime.datetime.fromisoformat(marker.created),
            manifests.parse(store.get(f"{name}/{MANIFEST}")).objects if policy.best else {},
        )
        for name, marker in found
    ]
    kept = retention.kept(candidates, policy, datetime.datetime.now(datetime.UTC))
    gone = [name for name, _ in found if Path(name) not in kept]
    gone += [name for name, sizes in folders.items() if name.startswith("step-") and MARKER not in sizes]
    for name in gone:
        if MARKER in folders[name]:
            store.delete([f"{name}/{MARKER}"])
        store.delete([f"{name}/{file}" for file in folders[name] if file != MARKER])
