"""What five ranks do together: move any layout into any other, by every way, and fail in every way that leaves them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tangram.errors import UserError
from tangram.hardware.host import shared
from tangram.layout import Region
from tangram.relayout import (
    BoundMapping,
    Piece,
    Sharding,
    TensorSpec,
    bind,
    execute,
    plan,
)
from tangram.relayout.exchange import redistribute, rounds
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.exchange.redistribute import move
from tangram.relayout.exchange.rounds import ExchangeReport
from tests.relayout.exchange_jobs import JOBS, rows
from tests.relayout.generate import Case
from tests.relayout.moving import Buffers, Side, all_buffers, as_torch, specs

RANKS = 5
SIZES = (3, 4, 5)
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"way": "shared memory"},
    {"way": "pairs", "memory": 40},
    {"way": "shared memory", "memory": 100},
    {"way": "all-to-all", "memory": 1 << 10},
)
"""The ways that move anything, with much and with little memory."""


@dataclass
class World:
    """Groups of the last so many ranks, by how many; and the cases that were drawn before the ranks began."""

    groups: dict[int, Peers]
    cases: list[Case]
    rank: int
    folder: Path

    def out(self, n: int) -> bool:
        """Whether this rank is not in the group of n."""
        return self.rank < RANKS - n


Scene = Callable[[World], Any]


def play(rank: int, folder: str, cases: list[Case], scenes: Sequence[Scene]) -> None:
    """All scenes, one after the other; what came of each goes into a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    groups = {n: Peers(dist.new_group(list(range(RANKS - n, RANKS)), backend="gloo")) for n in SIZES}
    world = World(groups, cases, rank, Path(folder))
    for scene in scenes:
        result = scene(world)
        Path(f"{folder}/{scene.__name__}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


Target = Sharding | Sequence[Piece]


def pieces_of(target: Target, me: int) -> Sequence[Piece]:
    """What a rank wants."""
    if isinstance(target, Sharding):
        return target.pieces(me) if me < target.mesh.size else []
    return target


def wanted_from_others(bound: BoundMapping, source: Sharding, target: Target, me: int) -> int:
    """The bytes of what this rank wants and does not hold, each element in the shorter of its two dtypes."""
    total = 0
    for copy in plan(bound, source, pieces_of(target, me), check_tied=False).copies:
        if copy.source is not None and copy.source.place != me and copy.cell.source is not None:
            dtypes = (
                bound.source.families[copy.source.tensor].spec.dtype,
                bound.target.families[copy.target.tensor].spec.dtype,
            )
            total += copy.size * min(getattr(torch, d).itemsize for d in dtypes)
    return total


def moved(
    bound: BoundMapping,
    source: Sharding,
    target: Target,
    have: Buffers,
    peers: Peers,
    dtype: str | None = None,
    **how: Any,
) -> tuple[list[str], ExchangeReport]:
    """Move, and say what differs from the same copies in one process. `have`: the buffers of all ranks."""
    me = peers.index
    mine = pieces_of(target, me)
    expected = {(me, n): blank(p, n, bound) for p in mine for n in names(p, bound)}
    execute(plan(bound, source, mine), have, expected)
    out = {key: t.clone() for key, t in expected.items()}
    for t in out.values():
        raw(t).bitwise_not_()
    report = move(bound, source, target, {k: v for k, v in have.items() if k[0] == me}, out, peers, **how)
    bad = [str(key) for key, t in out.items() if not torch.equal(raw(t), raw(expected[key]))]
    if report.received != (wanted := wanted_from_others(bound, source, target, me)):
        bad.append(f"received {report.received}, not {wanted}")
    return bad, report


def raw(t: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes."""
    return t.reshape(-1).view(torch.uint8)


def names(piece: Any, bound: BoundMapping) -> list[str]:
    """The real tensors of a piece of a family."""
    family = bound.target.families[piece.tensor]
    lead = {i for box in piece.region.boxes for i in np.ndindex(*[s[-1][1] for s in box[: family.family_dims]])}
    return [family.member(i) for i in sorted(lead) if any(held(box, i) for box in piece.region.boxes)]


def held(box: Any, index: tuple[int, ...]) -> bool:
    return all(any(a <= i < z for a, z in s) for s, i in zip(box, index, strict=False))


def blank(piece: Any, name: str, bound: BoundMapping) -> torch.Tensor:
    """A buffer for a tensor of a piece."""
    family = bound.target.families[piece.tensor]
    inner = [box[family.family_dims :] for box in piece.region.boxes if held(box, family.index(name) or ())]
    sizes = [[sum(b - a for a, b in s) for s in box] for box in inner]
    shape = sizes[0] if len(sizes) == 1 else [sum(int(np.prod(s)) for s in sizes)]
    return torch.zeros(shape, dtype=getattr(torch, family.spec.dtype))


# ---------------------------------------------------------------- scenes


def every_case(world: World) -> Any:
    """The cases that hypothesis drew, there and, in rounds of a few bytes, by each way that moves anything."""
    bad: list[str] = []
    for i, case in enumerate(world.cases):
        need = max(mesh_size(side) for side in (case.source, case.target))
        n = [size for size in SIZES if size >= need][i % len([size for size in SIZES if size >= need])]
        if world.out(n):
            continue
        bound = bind(case.mapping, *(specs(s.state, s.dtype) for s in (case.source, case.target)), **case.sizes)
        source, target = case.source.sharding(bound.source), case.target.sharding(bound.target)
        have = {k: as_torch(a, case.source.dtype) for k, a in all_buffers(case.source, source).items()}
        how = HOW[i % len(HOW)]
        found, _ = moved(bound, source, target, have, world.groups[n], **how)
        bad += [f"case {i} {how}: {what}" for what in found]
    return bad


def mesh_size(side: Side) -> int:
    return int(np.prod([int(x.split("=")[1]) for x in str(side.mesh).split("|")[0].split()]))


@contextmanager
def patched(*values: tuple[Any, str, Any]) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place, name, value in values:
            patch.setattr(place, name, value)
        yield


@contextmanager
def measured(found: list[tuple[int, int]]) -> Generator[None]:
    """Adds, for each time that bytes pass between nodes: how many this rank gave, and how many lay in memory."""

    def measuring(row: Any) -> Any:
        def carry(staged: Any) -> None:
            found.append((staged.out.numel(), staged.out.numel() + staged.into.numel()))
            row.carry(staged)

        return replace(row, carry=carry)

    with patched((rounds, "TRANSPORTS", tuple(map(measuring, rounds.TRANSPORTS)))):
        yield


def every_row(world: World) -> Any:
    """Each pattern finds its way, and is moved by it as by any other; on nodes of one rank, and of two."""
    bad: list[str] = []
    if world.out(4):
        return bad
    peers = world.groups[4]
    me = peers.index
    for name, (bound, source, target, have) in rows().items():
        own = target if isinstance(target, Sharding) else [p for p in target if p.place == me]
        ways = dict.fromkeys([None, *([name, "all-to-all", "pairs"] if name != "nothing" else [])])
        few = [(4, None, 90), *itertools.product((2, 1), (None, rounds.NEAR), (1 << 20, 300))]
        for nodes, way, memory in [*itertools.product((4,), ways, (1 << 20, 1000)), *few]:
            what = f"{name} by {way} on {nodes} nodes with {memory} bytes"
            given: list[tuple[int, int]] = []
            here = f"node {me * nodes // 4}"
            with patched((redistribute, "node", lambda here=here: here), (rounds, "ENOUGH", 1)), measured(given):
                found, report = moved(bound, source, own, have, peers, way=way, memory=memory)
            bad += [f"{what}: {x}" for x in found]
            near = {i for i in range(4) if i != me and i * nodes // 4 == me * nodes // 4}
            shares = way in (None, rounds.NEAR)
            for peer, by in report.ways.items():
                if (by == rounds.NEAR) != (shares and peer in near) or (nodes == 4 and way is None and by != name):
                    bad.append(f"{what}: {peer} by {by}")
            if memory == 1000 and any(most > 1000 for _, most in given):
                bad.append(f"{what}: {max(given)} in memory")
            if (report.rounds > 1) != (memory < 1 << 20) and name != "nothing":
                bad.append(f"{what}: {report.rounds} rounds")
            far = sum(n for n, _ in given)
            if not shares and far != report.sent // (3 if way in ("broadcast", "all-gather") else 1):
                bad.append(f"{what}: {far} bytes went, of {report.sent}")
    return bad


def without_memory_in_common(world: World) -> Any:
    """Files serve, and where there are none either, the network; a way that is asked for is then refused."""
    said: list[Any] = []
    if world.out(4):
        return said
    bound, source, target, have = rows()["all-to-all"]
    for found in ((shared.in_a_file,), (lambda size: _full(), shared.nameless), ()):
        with patched((shared, "WAYS", found), (rounds, "ENOUGH", 1)):
            bad, report = moved(bound, source, target, have, world.groups[4])
            said.append([bad, sorted(set(report.ways.values()))])
            said.append(raised(lambda: moved(bound, source, target, have, world.groups[4], way=rounds.NEAR)))
    return said


def _full() -> Any:
    raise OSError("No space left on device")


def raised(act: Callable[[], Any]) -> str:
    """What it raises, in a word and a sentence."""
    try:
        act()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def every_job(world: World) -> Any:
    """Codecs, fills, ties and odd shapes, by all ways."""
    bad: list[str] = []
    if world.out(4):
        return bad
    for name, make in JOBS.items():
        bound, source, target, have = make()
        for how in HOW:
            found, _ = moved(bound, source, target, have, world.groups[4], **how)
            bad += [f"{name} {how}: {x}" for x in found]
    return bad


def spread(world: World) -> Any:
    """Two of four hold all, as explicit pieces; the others take it from one of them each, and nothing twice."""
    if world.out(4):
        return None
    me = world.groups[4].index
    bound = bind("w -> w", {"w": TensorSpec((4, 6))})
    pieces = [Piece(i, "w", Region.full((4, 6))) for i in (0, 1)]
    have, out = {(me, "w"): torch.arange(24.0).reshape(4, 6)}, {(me, "w"): torch.zeros(4, 6)}
    report = move(bound, pieces, [Piece(me, "w", Region.full((4, 6)))], have if me < 2 else {}, out, world.groups[4])
    return [torch.equal(out[me, "w"], torch.arange(24.0).reshape(4, 6)), report.sent, report.received, report.local]
