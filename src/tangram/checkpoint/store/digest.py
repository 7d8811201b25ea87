"""A digest of a tensor that does not know how the tensor was cut: every piece adds its share, in any order.

    row       the bytes of the fewest trailing dims that have 256 together, or of all dims
    block     4096 bytes of a row, each a signed number, times a table of 16 columns of odd numbers from -63 to 63
    key       of a block: the product of random odd numbers for its place in the row and the row's index by each dim
    sum       of product x key over all blocks, modulo 2**64, for each column; eight have other keys than the rest
    digest    the first 128 bits of the sha256 of dtype, shape and the sixteen sums

So the digest is a function of the stored dtype, the shape, and the bits of each element at its index, and of nothing
else: a resharded copy has the same one. A byte that differs changes every sum for certain. Of any other fault a column
sees nothing with a chance of 2**-6, over random tables, or where the keys of several blocks cancel out; so all miss it
with about 2**-96, and with 2**-75 in the worst place that we know (sign bits at the eight corners of a box, whose keys
are products). It finds faults, not forgeries: the table and the keys are public.

The sums are linear on purpose: only that lets each piece add its own. Nearly all the work is a product of 8-bit
matrices, for which torch has the processor's own instructions, though under a private name: it is tried out first, and
without it the same numbers come from 32-bit floats, at a fifth of the speed.

It all runs on one thread, whatever torch is told to use (`one_thread`): torch hands a large copy or product to helper
threads and waits for all of them, spinning, and beside other ranks and threads one of them is often not running.
"""

# ruff: noqa: N803, N806  an array carries its dims in its name

import contextlib
import ctypes
import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.layout import intervals
from tangram.layout.region import Box, stretch

COLUMNS = 16  # of the table: as many as a vector of the processor has sums of 32 bits, fewer would cost the same
PLACES = 4096  # bytes of a row under one key: the table of 64 KB stays in the cache
WIDE = 256  # bytes of a row, where the tensor has them
ROWS = 4096  # that are multiplied at once: their sums stay in the cache
LAID = 1 << 20  # bytes of zeros that single elements are laid into at once
SMALL = 1 << 16  # bytes that are rather copied than multiplied in several steps
FEW = 16  # runs of a row that are multiplied one by one
EXACT = 1024  # bytes whose products, at most 128 * 63 each, add up to less than 2**24: exact in 32-bit floats
KEPT = 1 << 16  # keys of a dim that are kept

Words = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Signed = np.ndarray[Any, np.dtype[np.int8]]
Ints = np.ndarray[Any, np.dtype[np.signedinteger]]
Sums = tuple[int, ...]
"""One for each column."""
NOTHING: Sums = (0,) * COLUMNS


def add(*sums: Sums) -> Sums:
    """The sums of pieces that have no element in common, together."""
    return tuple([sum(column) % (1 << 64) for column in zip(*sums, strict=True)])


def digest(dtype: str, shape: Sequence[int], sums: Sums) -> str:
    """The digest of a tensor, from the sums of all its elements: 32 hexadecimal digits. `dtype` is torch's name."""
    words = b"".join(one.to_bytes(8, "little") for one in sums)
    return hashlib.sha256(f"{dtype} {list(shape)}".encode() + words).hexdigest()[:32]


