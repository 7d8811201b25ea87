"""Rounds: the messages of all ranks cut into as many parts as it takes for each part to fit into memory.

Every message is cut into the same number of parts, so all ranks know of all rounds from one number, and each rank moves
in each round the same share of what it moves in all. Ranks of a node pass their bytes through memory that they share
(`lanes`), the others through the row of `transports` that fits what is left.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tangram.relayout.agreement import noticed
from tangram.relayout.codecs import Codec
from tangram.relayout.execute import Step, write
from tangram.relayout.messages import ALIGNED, Message, pack, unpack
from tangram.relayout.peers import Peers
from tangram.relayout.transports import Staged, Traffic, Transport, by_rank, choose


@dataclass(frozen=True)
class Report:
    """What one rank moved: bytes to others and from others, copied from its own pieces; the way to and from each."""

    sent: int
    received: int
    local: int
    rounds: int
    ways: Mapping[int, str]


def rounds_of(ranks: Sequence[Traffic], row: Transport, memory: int) -> int:
    """Into how many rounds all messages are cut, so that no rank packs more than `memory` at a time.

    Each message of a round may be a few bytes longer than its share; where memory is less than twice that, it is not
    kept to.
    """
    most = 1
    for r in ranks:
        sent = 2 * max(r.alike, 0) if row.once else r.sent
        room = max(memory - (r.targets + r.sources + 1) * ALIGNED, memory // 2, 1)
        most = max(most, -(-(sent + r.received) // room))
    return most


class Route:
    """The messages of one rank, and the way that they take."""

    def __init__(
        self,
        peers: Peers,
        nodes: Sequence[str],
        sends: Mapping[int, Message],
        takes: Mapping[int, Message],
        alike: bool,
    ) -> None:
        self._peers, self._nodes = peers, nodes
        self._sends, self._takes, self._alike = sends, takes, alike
        self._rounds = 1
        self._faults: list[Exception] = []

    def word(self) -> Any:
        """What the others need to know to choose the way."""
        sent = [m.nbytes for m in self._sends.values()]
        received = [m.nbytes for m in self._takes.values()]
        return [len(sent), len(received), sum(sent), sum(received), sent[0] if self._alike and sent else -1]

    def choose(self, rows: Sequence[Any], memory: int, way: str | None) -> None:
        """Find the way, the same on all ranks. Raises RelayoutError where `way` does not fit."""
        ranks = [Traffic(*row) for row in rows]
        self._row = choose(ranks, way)
        self._rounds = rounds_of(ranks, self._row, memory)

    def run(self, local: Sequence[Step], codecs: Mapping[str, Codec]) -> None:
        """Copy what is here, and move the rest. What goes wrong here is raised when all rounds are over."""
        with self._later():
            write(local, codecs)
        for k in range(self._rounds):
            self._turn(k, codecs)
        if self._faults:
            raise self._faults[0]

    @contextmanager
    def _later(self) -> Generator[None]:
        """Keep an error for later: the others count on all rounds."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._faults.append(error)

    def _turn(self, k: int, codecs: Mapping[str, Codec]) -> None:
        group = self._peers.group
        if group is None:
            return
        n, me, once = self._peers.size, self._peers.index, self._row.once
        sent, received = ([_length(of.get(i), k, self._rounds) for i in range(n)] for of in (self._sends, self._takes))
        if once and self._sends:
            keep, self_message = me, next(iter(self._sends.values()))
            sent = [self_message.length(k, self._rounds)]
            received[keep] = sent[0] if self._row.name == "all-gather" else 0
        out, into = torch.empty(sum(sent), dtype=torch.uint8), torch.empty(sum(received), dtype=torch.uint8)
        with self._later():
            if once:
                for message in list(self._sends.values())[:1]:
                    pack(message, k, self._rounds, out, codecs)
            else:
                for i, part in by_rank(out, sent):
                    if i in self._sends:
                        pack(self._sends[i], k, self._rounds, part, codecs)
        with noticed():
            self._row.carry(Staged(group, out, sent, into, received))
        with self._later():
            for i, part in by_rank(into, received):
                if i in self._takes:
                    unpack(self._takes[i], k, self._rounds, part, codecs)

    def report(self, local: int) -> Report:
        """What was moved."""
        others = sorted({*self._sends, *self._takes})
        return Report(
            sum(m.nbytes for m in self._sends.values()),
            sum(m.nbytes for m in self._takes.values()),
            local,
            self._rounds,
            dict.fromkeys(others, self._row.name),
        )


def _length(message: Message | None, k: int, rounds: int) -> int:
    return 0 if message is None else message.length(k, rounds)
