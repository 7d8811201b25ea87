"""A digest of a tensor that does not know how the tensor was cut: every piece adds its share, in any order.

    lane      4 bytes of a row of the last dim, little endian, the last one filled up with zeros: an unsigned number
    key       of a lane, for each of two sums: the product over the dims of a random odd number by dim and index
    sum       of lane x key over all lanes, modulo 2**64
    digest    the two sums, each plus a number that stands for dtype and shape, as 32 hexadecimal digits

So the digest is a function of the stored dtype, the shape, and the bits of each element at its index, and of nothing
else: a resharded copy has the same one. A sum modulo 2**64 of 32-bit lanes under random keys misses a difference with a
chance of about 2**-32 in the worst place (sign bits), so there are two. It finds
faults, not forgeries: the keys are public.

The sums are linear on purpose: only that lets a column cut in the middle of a lane add its half. It is arithmetic of
numpy on 64-bit integers; per core it passes several GB/s where the processor multiplies those in vectors.
"""

# ruff: noqa: N803, N806  an array carries its dims in its name

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tangram.layout import intervals
from tangram.layout.region import Box, stretch

LANES = 4096  # of a row under one table of keys: the last dim counts as two, the block of lanes and the lane in it
NARROW = 64  # lanes of a row below which columns go first
KEPT = 1 << 16  # keys of a dim that are kept
GROUP = 1 << 15  # lanes at once: with their 64-bit copies they stay in the cache
MODULUS = 1 << 64

Words = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Lanes = np.ndarray[Any, np.dtype[np.uint32]]
Sums = tuple[int, int]
NOTHING: Sums = (0, 0)


def add(*sums: Sums) -> Sums:
    """The sums of pieces that have no element in common, together."""
    return sum(one for one, _ in sums) % MODULUS, sum(other for _, other in sums) % MODULUS


def digest(dtype: str, shape: Sequence[int], sums: Sums) -> str:
    """The digest of a tensor, from the sums of all its elements: 32 hexadecimal digits. `dtype` is torch's name."""
    stands = hashlib.sha256(f"{dtype} {list(shape)}".encode()).digest()
    seeds = (int.from_bytes(stands[8 * i : 8 * i + 8], "little") for i in (0, 1))
    return "".join(f"{(seed + one) % MODULUS:016x}" for seed, one in zip(seeds, sums, strict=True))


def sums(box: Box, itemsize: int, start: int, stop: int, data: Bytes) -> Sums:
    """The sums of elements `start <= i < stop` of a box, counted in its own row-major order.

    `data`: their bytes, one behind the other, (stop - start) * itemsize of them.
    """
    total, at = NOTHING, 0
    for part in stretch(box, start, stop):
        size = math.prod(intervals.size(s) for s in part) * itemsize
        total = add(total, _of_box(part, itemsize, data[at : at + size]))
        at += size
    return total


