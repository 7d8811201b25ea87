"""The checkpoint beside the raw disk and its peers: seconds, bytes read, memory, time that training waits, damage.

About 2 GB of weights and AdamW's moments, cut as FSDP does. Contenders take turns on the same ranks, the one that
begins changes, figures are medians. Files are put out of the page cache before each load (mincore says that nothing is
left), every load is checked value by value, and our checksums are always on. The limit of a save is a write of the same
memory around the page cache by as many ranks; of a load, such a read of as many bytes. Peers that need a package are
left out without it; `pip install tangram-train[peers]` brings them.

`--only`: a group of figures (speed, bytes, async, memory, export, damage, digest). `--size`: gigabytes of the state.
`--repeats`: turns. `--folder`: on the disk that is meant, with room for ten times the size.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench._checkpoint import beside, damage, export, memory, peers, speed
from bench._checkpoint.speed import Figures, Phase
from tangram.checkpoint.state.replicated import contents
from tangram.checkpoint.store import digest
from tangram.checkpoint.store.manifest import BLOCK, checksum
from tangram.errors import UserError
from tangram.hardware.host.hostmemory import available
from tangram.hardware.measuring.measure import Row, interleaved
from tangram.layout import intervals
from tangram.training.run.launch import RankError, run_ranks

SIZE = 2.05
"""Gigabytes."""
TURNS = 5
MEMORY = 512 << 20
"""Of an export: the default of `tangram checkpoint convert --memory`."""
RESHARDABLE = ("raw", "ours", "DCP", "DCP-HF", "torch_checkpointing")


@dataclass(frozen=True)
class Settings:
    """What is measured, and where."""

    folder: str
    nbytes: float
    repeats: int
    names: tuple[str, ...]
    """Of the contenders that are installed."""
    quick: bool

    def of(self, *wanted: str) -> tuple[str, ...]:
        """Those of some that are here."""
        return tuple(name for name in wanted if name in self.names)


def rows(
    quick: bool,
    *,
    size: float | None = None,
    repeats: int | None = None,
    only: tuple[str, ...] = (),
    folder: Path | None = None,
) -> Iterable[Row]:
    """The figures; `quick` takes a small state and fewer turns."""
    unknown = [name for name in only if name not in GROUPS]
    if unknown:
        raise UserError(f"there are no figures {unknown[0]!r}: give some of {', '.join(GROUPS)}")
    gigabytes = size or (0.05 if quick else SIZE)
    _refuse_what_does_not_fit(gigabytes * 1e9, folder or Path.cwd())
    there, absent = peers.installed()
    for name in absent:
        _note(f"{name} is not installed and left out: the extra `peers` brings it")
    yield Row("load average of the machine as the bench began", "processes", os.getloadavg()[0])
    with tempfile.TemporaryDirectory(prefix=".tangram-bench-", dir=folder or Path.cwd()) as place:
        settings = Settings(place, gigabytes * 1e9, repeats or (2 if quick else TURNS), tuple(there), quick)
        for name, group in GROUPS.items():
            if not only or name in only:
                yield from group(settings)
                for left in Path(place).iterdir():
                    shutil.rmtree(left)


def _refuse_what_does_not_fit(nbytes: float, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f'"{folder}" is no folder: give one on the disk that is to be measured')
    free, left = shutil.disk_usage(folder).free, available()
    if free < 10 * nbytes:
        raise UserError(
            f'"{folder}" has {free / 1e9:.1f} GB left, {nbytes / 1e8:.1f} are needed: give a smaller --size'
        )
    if left is not None and left < 2.5 * nbytes:
        raise UserError(
            f"{left / 1e9:.1f} GB of memory are left, {2.5 * nbytes / 1e9:.1f} are needed: give a smaller --size"
        )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- seconds


def _speed(settings: Settings) -> Iterable[Row]:
    """Saves and loads by two ranks and by one."""
    several = settings.of(*RESHARDABLE)
    measured = _phase(
        settings, 2, Phase(settings.folder, several, settings.nbytes, settings.repeats, save_as="2", load_from=("2",))
    )
    yield _over_raw("save, durable, 2 ranks", measured.saves, 1.3)
    yield _over_raw("load, the same 2 ranks", measured.loads["2"], 1.15)
    columns = _phase(
        settings, 2, Phase(settings.folder, several, settings.nbytes, settings.repeats, "columns", load_from=("2",))
    )
    yield _over_raw("load, Shard(0) to Shard(1)", columns.loads["2"], 1.2)
    one = _phase(
        settings,
        1,
        Phase(settings.folder, settings.names, settings.nbytes, settings.repeats, save_as="1", load_from=("2", "1")),
    )
    yield _over_raw("load, 2 ranks to 1", one.loads["2"], 1.2)
    yield _over_raw("save, durable, 1 process", one.saves, 1.3)
    yield _over_raw("load, the same process", one.loads["1"], 1.15)
    two = _phase(settings, 2, Phase(settings.folder, several, settings.nbytes, settings.repeats, load_from=("1",)))
    yield _over_raw("load, 1 rank to 2", two.loads["1"], 1.2)


def _phase(settings: Settings, world: int, phase: Phase) -> Figures:
    found = run_ranks(speed.measure, phase, world=world, on_event=lambda event: None, device="cpu")[0]
    for name, why in found.failures.items():
        _note(f"{name} failed and is left out of what followed: {why}")
    return found


def _over_raw(figure: str, seconds: Mapping[str, float], target: float) -> Row:
    known = dict(seconds)
    ours, raw = known.pop("ours"), known.pop("raw")
    return Row(figure, "s", ours, known, limit=raw, target_ratio=target)


# ---------------------------------------------------------------- bytes


def _amplification(settings: Settings) -> Iterable[Row]:
    """Bytes read by eight ranks of what two have saved, over the bytes of the state."""
    several = settings.of(*RESHARDABLE)
    nbytes = settings.nbytes / 8  # eight copies of it, whole
    saved = Phase(settings.folder, several, nbytes, 1, save_as="2")
    _phase(settings, 2, saved)
    for what, cut in (("Shard(1) of 8", "columns"), ("replicated on 8", "whole")):
        found = _phase(settings, 8, Phase(settings.folder, several, nbytes, 1, cut, load_from=("2",)))  # pyright: ignore[reportArgumentType]
        for figure, table in (("storage", found.storage["2"]), ("read()", found.calls["2"])):
            known = {name: value for name, value in table.items() if name != "raw"}
            if figure == "read()":
                known.pop("DCP-HF", None)  # it maps its files, which no call shows
            ours = known.pop("ours")
            how = "bytes from storage" if figure == "storage" else "bytes through read()"
            yield Row(f"{how} / bytes of the state, Shard(0) of 2 to {what}", "", ours, known, target=1.02)
    phase = Phase(settings.folder, settings.of("ours"), nbytes, 1, "whole", load_from=("2",), nodes=2)
    apart = _phase(settings, 8, phase).storage["2"]
    yield Row(
        "bytes from storage / bytes of the state, replicated on 8 ranks of 2 nodes", "", apart["ours"], {}, target=1.02
    )


# ---------------------------------------------------------------- beside training


def _asynchronous(settings: Settings) -> Iterable[Row]:
    """What a save beside training costs it."""
    found: dict[str, beside.Beside] = {}
    for name in beside.SAVERS:
        task = beside.Task(settings.folder, name, settings.nbytes, 2 if settings.quick else 1 + settings.repeats)
        measured = _ranks(beside.measure, task, 2, name)
        if measured is not None:
            found[name] = measured
    yield _each("training waits for its first save", "ms", found, lambda b: b.blocked[0] * 1e3, 20)
    yield _each("training waits for a later save", "ms", found, lambda b: statistics.median(b.blocked[1:]) * 1e3, 20)
    step = found["ours"].step
    yield _each(
        f"the step ({step:.2f} s) beside the copy is longer by",
        "ms",
        found,
        lambda b: statistics.median(b.overlapped) * 1e3,
    )
    yield _each(
        "all steps until it is durable are longer by", "ms", found, lambda b: statistics.median(b.all_steps) * 1e3
    )
    yield _each("from save until it is durable", "s", found, lambda b: statistics.median(b.durable))


def _each(
    figure: str,
    unit: str,
    found: Mapping[str, beside.Beside],
    value: Callable[[beside.Beside], float],
    target: float | None = None,
) -> Row:
    values = {name: value(one) for name, one in found.items()}
    return Row(figure, unit, values.pop("ours"), values, target=target)


def _ranks(task: Callable[..., Any], payload: Any, world: int, name: str) -> Any:
    """What the first rank found; None, and a note, where a peer cannot."""
    try:
        return run_ranks(task, payload, world=world, on_event=lambda event: None, device="cpu")[0]
    except RankError as error:
        if name == "ours":
            raise
        _note(f"{name} failed and is left out: {error}")
        return None


# ---------------------------------------------------------------- memory


def _memory(settings: Settings) -> Iterable[Row]:
    """What a save and a load take beyond the state."""
    tables: dict[str, dict[str, float]] = {"save": {}, "load": {}}
    for name in settings.of(*RESHARDABLE[1:]):
        for act, table in tables.items():
            extra = _ranks(memory.measure, memory.Task(settings.folder, name, settings.nbytes, act), 2, name)
            if extra is not None:
                table[name] = extra / 1e6
    for act, table in tables.items():
        yield Row(
            f"memory of a {act} beyond the state, per rank, at its peak", "MB", table.pop("ours"), table, target=64
        )


# ---------------------------------------------------------------- export and verify


def _export(settings: Settings) -> Iterable[Row]:
    """Hugging Face's format, and a verification."""
    _phase(settings, 2, Phase(settings.folder, settings.of("ours", "DCP"), settings.nbytes, 1, save_as="2"))
    task = export.Task(settings.folder, "2", settings.nbytes, settings.repeats, MEMORY, settings.names)
    found: export.Figures = _ranks(export.measure, task, 1, "ours")
    yield _over_raw("export of the model to Hugging Face", found.exports, 1.3)
    yield Row("memory of the export at its peak", "MB", found.extra / 1e6, target=MEMORY / 1e6)
    speeds = {name: found.nbytes / seconds / 1e9 for name, seconds in found.verifies.items()}
    yield Row("verify, cold, 1 process", "GB/s", speeds["ours"], limit=speeds["raw"], better="higher")


