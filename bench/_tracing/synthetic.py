"""Traces of many ranks that never ran: their steps from the planner's time model, with noise and one planted fault.

Within a step ranks of tp wait for the slowest of them, stages for each other as a pipeline does, and replicas for the
slowest at the end. What a rank waits follows from what all ranks take; nothing else is written than what a recorder
writes: a ring, of which only the pages that say something are on the disk, and the names of its calls.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tangram.hardware.catalogue.devices import device
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.timeline import KINDS, play
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid
from tangram.planner.space.setting import Setting
from tangram.tracing.files.format import (
    EVENT,
    EVENTS,
    HEADER,
    HEADER_BYTES,
    LIVE,
    LIVE_AT,
    MAGIC,
    ROW_DTYPE,
    ROWS,
    VERSION,
    Kind,
    Phase,
    file_of,
    ring_bytes,
)
from tangram.tracing.finding import Finding

MICROS, STEPS, NOISE, HOST = 16, 50, 0.005, 8
LINK = ("tp", "dp", "pp")
AXES = ("tp", "pp", "dp", "pp dp tp")
"""Of groups, in the order of their slots."""


@dataclass(frozen=True)
class Planted:
    """What is wrong in a synthetic trace."""

    kind: str
    """slow, slow host, slow link or stopped."""
    rank: int
    """Of a link: one of its ranks."""
    axis: str
    since: int
    factor: float

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that take longer; of a link one of its own."""
        first = self.rank // HOST * HOST
        return tuple(range(first, first + HOST)) if self.kind == "slow host" else (self.rank,)


@dataclass(frozen=True)
class Cluster:
    """A mesh of stages, replicas and TP ranks."""

    stages: int
    replicas: int
    tensor: int

    @property
    def mesh(self) -> str:
        """In the notation."""
        return f"pp={self.stages} dp={self.replicas} tp={self.tensor}"

    @property
    def ranks(self) -> int:
        """How many."""
        return self.stages * self.replicas * self.tensor


