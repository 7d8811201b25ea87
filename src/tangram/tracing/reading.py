"""Traces as they lie on the disk, of ranks that run, have ended or were killed.

Nothing is taken for complete: events and steps without their own number are passed over, a chunk that is torn ends its
file, a line of names that is not whole is left out. What cannot be read at all is refused in a sentence.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tangram.errors import UserError
from tangram.tracing.files.format import (
    CHUNK_HEADER,
    CHUNK_MAGIC,
    EVENT_DTYPE,
    HEADER,
    HEADER_BYTES,
    LIVE,
    LIVE_AT,
    MAGIC,
    OPS,
    ROW_DTYPES,
    End,
    Kind,
    Phase,
    as_now,
    ring_bytes,
)
from tangram.tracing.files.ring import unpacked_rows
from tangram.tracing.sites import Site, call_words

VERDICT = "verdict.json"
"""What whoever watched the ranks has found when the run ended badly."""
_RING = re.compile(r"rank-(\d+)\.ring")
_FOLDER = re.compile(r"trace(-\d+)?")


Ranks = Sequence[int]
"""Of a group, in order: a `range` where it is one, else a tuple."""
KEPT_RANKS = 512
"""Of runs of more ranks rings are not kept in memory, but read again where their events are looked at."""


@dataclass(frozen=True)
class Ring:
    """The ring of a rank: its bytes as they were when it was read, or where they are."""

    path: Path
    events: int
    rows: int
    version: int
    data: bytes | None

    def read(self, start: int = 0, size: int = -1) -> bytes:
        if self.data is not None:
            return self.data if size < 0 else self.data[start : start + size]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size if size >= 0 else ring_bytes(self.events, self.rows, self.version) - start)


@dataclass(frozen=True)
class Live:
    """What a rank writes over and over."""

    beat: int
    """Monotonic ns of its machine."""
    cpu: int
    """CPU time of the process, ns."""
    waiting: int
    """The number of the call that it waits for; 0: none."""
    phase: Phase
    step: int
    deviations: int
    end: End


@dataclass(frozen=True)
class Call:
    """A call of a collective, in the words of the names file."""

    op: str
    group: int
    name: str
    """Of the group, the same on all its ranks: there may be several of the same ranks."""
    axes: str
    ranks: Ranks
    turn: int
    """Which call of the group it is, from 1."""
    nbytes: int
    dtype: str = ""
    site: Site = field(default_factory=Site)

    def __str__(self) -> str:
        return call_words(self.op, self.axes, self.site)


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank."""

    rank: int
    world: int
    pid: int
    run: bytes
    host: str
    begun: int
    """Monotonic ns of its machine."""
    begun_wall: int
    """ns since 1970."""
    live: Live
    ring: Ring
    rows: npt.NDArray[np.void]
    """Of `ROW_DTYPE`, in order of steps."""
    groups: Mapping[int, Mapping[str, Any]]
    """"ranks" of each is a `range` where it is one."""
    sites: Mapping[int, Mapping[str, Any]]
    deviations: tuple[Mapping[str, Any], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the run: the text of its mesh, the axes of stages, the seconds after which it is taken to hang."""
    sequences: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The sites of the calls of the steps that the rank has learned from, by step."""
    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Layers whose weights are summed, and the axes that shard them."""
    sums: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """By step the sum of each layer's bits after the update."""
    planned: tuple[str, ...] = ()
    """Which calls of a step its plan says, in words."""
    spikes: tuple[Mapping[str, Any], ...] = ()
    """Steps whose loss or gradient has jumped."""
    not_finite: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    """By step the first call to which it gave what was not finite, where the step's loss or gradient was not."""
    first_not_finite: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    stood: tuple[tuple[int, int], ...] = ()
    """From when to when its process has not run, at most; monotonic ns of its machine."""
    failed: str = ""
    """The class of the exception that it ended with."""

    @property
    def events(self) -> npt.NDArray[np.void]:
        """Of `EVENT_DTYPE`, in order."""
        return _events(np.frombuffer(self.ring.read(), EVENT_DTYPE, self.ring.events, HEADER_BYTES))

    @property
    def last(self) -> int:
        """The number of the last event; 0: none."""
        return int(self.events["number"][-1]) if len(self.events) else 0

    @cached_property
    def waiting(self) -> Call | None:
        return self.call(self.live.waiting) if self.live.waiting else None

    def call(self, number: int) -> Call | None:
        """The call that an event began; None where it has left the ring."""
        found = self.event(number)
        return self.in_words(found) if found is not None and found["kind"] == Kind.ENTER else None

    def event(self, number: int) -> np.void | None:
        """The event of this number; None where it has left the ring."""
        at = HEADER_BYTES + (number % self.ring.events) * EVENT_DTYPE.itemsize
        data = self.ring.read(at, EVENT_DTYPE.itemsize)
        found = np.frombuffer(data, EVENT_DTYPE) if len(data) == EVENT_DTYPE.itemsize else None
        return found[0] if found is not None and int(found["number"][0]) == number else None

    def in_words(self, event: np.void) -> Call:
        site, group = self.sites.get(int(event["site"]), {}), self.groups.get(int(event["group"]), {})
        return Call(
            op=op_word(int(event["op"])),
            group=int(event["group"]),
            name=str(group.get("name", "")),
            axes=str(group.get("axes", "an unknown group")),
            ranks=group.get("ranks", ()),
            turn=int(event["turn"]),
            nbytes=int(event["size"]),
            dtype=str(site.get("dtype", "")),
            site=Site(*(str(site.get(part, "")) for part in ("what", "layer", "line"))),
        )

    def same_group(self, call: Call) -> int | None:
        """The number here of the group of another rank's call."""
        alike = (n for n, one in self.groups.items() if one["ranks"] == call.ranks and one["name"] == call.name)
        return next(alike, None)

    def turns(self, call: Call) -> int:
        """How many calls of the group of another rank's call it has begun."""
        events = self.events
        some = events[(events["group"] == self.same_group(call)) & (events["kind"] == Kind.ENTER)]
        return int(some["turn"].max()) if len(some) else 0


def op_word(op: int) -> str:
    return OPS[op] if op < len(OPS) else f"call {op}"


def attempts(run: Path) -> list[Path]:
    """The folders of a run's traces, in order: one for each time that it was begun, or went on."""
    some = (path for path in run.glob("trace*") if _FOLDER.fullmatch(path.name) and any(path.glob("rank-*.ring")))
    return sorted(some, key=lambda path: int(path.name.partition("-")[2] or 1))


def trace_folder(folder: Path | str, attempt: int = 0) -> Path:
    """The folder of the newest trace of a run, of its `attempt`-th from 1, or the one that is given. Raises UserError
    where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f'there is no folder "{folder}"')
    if any(folder.glob("rank-*.ring")) and not attempt:
        return folder
    below = attempts(folder)
    if not below:
        raise UserError(f'"{folder}" has no trace: give the folder of a run that was traced (run.trace), or its trace')
    if attempt > len(below):
        raise UserError(f'"{folder}" has traces of {len(below)} attempts: none is number {attempt}')
    return below[attempt - 1]


def read(folder: Path | str) -> list[RankTrace]:
    """The traces of all ranks that have one, in order. Raises UserError for what is no trace or one of several runs."""
    folder = trace_folder(folder)
    found = [read_rank(path) for path in sorted(folder.glob("rank-*.ring")) if _RING.fullmatch(path.name)]
    runs = {one.run: one.rank for one in found}
    if len(runs) > 1:
        first, second, *_ = runs.values()
        raise UserError(
            f'"{folder}" has traces of {len(runs)} runs, as of ranks {first} and {second}: move those of one away'
        )
    return found


def missing(traces: list[RankTrace]) -> list[int]:
    """The ranks of the run that have no trace here."""
    return sorted(set(range(traces[0].world)) - {one.rank for one in traces}) if traces else []


def read_rank(path: Path) -> RankTrace:
    """The trace of the rank whose ring this is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            _, version, rank, world, pid, events, rows, run, host, begun, wall = _header(path, head)
            if size < (full := ring_bytes(events, rows, version)):
                raise UserError(f'"{path}" is cut off: {size} of {full} bytes are there')
            # Of many ranks only the rows of steps, which lie behind the events.
            file.seek(0 if world <= KEPT_RANKS else ring_bytes(events, 0))
            data = file.read()
    except OSError as error:
        raise UserError(f'"{path}" cannot be read: {error.strerror}') from None
    whole = data if world <= KEPT_RANKS else None
    ring = as_now(np.frombuffer(data, ROW_DTYPES[version], rows, 0 if whole is None else ring_bytes(events, 0)))
    names = _names(path.with_suffix(".names.jsonl"))

    def first(key: str, none: Any = ()) -> Any:
        return next((one[key] for one in names if key in one), none)

    return RankTrace(
        rank=rank,
        world=world,
        pid=pid,
        run=run,
        host=host.rstrip(b"\0").decode(errors="replace"),
        begun=begun,
        begun_wall=wall,
        live=live_of(data if whole is not None else head),
        ring=Ring(path, events, rows, version, whole),
        rows=_joined([*_chunks(path.with_suffix(".steps-before")), *_chunks(path.with_suffix(".steps")), ring]),
        groups={int(one["group"]): {**one, "ranks": in_steps(one["ranks"])} for one in names if "ranks" in one},
        sites={int(one["site"]): one for one in names if "site" in one},
        deviations=tuple(one for one in names if "deviation" in one),
        about=first("run", {}),
        sequences={int(one["step"]): tuple(one["sequence"]) for one in names if "sequence" in one},
        layers=tuple((name, tuple(axes)) for name, axes in first("layers")),
        sums={int(one["step"]): tuple(one["sums"]) for one in names if "sums" in one},
        planned=tuple(first("planned")),
        spikes=tuple(one for one in names if "spike" in one),
        not_finite={int(one["not_finite"]): one for one in names if "not_finite" in one},
        first_not_finite={int(one["step"]): one for one in names if "first_not_finite" in one},
        stood=tuple((one["until"] - one["stood"], one["until"]) for one in names if "stood" in one),
        failed=str(first("failed", "")),
    )


def _header(path: Path, head: bytes) -> tuple[Any, ...]:
    """The fields of a ring's header. Raises UserError for what is none."""
    try:
        found = HEADER.unpack_from(head)
    except struct.error:
        raise UserError(f'"{path}" is too short for a trace ({len(head)} bytes): leave it out') from None
    if found[0] != MAGIC:
        raise UserError(f'"{path}" is no trace of Tangram: leave it out')
    if found[1] not in ROW_DTYPES:
        raise UserError(
            f'"{path}" was written by a newer Tangram (version {found[1]} of traces): read it with that one'
        )
    if len(head) < HEADER_BYTES:
        raise UserError(f'"{path}" is too short for a trace ({len(head)} bytes): leave it out')
    return found


def in_steps(ranks: Sequence[int] | Mapping[str, int]) -> Ranks:
    """Ranks as names files have them, which write many in equal steps as their first, step and count."""
    if isinstance(ranks, Mapping):
        first, step, count = ranks["first"], ranks["step"], ranks["count"]
        return range(first, first + step * count, step)
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[0] + step * len(ranks), step) if ranks and step > 0 else range(0)
    return regular if [*regular] == [*ranks] else tuple(ranks)