# ---------------------------------------------------------------- damage


def _damage(settings: Settings) -> Iterable[Row]:
    """How much of it is noticed."""
    counts: dict[str, damage.Counts] = {}
    for name in (name for name in settings.names if name != "raw"):
        count = 6 if settings.quick else 40
        task = damage.Task(settings.folder, name, min(settings.nbytes, 25e6), count)
        _ranks(damage.prepare, task, peers.ALL[name].processes or 2, name)
        counted = _ranks(damage.count, task, 1, name)
        if counted is not None:
            counts[name] = counted
    ours = counts["ours"]
    for kind in damage.KINDS:
        tables = {name: one.loads for name, one in counts.items()} | {"verify": ours.verifies}
        noticed = {name: 100 * table[kind][0] / table[kind][1] for name, table in tables.items() if kind in table}
        own, by_verify = noticed.pop("ours"), noticed.pop("verify")
        cases = ours.loads[kind][1]
        yield Row(f"{kind}, noticed by load, of {cases}", "%", own, noticed, target=100, better="higher")
        yield Row(f"{kind}, noticed by verify, of {cases}", "%", by_verify, target=100, better="higher")


# ---------------------------------------------------------------- sums


def _digest(settings: Settings) -> Iterable[Row]:
    """The speed of what every byte passes through."""
    shape = (BLOCK // 4 // 1024, 1024)
    data = np.random.default_rng(1).integers(0, 256, BLOCK, np.uint8)
    box = tuple(intervals.span(0, n) for n in shape)
    times = interleaved(
        {
            "ours": lambda: digest.sums(shape, 4, box, 0, BLOCK // 4, data),
            "XXH3": lambda: checksum(data.data),
            "crc32": lambda: zlib.crc32(data.data),
            "SHA-256": lambda: hashlib.sha256(data.data).digest(),
        },
        repeats=5 if settings.quick else 25,
    )
    speeds = {name: BLOCK / seconds / 1e9 for name, seconds in times.items()}
    yield Row("digest of a tensor, 1 core", "GB/s", speeds.pop("ours"), speeds, target=1.5, better="higher")
    plain = torch.from_numpy(data)
    times = interleaved(
        {"ours": lambda: contents([plain]), "XXH3": lambda: checksum(data.data)}, repeats=5 if settings.quick else 25
    )
    speeds = {name: BLOCK / seconds / 1e9 for name, seconds in times.items()}
    yield Row("replicas compared before a save, 1 core", "GB/s", speeds.pop("ours"), speeds, better="higher")


GROUPS: Mapping[str, Callable[[Settings], Iterable[Row]]] = {
    "speed": _speed,
    "bytes": _amplification,
    "async": _asynchronous,
    "memory": _memory,
    "export": _export,
    "damage": _damage,
    "digest": _digest,
}
