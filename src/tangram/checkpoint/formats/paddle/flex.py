"""PaddlePaddle's flex checkpoint, of `paddle.distributed.save_state_dict`: any ranks' pieces, read and written.

    ID.metadata                  which pieces there are, and in which files: a pickle (`paddle_pickles`)
    RANK_ID.safetensors          at most one piece of each tensor, by the tensor's name; or
    RANK_ID.distcp               the same as a pickle of numpy arrays, which is read and not written

A piece is a block, or a range of a block's elements (ZeRO). Equal ones of several ranks are read once; those that
overlap must have the same bits, which is looked at when one of them is first used. Paddle itself looks at neither.

An optimiser's states are `NAME.moment1_0` ... there, and have torch's names here. Instead of a count of steps Paddle
has powers of the betas (`paddle_steps`).

Trade-off: what is written is cut for files of a size, not for any ranks: Paddle's reader takes any pieces.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import renamed
from tangram.checkpoint.formats.common.outgoing import WriteTask, boxes
from tangram.checkpoint.formats.common.side_files import small_files, write_side_files
from tangram.checkpoint.formats.paddle.pickles import Array, BytesInFile, Stored, metadata, read_arrays, read_metadata
from tangram.checkpoint.formats.paddle.step_count import POWERS, betas_of, power
from tangram.checkpoint.saving.file_layout import Image, Outgoing, PlacedPiece, parts
from tangram.checkpoint.saving.file_writer import Ring, write_from
from tangram.checkpoint.store import safetensors_header
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.layout import Region, coverage
from tangram.layout.intervals import span
from tangram.layout.region import box_size, flat_boxes, stretch
from tangram.relayout import Piece, TensorSpec, bind, execute, plan
from tangram.relayout.mapping.states import SAME, SHARED, States

_INDEX = re.compile(r"(\d+)\.metadata")
STATES: States = {
    "exp_avg": SAME, "exp_avg_sq": SAME, "momentum_buffer": SAME, "master": SAME, "beta1_pow": SHARED,
    "beta2_pow": SHARED, "step": SHARED,
}  # fmt: skip
"""What is read and written; `step` only where the betas are known."""
SUFFIXES: Mapping[str, str] = {
    "exp_avg": "moment1_0", "exp_avg_sq": "moment2_0", "momentum_buffer": "velocity_0", "master": "w_0",
    "beta1_pow": "beta1_pow_acc_0", "beta2_pow": "beta2_pow_acc_0",
}  # fmt: skip
"""Paddle's names of states."""
WRITTEN = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn",
    "float8_e5m2", "complex64",
)  # fmt: skip
"""The types that Paddle's own reader knows."""
# numpy has no name for some types: as what their bits lie in a file.
_STANDS_FOR = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_KINDS = {
    "b1": "bool", "u1": "uint8", "i1": "int8", "u2": "uint16", "i2": "int16", "i4": "int32", "i8": "int64",
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


def is_paddle(path: Path) -> bool:
    """Whether a directory has metadata of Paddle's. What Paddle leaves beside Hugging Face's files has another name."""
    return path.is_dir() and any(_INDEX.fullmatch(one.name) for one in path.iterdir())


# ---------------------------------------------------------------- reading


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """The newest checkpoint of a directory. Raises UserError for one that is not whole."""
    newest = max((one for one in path.iterdir() if _INDEX.fullmatch(one.name)), key=lambda one: int(one.stem))
    pieces = read_metadata(newest)
    specs = _specs(path, pieces)
    files = {file: _contents(maps, file) for file in dict.fromkeys(one.file for one in pieces)}
    found: dict[tuple[str, str], tuple[Stored, Region]] = {}
    for one in pieces:
        if (one.file, one.name) in found:
            raise UserError(f'"{newest}" says that two pieces of {one.name} are in {one.file}')
        _refuse_other(path, one, files[one.file].get(one.name))
        found[one.file, one.name] = one, _region(one)
    raw = OpenCheckpoint(
        "paddle",
        path,
        specs,
        tuple(Piece(file, name, region) for (file, name), (one, region) in found.items() if not one.copy),
        _reader(path, maps, specs, files, found),
        maps.release,
        small=small_files(path),
    )
    _refuse_gaps(raw)
    return _named(raw)


def _specs(path: Path, pieces: Iterable[Stored]) -> dict[str, TensorSpec]:
    """Shape and type of every tensor, on which all of its pieces agree."""
    sizes: dict[str, list[Stored]] = {}
    for one in pieces:
        sizes.setdefault(one.name, []).append(one)
    specs: dict[str, TensorSpec] = {}
    for name, some in sizes.items():
        ends = [[a + n for a, n in zip(one.offset, one.shape, strict=True)] for one in some]
        if len({len(end) for end in ends}) > 1 or len({(one.full_shape, one.dtype) for one in some}) > 1:
            raise UserError(f'the pieces of {name} in "{path}" are of tensors that are not alike')
        whole = (
            some[0].full_shape if some[0].full_shape is not None else tuple(max(dim) for dim in zip(*ends, strict=True))
        )
        if any(len(end) != len(whole) or any(b > n for b, n in zip(end, whole, strict=True)) for end in ends):
            raise UserError(f'a piece of {name} in "{path}" lies outside of its shape {list(whole)}')
        specs[name] = TensorSpec(whole, some[0].dtype)
    return specs


def _region(one: Stored) -> Region:
    if one.flat is None:
        return Region.box(one.offset, one.shape)
    sets = tuple(span(a, a + n) for a, n in zip(one.offset, one.shape, strict=True))
    return Region.of(flat_boxes(sets, span(*one.flat)))


def _contents(maps: Maps, file: str) -> Mapping[str, safetensors_header.TensorSlot | Array]:
    if file.endswith(".distcp"):
        return read_arrays(maps, file)
    return {slot.name: slot for slot in maps.header(file)[0]}


def _refuse_other(path: Path, one: Stored, slot: safetensors_header.TensorSlot | Array | None) -> None:
    """Refuse a piece that is not in its file as the metadata says."""
    if slot is None:
        raise UserError(f'"{path}" is not whole: its metadata says that {one.name} is in {one.file}, but it is not')
    if wrong := _wrong(one, slot):
        raise UserError(f'{one.name} in "{path / one.file}" {wrong}')


def _wrong(one: Stored, slot: safetensors_header.TensorSlot | Array) -> str:
    """What of a piece in its file is not as the metadata says; "" where all is."""
    dtype = slot.dtype if isinstance(slot, safetensors_header.TensorSlot) else _KINDS.get(slot.kind, slot.kind)
    if dtype != one.dtype and dtype != _STANDS_FOR.get(one.dtype):
        return f"is {dtype}, but {one.dtype} by the metadata"
    if one.flat is not None and one.flat[1] > math.prod(one.shape):
        return f"has the elements {one.flat[0]} to {one.flat[1]} of {math.prod(one.shape)}"
    shape = one.shape if one.flat is None else (one.flat[1] - one.flat[0],)
    if slot.shape != shape and not (one.flat is not None and math.prod(slot.shape) == shape[0]):
        return f"has the shape {list(slot.shape)}, but {list(shape)} by the metadata"
    if isinstance(slot, Array) and len(slot.data) != math.prod(shape) * DTYPES[one.dtype]:
        return f"has {len(slot.data):,} bytes, not those of its shape"
    return ""


def _refuse_gaps(raw: OpenCheckpoint) -> None:
    regions: dict[str, list[Region]] = {}
    for piece in raw.pieces:
        regions.setdefault(piece.tensor, []).append(piece.region)
    for name, spec in raw.specs.items():
        if not math.prod(spec.shape):
            continue
        missing = coverage(Region.full(spec.shape), regions.get(name, ())).missing
        if missing:
            has = f"whose shape is {list(spec.shape)}"
            raise UserError(f'"{raw.path}" is not whole: no piece has {missing} of {name}, {has}')


def _reader(
    path: Path,
    maps: Maps,
    specs: Mapping[str, TensorSpec],
    files: Mapping[str, Mapping[str, safetensors_header.TensorSlot | Array]],
    found: Mapping[tuple[str, str], tuple[Stored, Region]],
) -> Callable[[Hashable, str], Tensor]:
    """A function from the file and name of a piece to its values, compared first with those that have some of them."""
    homes: dict[str, list[str]] = {}
    for file, name in found:
        homes.setdefault(name, []).append(file)
    compared: set[tuple[str, str, str]] = set()

    def view(file: str, name: str) -> Tensor:
        slot, (one, region) = files[file][name], found[file, name]
        shape = region.local_shape if region.local_shape is not None else (region.size,)
        if not region:
            return torch.empty(one.shape, dtype=getattr(torch, one.dtype))
        if isinstance(slot, safetensors_header.TensorSlot):
            return maps.view(file, slot.offset, one.dtype, shape)
        if isinstance(slot.data, BytesInFile):
            return maps.view(file, slot.data.offset, one.dtype, shape)
        return torch.frombuffer(bytearray(slot.data), dtype=getattr(torch, one.dtype)).view(shape)

    def read(place: Hashable, name: str) -> Tensor:
        file = str(place)
        values = view(file, name)
        for other in homes[name]:
            both = (name, min(file, other), max(file, other))
            if other != file and both not in compared:
                compared.add(both)
                common = found[file, name][1] & found[other, name][1]
                two = [(found[one, name][1], view(one, name)) for one in (file, other)]
                if common and not same_bits(name, specs[name], common, two):
                    have = f"which both have {common} of"
                    raise UserError(f'{name} in "{path}", {have}, has other values in {file} than in {other}')
        return values

    return read


def _named(raw: OpenCheckpoint) -> OpenCheckpoint:
    """The same with torch's names of states, where their parameter is there."""
    words = {word: state for state, word in SUFFIXES.items()}
    names: dict[str, str] = {}
    states: dict[str, None] = {}
    for name in raw.specs:
        param, _, suffix = name.rpartition(".")
        state = words.get(suffix) if param in raw.specs else None
        if state is not None:
            states[state] = None
        names[name] = name if state is None else f"{param}.{state}"
    return replace(renamed(raw, names), states={state: STATES[state] for state in states})


# ---------------------------------------------------------------- writing


def write(task: WriteTask) -> list[str]:
    """Write a directory that `paddle.distributed.load_state_dict(..., safetensors=True)` loads; the names of its files.

    A tensor that is larger than a file may be is cut into blocks. Raises UserError for what Paddle has no place for.
    """
    outgoing, folder, shard = _outgoing(task), task.folder, task.shard
    cuts: list[list[_Cut]] = [[]]
    room = shard
    inside: set[str] = set()
    for one in outgoing:
        for cut in _cut(one, shard):
            if cuts[-1] and (cut.nbytes > room or one.name in inside):
                cuts.append([])
                room, inside = shard, set[str]()
            cuts[-1].append(cut)
            inside.add(one.name)
            room -= cut.nbytes
    files = [f"{i}_0.safetensors" for i in range(len(cuts))]
    ring = Ring()
    for file, some in zip(files, cuts, strict=True):
        image, owners = _image(file, some)
        write_from(folder, image, _taking(image, owners, task), ring, checked=False, summed=False)
    pieces = (cut.stored(file) for file, some in zip(files, cuts, strict=True) for cut in some)
    beside = {**task.small, "0.metadata": metadata(pieces)}
    return [*files, *write_side_files(folder, beside)]


@dataclass(frozen=True)
class _Out:
    """A tensor under Paddle's name: one that is made, or a value."""

    name: str
    spec: TensorSpec
    source: str
    value: bytes | None = None


@dataclass(frozen=True)
class _Cut:
    """A block of a tensor whose bytes follow each other in it."""

    out: _Out
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.out.spec.dtype]

    @property
    def first(self) -> int:
        """The byte of the tensor that it begins with."""
        strides = [math.prod(self.out.spec.shape[dim + 1 :]) for dim in range(len(self.offset))]
        return sum(a * n for a, n in zip(self.offset, strides, strict=True)) * DTYPES[self.out.spec.dtype]

    def stored(self, file: str) -> Stored:
        return Stored(self.out.name, self.offset, self.shape, self.out.spec.dtype, self.out.spec.shape, None, file)