def live_of(data: bytes | mmap.mmap) -> Live:
    """What a ring says of its rank now."""
    beat, cpu, waiting, phase, step, deviations, end = LIVE.unpack_from(data, LIVE_AT)
    what = Phase(phase) if phase < len(Phase) else Phase.OTHER
    return Live(beat, cpu, waiting, what, step, deviations, End(end) if end in (0, 1, 2) else End.RUNNING)


class Peek:
    """The rings of ranks of one run, looked into again and again for next to nothing.

    Of more than `KEPT_RANKS` no events are read, which for 16,384 ranks are gigabytes of a file system that all share:
    what a rank says over and over (its step, phase, and the call that it waits for) tells whether it has moved.
    """

    def __init__(self, folder: Path, run: bytes) -> None:
        self._folder, self._run = folder, run
        self._rings: dict[Path, mmap.mmap] = {}
        self._events: dict[Path, int] = {}
        self._world = 1

    def look(self) -> list[tuple[int, Live]]:
        """Of each rank that has begun, in order: the number of its last event, 0 of many ranks; what it says now."""
        for path in sorted(self._folder.glob("rank-*.ring")) if len(self._rings) < self._world else ():
            if path not in self._rings and path.stat().st_size >= HEADER_BYTES:
                with path.open("rb") as file:
                    ring = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _, version, _, world, _, events, rows, run, *_ = HEADER.unpack_from(ring)
                if run == self._run and version in ROW_DTYPES and len(ring) >= ring_bytes(events, rows, version):
                    self._rings[path], self._events[path], self._world = ring, events, world
        few = self._world <= KEPT_RANKS
        return [(self._last(path) if few else 0, live_of(ring)) for path, ring in sorted(self._rings.items())]

    def _last(self, path: Path) -> int:
        numbers = np.frombuffer(self._rings[path], EVENT_DTYPE, self._events[path], HEADER_BYTES)["number"]
        return int(numbers.max())