def _of_box(box: Box, itemsize: int, data: Bytes) -> Sums:
    """Of all elements of a box."""
    *leading, last = box or (intervals.span(0, 1),)
    rows_RB = data.reshape(-1, intervals.size(last) * itemsize)
    weights = _row_keys(leading)
    total, at = np.zeros(2, np.uint64), 0
    for begin, end in last:
        width = (end - begin) * itemsize
        lanes_RL = _lanes(rows_RB[:, at : at + width], begin * itemsize)
        total += (_of_narrow if lanes_RL.shape[1] < NARROW else _of_wide)(lanes_RL, begin * itemsize // 4, weights)
        at += width
    one, other = total
    return int(one), int(other)


def _lanes(rows_RB: Bytes, offset: int) -> Lanes:
    """The lanes of rows that begin `offset` bytes into the whole tensor's rows; lanes that are cut get zeros."""
    lead, tail = offset % 4, -(offset + rows_RB.shape[1]) % 4
    if lead or tail or not rows_RB.flags.c_contiguous:
        padded_RB = np.zeros((rows_RB.shape[0], lead + rows_RB.shape[1] + tail), np.uint8)
        padded_RB[:, lead : lead + rows_RB.shape[1]] = rows_RB
        rows_RB = padded_RB
    return rows_RB.view("<u4")


def _row_keys(leading: Sequence[intervals.IntSet]) -> list[Words]:
    """The key of each row: the product over the leading dims, which are numbered from the last one, from 2 on."""
    keys: list[Words] = []
    for which in (0, 1):
        product = np.ones(1, np.uint64)
        for number, indices in enumerate(reversed(leading), start=2):
            own = np.concatenate([_keys(which, number, a, b) for a, b in indices])
            product = np.multiply.outer(own, product).ravel()
        keys.append(product)
    return keys


def _of_wide(lanes_RL: Lanes, first: int, weights: Sequence[Words]) -> Words:
    """Both sums of rows from lane `first` on: first along each row, block by block, then over the rows."""
    out = np.zeros((2, lanes_RL.shape[0]), np.uint64)
    at = 0
    while at < lanes_RL.shape[1]:
        block, inside = divmod(first + at, LANES)
        if inside or lanes_RL.shape[1] - at < LANES:
            blocks, stop = 1, min(at + LANES - inside, lanes_RL.shape[1])
        else:
            blocks = (lanes_RL.shape[1] - at) // LANES
            stop = at + blocks * LANES
        by_block = _times_table(lanes_RL[:, at:stop].reshape(-1, (stop - at) // blocks), inside).reshape(2, -1, blocks)
        by_block *= np.stack([_keys(which, 1, block, block + blocks) for which in (0, 1)])[:, None]
        out += by_block.sum(2, dtype=np.uint64)
        at = stop
    return (out * np.stack(weights)).sum(1, dtype=np.uint64)


def _times_table(lanes_RL: Lanes, inside: int) -> Words:
    """Each row of lanes times the keys of its place in a block, [2, rows]."""
    rows, lanes = lanes_RL.shape
    keys = [_table(which)[inside : inside + lanes] for which in (0, 1)]
    out = np.empty((2, rows), np.uint64)
    step = max(1, GROUP // lanes)
    wide_RL = np.empty((min(step, rows), lanes), np.uint64)
    for row in range(0, rows, step):
        n = min(step, rows - row)
        np.copyto(wide_RL[:n], lanes_RL[row : row + n])
        for which in (0, 1):
            np.einsum("rl,l->r", wide_RL[:n], keys[which], out=out[which, row : row + n])
    return out


def _of_narrow(lanes_RL: Lanes, first: int, weights: Sequence[Words]) -> Words:
    """The same for short rows: first down each column of lanes, then along the row."""
    rows, lanes = lanes_RL.shape
    block, inside = divmod(first, LANES)  # short rows lie in one block, or across one border
    own = [
        np.concatenate(
            [_table(which)[inside : inside + lanes] * _keys(which, 1, block, block + 1)]
            + (
                [_table(which)[: inside + lanes - LANES] * _keys(which, 1, block + 1, block + 2)]
                * (inside + lanes > LANES)
            )
        )
        for which in (0, 1)
    ]
    total = np.zeros(2, np.uint64)
    for row in range(0, rows, GROUP):
        columns_LR = lanes_RL[row : row + GROUP].T
        for lane in range(lanes):
            wide_R = columns_LR[lane].astype(np.uint64)
            for which in (0, 1):
                found = np.einsum("r,r->", wide_R, weights[which][row : row + GROUP])
                total[which : which + 1] += found * own[which][lane : lane + 1]
    return total


def _table(which: int) -> Words:
    return _first_keys(which, 0)


def _keys(which: int, dim: int, start: int, stop: int) -> Words:
    """The keys of the indices `start <= i < stop` of a dim. The first ones are kept: blocks ask for them again."""
    return _first_keys(which, dim)[start:stop] if stop <= KEPT else _new_keys(which, dim, start, stop)


@lru_cache(16)
def _first_keys(which: int, dim: int) -> Words:
    kept = _new_keys(which, dim, 0, KEPT if dim else LANES)
    kept.flags.writeable = False
    return kept


def _new_keys(which: int, dim: int, start: int, stop: int) -> Words:
    """Outputs of splitmix64, made odd."""
    seed = _splitmix(np.array([256 * which + dim], np.uint64))
    with np.errstate(over="ignore"):
        steps = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return _splitmix(seed + steps) | np.uint64(1)


def _splitmix(z: Words) -> Words:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