def _outgoing(task: WriteTask) -> Iterator[_Out]:
    """All tensors by Paddle's names. A count of steps becomes the powers of the betas."""
    betas = betas_of(task.objects)
    seen: set[str] = set()
    for name, spec in task.specs.items():
        param, state = task.owners[name]
        owned = bool(state)
        if owned and state not in STATES:
            raise UserError(f"{name}: Paddle has no name for the state {state}: leave the optimiser's states out")
        if owned and state == "step":
            if betas is None:
                raise UserError(f"{name}: Paddle keeps the powers of the betas instead: give --betas, as 0.9,0.95")
            value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            task.fill(name, Region.full(spec.shape), value)
            values = [np.float32(power(beta, float(value), name)).tobytes() for beta in betas]
            names = [f"{param}.{SUFFIXES[key]}" for key in POWERS]
            made = [_Out(own, TensorSpec((1,)), name, data) for own, data in zip(names, values, strict=True)]
        else:
            made = [_Out(f"{param}.{SUFFIXES[state]}" if owned else name, spec, name)]
        for one in made:
            if one.spec.dtype not in WRITTEN:
                raise UserError(f"{one.source} is {one.spec.dtype}, which Paddle does not read: give a --dtype")
            if not math.prod(one.spec.shape):
                raise UserError(f"{name} has no elements, and Paddle reads no such: drop it by a mapping, {name} -> _")
            if one.name in seen:
                raise UserError(f"two tensors would have Paddle's name {one.name}")
            seen.add(one.name)
            yield one


