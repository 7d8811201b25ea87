"""Who reads which block from storage, and who has it from whom.

    a block that one rank wants            that rank reads it, and copies what it wants
    a block that several of a node want    one of them gets it into its window; each copies what it wants from there
    a block that several nodes want        one of them reads it and sends it to the others
    a block whose file is on other nodes   one that has it reads it and sends it, whether it wants it or not

Every rank works the same deal out from what all of them want. Within a node, what several want is dealt out in
contiguous stretches, so that all its ranks get hold of about as many blocks. Of what the same nodes want, each reads
its turn: where all want all, that is an all-gather in which each node reads and sends an equal part.

No rank waits for another forever, whatever its threads: all get hold of blocks in one order, first those that pass
between nodes, by their numbers, then those that pass within one, then their own. So the first block that is not
there yet has somebody at work on it.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tangram.checkpoint.loading.scatter import Item
from tangram.errors import UserError

Wants = Mapping[str, Sequence[Sequence[int]]]
"""Of a rank: for each file, the blocks that it wants, as intervals."""


@dataclass(frozen=True)
class BlockTask:
    """A block that a rank gets hold of."""

    item: Item
    number: int
    """The block's place among all blocks of the checkpoint."""
    slot: int | None
    """How many blocks its window had before; None where no other rank of the node wants it."""
    source: int | None = None
    """The rank that sends it; None: it is read from storage."""
    to: tuple[int, ...] = ()
    """The ranks that it is sent to, one of each other node that wants it."""

    @property
    def passes(self) -> bool:
        return self.source is not None or bool(self.to)


@dataclass(frozen=True)
class Deal:
    """What one rank does, and what it finds in the windows of its node."""

    tasks: list[BlockTask]
    """In their order."""
    stretches: list[list[Item]]
    """For each rank of the node, the blocks that pass through its window."""


@dataclass(frozen=True)
class _Node:
    """The blocks that a node wants."""

    numbers: NDArray[np.int64]
    """Ascending."""
    holder: NDArray[np.int64]
    """The rank that gets hold of each."""
    several: NDArray[np.bool_]
    """Whether more than one of its ranks wants it."""


def deal(
    wants: Sequence[Wants],
    nodes: Sequence[object],
    me: int,
    sizes: Mapping[str, int],
    holds: Sequence[Collection[str]] | None = None,
) -> Deal:
    """Who reads what, as the rank `me` does its part. `nodes`: where each rank is; `sizes`: of the files, in blocks.

    `holds`: the files that are where a rank is; None: all are everywhere. Raises UserError for a file that is nowhere.
    """
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    total = sum(sizes.values())
    places = {node: [i for i, at in enumerate(nodes) if at == node] for node in dict.fromkeys(nodes)}
    here = places[nodes[me]]
    held = {node: _readable(sizes, None if holds is None else holds[at[0]]) for node, at in places.items()}
    if holds is not None:
        wants = _with_carriers(wants, places, held, starts, total)
    mine = _node([wants[i] for i in here], here, starts, total)
    names, firsts = list(starts), np.array(list(starts.values()))

    def item(number: int) -> Item:
        file = int(np.searchsorted(firsts, number, side="right")) - 1
        return names[file], number - int(firsts[file])

    there = np.zeros(total, np.bool_)
    there[mine.numbers] = True
    wanting = {
        node: mine if at is here else _node([wants[i] for i in at], at, starts, total) for node, at in places.items()
    }
    wanting = {node: some for node, some in wanting.items() if some is mine or there[some.numbers].any()}
    sources, targets = _between(mine, list(wanting.values()), np.array([held[n][mine.numbers] for n in wanting]))
    order = np.lexsort((mine.numbers, sources == -1))  # first what passes between nodes
    slots: dict[int, list[int]] = {rank: [] for rank in here}
    tasks: list[BlockTask] = []
    for i in order:
        rank, number = int(mine.holder[i]), int(mine.numbers[i])
        slot = len(slots[rank]) if mine.several[i] else None
        if slot is not None:
            slots[rank].append(number)
        if rank == me:
            source = int(sources[i]) if sources[i] not in (-1, me) else None
            to = targets[int(i)] if sources[i] == me else ()
            tasks.append(BlockTask(item(number), number, slot, source, to))
    tasks.sort(key=lambda task: 0 if task.passes else 1 if task.slot is not None else 2)  # of each kind as they are
    return Deal(tasks, [[item(number) for number in slots[rank]] for rank in here])


