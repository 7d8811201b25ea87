"""Where a parameter's elements lie in the flat partitions of ZeRO: arithmetic, with no files.

    stages 1 and 2    of each group the parameters, one behind the other, padded: | rank 0 | rank 1 | rank 2 |
    stage 3           of each parameter the share of a rank, padded to the same size for all; a rank has its shares one
                      behind the other, over all its partitions

Either way a parameter is a few stretches of elements that lie together both in it and in a partition, and what holds
for a partition of the parameters holds for those of their states.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tangram.checkpoint.formats.archives.archive import TensorPlace
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

Key = tuple[int, int]
"""A partition: its rank, and its number there."""
Shape = dict[str, tuple[int, ...]]
ALIGNED = 2
"""Elements times ranks that the partitions of a group are a multiple of, where they are padded."""


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop` of a parameter, which lie from the element `at` of a partition on."""

    part: Key
    at: int
    start: int
    stop: int


def in_rows(
    shapes: Sequence[Shape], paddings: Sequence[Sequence[int]], lengths: Mapping[Key, int], ranks: int
) -> dict[str, list[Stretch]]:
    """Stages 1 and 2. Raises UserError where the partitions are not those of the parameters.

    `paddings`: elements behind each parameter.
    """
    groups = sum(rank == 0 for rank, _ in lengths)
    if groups != len(shapes):
        raise UserError(f"there are {groups} partitions a rank, but {len(shapes)} groups of parameters")
    found: dict[str, list[Stretch]] = {}
    for group, (some, gaps) in enumerate(zip(shapes, paddings, strict=True)):
        keys = [(rank, group) for rank in range(ranks)]
        sizes = [lengths[key] for key in keys]
        end = sum(map(math.prod, some.values())) + sum(gaps)
        full, unit = sizes[0], ALIGNED * ranks
        equal = all(n in (full, min(full, max(0, end - rank * full))) for rank, n in enumerate(sizes))
        if not equal or sum(sizes) < end or -(-end // unit) != -(-sum(sizes) // unit):
            raise UserError(f"the partitions of group {group} have {sizes} elements, its parameters {end:,}")
        first = 0
        for (name, shape), gap in zip(some.items(), gaps, strict=True):
            if name in found:
                raise UserError(f"{name} is in two groups of parameters")
            found[name] = list(_run(keys, sizes, first, 0, math.prod(shape)))
            first += math.prod(shape) + gap
    return found


def share_of(shape: tuple[int, ...], ranks: int) -> tuple[int, list[Stretch]]:
    """Stage 3: the size of a rank's share of a parameter, and which of its elements these are."""
    n = math.prod(shape)
    part = -(-n // ranks)
    return part, [Stretch((r, 0), 0, r * part, min(n, (r + 1) * part)) for r in range(ranks) if r * part < n]


def in_shares(shapes: Sequence[Shape], lengths: Mapping[Key, int], ranks: int) -> dict[str, list[Stretch]]:
    """Stage 3. Raises UserError where the partitions are not those of the parameters."""
    parts = sum(rank == 0 for rank, _ in lengths)
    keys = [[(rank, part) for part in range(parts)] for rank in range(ranks)]
    sizes = [[lengths[key] for key in some] for some in keys]
    end = sum(share_of(shape, ranks)[0] for some in shapes for shape in some.values())
    for rank, some in enumerate(sizes):
        if sum(some) != end:
            raise UserError(f"the partitions of rank {rank} have {sum(some):,} elements, its parameters {end:,}")
    found: dict[str, list[Stretch]] = {}
    first = 0
    for some in shapes:
        for name, shape in some.items():
            if name in found:
                raise UserError(f"{name} is in two groups of parameters")
            part, shares = share_of(shape, ranks)
            runs = ((one.part[0], one) for one in shares)
            found[name] = [s for r, one in runs for s in _run(keys[r], sizes[r], first, one.start, one.stop)]
            first += part
    return found


def _run(keys: Sequence[Key], sizes: Sequence[int], first: int, start: int, stop: int) -> Iterator[Stretch]:
    """Elements of a parameter that lie from a place on in partitions one behind the other, which have that many."""
    ends = list(accumulate(sizes))
    at = bisect_right(ends, first)
    while start < stop:
        n = min(stop - start, ends[at] - first)
        if n:
            yield Stretch(keys[at], first - ends[at] + sizes[at], start, start + n)
        first, start, at = first + n, start + n, at + 1


def pieces_of(
    name: str, shape: tuple[int, ...], stretches: Sequence[Stretch], places: Mapping[Key, TensorPlace]
) -> tuple[TensorSpec, list[Piece]]:
    """A tensor of a parameter's shape as pieces of partitions."""
    found: list[Piece] = []
    dtypes = {places[one.part].dtype for one in stretches} or {place.dtype for place in places.values()}
    if len(dtypes) != 1:
        raise UserError(f"{name} has parts of several types: {', '.join(sorted(dtypes))}")
    for one in stretches:
        flat, region = places[one.part], Region.flat(shape, one.start, one.stop)
        local = region.local_shape if region.local_shape is not None else (region.size,)
        strides = tuple(math.prod(local[dim + 1 :]) for dim in range(len(local)))
        offset = flat.offset + one.at * DTYPES[flat.dtype]
        found.append(Piece(TensorPlace(flat.file, offset, flat.dtype, local, strides), name, region))
    return TensorSpec(shape, dtypes.pop()), found
