"""How bytes pass between the ranks of a group: a table of ways, and which of them fits a pattern.

Every rank says in a few numbers how much it sends and receives; from all of these, which are the same on all ranks,
each finds the same way. A row that packs once sends the same bytes to all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from tangram.relayout.mapping.errors import RelayoutError


@dataclass(frozen=True)
class RankTraffic:
    """Of one rank: to and from how many others it has messages, how many bytes in all, the bytes that all others want
    alike (-1 where they want different ones)."""

    targets: int
    sources: int
    sent: int
    received: int
    alike: int


@dataclass(frozen=True)
class Staged:
    """What passes in one round: the bytes that this rank sends and those that it receives, by rank one after the other.

    Of a row that packs once, `out` is what all others get.
    """

    group: dist.ProcessGroup
    out: Tensor
    sent: Sequence[int]
    into: Tensor
    received: Sequence[int]


@dataclass(frozen=True)
class Transport:
    """One row. `fits` the traffic of all ranks; `carry` is collective and returns when `into` is there.

    `once`: a rank packs only once what all others get. `own`: it gets that itself, too. `idle`: nothing moves.
    """

    name: str
    fits: Callable[[Sequence[RankTraffic]], bool]
    carry: Callable[[Staged], None]
    once: bool = False
    own: bool = False
    idle: bool = False


def _one_to_all(ranks: Sequence[RankTraffic]) -> bool:
    senders = [r for r in ranks if r.sent]
    return len(ranks) > 2 and len(senders) == 1 and senders[0].alike > 0


def _all_to_all_alike(ranks: Sequence[RankTraffic]) -> bool:
    return len(ranks) > 2 and ranks[0].alike > 0 and len({r.alike for r in ranks}) == 1


def _dense(ranks: Sequence[RankTraffic]) -> bool:
    return 2 * sum(r.targets for r in ranks) >= len(ranks) * (len(ranks) - 1)


def _broadcast(s: Staged) -> None:
    if not s.out.numel() + s.into.numel():  # a short message has rounds in which nothing moves
        return
    root = next((i for i, n in enumerate(s.received) if n), dist.get_rank(s.group))
    dist.broadcast(s.out if s.out.numel() else s.into, group=s.group, group_src=root)


def _all_gather(s: Staged) -> None:
    if not s.out.numel():
        return
    dist.all_gather([part for _, part in by_rank(s.into, s.received)], s.out, group=s.group)


def _all_to_all(s: Staged) -> None:
    dist.all_to_all_single(s.into, s.out, list(s.received), list(s.sent), group=s.group)


def _pairs(s: Staged) -> None:
    sends = [dist.P2POp(dist.isend, t, group=s.group, group_peer=i) for i, t in by_rank(s.out, s.sent) if t.numel()]
    takes = [
        dist.P2POp(dist.irecv, t, group=s.group, group_peer=i) for i, t in by_rank(s.into, s.received) if t.numel()
    ]
    if sends or takes:
        for work in dist.batch_isend_irecv(takes + sends):
            work.wait()


def by_rank(data: Tensor, sizes: Sequence[int]) -> list[tuple[int, Tensor]]:
    """The part of each rank."""
    starts = itertools.accumulate(sizes, initial=0)
    return [(i, data[at : at + n]) for i, (at, n) in enumerate(zip(starts, sizes, strict=False))]


TRANSPORTS = (
    Transport("nothing", lambda ranks: not any(r.sent for r in ranks), lambda staged: None, idle=True),
    Transport("broadcast", _one_to_all, _broadcast, once=True),
    Transport("all-gather", _all_to_all_alike, _all_gather, once=True, own=True),
    Transport("all-to-all", _dense, _all_to_all),
    Transport("pairs", lambda ranks: True, _pairs),
)
"""The first that fits is taken. An all-to-all where most pairs of ranks have something for each other."""
NEAR = "shared memory"
"""The way between ranks of a node, where they can have memory in common (`lanes`)."""
ALWAYS = ("all-to-all", "pairs")
"""Rows that move any traffic, if they are asked for."""


def choose(ranks: Sequence[RankTraffic], way: str | None = None) -> Transport:
    """The row for this traffic; or the one that is asked for by `way`: RelayoutError where it does not fit."""
    if way is None:
        return next(row for row in TRANSPORTS if row.fits(ranks))
    found = next((row for row in TRANSPORTS if row.name == way), None)
    if found is None:
        names = ", ".join([NEAR, *(row.name for row in TRANSPORTS)])
        raise RelayoutError(f"there is no way {way!r} between ranks; there are {names}")
    if way not in ALWAYS and not found.fits(ranks):
        raise RelayoutError(f"the ranks do not want what {way} moves; leave the way to the pattern")
    return found
