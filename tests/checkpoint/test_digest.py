"""The digest: against the definition spelled out byte by byte, over any cut, and against planted faults."""

import hashlib
import itertools
import math
import threading
from collections.abc import Sequence
from operator import mul
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tangram.checkpoint.saving.file_layout import Outgoing, add_piece, add_sums, images
from tangram.checkpoint.store import digest
from tangram.checkpoint.store.digest import NOTHING, Sums
from tangram.layout import Region, intervals
from tangram.relayout import TensorSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ONES = "032c831a9719d2e2c0fd483b9bdc27ef"
COUNTING = "63909a03832579c05caf3adcc553f79e"
ROWS = "a96a7ea67ab591948a6128beeb6081cf"
EMPTY = "cd8d4eaacaca0aa08bc9d6f353bdc5b2"
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}
KERNEL = digest.fast()


def splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def drawn(which: int, dim: int, index: int) -> int:
    return splitmix((splitmix(256 * which + dim) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)


TABLE = [[2 * (drawn(0, 0, 16 * place + column) >> 58) - 63 for place in range(4096)] for column in range(16)]


def spelled_out(dtype: str, shape: Sequence[int], data: bytes) -> str:
    """The definition in docs/checkpoint-format.md, in numbers of any size and without a thought for speed."""
    dims = len(shape)  # that number the rows
    width = len(data) // math.prod(shape) if math.prod(shape) else 1
    while dims and width < 256:
        dims -= 1
        width *= shape[dims]
    sums = [0] * 16
    for row, index in enumerate(itertools.product(*map(range, shape[:dims])) if data else ()):
        line = [byte - 256 if byte > 127 else byte for byte in data[row * width : (row + 1) * width]]
        for block, at in enumerate(range(0, width, 4096)):
            for column in range(16):
                which = column // 8
                product = drawn(which, 1, block) | 1
                for number, i in enumerate(reversed(index), start=2):
                    product *= drawn(which, number, i) | 1
                sums[column] += sum(map(mul, line[at : at + 4096], TABLE[column])) * product
    words = b"".join((one % 2**64).to_bytes(8, "little") for one in sums)
    return hashlib.sha256(f"{dtype} {list(shape)}".encode() + words).hexdigest()[:32]


def of_pieces(shape: Sequence[int], itemsize: int, data: Bytes, regions: Sequence[Region], step: int = 1 << 20) -> str:
    """What the engine finds over pieces, each passed in stretches of `step` elements."""
    dtype = DTYPES[itemsize]
    elements = data.reshape(-1, itemsize)
    found: dict[str, Sums] = {"x": NOTHING}
    for region in regions:
        flat = np.concatenate([np.arange(a, b) for a, b in region.runs(shape)] or [np.arange(0)])
        own = elements[flat]
        piece = Outgoing("x", TensorSpec(tuple(shape), dtype), region)
        for start in range(0, len(own), step):
            part = np.ascontiguousarray(own[start : start + step]).reshape(-1)
            add_piece(piece, start * itemsize, part, found)
    return digest.digest(dtype, shape, found["x"])


def of_whole(shape: Sequence[int], itemsize: int, data: Bytes) -> str:
    return of_pieces(shape, itemsize, data, [Region.full(tuple(shape))] if math.prod(shape) else [])


def made(shape: Sequence[int], itemsize: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, math.prod(shape) * itemsize, dtype=np.uint8)


# ---------------------------------------------------------------- the definition


@pytest.mark.parametrize(
    "shape",
    [
        *[(), (1,), (5,), (3, 7), (2, 3, 5), (4, 1, 2, 3), (0, 3), (3, 0), (2, 0, 300), (9000,), (1000, 3), (700, 1)],
        *[(3, 256), (2, 3, 255), (2, 2, 257), (2, 8195), (3, 2, 300), (20, 4, 3, 3), (70, 1, 130)],
    ],
)
@pytest.mark.parametrize("itemsize", list(DTYPES))
def test_it_is_what_its_definition_says(shape: tuple[int, ...], itemsize: int) -> None:
    data = made(shape, itemsize)
    assert of_whole(shape, itemsize, data) == spelled_out(DTYPES[itemsize], shape, data.tobytes())


@pytest.mark.parametrize(("filled", "shape"), [(128, (2, 70_000)), (127, (140_000,)), (128, (300, 300))])
def test_the_largest_numbers_overflow_nowhere(filled: int, shape: tuple[int, ...]) -> None:
    data = np.full(math.prod(shape), filled, np.uint8)
    assert of_whole(shape, 1, data) == spelled_out("uint8", shape, data.tobytes())


def test_indices_beyond_the_keys_that_are_kept() -> None:
    shape, row = (1 << 17, 256), 70_000
    data = made((3, 256), 1)
    region = Region.box((row, 0), (3, 256))
    one, other = of_pieces(shape, 1, np.zeros(0, np.uint8), []), NOTHING
    total = [0] * 16
    for i, column in itertools.product(range(3), range(16)):
        line = data.view(np.int8)[256 * i : 256 * (i + 1)].tolist()
        key = (drawn(column // 8, 1, 0) | 1) * (drawn(column // 8, 2, row + i) | 1)
        total[column] += sum(map(mul, line, TABLE[column])) * key
    found: dict[str, Sums] = {}
    add_piece(Outgoing("x", TensorSpec(shape, "uint8"), region), 0, data, found)
    assert found["x"] == tuple(one % 2**64 for one in total)
    assert digest.digest("uint8", shape, other) == one != digest.digest("uint8", shape, found["x"])


@pytest.mark.parametrize("cut", [0, 1, 37, 64])
def test_tensors_of_one_kind_side_by_side_each_have_their_own(cut: int) -> None:
    """Whole small tensors of a file are summed together; those that a border of two reads cuts are not."""
    shapes = [(1,)] * 5 + [()] * 3 + [(5,)] * 2 + [(2, 3, 5)] * 2 + [(3, 257)] * 2 + [(1,)]
    pieces = [Outgoing(f"m.{i}", TensorSpec(shape, "float32"), Region.full(shape)) for i, shape in enumerate(shapes)]
    (image,) = images(pieces, 0, 1, "0" * 32)
    data = made((image.size,), 1)
    found: dict[str, Sums] = {}
    border = len(image.head) + 4 * cut
    add_sums(image, 0, data[:border], found)
    add_sums(image, border, data[border:], found)
    for placed in image.placed:
        shape, own = placed.piece.spec.shape, data[placed.offset : placed.stop].tobytes()
        assert digest.digest("float32", shape, found[placed.piece.name]) == spelled_out("float32", shape, own)


def test_vectors() -> None:
    """Those of docs/checkpoint-format.md: other implementations can try theirs."""
    ones = np.ones(3, np.float32).view(np.uint8)
    counting = np.arange(6, dtype=np.int16).view(np.uint8)
    rows = np.arange(2048, dtype=np.int64).view(np.uint8)
    assert of_whole((3,), 4, ones) == spelled_out("float32", (3,), ones.tobytes()) == ONES
    assert spelled_out("int16", (2, 3), counting.tobytes()) == COUNTING
    assert of_whole((2, 1024), 8, rows) == spelled_out("int64", (2, 1024), rows.tobytes()) == ROWS
    assert digest.digest("float32", (0,), NOTHING) == spelled_out("float32", (0,), b"") == EMPTY


def test_no_two_bytes_of_a_block_can_hide_each_other() -> None:
    """By a swap, or where one gains what the other loses: lines of the table are neither equal nor opposite."""
    lines = np.array(TABLE).T
    assert len(np.unique(np.concatenate([lines, -lines]), axis=0)) == 2 * 4096
    assert set(np.unique(lines).tolist()) == set(range(-63, 64, 2))


# ---------------------------------------------------------------- any cut


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape and a partition of it: cut again and again along some dim, or flat."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=0, max_size=3)))
    shape = (*shape, draw(st.integers(1, 12) | st.sampled_from([63, 130, 256, 300, 1100])))
    if draw(st.booleans()):
        size = math.prod(shape)
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
        return shape, [Region.flat(shape, a, b) for a, b in itertools.pairwise(edges)]
    regions = [Region.full(shape)]
    for _ in range(draw(st.integers(0, 4))):
        i = draw(st.integers(0, len(regions) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        if draw(st.booleans()):
            chosen = draw(st.sets(st.integers(0, shape[dim] - 1), min_size=1))
        else:  # many runs
            chosen = set(range(draw(st.integers(0, shape[dim] - 1)), shape[dim], draw(st.integers(1, 4))))
        box = [intervals.span(0, n) for n in shape]
        box[dim] = intervals.normal((k, k + 1) for k in sorted(chosen))
        inside = regions[i] & Region.of([tuple(box)])
        outside = regions[i] - inside
        regions[i : i + 1] = [r for r in (inside, outside) if r]
    return shape, regions


@given(cut(), st.sampled_from(sorted(DTYPES)), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_it_does_not_know_how_the_tensor_was_cut(
    shape_regions: tuple[tuple[int, ...], list[Region]], itemsize: int, step: int, random: Any
) -> None:
    shape, regions = shape_regions
    data = made(shape, itemsize)
    random.shuffle(regions)
    step = max(step, math.prod(shape) // 50)
    assert of_pieces(shape, itemsize, data, regions, step) == of_whole(shape, itemsize, data)


@pytest.mark.parametrize("itemsize", [1, 2, 8])
@pytest.mark.parametrize(
    "shape", [(600, 400), (40, 6000), (200_000,), (60_000, 3), (300, 20, 3, 3), (3, 70_001), (2, 3, 20_000)]
)
def test_larger_ones_cut_by_every_second_and_every_third(shape: tuple[int, ...], itemsize: int) -> None:
    """Large enough for all ways of multiplying: groups of rows, blocks that are cut, elements laid into zeros."""
    data = made(shape, itemsize)
    whole = of_whole(shape, itemsize, data)
    for dim, n in enumerate(shape):
        sets = [tuple((k, k + 1) for k in range(r, n, 3)) for r in range(3)] if n < 8000 else [((7, n // 2),)]
        boxes = [Region.of([tuple(s if d == dim else ((0, m),) for d, m in enumerate(shape))]) for s in sets if s]
        rest = Region.full(shape)
        for region in boxes:
            rest = rest - region
        assert of_pieces(shape, itemsize, data, [*boxes, *([rest] if rest else [])]) == whole


# ---------------------------------------------------------------- both ways to multiply


@pytest.mark.skipif(KERNEL is None, reason="this torch has no kernel for 8-bit integers that is right here")
@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([0, -128, 127]), st.integers(0, 9), st.data())
def test_both_ways_find_the_same(rows: int, width: int, filled: int, gap: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(rows * width)
    memory = np.full((rows, width + gap), filled, np.int8)
    if not filled:
        memory[:] = rng.integers(-128, 128, memory.shape)
    table = np.full((width, 16), data.draw(st.sampled_from([1, 63, -63])), np.int8)
    if data.draw(st.booleans()):
        table[:] = rng.integers(-63, 64, table.shape)
    assert KERNEL is not None
    ours = digest.by_floats(memory[:, gap:], table)
    assert np.array_equal(ours, memory[:, gap:].astype(np.int64) @ table.astype(np.int64))
    assert np.array_equal(KERNEL(memory[:, gap:], table), ours)


@pytest.fixture
def anew() -> Any:
    """The kernel is tried again, now and afterwards."""
    digest.fast.cache_clear()
    yield
    digest.fast.cache_clear()


@pytest.mark.parametrize("harm", ["missing", "saturates", "other arguments", "not for this processor"])
def test_without_a_kernel_that_is_right_the_digest_is_the_same(
    harm: str, anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (40, 6000)
    data = made(shape, 2)
    whole = of_whole(shape, 2, data)
    digest.fast.cache_clear()

    def wrong(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if harm == "not for this processor":
            raise RuntimeError(harm)
        return (rows.double() @ table.double()).clamp(-(1 << 15), (1 << 15) - 1).int()

    if harm == "missing":
        monkeypatch.delattr(torch, "_int_mm", raising=False)
    else:
        monkeypatch.setattr(torch, "_int_mm", torch.neg if harm == "other arguments" else wrong, raising=False)
    assert digest.fast() is None
    assert of_whole(shape, 2, data) == whole


def test_whatever_torch_is_set_to(anew: None) -> None:
    shape = (40, 6000)
    data = made(shape, 2)
    whole = of_whole(shape, 2, data)
    digest.fast.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.inference_mode():
        assert of_whole(shape, 2, data) == whole
        rows, table = data.view(np.int8).reshape(-1, 6000), np.full((6000, 16), 63, np.int8)
        assert np.array_equal(digest.by_floats(rows, table), rows.astype(np.int64) @ table.astype(np.int64))


def test_threads_at_once_and_memory_that_cannot_be_written() -> None:
    shape = (40, 6000)
    data = made(shape, 2)
    whole = of_whole(shape, 2, data)
    data.flags.writeable = False
    found: list[Sums] = []
    box = Region.full(shape).boxes[0]

    def run() -> None:
        found.extend(digest.sums(shape, 2, box, 0, math.prod(shape), data) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [digest.digest("bfloat16", shape, one) for one in found] == [whole] * 20


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("shape", [(3, 5), (3, 70)])
def test_every_bit_counts(shape: tuple[int, ...]) -> None:
    data = made(shape, 4)
    found = {of_whole(shape, 4, data)}
    for bit in range(8 * len(data)):
        bad = data.copy()
        bad[bit // 8] ^= 1 << bit % 8
        found.add(of_whole(shape, 4, bad))
    assert len(found) == 1 + 8 * len(data)


@given(cut(), st.sampled_from(sorted(DTYPES)), st.data())
def test_every_fault_changes_it(
    shape_regions: tuple[tuple[int, ...], list[Region]], itemsize: int, data: st.DataObject
) -> None:
    shape, _ = shape_regions
    good = made(shape, itemsize)
    kind = data.draw(st.sampled_from(["bit", "signs", "swap", "rows", "blocks", "zeros", "roll"]))
    bad = good.copy()
    at, other = (data.draw(st.integers(0, len(bad) - 1)) for _ in (0, 1))
    if kind == "bit":
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "signs":  # the highest bit of every element, which a sum modulo 2**64 takes least of
        bad[itemsize - 1 :: itemsize] ^= 0x80
    elif kind == "swap":
        bad[at], bad[other] = good[other], good[at]
    elif kind in ("rows", "blocks"):
        size = shape[-1] * itemsize if kind == "rows" else 4096
        count = len(bad) // size
        assume(count > 1)
        at, other = at % count, other % count
        bad[at * size : (at + 1) * size] = good[other * size : (other + 1) * size]
        bad[other * size : (other + 1) * size] = good[at * size : (at + 1) * size]
    elif kind == "zeros":
        bad[at : at + 64] = 0
    else:
        bad = np.roll(bad, itemsize)
    assume(bool((bad != good).any()))
    assert of_whole(shape, itemsize, bad) != of_whole(shape, itemsize, good)


@pytest.mark.parametrize("shape", [(64, 64), (1 << 15,), (4, 4, 4, 64)])
def test_sign_bits_of_pairs_and_boxes_do_not_cancel(shape: tuple[int, ...]) -> None:
    """Linear sums modulo a power of two are weak there: many such faults in one tensor of powers of two."""
    good = made(shape, 4)
    whole = of_whole(shape, 4, good)
    rng = np.random.default_rng(0)
    for _ in range(200):
        bad = good.copy().reshape(*shape, 4)
        chosen = (np.sort(rng.choice(n, 1 << rng.integers(0, n.bit_length() - 1), replace=False)) for n in shape)
        bad[np.ix_(*chosen)] ^= np.array([0, 0, 0, 0x80], np.uint8)
        assert of_whole(shape, 4, bad.reshape(-1)) != whole


def test_dtype_and_shape_count() -> None:
    data = made((4, 6), 2)
    same = spelled_out("float16", (4, 6), data.tobytes())
    others = {spelled_out("bfloat16", (4, 6), data.tobytes()), spelled_out("float16", (6, 4), data.tobytes())}
    assert len({same} | others) == 3
