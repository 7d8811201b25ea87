"""What five ranks do together: move any layout into any other, by every way, and fail in every way that leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tangram.relayout import Bound, Sharding, bind, execute, plan
from tangram.relayout.exchange import move
from tangram.relayout.peers import Peers
from tangram.relayout.rounds import Report
from tests.relayout.generate import Case
from tests.relayout.moving import Buffers, Side, all_buffers, as_torch, specs

RANKS = 5
SIZES = (3, 4, 5)


@dataclass
class World:
    """The groups of the first so many ranks, and the cases that were drawn before the ranks began."""

    groups: dict[int, Peers]
    cases: list[Case]
    rank: int
    folder: Path


Scene = Callable[[World], Any]


def play(rank: int, folder: str, cases: list[Case], scenes: Sequence[Scene]) -> None:
    """All scenes, one after the other; what came of each goes into a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    groups = {n: Peers(dist.new_group(list(range(n)), backend="gloo")) for n in SIZES}
    world = World(groups, cases, rank, Path(folder))
    for scene in scenes:
        result = scene(world)
        Path(f"{folder}/{scene.__name__}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


def wanted_from_others(bound: Bound, source: Sharding, target: Sharding, me: int) -> int:
    """The bytes of what this rank wants and does not hold, each element in the shorter of its two dtypes."""
    total = 0
    pieces = target.pieces(me) if me < target.mesh.size else []
    for copy in plan(bound, source, pieces, check_tied=False).copies:
        if copy.source is not None and copy.source.place != me and copy.cell.source is not None:
            dtypes = (
                bound.source.families[copy.source.tensor].spec.dtype,
                bound.target.families[copy.target.tensor].spec.dtype,
            )
            total += copy.size * min(getattr(torch, d).itemsize for d in dtypes)
    return total


def moved(
    bound: Bound, source: Sharding, target: Sharding, have: Buffers, peers: Peers, dtype: str | None = None, **how: Any
) -> tuple[list[str], Report]:
    """Move, and say what differs from the same copies in one process. `have`: the buffers of all ranks."""
    me = peers.index
    mine = target.pieces(me) if me < target.mesh.size else []
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


def names(piece: Any, bound: Bound) -> list[str]:
    """The real tensors of a piece of a family."""
    family = bound.target.families[piece.tensor]
    lead = {i for box in piece.region.boxes for i in np.ndindex(*[s[-1][1] for s in box[: family.family_dims]])}
    return [family.member(i) for i in sorted(lead) if any(held(box, i) for box in piece.region.boxes)]


def held(box: Any, index: tuple[int, ...]) -> bool:
    return all(any(a <= i < z for a, z in s) for s, i in zip(box, index, strict=False))


def blank(piece: Any, name: str, bound: Bound) -> torch.Tensor:
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
        if world.rank >= n:
            continue
        bound = bind(case.mapping, *(specs(s.state, s.dtype) for s in (case.source, case.target)), **case.sizes)
        source, target = case.source.sharding(bound.source), case.target.sharding(bound.target)
        have = {k: as_torch(a, case.source.dtype) for k, a in all_buffers(case.source, source).items()}
        how = [{}, {"way": "pairs", "memory": 40}, {"way": "all-to-all", "memory": 1 << 10}][i % 3]
        found, _ = moved(bound, source, target, have, world.groups[n], **how)
        bad += [f"case {i} {how}: {what}" for what in found]
    return bad


def mesh_size(side: Side) -> int:
    return int(np.prod([int(x.split("=")[1]) for x in str(side.mesh).split("|")[0].split()]))


SCENES: tuple[Scene, ...] = (every_case,)
