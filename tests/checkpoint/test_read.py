"""Reading regions back: compared bit for bit with numpy's own indexing, and every damage is noticed."""

import itertools
import math
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.checkpoint.loading.read import DamagedError, Want, read_wants, tensor
from tangram.checkpoint.loading.scatter import cut
from tangram.checkpoint.store.manifest import BLOCK, Manifest
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tests.checkpoint.stored import elements, random_tensor, same, store, with_small_blocks

DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


@st.composite
def index_sets(draw: st.DrawFn, n: int) -> intervals.IntSet:
    marks = sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=6)))
    return (
        intervals.normal(itertools.pairwise(marks))
        if draw(st.booleans())
        else intervals.normal(zip(marks[::2], marks[1::2], strict=False))
    )


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Grids, flat ranges, unions, everything, nothing."""
    kind = draw(st.sampled_from(["grid", "flat", "union", "full", "nothing"]))
    total = math.prod(shape)
    if kind == "full" or not shape:
        return Region.full(shape)
    if kind == "nothing" or not total:
        return Region()
    if kind == "flat":
        a, b = sorted(draw(st.tuples(st.integers(0, total), st.integers(0, total))))
        return Region.flat(shape, a, b)
    count = 1 if kind == "grid" else 2
    return Region.of([tuple(draw(index_sets(n)) for n in shape) for _ in range(count)])


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A tensor in pieces: what is drawn, less what was drawn before, and the rest."""
    left, out = Region.full(shape), list[Region]()
    for _ in range(draw(st.integers(0, 3))):
        out.append(draw(regions(shape)) & left)
        left = left - out[-1]
    return [*out, left]


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9000)),
    st.tuples(st.integers(1, 80), st.integers(0, 80)),
    st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 33)),
)


@given(st.data())
def test_any_region_of_any_pieces_is_read_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    with pytest.MonkeyPatch.context() as patch:
        with_small_blocks(patch)
        tensors, cuts = {}, {}
        for i in range(data.draw(st.integers(1, 3), label="tensors")):
            shape = data.draw(shapes, label="shape")
            tensors[f"model.{i}"] = random_tensor(shape, data.draw(st.sampled_from(DTYPES)), i)
            cuts[f"model.{i}"] = data.draw(partitions(shape), label="pieces")
        path = tmp_path_factory.mktemp("any") / "a"
        manifest = store(path, tensors, cuts)
        wants = []
        for name, whole in tensors.items():
            region = data.draw(regions(tuple(whole.shape)), label="wanted")
            expected = elements(whole, region)
            into = torch.zeros_like(expected)
            if data.draw(st.booleans(), label="transposed") and into.ndim > 1:
                into = into.transpose(0, -1).contiguous().transpose(0, -1)
            elif data.draw(st.booleans(), label="in strides") and into.ndim:
                into = torch.zeros(*into.shape[:-1], 2 * into.shape[-1], dtype=into.dtype)[..., 1::2]
            wants.append((Want(name, region, into), expected))
        read_wants(path, manifest, [want for want, _ in wants])
        for want, expected in wants:
            assert same(want.into, expected), want


@given(st.data())
def test_a_move_is_cut_into_exactly_the_elements_between_two_bytes(data: st.DataObject):
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    dims, step, place = [], itemsize, 1
    for _ in range(data.draw(st.integers(0, 3))):
        n = data.draw(st.integers(2, 5))
        step += itemsize * data.draw(st.integers(0, 7))
        dims.insert(0, (n, step, place))
        step, place = step * n, place * n
    start = itemsize * data.draw(st.integers(0, 20))
    low, high = sorted(itemsize * data.draw(st.integers(0, 200)) for _ in range(2))
    every = {}
    for index in itertools.product(*(range(n) for n, _, _ in dims)):
        byte = start + sum(i * s for i, (_, s, _) in zip(index, dims, strict=True))
        every[byte] = sum(i * p for i, (_, _, p) in zip(index, dims, strict=True))
    found: list[tuple[int, int]] = []
    for first, some, at in cut(start, tuple(dims), 0, itemsize, low, high):
        for index in itertools.product(*(range(n) for n, _, _ in some)):
            byte = first + sum(i * s for i, (_, s, _) in zip(index, some, strict=True))
            found.append((byte, at + sum(i * p for i, (_, _, p) in zip(index, some, strict=True))))
    assert sorted(found) == sorted((b, p) for b, p in every.items() if low <= b < high)


