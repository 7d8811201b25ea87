"""DTensors into DTensors of any other meshes and placements, on the ranks of one group.

    prepare    each rank plans the copies that it wants, looks at its target buffers, and says what it wants of whom
    serve      each finds what is asked of it in its own pieces and looks at these buffers; tied copies are compared
    run        packed bytes pass in rounds of bounded memory; what a rank holds itself is copied from memory to memory

Between these all ranks agree: what is wrong on one is raised on all as one sentence that names the rank, and until all
have agreed no byte of a target is written. What ranks say to each other grows with their overlaps, not with the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tangram.hardware.host.shared import node
from tangram.layout import Region, region
from tangram.layout.region import Box, box_size
from tangram.relayout.copies.buffers import Buffers, Side, refuse_shared
from tangram.relayout.copies.dtensor import layout_of, mesh_of
from tangram.relayout.copies.pieces import Holders, Piece, PieceIndex, Sharding
from tangram.relayout.copies.plan import Copy, Step, TieCheck, compare, first_member, plan, steps
from tangram.relayout.exchange.messages import DIGEST, BoxRequest, Message, Segment, Wire, decoded, digest, encoded
from tangram.relayout.exchange.peers import Peers
from tangram.relayout.exchange.rounds import ExchangeReport, ExchangeRoute
from tangram.relayout.exchange.shared_lanes import agreed, noticed, tried
from tangram.relayout.mapping.bind import BoundMapping, bind
from tangram.relayout.mapping.cells import CellPart
from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorSpec

MEMORY = 64 << 20
"""Bytes of packed data that a rank holds at a time, if nobody says otherwise."""


def move(
    bound: BoundMapping,
    source: Holders | Iterable[Piece],
    target: Sharding | Iterable[Piece],
    have: Buffers,
    out: Buffers,
    peers: Peers,
    *,
    memory: int = MEMORY,
    check_tied: bool = True,
    way: str | None = None,
) -> ExchangeReport:
    """Fill what every rank wants from what all of them have. Collective over `peers`.

    Places are ranks of the group: `source` says who holds what (a `Sharding`, or all pieces with the rank as their
    place), `target` what this rank wants. `have` and `out` are this rank's buffers by `(rank, real name)`, as for
    `execute`, and are filled as it would fill them. `memory`: bytes of packed data that a rank has at a time, of what
    it sends and receives together. `way`: a transport to use instead of the one that fits the pattern.

    Raises the same on all ranks, RelayoutError or CoverageError, before any target is written; PeerError when another
    rank ended (let it end this one too: others may wait for it).
    """
    job = _Job(bound, peers, memory)
    _, fault = tried(lambda: job.prepare(source, target, have, out, check_tied))
    words = agreed(peers, fault, job.word([memory, check_tied, way]))
    _refuse_apart(words)
    with noticed():
        asked = peers.swap([torch.tensor(encoded(job.wants.get(i, [])), dtype=torch.int64) for i in range(peers.size)])
    digests, fault = tried(lambda: job.serve(asked))
    if any(word["ties"] for word in words):
        agreed(peers, fault)
        with noticed():
            answers = peers.swap(digests or [])
        _, fault = tried(lambda: job.refuse_ties(answers))
    route = ExchangeRoute(peers, [word["node"] for word in words], job.sends, job.takes, _alike(asked, peers.index))
    rows = agreed(peers, fault, route.word())
    route.choose(rows, memory, way)
    _, fault = tried(lambda: route.run(job.local, bound.codecs))
    agreed(peers, fault)
    return route.report(job.local_bytes)


def _refuse_apart(words: Sequence[Any]) -> None:
    for what, name in (("mapping", "another mapping, or other tensors,"), ("settings", "other settings")):
        other = next((i for i, word in enumerate(words) if word[what] != words[0][what]), None)
        if other is not None:
            raise RelayoutError(f"rank {other} was given {name} than rank 0: all ranks move by the same")


def _alike(asked: Sequence[Tensor], me: int) -> bool:
    """Whether all others want the same of this rank."""
    first, *more = [numbers for i, numbers in enumerate(asked) if i != me] or [torch.empty(0)]
    return bool(first.numel()) and all(torch.equal(numbers, first) for numbers in more)


class _Job:
    """One rank's part: what it wants of whom, and what the others want of it."""

    def __init__(self, bound: BoundMapping, peers: Peers, memory: int) -> None:
        self._bound, self._peers, self._memory = bound, peers, memory
        self._cells = [cell for cells in bound.cells.values() for cell in cells]
        self._numbers = {id(cell): i for i, cell in enumerate(self._cells)}
        self._ties: list[tuple[TieCheck, Box, int, int]] = []
        self.wants: dict[int, list[BoxRequest]] = {}
        self.takes: dict[int, Message] = {}
        self.sends: dict[int, Message] = {}
        self.local: list[Step] = []
        self.local_bytes = 0

    def prepare(
        self,
        source: Holders | Iterable[Piece],
        target: Sharding | Iterable[Piece],
        have: Buffers,
        out: Buffers,
        check_tied: bool,
    ) -> None:
        """Plan what this rank wants, and look at all buffers that it knows of by itself."""
        me, n, bound = self._peers.index, self._peers.size, self._bound
        if self._memory < 1:
            raise RelayoutError(f"memory={self._memory}: give at least one byte")
        self._holders = source if not isinstance(source, Iterable) else PieceIndex(tuple(source), bound.source)
        _refuse_larger("source", self._holders, n)
        _refuse_larger("target", target, n)
        self._sources, self._targets = Side(bound.source, have, False, {}), Side(bound.target, out, True, {})
        copies = plan(bound, self._holders, _target_pieces(target, me), check_tied=check_tied)
        segments: dict[int, list[tuple[BoxRequest, Segment]]] = {}
        for copy in copies.copies:
            place = me if copy.source is None else self._rank(copy.source)
            if place == me:
                self.local += steps(copy, self._sources, self._targets)
                self.local_bytes += 0 if copy.source is None else copy.size * Wire.of(bound, copy.cell).after.itemsize
            else:
                segments.setdefault(place, []).extend(self._remote(copy))
        for place, some in segments.items():
            some.sort(key=lambda pair: -pair[1].wire.dtype.itemsize)  # so that no element lies across a boundary
            self.wants[place] = [request for request, _ in some]
            self.takes[place] = Message([segment for _, segment in some])
        for check in copies.checks:
            self._check(check)

    def _rank(self, piece: Piece) -> int:
        if not isinstance(piece.place, int) or not 0 <= piece.place < self._peers.size:
            raise RelayoutError(f"{piece.tensor} is held at {piece.place!r}, which is no rank of the group")
        return piece.place

    def _remote(self, copy: Copy) -> list[tuple[BoxRequest, Segment]]:
        cell, wire, number = copy.cell, Wire.of(self._bound, copy.cell), self._numbers[id(copy.cell)]
        return [
            (
                BoxRequest(number, box, 0, False),
                Segment.of(cell, box, wire, self._targets, cell.target, [(copy.target, box)]),
            )
            for box in copy.boxes
        ]

    def _check(self, check: TieCheck) -> None:
        """Compare tied copies that are here; ask for digests of those of which one is elsewhere."""
        places = self._rank(check.source), self._rank(check.other)
        if places == (self._peers.index,) * 2:
            compare(check, self._sources)
            return
        number = self._numbers[id(check.cell)]
        tied = 1 + next(i for i, part in enumerate(check.cell.tied) if part is check.part)
        for box in check.boxes:
            at: list[int] = []
            for place, part in zip(places, (0, tied), strict=True):
                asked = self.wants.setdefault(place, [])
                at.append(sum(r.digest for r in asked))
                asked.append(BoxRequest(number, box, part, True))
            self._ties.append((check, box, at[0], at[1]))

    def word(self, settings: list[Any]) -> Any:
        """What all ranks must have alike, where this one is, and whether it compares copies that are elsewhere."""
        families = [
            (name, f.spec.shape, f.spec.dtype)
            for side in (self._bound.source, self._bound.target)
            for name, f in side.families.items()
        ]
        text = repr((str(self._bound.mapping), families, sorted(self._bound.known.items())))
        same = hashlib.sha256(text.encode()).hexdigest()
        return {"mapping": same, "settings": settings, "node": node(), "ties": bool(self._ties)}

    def serve(self, asked: Sequence[Tensor]) -> list[Tensor]:
        """Find what each rank wants of this one; returns the digests for each. Raises RelayoutError."""
        known: dict[BoxRequest, bytes] = {}
        answers: list[Tensor] = []
        for rank, numbers in enumerate(asked):
            segments: list[Segment] = []
            data = bytearray()
            for r in decoded(cast("list[int]", numbers.tolist()), self._cells):
                if r not in known:
                    segment = self._segment(r, rank)
                    if r.digest:
                        known[r] = digest(segment, self._memory)
                    else:
                        segments.append(segment)
                if r.digest:
                    data += known[r]
            if segments:
                self.sends[rank] = Message(segments)
            answers.append(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
        refuse_shared(self._bound, self._sources, self._targets)
        return answers

    def _segment(self, r: BoxRequest, rank: int) -> Segment:
        cell, me = self._cells[r.cell], self._peers.index
        part = cell.source if r.part == 0 else cell.tied[r.part - 1]
        wire = Wire.of(self._bound, cell)
        if part is None:
            raise TypeError("what is created is asked of nobody")
        lies = self._holders.find(part, r.box, me)
        if any(p.place != me for p, _ in lies) or sum(box_size(b) for _, b in lies) != box_size(r.box):
            name, region = self._names(part, r.box)
            raise RelayoutError(
                f"rank {rank} wants {region} of {name}, which is not here: give all ranks the same source"
            )
        return Segment.of(cell, r.box, wire.raw if r.digest else wire, self._sources, part, lies)

    def _names(self, part: CellPart, box: Box) -> tuple[str, Region]:
        return first_member(self._bound.source.families[part.tensor], Region.of([part.indices(box)]))

    def refuse_ties(self, answers: Sequence[Tensor]) -> None:
        """Compare the digests of tied copies. Raises RelayoutError."""
        for check, box, i, j in self._ties:
            a, b = self._rank(check.source), self._rank(check.other)
            if check.cell.source is None or torch.equal(_digest(answers[a], i), _digest(answers[b], j)):
                continue
            (name, region), (other, _) = self._names(check.cell.source, box), self._names(check.part, box)
            raise RelayoutError(f"{name} at {a} and {other} at {b} are tied, but differ in {region} of {name}")


def _digest(answers: Tensor, i: int) -> Tensor:
    return answers[i * DIGEST : (i + 1) * DIGEST]


def _refuse_larger(side: str, of: object, ranks: int) -> None:
    if isinstance(of, Sharding) and of.mesh.size > ranks:
        raise RelayoutError(f"the {side} is laid over {of.mesh.size} ranks, but the group has {ranks}")


def _target_pieces(target: Sharding | Iterable[Piece], me: int) -> list[Piece]:
    if isinstance(target, Sharding):
        return target.pieces(me) if me < target.mesh.size else []
    wanted = list(target)
    other = next((p for p in wanted if p.place != me), None)
    if other is not None:
        raise RelayoutError(f"{other.tensor} is wanted at {other.place!r}: a rank names what it wants itself")
    return wanted


DTensors = Mapping[str, DTensor]


def redistribute(
    have: DTensors, want: DTensors, peers: Peers, *, mapping: str = "{name*} -> {name*}", memory: int = MEMORY
) -> ExchangeReport:
    """Fill the DTensors of one state from those of another. Collective over `peers`, which has all ranks of all meshes.

    Names, shapes and dtypes may change as the mapping says; meshes and placements as they like, and from tensor to
    tensor. All ranks name the same tensors. Raises the same on all ranks, before any target is written.
    """
    group = peers.group
    if group is None:
        raise RelayoutError("DTensors are moved by the ranks of a group: give it to the peers")
    local = [{name: list(t.to_local().shape) for name, t in side.items()} for side in (have, want)]
    shapes = agreed(peers, None, local)
    made, fault = tried(
        lambda: (
            bind(mapping, _specs(have), _specs(want)),
            _pieces(have, [of[0] for of in shapes], group),
            _pieces(want, [of[1] for of in shapes], group),
        )
    )
    agreed(peers, fault)
    if made is None:
        raise AssertionError("what has no fault was made")
    bound, held, wanted = made
    me = peers.index
    sources, targets = ({(me, name): t.to_local() for name, t in side.items()} for side in (have, want))
    return move(bound, held, [p for p in wanted if p.place == me], sources, targets, peers, memory=memory)


def _specs(side: DTensors) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(t.shape), str(t.dtype)) for name, t in side.items()}


def _pieces(side: DTensors, shapes: list[Any], group: dist.ProcessGroup) -> list[Piece]:
    """What each rank of the group holds. `shapes`: by rank, the local shape of each tensor."""
    found: list[Piece] = []
    places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
    for name, t in side.items():
        mesh, ranks = mesh_of(t.device_mesh)
        outside = next((rank for rank in ranks if rank not in places), None)
        if outside is not None:
            raise RelayoutError(f"{name}: rank {outside} of its mesh is not in the group")
        here = [places[rank] for rank in ranks]
        lacking = next((place for place in here if name not in shapes[place]), None)
        if lacking is not None:
            raise RelayoutError(f"rank {lacking} has no {name}: all ranks name the same tensors")
        _, layout = layout_of(t, {i: tuple(shapes[place][name]) for i, place in enumerate(here)})
        if layout.pending:
            raise RelayoutError(f"{name} waits for a reduction over {layout.pending[0][1]}: do that first")
        regions = [region(layout, mesh, i) for i in range(len(here))]
        found += [Piece(place, name, held) for place, held in zip(here, regions, strict=True) if held]
    return found