def _node(wants: Sequence[Wants], ranks: Sequence[int], starts: Mapping[str, int], total: int) -> _Node:
    times, last = np.zeros(total, np.int32), np.zeros(total, np.int64)
    for at, want in enumerate(wants):
        for file, some in want.items():
            for start, stop in some:
                times[starts[file] + start : starts[file] + stop] += 1
                last[starts[file] + start : starts[file] + stop] = at
    alone = np.bincount(last[times == 1], minlength=len(ranks))
    several = np.flatnonzero(times > 1)
    last[several] = np.repeat(np.arange(len(ranks)), level([int(n) for n in alone], len(several)))
    numbers = np.flatnonzero(times)
    return _Node(numbers, np.array(ranks)[last[numbers]], times[numbers] > 1)


def _readable(sizes: Mapping[str, int], files: Collection[str] | None) -> NDArray[np.bool_]:
    """Of all blocks those of these files; None: all."""
    if files is None:
        return np.ones(sum(sizes.values()), np.bool_)
    return np.repeat(np.array([file in files for file in sizes], np.bool_), np.array(list(sizes.values()), np.int64))


def _with_carriers(
    wants: Sequence[Wants],
    places: Mapping[object, Sequence[int]],
    held: Mapping[object, NDArray[np.bool_]],
    starts: Mapping[str, int],
    total: int,
) -> list[Wants]:
    """The wants, and with them the blocks that a rank reads for others: no node that wants them has their file."""
    lacking, served = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
    for node, at in places.items():
        wanted = np.zeros(total, np.bool_)
        wanted[_node([wants[i] for i in at], at, starts, total).numbers] = True
        lacking |= wanted & ~held[node]
        served |= wanted & held[node]
    names, firsts = list(starts), np.array(list(starts.values()))
    carried: dict[int, dict[str, list[Sequence[int]]]] = {}
    for number in np.flatnonzero(lacking & ~served).tolist():
        file = int(np.searchsorted(firsts, number, side="right")) - 1
        able = [node for node in places if held[node][number]]
        if not able:
            raise UserError(f'the file "{names[file]}" of the checkpoint is on none of the machines')
        ranks = places[able[number % len(able)]]
        some = carried.setdefault(ranks[number % len(ranks)], {}).setdefault(names[file], [])
        some.append((number - int(firsts[file]), number - int(firsts[file]) + 1))
    return [
        {file: [*own.get(file, ()), *more.get(file, ())] for file in own.keys() | more.keys()}
        for own, more in ((own, carried.get(rank, {})) for rank, own in enumerate(wants))
    ]


def level(has: Sequence[int], more: int) -> list[int]:
    """How many of `more` each gets, so that all have as much the same as can be."""
    shares = [0] * len(has)
    order = sorted(range(len(has)), key=lambda rank: (has[rank], rank))
    for count in range(len(order), 0, -1):  # the ones with least, filled to one level
        some = order[:count]
        total = sum(has[rank] for rank in some) + more
        if total >= count * has[some[-1]]:
            for i, rank in enumerate(some):
                shares[rank] = total // count + (i < total % count) - has[rank]
            break
    return shares


def _between(
    mine: _Node, wanting: Sequence[_Node], held: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], list[tuple[int, ...]]]:
    """For each block of `mine`, the rank that reads it for several nodes (-1: no other node wants it) and for whom.

    `wanting`: the nodes that want something of the same, `mine` among them, in the order that all agree on. `held`: for
    each of them, which blocks of `mine` it could read.
    """
    count = len(mine.numbers)
    holders = np.full((len(wanting), count), -1, np.int64)
    for row, node in zip(holders, wanting, strict=True):
        _, at, theirs = np.intersect1d(mine.numbers, node.numbers, assume_unique=True, return_indices=True)
        row[at] = node.holder[theirs]
    wants = holders >= 0
    sources, targets = np.full(count, -1, np.int64), [tuple[int, ...]()] * count
    # Only of nodes that want a block: another node may not see the rest, and has to come to the same turns.
    for some in _alike(np.concatenate([wants, wants & held])):
        rows = np.flatnonzero(wants[:, some[0]])
        if len(rows) < 2:
            continue
        found = holders[np.ix_(rows, some)]
        able = np.flatnonzero(held[rows, some[0]])
        turns = able[np.arange(len(some)) % len(able)]
        sources[some] = found[turns, np.arange(len(some))]
        for i, turn, ranks in zip(some, turns, found.T.tolist(), strict=True):
            targets[i] = tuple(ranks[:turn] + ranks[turn + 1 :])
    return sources, targets


def _alike(wants: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """The blocks that the same nodes want, and could read, group by group, each ascending."""
    if not wants.size:
        return
    _, group = np.unique(np.packbits(wants, axis=0), axis=1, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
