"""The digest: against the definition spelled out lane by lane, over any cut, and against planted faults."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tangram.checkpoint import digest
from tangram.checkpoint.digest import NOTHING, Sums
from tangram.checkpoint.image import Outgoing, add_piece
from tangram.layout import Region
from tangram.relayout import TensorSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ONES = "5a7fc5646fae31a8a0e724b228d4376e"
COUNTING = "21a9fbb1ef07be7fc53f14621975e940"
EMPTY = "d79ad4a3dc48b4cbd344fa239aaf9b7c"
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}


def splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def key(which: int, dim: int, index: int) -> int:
    return splitmix((splitmix(256 * which + dim) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64) | 1


def spelled_out(dtype: str, shape: Sequence[int], data: bytes) -> str:
    """The definition in docs/checkpoint-format.md, without a thought for speed."""
    leading = shape[:-1]
    rows = math.prod(leading)
    width = len(data) // rows if rows else 0
    words = ""
    stands = hashlib.sha256(f"{dtype} {list(shape)}".encode()).digest()
    for which in (0, 1):
        total = int.from_bytes(stands[8 * which : 8 * which + 8], "little")
        for row, index in enumerate(itertools.product(*map(range, leading))):
            line = data[row * width : (row + 1) * width]
            for lane in range(-(-width // 4)):
                product = key(which, 0, lane % 4096) * key(which, 1, lane // 4096)
                for number, i in enumerate(reversed(index), start=2):
                    product *= key(which, number, i)
                total += int.from_bytes(line[4 * lane : 4 * lane + 4], "little") * product
        words += f"{total % 2**64:016x}"
    return words


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


def made(shape: Sequence[int], itemsize: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, math.prod(shape) * itemsize, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (2, 3, 5), (4, 1, 2, 3), (0, 3), (3, 0), (9000,), (2, 8195)])
@pytest.mark.parametrize("itemsize", list(DTYPES))
def test_it_is_what_its_definition_says(shape: tuple[int, ...], itemsize: int) -> None:
    data = made(shape, itemsize)
    whole = [Region.full(shape)] if math.prod(shape) else []
    assert of_pieces(shape, itemsize, data, whole) == spelled_out(DTYPES[itemsize], shape, data.tobytes())


def test_vectors() -> None:
    """Those of docs/checkpoint-format.md: other implementations can try theirs."""
    ones = np.ones(3, np.float32).view(np.uint8)
    counting = np.arange(6, dtype=np.int16).view(np.uint8)
    assert of_pieces((3,), 4, ones, [Region.full((3,))]) == spelled_out("float32", (3,), ones.tobytes())
    assert spelled_out("float32", (3,), ones.tobytes()) == ONES
    assert spelled_out("int16", (2, 3), counting.tobytes()) == COUNTING
    assert digest.digest("float32", (0,), NOTHING) == spelled_out("float32", (0,), b"") == EMPTY


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape and a partition of it: cut again and again along some dim, or flat."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    if draw(st.booleans()):
        size = math.prod(shape)
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
        return shape, [Region.flat(shape, a, b) for a, b in itertools.pairwise(edges)]
    regions = [Region.full(shape)]
    for _ in range(draw(st.integers(0, 4))):
        i = draw(st.integers(0, len(regions) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        chosen = draw(st.sets(st.integers(0, shape[dim] - 1), min_size=1))
        box = [((0, n),) for n in shape]
        box[dim] = tuple((k, k + 1) for k in sorted(chosen))
        inside = regions[i] & Region.of([tuple(box)])
        outside = regions[i] - inside
        regions[i : i + 1] = [r for r in (inside, outside) if r]
    return shape, regions


@given(cut(), st.sampled_from(sorted(DTYPES)), st.integers(1, 40), st.randoms(use_true_random=False))
def test_it_does_not_know_how_the_tensor_was_cut(
    shape_regions: tuple[tuple[int, ...], list[Region]], itemsize: int, step: int, random: Any
) -> None:
    shape, regions = shape_regions
    data = made(shape, itemsize)
    random.shuffle(regions)
    assert of_pieces(shape, itemsize, data, regions, step) == of_pieces(shape, itemsize, data, [Region.full(shape)])


@given(cut(), st.sampled_from(sorted(DTYPES)), st.data())
def test_every_fault_changes_it(
    shape_regions: tuple[tuple[int, ...], list[Region]], itemsize: int, data: st.DataObject
) -> None:
    shape, _ = shape_regions
    good = made(shape, itemsize)
    whole = [Region.full(shape)]
    kind = data.draw(st.sampled_from(["bit", "signs", "swap", "zeros", "roll"]))
    bad = good.copy()
    at = data.draw(st.integers(0, len(bad) - 1))
    if kind == "bit":
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "signs":  # the highest bit of every element, which a sum modulo 2**64 takes least of
        bad[itemsize - 1 :: itemsize] ^= 0x80
    elif kind == "swap":
        other = data.draw(st.integers(0, len(bad) - 1))
        bad[at], bad[other] = good[other], good[at]
    elif kind == "zeros":
        bad[at : at + 64] = 0
    else:
        bad = np.roll(bad, itemsize)
    assume(bool((bad != good).any()))
    assert of_pieces(shape, itemsize, bad, whole) != of_pieces(shape, itemsize, good, whole)


def test_sign_bits_of_pairs_and_squares_do_not_cancel() -> None:
    """Linear sums modulo a power of two are weak there: many such faults in one tensor of powers of two."""
    shape = (64, 64)
    good = made(shape, 4)
    whole = of_pieces(shape, 4, good, [Region.full(shape)])
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = good.copy().reshape(64, 64, 4)
        rows, columns = (np.sort(rng.choice(64, 1 << rng.integers(0, 6), replace=False)) for _ in (0, 1))
        bad[np.ix_(rows, columns)] ^= np.array([0, 0, 0, 0x80], np.uint8)
        assert of_pieces(shape, 4, bad.reshape(-1), [Region.full(shape)]) != whole


def test_dtype_and_shape_count() -> None:
    data = made((4, 6), 2)
    same = spelled_out("float16", (4, 6), data.tobytes())
    assert (
        len({same, spelled_out("bfloat16", (4, 6), data.tobytes()), spelled_out("float16", (6, 4), data.tobytes())})
        == 3
    )