def _cut(one: _Out, shard: int) -> Iterator[_Cut]:
    most = max(1, shard // DTYPES[one.spec.dtype])
    for box in boxes(one.spec.shape, most):
        yield _Cut(one, tuple(a for a, _ in box), tuple(b - a for a, b in box))


def _image(file: str, cuts: Sequence[_Cut]) -> tuple[Image, Mapping[str, _Cut]]:
    """A file of blocks by their tensors' names; those with the largest elements first, so that all are aligned."""
    ordered = sorted(cuts, key=lambda cut: -DTYPES[cut.out.spec.dtype])
    rows = [(cut.out.name, cut.out.spec.dtype, cut.shape) for cut in ordered]
    head, slots = safetensors_header.build(rows, {"format": "pd"})
    placed = tuple(
        PlacedPiece(Outgoing(cut.out.name, cut.out.spec, Region.box(cut.offset, cut.shape)), slot.offset)
        for cut, slot in zip(ordered, slots, strict=True)
    )
    return Image(file, head, placed, placed[-1].stop if placed else len(head)), {cut.out.name: cut for cut in cuts}


def _taking(image: Image, cuts: Mapping[str, _Cut], task: WriteTask) -> Callable[[int, Bytes], Bytes]:
    def take(start: int, out: Bytes) -> Bytes:
        head = image.head[start : start + len(out)]
        out[: len(head)] = np.frombuffer(head, np.uint8)
        for placed, first, last in parts(image, start, start + len(out)):
            cut = cuts[placed.piece.name]
            begin = placed.offset + first - start
            room = out[begin : begin + last - first]
            if cut.out.value is not None:
                room[:] = np.frombuffer(cut.out.value, np.uint8)[first:last]
            else:
                task.fill_bytes(cut.out.source, cut.first + first, room)
        task.on_bytes(len(out))
        return out

    return take


COMPARED = 1 << 20
"""Elements that are compared at once."""


def same_bits(name: str, spec: TensorSpec, common: Region, pieces: Sequence[tuple[Region, Tensor]]) -> bool:
    """Whether two pieces of a tensor have the same bits in the region that both have; in parts of bounded size."""
    bound = bind("{name*} -> {name*}", {name: spec})
    for box in common.boxes:
        size = box_size(box)
        for at in range(0, size, COMPARED):
            wanted = Region.of(stretch(box, at, min(at + COMPARED, size)))
            shape = wanted.local_shape if wanted.local_shape is not None else (wanted.size,)
            got: list[Tensor] = []
            for region, values in pieces:
                into = torch.empty(shape, dtype=values.dtype)
                execute(
                    plan(bound, [Piece(0, name, region)], [Piece(1, name, wanted)]),
                    {(0, name): values},
                    {(1, name): into},
                )
                got.append(into.reshape(-1).view(torch.uint8))
            if not torch.equal(got[0], got[1]):
                return False
    return True