def _events(ring: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Those that stand where their number puts them, in order: a torn one does not."""
    right = ring["number"] % len(ring) == np.arange(len(ring))
    some = ring[right & (ring["number"] > 0)]
    return some[np.argsort(some["number"])]


def _joined(parts: list[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """The rows of all parts, each once."""
    rows = np.concatenate([part[part["step"] > 0] for part in parts])
    _, first = np.unique(rows["begin"], return_index=True)
    return rows[first]


def _chunks(path: Path) -> list[npt.NDArray[np.void]]:
    """The chunks of a file of steps up to the first that is not whole."""
    if not path.exists():
        return []
    data, at = path.read_bytes(), 0
    found: list[npt.NDArray[np.void]] = []
    while at + CHUNK_HEADER.size <= len(data):
        magic, rows, size, checksum = CHUNK_HEADER.unpack_from(data, at)
        body = data[at + CHUNK_HEADER.size : at + CHUNK_HEADER.size + size]
        if magic != CHUNK_MAGIC or len(body) < size or zlib.crc32(body) != checksum:
            break
        found.append(unpacked_rows(rows, body))
        at += CHUNK_HEADER.size + size
    return found


def _names(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            words = json.loads(line)
        except ValueError:  # the last one, of a rank that was killed in the midst of it
            continue
        if isinstance(words, dict):  # else of somebody else
            found.append(cast("dict[str, Any]", words))
    return found
