"""Both sides over the whole database: ours in forks of two processes, DTensor on two that belong together."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from bench._sharding import ours, theirs
from bench._sharding.cases import RANKS, Case, name_of, samples
from tangram.errors import UserError
from tangram.hardware.host import workers

LIMIT = 900.0
EACH = 120.0
"""Seconds of an entry, ours."""
WAIT = 5.0
"""Seconds after which a rank that waits for the other in a collective gives up: the other has raised."""
ORDER = ("right", "raises", "wrong")
"""From the mildest: the verdict of a case is the worst of its ranks'."""

Cases = dict[str, Case]
"""By sample, tensor and dim: "0 1 0"."""


def entries(every: int) -> list[Any]:
    """Every so-manyeth entry of torch's database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return cast("list[Any]", op_db)[::every]


# ---------------------------------------------------------------- ours


def by_us(every: int) -> dict[str, Cases | None]:
    """Our cases by entry; None where the process of the entry ended. Raises UserError where they cannot be run."""
    jobs = [workers.Job(f"{__name__}:our_share", {"every": every, "part": i, "parts": 2}) for i in range(2)]
    found: dict[str, Cases | None] = {}
    for outcome in workers.run(jobs, LIMIT, {"OMP_NUM_THREADS": "1"}):
        if not outcome.ok:
            raise UserError(f"the database could not be run: {outcome.error}")
        found |= {name: _read(cases) for name, cases in cast("dict[str, Any]", outcome.value).items()}
    return found


def our_share(every: int, part: int, parts: int) -> Any:
    """One process's share of the database."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {name_of(info): workers.forked(lambda info=info: _ours(info), EACH) for info in entries(every)[part::parts]}


def _ours(info: Any) -> Any:
    found: dict[str, Any] = {}
    for k, sample in enumerate(samples(info)):
        if sample is not None:
            found |= {f"{k} {i} {dim}": asdict(ours.tried(sample, i, dim)) for i, dim in sample.cuts()}
    return found


def _read(cases: Any) -> Cases | None:
    return None if cases is None else {key: Case(**one) for key, one in cases.items()}


# ---------------------------------------------------------------- DTensor


def by_dtensor(every: int) -> dict[str, Cases | None]:
    """DTensor's cases by entry; None where a process ended. Raises UserError where they cannot be run."""
    names = [name_of(info) for info in entries(every)]
    found: dict[str, Cases | None] = {}
    while left := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
            jobs = [
                workers.Job(f"{__name__}:rank_of_a_pair", {"names": [*left], "rank": r, "folder": folder})
                for r in range(RANKS)
            ]
            ended = workers.run(jobs, LIMIT, {"OMP_NUM_THREADS": "1"})
            heard = [_lines(Path(folder, f"{r}.jsonl")) for r in range(RANKS)]
        both = [name for name in left if all(one.get(name) is not None for one in heard)]
        found |= {name: _joined([_read(one[name]) or {} for one in heard]) for name in both}
        begun = [name for name in left if name not in both and any(name in one for one in heard)]
        if len(both) < len(left):
            if not begun:
                raise UserError(f"the database could not be run by DTensor: {[one.error for one in ended]}")
            found |= dict.fromkeys(begun)
    return found


def _lines(path: Path) -> dict[str, Any]:
    """What a rank left of each entry; None of the one that it was at when it ended."""
    text = path.read_text() if path.exists() else ""
    return dict(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))


def _joined(sides: Sequence[Cases]) -> Cases:
    """The ranks' verdicts together: the worst one, and the bytes of all."""
    found: Cases = {}
    for key, first in sides[0].items():
        every = [first, *(other[key] for other in sides[1:] if key in other)]
        worst = max(every, key=lambda one: ORDER.index(one.kind))
        sums = {name: sum(getattr(one, name) for one in every) for name in ("forward", "backward", "closing")}
        found[key] = replace(worst, **sums)
    return found


def rank_of_a_pair(names: list[str], rank: int, folder: str) -> None:
    """One rank: try the entries in turn, and leave a line for each before going on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = set(names)
    pair = _Pair(rank, Path(folder))
    with Path(folder, f"{rank}.jsonl").open("w", buffering=1) as lines:
        for info in entries(1):
            if (name := name_of(info)) not in wanted:
                continue
            lines.write(json.dumps([name, None]) + "\n")
            found: dict[str, Any] = {}
            for k, sample in enumerate(samples(info)):
                if sample is None:
                    continue
                for i, dim in sample.cuts():
                    case = theirs.tried(sample, i, dim, pair.mesh)
                    found[f"{k} {i} {dim}"] = asdict(case)
                    pair.agree(case.kind == "raises")
            lines.write(json.dumps([name, found]) + "\n")
    pair.close()


class _Pair:
    """A rank's ties to the other: a store that says how the other fares, and a group of their own."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._count, self._groups = rank, 0, 0
        files = FileStore(str(folder / "port"), RANKS)
        if not rank:
            self._store = TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
            files.set("port", str(self._store.port))
        else:
            self._store = TCPStore("127.0.0.1", int(files.get("port")), RANKS, is_master=False)
        self.mesh = self._group()

    def _group(self) -> DeviceMesh:
        self._groups += 1
        store = PrefixStore(f"group {self._groups}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=RANKS, timeout=timedelta(seconds=WAIT))
        return DeviceMesh("cpu", torch.arange(RANKS))

    def agree(self, raised: bool) -> None:
        """Wait for the other at the end of a case; where one has raised, both begin with a fresh group."""
        self._count += 1
        self._store.set(f"{self._count} {self._rank}", str(int(raised)))
        if raised or bool(int(self._store.get(f"{self._count} {1 - self._rank}"))):
            self._store.get(f"{self._count} {1 - self._rank}")
            dist.destroy_process_group()
            self.mesh = self._group()

    def close(self) -> None:
        """End the group."""
        self._store.get(f"{self._count} {1 - self._rank}")
        dist.destroy_process_group()
