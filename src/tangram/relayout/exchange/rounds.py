"""Rounds: the messages of all ranks cut into as many parts as it takes for each part to fit into memory.

Every message is cut into the same number of parts, so all ranks know of all rounds from one number, and each rank moves
in each round the same share of what it moves in all. Ranks of a node pass their bytes through memory that they share
(`lanes`), the others through the row of `transports` that fits what is left.

Every rank says in a few numbers how much it sends and receives; from all of these, which are the same on all ranks,
each finds the same way in a table of transports. A row that packs once sends the same bytes to all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.relayout.copies.plan import Step, write
from tangram.relayout.exchange.messages import ALIGNED, Message, pack, unpack
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.exchange.shared_lanes import Lanes, noticed, open_lanes
from tangram.relayout.mapping.codecs import Codec
from tangram.relayout.mapping.errors import PeerError, RelayoutError


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


ENOUGH = 16 << 20
"""Bytes that a rank has for others of its node, from which on it is worth while to open memory for them."""

ROOM = 2 << 20
"""Bytes that a rank packs at a time for ranks of its node: few enough to stay in a cache, and memory that is used again
costs less than new memory."""

Messages = Mapping[int, Message]


@dataclass(frozen=True)
class ExchangeReport:
    """What one rank moved: bytes to others and from others, copied from its own pieces; the way to and from each."""

    sent: int
    received: int
    local: int
    rounds: int
    ways: Mapping[int, str]


@dataclass(frozen=True)
class Load:
    """What one rank has to move: bytes to ranks of its node, its traffic with ranks of others, and with all."""

    near: int
    far: RankTraffic
    all: RankTraffic


@dataclass(frozen=True)
class RoundChoice:
    """How all ranks move: whether those of a node share memory, the row for what is left, and in how many rounds."""

    near: bool
    row: Transport
    rounds: int


def decide(loads: Sequence[Load], memory: int, way: str | None, *, shared: bool = True) -> RoundChoice:
    """The way for these loads, which are the same on all ranks. `shared`: whether ranks can have memory in common.

    Raises RelayoutError where the `way` that is asked for does not fit.
    """
    most = max(load.near for load in loads)
    near = shared and most > 0 and (way == NEAR or (way is None and most >= ENOUGH))
    row = choose([load.far if near else load.all for load in loads], None if way == NEAR else way)
    return RoundChoice(near, row, max(_rounds(load, near, row, memory) for load in loads))


def _rounds(load: Load, near: bool, row: Transport, memory: int) -> int:
    """Into how many rounds a rank's messages must be cut, so that it packs no more than `memory` at a time.

    A message of a round may be a few bytes longer than its share; where memory is not twice that, it is exceeded.
    """
    of = load.far if near else load.all
    staged = of.received + ((1 + row.own) * max(of.alike, 0) if row.once else of.sent)
    room = max(memory - (load.all.targets + load.all.sources + 1) * 2 * ALIGNED, memory // 2, 1)
    if not near:
        return max(1, -(-staged // room))
    if load.near <= ROOM and load.near + staged <= room:
        return 1
    return max(-(-load.near // ROOM), -(-(2 * load.near + staged) // room))


class ExchangeRoute:
    """The messages of one rank, and the way that they take."""

    def __init__(self, peers: Peers, nodes: Sequence[str], sends: Messages, takes: Messages, alike: bool) -> None:
        self._peers, self._nodes, self._alike = peers, nodes, alike
        self._all = sends, takes
        self._near: tuple[Messages, Messages] = {}, {}
        self._far = self._all
        self._faults: list[Exception] = []
        self._lanes: Lanes | None = None

    def word(self) -> Any:
        """What the others need to know to decide on the way."""
        alone = self._nodes.count(self._nodes[self._peers.index]) == 1
        near, far = sum(m.nbytes for m in self._side(True)[0].values()), self._side(False)
        return [near, _traffic(far, self._alike and alone), _traffic(self._all, self._alike)]

    def _side(self, near: bool) -> tuple[Messages, Messages]:
        """The messages to and from ranks of this node, or of others."""
        mine = self._nodes[self._peers.index]
        sends, takes = ({i: m for i, m in some.items() if (self._nodes[i] == mine) is near} for some in self._all)
        return sends, takes

    def choose(self, words: Sequence[Any], memory: int, way: str | None) -> None:
        """Find the way, the same on all ranks, and open it. Raises RelayoutError where `way` does not fit."""
        loads = [Load(near, RankTraffic(*far), RankTraffic(*every)) for near, far, every in words]
        self._way = decide(loads, memory, way)
        if not self._way.near:
            return
        k = self._way.rounds
        longest = [max(m.length(j, k) for j in range(k)) for m in self._side(True)[0].values()]
        room = sum(-(-n // ALIGNED) * ALIGNED for n in longest)
        self._lanes = open_lanes(self._peers, self._nodes, room, min(k, 2))
        if self._lanes is not None:
            self._near, self._far = self._side(True), self._side(False)
        elif way == NEAR:
            raise RelayoutError("the ranks of a node can have no memory in common here; leave the way to the pattern")
        else:
            self._way = decide(loads, memory, way, shared=False)

    def run(self, local: Sequence[Step], codecs: Mapping[str, Codec]) -> None:
        """Copy what is here, and move the rest. What goes wrong here is raised when all rounds are over."""
        with ExitStack() as stack:
            if self._lanes is not None:
                stack.enter_context(self._lanes.in_use())
            for k in range(self._way.rounds):
                if self._lanes is not None:
                    with self._later():
                        self._lanes.pack(self._near[0], k, self._way.rounds, codecs)
                if k == 0:  # while the others pack
                    with self._later():
                        write(local, codecs)
                self._turn(k, codecs)
                if self._lanes is not None:
                    with self._later():
                        self._lanes.unpack(self._near[1], k, self._way.rounds, codecs)
        if self._faults:
            raise self._faults[0]

    @contextmanager
    def _later(self) -> Generator[None]:
        """Keep an error for later: the others count on all rounds."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, all ranks will hear of it
            self._faults.append(error)

    def _turn(self, k: int, codecs: Mapping[str, Codec]) -> None:
        """What passes between nodes in a round."""
        group, row, rounds = self._peers.group, self._way.row, self._way.rounds
        if group is None or row.idle:
            return
        sends, takes = self._far
        if row.once and sends:  # what is for one is for all
            sends = {self._peers.index: next(iter(sends.values()))}
        sent, received = ([_length(some.get(i), k, rounds) for i in range(self._peers.size)] for some in (sends, takes))
        if row.own:
            received[self._peers.index] = sum(sent)
        out, into = torch.empty(sum(sent), dtype=torch.uint8), torch.empty(sum(received), dtype=torch.uint8)
        with self._later():
            for i, part in by_rank(out, sent):
                if i in sends:
                    pack(sends[i], k, rounds, part, codecs)
        with noticed():
            row.carry(Staged(group, out, sent, into, received))
        with self._later():
            for i, part in by_rank(into, received):
                if i in takes:
                    unpack(takes[i], k, rounds, part, codecs)

    def report(self, local: int) -> ExchangeReport:
        """What was moved."""
        sends, takes = self._all
        ways = {
            i: NEAR if i in {**self._near[0], **self._near[1]} else self._way.row.name for i in sorted({*sends, *takes})
        }
        sent, received = (sum(m.nbytes for m in some.values()) for some in (sends, takes))
        return ExchangeReport(sent, received, local, self._way.rounds, ways)


def _traffic(of: tuple[Messages, Messages], alike: bool) -> list[int]:
    sent, received = ([m.nbytes for m in some.values()] for some in of)
    return [len(sent), len(received), sum(sent), sum(received), sent[0] if alike and sent else -1]


def _length(message: Message | None, k: int, rounds: int) -> int:
    return 0 if message is None else message.length(k, rounds)
