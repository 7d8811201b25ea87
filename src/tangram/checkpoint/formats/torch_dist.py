"""Megatron-core's distributed checkpoint, `torch_dist`: DCP with files of its own beside, and layers that are stacked.

    metadata.json    which back end wrote it
    common.pt        what is the same on all ranks: arguments, step; a pickle
    .metadata, *.distcp    DCP

Where all layers are alike, Megatron-core stores each kind of tensor of all layers as one, with the layer in front:
`decoder.layers.mlp.linear_fc2.weight` of [layers, out, in]. Here they are taken apart on the way in, so that a mapping
names `decoder.layers.{l}.mlp...` whether they were stacked or not, and stacked again on the way out.

Trade-off: a DCP of several ranks is written by one process, in chunks of a size of its own: readers of DCP take any
chunks, and no rank's layout is asked for.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.fetched import fetched
from tangram.checkpoint.formats import dcp
from tangram.checkpoint.formats.archive import read_archive
from tangram.checkpoint.formats.huggingface import small_files
from tangram.checkpoint.formats.mapped import Maps
from tangram.checkpoint.formats.opened import Opened
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.relayout import Piece, TensorSpec

CONFIG = "metadata.json"
COMMON = "common.pt"
SOURCE = "source"
"""A folder for the configuration and tokenizer that the checkpoint was made with; Megatron-core does not look at it."""
TENSORS, OBJECTS = "__0_0.distcp", "__0_1.distcp"
_LINEAR = re.compile(r"(.+\.(?:linear_\w+|eh_proj))\.weight")
_STACK = re.compile(r"(.*\blayers)\.((?!\d+\.).+)")
_MEMBER = re.compile(r"(.*?\blayers)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Row:
    """A layer of a stacked chunk."""

    span: dcp.Span
    index: int


def is_torch_dist(path: Path) -> bool:
    """Whether a directory says that it is one."""
    try:
        fields: Any = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and cast("dict[str, Any]", fields).get("sharded_backend") == "torch_dist"


def open_folder(path: Path) -> Opened:
    """A directory, stacked layers taken apart. Raises UserError for one that is not whole."""
    index = dcp.read_index(path)
    maps = Maps(path)
    whole = dcp.mapped_chunks(maps)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    stacks = {name: (m[1], m[2]) for name in index.specs if (m := _STACK.fullmatch(name))}
    for name, spec in index.specs.items():
        if name in stacks and spec.shape:
            before, after = stacks[name]
            one = TensorSpec(spec.shape[1:], spec.dtype)
            specs.update({f"{before}.{i}.{after}": one for i in range(spec.shape[0])})
        else:
            specs[name] = spec
    for piece in index.pieces:
        if piece.tensor in stacks and index.specs[piece.tensor].shape:
            assert isinstance(piece.place, dcp.Span)
            before, after = stacks[piece.tensor]
            for box in piece.region.boxes:
                ((first, last),) = box[0]
                rows = ((i, Row(piece.place, i - first)) for i in range(first, last))
                pieces += [Piece(row, f"{before}.{i}.{after}", Region.of([box[1:]])) for i, row in rows]
        else:
            pieces.append(piece)

    def read(place: Hashable, name: str) -> Tensor:
        return whole(place.span, name)[place.index] if isinstance(place, Row) else whole(place, name)

    small = small_files(path / SOURCE) if (path / SOURCE).is_dir() else {}
    return Opened("torch_dist", path, specs, tuple(pieces), read, maps.release, index.opaque, small)


def common(path: Path) -> Any:
    """What is the same on all ranks, without running anything of it."""
    return read_archive(Maps(path), COMMON)


# ---------------------------------------------------------------- writing


def stacked(names: Iterable[str], specs: Mapping[str, TensorSpec]) -> dict[str, tuple[str, int, int]]:
    """Of each tensor of a layer its name in a stack, its number and how many there are, where all layers are alike.

    Layers are alike where each has the same tensors with the same shapes and types.
    """
    groups: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        if match := _MEMBER.fullmatch(name):
            groups.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = name
    found: dict[str, tuple[str, int, int]] = {}
    for before, layers in groups.items():
        kinds = [{after: specs[name] for after, name in some.items()} for some in layers.values()]
        if sorted(layers) == list(range(len(layers))) and all(kind == kinds[0] for kind in kinds):
            found.update({n: (f"{before}.{a}", i, len(layers)) for i, some in layers.items() for a, n in some.items()})
    return found


def boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """A tensor in blocks of at most so many elements: rows of the first dim, and where one is more, parts of it."""
    if not shape:
        yield ()
        return
    row = 1
    for n in shape[1:]:
        row *= n
    if row > most:
        for i, rest in itertools.product(range(shape[0]), boxes(shape[1:], most)):
            yield ((i, i + 1), *rest)
        return
    step = max(1, most // max(row, 1))
    for first in range(0, max(shape[0], 1), step):
        yield ((first, min(first + step, shape[0])), *((0, n) for n in shape[1:]))


def write(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    fill: Callable[[str, Region, Tensor], None],
    chunk: int,
    stack: bool,
    extra: bool,
    told: Callable[[int], None],
) -> list[str]:
    """Write tensors into a new directory, in chunks of at most so many bytes; `fill` gives a box of one.

    `stack`: layers that are alike as Megatron-core stacks them. `extra`: with the states that its layers ask for.
    Returns the names of the files.
    """
    homes = stacked(specs, specs) if stack else {}
    whole: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        home = homes.get(name)
        whole[home[0] if home else name] = TensorSpec((home[2], *spec.shape), spec.dtype) if home else spec

    def chunks() -> Iterator[dcp.Chunk]:
        for name, spec in specs.items():
            home = homes.get(name)
            itemsize = getattr(torch, spec.dtype).itemsize
            for box in boxes(spec.shape, max(1, chunk // itemsize)):
                region = Region.of([tuple(span(a, b) for a, b in box)])
                values = torch.empty([b - a for a, b in box], dtype=getattr(torch, spec.dtype))
                if values.numel():
                    fill(name, region, values)
                offsets = tuple(a for a, _ in box)
                if home:
                    yield dcp.Chunk(home[0], (home[1], *offsets), values[None])
                else:
                    yield dcp.Chunk(name, offsets, values)
                told(values.nbytes)

    with fetched(chunks()) as made:
        written = dcp.stream_chunks(folder / TENSORS, made)
    files = [TENSORS]
    objects: dict[str, dcp.Span] = {}
    if extra:
        blank = dcp.write_object(folder / OBJECTS, [None])
        objects = dict.fromkeys(extra_states(whole, {home[0] for home in homes.values()}), blank)
        files.append(OBJECTS)
    dcp.write_index(folder, whole, written, objects)
    return [*files, dcp.INDEX]


def extra_states(specs: Mapping[str, TensorSpec], stacks: Collection[str]) -> Iterator[str]:
    """The names of the empty states that Megatron-core keeps beside linear layers and attention, and asks for.

    `stacks`: the tensors that have the layers in front. One is there for each layer and expert.
    """
    for name, spec in specs.items():
        match = _LINEAR.fullmatch(name)
        if match is None:
            continue
        dims = spec.shape[: (name in stacks) + (".experts.experts." in name)]
        for index in itertools.product(*map(range, dims)) if dims else [(0,)]:
            place = f"_extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, dims or (1,)))}"
            yield f"{match[1]}.{place}"
            if match[1].endswith(".self_attention.linear_proj"):
                yield f"{match[1].removesuffix('linear_proj')}core_attention.{place}"


def write_beside(folder: Path, small: Mapping[str, bytes]) -> list[str]:
    """The files that make a DCP one of Megatron-core, and those that it was made with."""
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    text = json.dumps({**versions, "common_backend": "torch", "common_backend_version": 1})
    (folder / CONFIG).write_text(text, encoding="utf-8")
    torch.save({}, folder / COMMON)
    if small:
        (folder / SOURCE).mkdir()
    for name, data in small.items():
        (folder / SOURCE / name).write_bytes(data)
    return [CONFIG, COMMON, *(f"{SOURCE}/{name}" for name in small)]