@pytest.mark.parametrize("memory", [0, BLOCK, 16 * BLOCK])
def test_large_tensors_over_many_blocks(tmp_path: Path, memory: int):
    whole = random_tensor((1500, 3001), torch.float32)
    rows = [Region.box((i, 0), (n, 3001)) for i, n in ((0, 700), (700, 800))]
    manifest = store(tmp_path / "a", {"model.w": whole}, {"model.w": rows})
    columns = Region.box((0, 17), (1500, 1500))
    into = torch.zeros(1500, 1500)
    read_wants(tmp_path / "a", manifest, [Want("model.w", columns, into)], memory=memory)
    assert same(into, whole[:, 17:1517].contiguous())
    assert same(tensor(tmp_path / "a", manifest, "model.w"), whole)


def test_only_the_blocks_that_hold_something_are_read(tmp_path: Path):
    """A column far to the right of few long rows: the blocks between are damaged, and nobody looks at them."""
    row = 3 * BLOCK // 4
    whole = random_tensor((4, row), torch.float32)
    manifest = store(tmp_path / "a", {"model.w": whole}, {})
    (piece,) = manifest.tensors["model.w"].pieces
    file = tmp_path / "a" / piece.file
    with file.open("r+b") as stream:
        stream.seek(piece.offset + 2 * BLOCK)  # in the middle of the first row
        stream.write(b"\x55" * 4096)
    region = Region.box((0, row - 3), (4, 3))
    assert same(tensor(tmp_path / "a", manifest, "model.w", region), whole[:, -3:].contiguous())
    with pytest.raises(DamagedError, match=re.escape(f'"{piece.file}", with model.w')):
        tensor(tmp_path / "a", manifest, "model.w")


# ---------------------------------------------------------------- damage


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Manifest]:
    tensors = {"model.a": random_tensor((30,), torch.float32), "model.b": random_tensor((5, 6), torch.bfloat16, 1)}
    cuts = {"model.a": [Region.flat((30,), 0, 11), Region.flat((30,), 11, 30)]}
    return tmp_path / "a", store(tmp_path / "a", tensors, cuts)


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << at % 8]))


def test_every_flipped_byte_of_a_file_is_refused(small: tuple[Path, Manifest]):
    path, manifest = small
    for name in manifest.files:
        wanted = next(t.name for t in manifest.tensors.values() if any(p.file == name for p in t.pieces))
        size = manifest.files[name].size
        for at in [*range(200), *range(200, 4096, 97), *range(4096, size)]:
            flip(path / name, at)
            with pytest.raises(DamagedError, match=re.escape(f'"{name}", with {wanted}')):
                tensor(path, manifest, wanted)
            flip(path / name, at)
        tensor(path, manifest, wanted)


def test_a_file_that_is_cut_off_or_too_long_or_gone(small: tuple[Path, Manifest]):
    path, manifest = small
    name = manifest.tensors["model.b"].pieces[0].file
    data = (path / name).read_bytes()
    for other in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
        (path / name).write_bytes(other)
        with pytest.raises(DamagedError, match=f'"{name}", with model.b.* has {len(other)} of {len(data)} bytes'):
            tensor(path, manifest, "model.b")
    (path / name).unlink()
    with pytest.raises(DamagedError, match=f'"{name}", with model.b.*No such file'):
        tensor(path, manifest, "model.b")


def test_what_is_no_plain_file_in_the_folder(small: tuple[Path, Manifest]):
    path, manifest = small
    name = manifest.tensors["model.b"].pieces[0].file
    (path / name).rename(path.parent / "elsewhere")
    (path / name).symlink_to(path.parent / "elsewhere")
    with pytest.raises(DamagedError, match=f'"{name}", with model.b.* is a link'):
        tensor(path, manifest, "model.b")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedError, match=f'"{name}", with model.b.* is no plain file'):
        tensor(path, manifest, "model.b")