def digest_of(tensor: Tensor) -> str:
    """The digest of a tensor in memory: that of the same values in any checkpoint, whatever its layout there."""
    shape = tuple(tensor.shape)
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    box = tuple(intervals.span(0, n) for n in shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return digest(dtype, shape, sums(shape, tensor.element_size(), box, 0, tensor.numel(), data))


def sums(shape: Sequence[int], itemsize: int, box: Box, start: int, stop: int, data: Bytes) -> Sums:
    """The sums of elements `start <= i < stop` of a box of a tensor, counted in the box's own row-major order.

    `data`: their bytes, one behind the other, (stop - start) * itemsize of them.
    """
    data = data if data.flags.writeable else data.copy()  # torch takes no other
    total, at = np.zeros(COLUMNS, np.uint64), 0
    with one_thread():
        for part in stretch(box, start, stop):
            size = math.prod([intervals.size(s) for s in part]) * itemsize
            total += _of_box(shape, itemsize, part, data[at : at + size].view(np.int8))
            at += size
    return tuple(total.tolist())


def sums_of_each(data_TB: Bytes) -> list[Sums]:
    """The sums of many tensors of one shape that `is_one_block` is true of, a row of bytes each."""
    rows_TB = data_TB if data_TB.flags.writeable else data_TB.copy()
    key_2 = _keys(1, 0, 1)[:, 0]
    found: list[Sums] = []
    with one_thread():
        for row in range(0, len(rows_TB), ROWS):
            some_TC = _products(rows_TB[row : row + ROWS].view(np.int8), _table()[: rows_TB.shape[1]])
            wide_T2C = some_TC.astype(np.uint64).reshape(-1, 2, COLUMNS // 2) * key_2[:, None]
            found += map(tuple, wide_T2C.reshape(-1, COLUMNS).tolist())
    return found


@lru_cache(1 << 10)
def is_one_block(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether all of a tensor is one row under one key, as what a mixture has many of: norms, biases, scales."""
    return 0 < itemsize * math.prod(shape) <= PLACES and _leading(shape, itemsize) == 0


def _leading(shape: Sequence[int], itemsize: int) -> int:
    """How many dims count the rows; the others make a row."""
    return max((i for i in range(len(shape)) if itemsize * math.prod(shape[i:]) >= WIDE), default=0)


def _of_box(shape: Sequence[int], itemsize: int, box: Box, data: Signed) -> Words:
    """Of all elements of a box."""
    dims = _leading(shape, itemsize)
    first, *inner = box[dims:] or (intervals.span(0, 1),)
    keys_2R = _row_keys(box[:dims])
    rows_RB = data.reshape(keys_2R.shape[1], -1)
    below = shape[dims + 1 :]  # less than WIDE bytes
    if len(first) > FEW or any(s != intervals.span(0, n) for s, n in zip(inner, below, strict=True)):
        return _of_elements(rows_RB, itemsize, _flat(box[dims:], (0, *below)), keys_2R)
    unit, at = itemsize * math.prod(below), 0
    total = np.zeros(COLUMNS, np.uint64)
    for begin, end in first:
        total += _of_run(rows_RB[:, at : at + (end - begin) * unit], begin * unit, keys_2R)
        at += (end - begin) * unit
    return total


def _of_run(rows_RB: Signed, begin: int, keys_2R: Words) -> Words:
    """Of rows from their byte `begin` on: the cut block at one end, whole blocks, the cut one at the other."""
    rows, width = rows_RB.shape
    block, inside = divmod(begin, PLACES)
    if inside + width <= PLACES:
        return _weighed(rows_RB, inside, keys_2R, block, 1)
    if rows * width <= SMALL:
        blocks = -(-(inside + width) // PLACES)
        whole_RB = np.zeros((rows, blocks * PLACES), np.int8)
        whole_RB[:, inside : inside + width] = rows_RB
        return _weighed(whole_RB, 0, keys_2R, block, blocks)
    at = -inside % PLACES
    block, blocks = block + (inside > 0), (width - at) // PLACES
    end = at + blocks * PLACES
    total = np.zeros(COLUMNS, np.uint64)
    if at:
        total += _weighed(rows_RB[:, :at], inside, keys_2R, block - 1, 1)
    if blocks:
        total += _weighed(rows_RB[:, at:end], 0, keys_2R, block, blocks)
    if end < width:
        total += _weighed(rows_RB[:, end:], 0, keys_2R, block + blocks, 1)
    return total


def _of_elements(rows_RB: Signed, itemsize: int, places_P: Ints, keys_2R: Words) -> Words:
    """Of elements at these places of rows, laid into zeros: for cuts that leave less than WIDE bytes together."""
    per, rows = PLACES // itemsize, min(len(rows_RB), LAID // PLACES)
    elements_RPI = rows_RB.reshape(len(rows_RB), -1, itemsize)
    total, at = np.zeros(COLUMNS, np.uint64), 0
    while at < len(places_P):
        block = int(places_P[at]) // per
        end = int(np.searchsorted(places_P, (block + LAID // PLACES // rows) * per))
        inside_P = places_P[at:end] - block * per
        blocks = int(inside_P[-1]) // per + 1
        laid_RPI = np.zeros((rows, blocks * per if blocks > 1 else int(inside_P[-1]) + 1, itemsize), np.int8)
        for row in range(0, len(rows_RB), rows):
            some_RPI = elements_RPI[row : row + rows, at:end]
            laid_RPI[: len(some_RPI), inside_P] = some_RPI
            laid_RB = laid_RPI.reshape(rows, -1)[: len(some_RPI)]
            total += _weighed(laid_RB, 0, keys_2R[:, row : row + rows], block, blocks)
        at = end
    return total


def _flat(sets: Sequence[intervals.IntSet], shape: Sequence[int]) -> Ints:
    """The places of a product of sets in a row."""
    places = np.zeros(1, np.int64)
    for indices, n in zip(sets, shape, strict=True):
        places = np.add.outer(places * n, np.concatenate([np.arange(a, b) for a, b in indices])).ravel()
    return places


def _weighed(rows_RB: Signed, inside: int, keys_2R: Words, block: int, blocks: int) -> Words:
    """Of rows that are `blocks` whole blocks each, or a part of one, from its place `inside` on."""
    rows_RB = rows_RB.reshape(len(rows_RB) * blocks, -1)
    keys_2R = (keys_2R[:, :, None] * _keys(1, block, block + blocks)[:, None]).reshape(2, -1)
    table_BC = _table()[inside : inside + rows_RB.shape[1]]
    total = np.zeros((2, COLUMNS // 2), np.uint64)
    for row in range(0, len(rows_RB), ROWS):
        found_RC = _products(rows_RB[row : row + ROWS], table_BC)
        wide_2CR = found_RC.T.astype(np.uint64, order="C").reshape(2, COLUMNS // 2, -1)
        total += np.einsum("fcr,fr->fc", wide_2CR, keys_2R[:, row : row + ROWS])
    return total.ravel()


# ---------------------------------------------------------------- products of 8-bit matrices


def _products(rows_RB: Signed, table_BC: Signed) -> Ints:
    return (fast() or by_floats)(rows_RB, table_BC)


def by_floats(rows_RB: Signed, table_BC: Signed) -> Ints:
    """Rows times columns, exactly, with public names alone."""
    rows, table = _tensors(rows_RB, table_BC)
    total = np.zeros((len(rows), table.shape[1]), np.int32)
    with torch.autocast("cpu", enabled=False):
        for row, at in itertools.product(range(0, len(rows), EXACT // 4), range(0, len(table), EXACT)):
            part = rows[row : row + EXACT // 4, at : at + EXACT].float()  # a megabyte
            total[row : row + EXACT // 4] += (part @ table[at : at + EXACT].float()).int().numpy()
    return total


def by_torch(rows_RB: Signed, table_BC: Signed) -> Ints:
    """The same by torch's own kernel for 8-bit integers."""
    product: Any = getattr(torch, "_int_mm")  # noqa: B009  a private name
    return product(*_tensors(rows_RB, table_BC)).numpy()


def _tensors(*arrays: Signed) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@lru_cache(1)
def fast() -> Callable[[Signed, Signed], Ints] | None:
    """`by_torch`, where there is such a kernel and it finds the right numbers; tried once."""
    try:
        return by_torch if all(np.array_equal(by_torch(a, b), by_floats(a, b)) for a, b in _trials()) else None
    except (AttributeError, RuntimeError, TypeError):
        return None


def _trials() -> Sequence[tuple[Signed, Signed]]:
    """Matrices that wrong kernels stumble over: the largest numbers, odd sizes, rows in strides."""
    rows = [np.full((67, PLACES), number, np.int8) for number in (-128, 127)]
    rows.append(np.resize(_table().ravel()[3:] * np.int8(2), (PLACES // 4, PLACES)))
    tables = [_table(), *(np.full((PLACES, COLUMNS), number, np.int8) for number in (63, -63))]
    cuts = [(PLACES, 0, PLACES), (67, 3, 1026), (1, 0, 5), (5, 1, 2)]
    return [(some[:n, a:b], table[a:b]) for some in rows for table in tables for n, a, b in cuts]


# ---------------------------------------------------------------- keys


def _row_keys(sets: Sequence[intervals.IntSet]) -> Words:
    """Both keys of each row: products over the leading dims, which are numbered from the last one, from 2 on."""
    product = np.ones((2, 1), np.uint64)
    for number, indices in enumerate(reversed(sets), start=2):
        own = np.concatenate([_keys(number, a, b) for a, b in indices], 1)
        product = (own[:, :, None] * product[:, None]).reshape(2, -1)
    return product


def _keys(dim: int, start: int, stop: int) -> Words:
    """Both keys of the indices `start <= i < stop` of a dim. The first ones are kept: blocks ask for them again."""
    return _first_keys(dim)[:, start:stop] if stop <= KEPT else _random(dim, start, stop) | np.uint64(1)


@lru_cache(8)
def _first_keys(dim: int) -> Words:
    return _random(dim, 0, KEPT) | np.uint64(1)


@lru_cache(1)
def _table() -> Signed:
    drawn = _random(0, 0, PLACES * COLUMNS)[0] >> np.uint64(58)
    return (2 * drawn.astype(np.int8) - 63).reshape(PLACES, COLUMNS)


def _random(dim: int, start: int, stop: int) -> Words:
    """Two rows of outputs of splitmix64."""
    seeds = _splitmix(np.array([[dim], [256 + dim]], np.uint64))
    return _splitmix(seeds + np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _splitmix(z: Words) -> Words:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@contextlib.contextmanager
def one_thread() -> Generator[None]:
    """Torch uses no helpers in this thread meanwhile; other threads are left as they are.

    `torch.set_num_threads` would be for all threads that begin afterwards. Without OpenMP nothing changes.
    """
    before = torch.get_num_threads()  # makes a new thread take what torch was told
    choose = _setter()
    choose(1)
    try:
        yield
    finally:
        choose(before)


@lru_cache(1)
def _setter() -> Any:
    """OpenMP's own setting, which is of the calling thread; torch has loaded it."""
    try:
        return ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return lambda count: None  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