def drawn(cluster: Cluster, seed: int) -> Planted:
    """A fault by seed."""
    draw = np.random.default_rng(seed)
    kind = ("slow", "slow link", "stopped", "slow host")[seed % 4]
    factor = 1.5 if kind == "slow link" else float(draw.uniform(1.06, 1.5))
    axis = LINK[int(draw.integers(3))] if kind == "slow link" else "tp"
    return Planted(kind, int(draw.integers(cluster.ranks)), axis, int(draw.integers(1, STEPS // 2)), factor)


def names(found: Finding, planted: Planted) -> bool:
    """Whether a finding names what was planted: the rank, and the axis over which the others wait.

    For a rank that is stopped they wait over every axis, for a host over any.
    """
    axes = found.axes.split(" and ")
    right = planted.rank in found.ranks if planted.kind == "slow link" else found.ranks == planted.blamed
    where = planted.axis in axes or planted.kind in ("stopped", "slow host")
    return found.kind == ("slow" if planted.kind == "slow host" else planted.kind) and right and where


def step_without(cluster: Cluster, planted: Planted, seed: int) -> float:
    """Seconds of a step since the fault began, had it not: the same noise."""
    return float(np.median(_steps(cluster, replace(planted, factor=1.0), seed)[2][planted.since :]))


def stage_seconds(cluster: Cluster) -> npt.NDArray[np.float64]:
    """What a step's forwards and backwards take a rank of each stage, by the planner's time model."""
    model = decoder(Dims(128, 16384, 128, 128256, ffn=53248, kv_heads=8), "synthetic")
    one = grid(
        sequence=8192, batch=MICROS * cluster.replicas, pipeline=cluster.stages, data=cluster.replicas,
        tensor=cluster.tensor, sequence_parallel=1,
    )  # fmt: skip
    found = play(model, one, Setting(device("h100"), framework("megatron-core")))
    return np.array([sum(took for _, took, action in row if action.kind in KINDS) for row in found.rows])


def write(folder: Path, cluster: Cluster, planted: Planted, seed: int) -> None:
    """The traces of all ranks."""
    folder.mkdir(parents=True)
    own, waits, total = _steps(cluster, planted, seed)
    places = np.arange(cluster.ranks).reshape(cluster.stages, cluster.replicas, cluster.tensor)
    now = max(time.monotonic_ns(), int(4000e9))  # of machines that have been on for less than the run, too
    beats = np.full(cluster.ranks, now)
    last = STEPS if planted.kind != "stopped" else planted.since + 8
    if planted.kind == "stopped":
        beats[planted.rank] -= int(60e9)
    rows = np.zeros((cluster.ranks, last), ROW_DTYPE)
    rows["step"] = np.arange(1, last + 1)
    rows["calls"], rows["memory_kb"] = 300, 40_000_000
    rows["nanoseconds"] = np.round(total[:last] * 1e9).astype(np.uint64)
    rows["begin"] = now - int(3600e9) + np.cumsum(rows["nanoseconds"], 1) - rows["nanoseconds"]
    rows["own_us"][..., Phase.PIPELINE] = np.round(own.reshape(STEPS, -1).T[:, :last] * 1e6)
    for slot, of in enumerate(waits):
        rows["wait_us"][..., slot] = np.round(of.reshape(STEPS, -1).T[:, :last] * 1e6)
    lines = _names(cluster)
    for rank in range(cluster.ranks):
        stage, replica, tensor = (int(n[0]) for n in np.nonzero(places == rank))
        groups = (
            (replica, tensor, stage),
            places[stage, replica],
            places[:, replica, tensor],
            places[stage, :, tensor],
        )
        host, waiting = f"node-{rank // HOST:05d}", planted.kind == "stopped" and rank != planted.rank
        _ring(
            folder,
            cluster,
            rank,
            host,
            int(beats[rank]),
            rows[rank],
            waiting=_waits_in(planted, rank, groups) * waiting,
        )
        words = [
            {"group": at, "name": axes, "axes": axes, "ranks": _short(some), "slot": at}
            for at, (axes, some) in enumerate(zip(AXES, (*groups[1:], places.reshape(-1)), strict=True))
        ]
        (folder / file_of(rank, "names.jsonl")).write_text(
            "".join(json.dumps(one) + "\n" for one in words) + lines, encoding="utf-8"
        )


def _waits_in(planted: Planted, rank: int, groups: tuple[object, ...]) -> int:
    """The slot + 1 of the group in which a rank waits for the one that is stopped."""
    for at, some in enumerate(groups[1:]):
        assert isinstance(some, np.ndarray)
        if planted.rank in some:
            return at + 1
    return 3


def _short(ranks: npt.NDArray[np.int64]) -> dict[str, int]:
    step = int(ranks[1] - ranks[0]) if len(ranks) > 1 else 1
    return {"first": int(ranks[0]), "step": step, "count": len(ranks)}


def _steps(
    cluster: Cluster, planted: Planted, seed: int
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]], npt.NDArray[np.float64]]:
    """By step and place: time of its own, waits over each of `AXES`; and what each step takes, in seconds."""
    draw = np.random.default_rng((seed, 1))
    shape = STEPS, cluster.stages, cluster.replicas, cluster.tensor
    base = stage_seconds(cluster)[:, None, None]
    own = base * (1 + NOISE * draw.standard_normal(shape))
    at = np.unravel_index(planted.rank, shape[1:])
    since = slice(planted.since, None)
    if planted.kind in ("slow", "slow host"):
        own.reshape(STEPS, -1)[since, [*planted.blamed]] *= planted.factor
    late = {axis: np.zeros(shape) for axis in LINK}
    if planted.kind == "slow link":
        stage, replica, tensor = at
        where = {"tp": (stage, replica), "pp": (slice(None), replica, tensor), "dp": (stage, slice(None), tensor)}
        late[planted.axis][(since, *where[planted.axis])] = float(base.mean()) * (planted.factor - 1)

    def link(share: float) -> npt.NDArray[np.float64]:
        return share * float(base.mean()) * (1 + NOISE * np.abs(draw.standard_normal(shape)))

    tensor_ends = own.max(3, keepdims=True) + late["tp"]
    wait_tensor = tensor_ends - own + link(0.05)
    stages = (own + wait_tensor).max(3, keepdims=True)
    pipeline = stages.max(1, keepdims=True) * (MICROS - 1) / MICROS + stages.sum(1, keepdims=True) / MICROS
    wait_pipeline = pipeline - (own + wait_tensor) + late["pp"] + link(0.01)
    reached = own + wait_tensor + wait_pipeline
    wait_data = reached.max(2, keepdims=True) - reached + late["dp"] + link(0.03)
    reached = reached + wait_data
    total = reached.max((1, 2, 3))
    wait_all = total[:, None, None, None] - reached + link(0.001)
    return own, [wait_tensor, wait_pipeline, wait_data, wait_all], total


def _names(cluster: Cluster) -> str:
    """What is the same on all ranks: the run, the sites of calls, and the sequence of a step."""
    sites = [
        {"site": 1 + at, "op": op, "group": on, "bytes": 1 << 20, "peer": -1, "dtype": "bfloat16",
         "what": "", "layer": "", "line": "synthetic.py:1"}
        for at, (op, on) in enumerate((("all-gather", 0), ("reduce-scatter", 0), ("all-reduce", 2), ("all-reduce", 3)))
    ]  # fmt: skip
    sequence = [*([1, 2] * 120), *([3] * 16), 4]
    lines = [{"run": {"mesh": cluster.mesh, "stages": ["pp"], "hang_seconds": 60.0}}, *sites]
    lines += [{"sequence": sequence, "step": step} for step in (1, 2, 3)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _ring(
    folder: Path, cluster: Cluster, rank: int, host: str, beat: int, rows: npt.NDArray[np.void], waiting: int
) -> None:
    """Its pages with something on them; the rest are holes. `waiting`: the slot + 1 of its group, or 0."""
    begun = beat - int(3600e9)
    with (folder / file_of(rank, "ring")).open("wb") as file:
        file.truncate(ring_bytes(EVENTS, ROWS))
        wall = time.time_ns()
        head = (MAGIC, VERSION, rank, cluster.ranks, 0, EVENTS, ROWS, b"synthetic-trace!", host.encode(), begun, wall)
        file.write(HEADER.pack(*head))
        file.seek(LIVE_AT)
        file.write(LIVE.pack(beat, beat // 2, int(waiting > 0), Phase.PIPELINE, int(rows["step"][-1]) + 1, 0, 0))
        if waiting:
            file.seek(HEADER_BYTES + EVENT.size)
            site = (1, 1, 3)[waiting - 1]
            enter = (1, beat - int(58e9), 1 << 20, site, 7, waiting - 1, Kind.ENTER, 0, int(rows["step"][-1]) + 1)
            file.write(EVENT.pack(*enter))
        file.seek(ring_bytes(EVENTS, 0))
        file.write(rows.tobytes())