def test_files_that_were_swapped_or_are_of_another_save(small: tuple[Path, Manifest], tmp_path: Path):
    path, manifest = small
    one, other = (piece.file for piece in manifest.tensors["model.a"].pieces)
    files = {name: (path / name).read_bytes() for name in (one, other)}
    (path / one).write_bytes(files[other])
    (path / other).write_bytes(files[one])
    with pytest.raises(
        DamagedError, match='"model-0000., with model.a'.replace(", with", '-of-00002.safetensors", with')
    ):
        tensor(path, manifest, "model.a")
    for name, data in files.items():
        (path / name).write_bytes(data)
    tensors = {"model.a": random_tensor((30,), torch.float32, 5), "model.b": random_tensor((5, 6), torch.bfloat16, 6)}
    cuts = {"model.a": [Region.flat((30,), 0, 11), Region.flat((30,), 11, 30)]}
    store(tmp_path / "b", tensors, cuts, save_id="f" * 32)
    (path / one).write_bytes((tmp_path / "b" / one).read_bytes())
    with pytest.raises(DamagedError, match=f'"{one}", with model.a.* is of another save'):
        tensor(path, manifest, "model.a")


def test_one_block_of_another_save_in_a_large_file(tmp_path: Path):
    paths = [tmp_path / name for name in "ab"]
    manifests = [
        store(path, {"model.w": random_tensor((3 * BLOCK,), torch.uint8, i)}, {}, save_id=f"{i:032}")
        for i, path in enumerate(paths)
    ]
    (piece,) = manifests[0].tensors["model.w"].pieces
    block = (paths[1] / piece.file).read_bytes()[BLOCK : 2 * BLOCK]
    with (paths[0] / piece.file).open("r+b") as stream:
        stream.seek(BLOCK)
        stream.write(block)
    with pytest.raises(DamagedError, match=rf"with model.w, has other bytes from {BLOCK} to {2 * BLOCK}"):
        tensor(paths[0], manifests[0], "model.w")
    tensor(paths[0], manifests[0], "model.w", Region.box((2 * BLOCK,), (7,)))


def test_nothing_of_a_damaged_block_is_written(small: tuple[Path, Manifest]):
    path, manifest = small
    name = manifest.tensors["model.b"].pieces[0].file
    flip(path / name, manifest.files[name].size - 1)
    into = torch.zeros(5, 6, dtype=torch.bfloat16)
    with pytest.raises(DamagedError):
        read_wants(path, manifest, [Want("model.b", Region.full((5, 6)), into)])
    assert not into.any()


# ---------------------------------------------------------------- mistakes


def test_what_does_not_fit_is_refused_before_anything_changes(small: tuple[Path, Manifest]):
    path, manifest = small
    good = torch.zeros(30)
    full = Region.full((30,))
    for want, words in [
        (Want("model.z", full, torch.zeros(30)), "has no tensor model.z"),
        (Want("model.a", full, torch.zeros(29)), r"model.a: \[30\] is wanted of it, into memory of shape \[29\]"),
        (Want("model.a", full, torch.zeros(30, dtype=torch.float64)), "stored as float32 but wanted as float64"),
        (Want("model.a", Region.box((10,), (30,)), torch.zeros(30)), "outside of it"),
        (Want("model.a", full, torch.zeros(30, device="meta")), "model.a is to be read into a tensor on meta"),
        (Want("model.a", full, torch.zeros(1).expand(30)), "model.a: .* share memory"),
    ]:
        with pytest.raises(UserError, match=words):
            read_wants(path, manifest, [Want("model.a", full, good), want])
    assert not good.any()


def test_other_dtypes_are_converted_where_that_is_asked_for(small: tuple[Path, Manifest]):
    path, manifest = small
    into = torch.zeros(4, 6, dtype=torch.float64)
    region = Region.box((1, 0), (4, 6))
    read_wants(path, manifest, [Want("model.b", region, into)], cast=True)
    assert same(into, tensor(path, manifest, "model.b", region).double())


def test_no_wants_and_empty_regions_read_nothing(small: tuple[Path, Manifest]):
    path, manifest = small
    for name in manifest.files:
        (path / name).unlink()
    read_wants(path, manifest, [])
    read_wants(path, manifest, [Want("model.a", Region(), torch.zeros(0))])
