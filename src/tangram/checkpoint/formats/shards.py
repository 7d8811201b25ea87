"""A directory of safetensors without an index: shards of a Hugging Face model, or those of torch's Hugging Face writer.

    model-00001-of-00003.safetensors ...          each tensor whole in one of them
    shard-00001-model-00001-of-00001.safetensors  of a rank, whose metadata says where each part begins

Both say enough in their headers. A name that says "of 3" asks for all three.
"""

import json
import re
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.side_files import small_files
from tangram.checkpoint.store.safetensors_header import TensorSlot
from tangram.errors import UserError
from tangram.layout import Region, coverage
from tangram.relayout import Piece, TensorSpec

DATA = ".safetensors"
NOT_MODELS = re.compile(r"(?:adapter_model|consolidated.*|optimizer|scheduler|sampler|random_states.*)\.safetensors")
"""Files that are not shards of a model in transformers' names."""
OWN = "tangram_save"
"""Of the metadata of our files, which are whole only with what is written last."""
INFO = "DCP_SHARDING_INFO"
_COUNT = re.compile(r"(.*?)(\d+)-of-(\d+)(?:-.*)?\.(?:safetensors|bin)")
_RANK = re.compile(r"shard-(\d+)-.*\.safetensors")


def is_shards(path: Path) -> bool:
    """Whether a directory has such files."""
    return path.is_dir() and bool(_files(path))


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """All tensors of all files. Raises UserError where a file or a part is missing, or a tensor there twice."""
    files = _files(path)
    refuse_missing(path, files)
    slots: dict[tuple[str, str], TensorSlot] = {}
    regions: dict[str, list[tuple[str, Region]]] = {}
    for file in files:
        found, metadata = maps.header(file)
        if OWN in metadata:
            raise UserError(f'"{path}" was written by Tangram and lacks its marker or index: that save did not end')
        offsets = _offsets(path / file, metadata)
        for slot in found:
            slots[file, slot.name] = slot
            at = offsets.get(slot.name, (0,) * len(slot.shape))
            if len(at) != len(slot.shape):
                raise UserError(f'"{path / file}" says that {slot.name} begins at {list(at)}, which is no place in it')
            regions.setdefault(slot.name, []).append((file, Region.box(at, slot.shape)))
    specs: dict[str, TensorSpec] = {}
    for name, some in regions.items():
        if len(some) > 1 and some[0][1] and some[0][1] == some[1][1]:
            raise UserError(f'"{path}" has the tensor {name} twice, in {some[0][0]} and in {some[1][0]}')
        kinds = {slots[file, name].dtype for file, _ in some}
        specs[name] = TensorSpec(_full_shape(path, name, [region for _, region in some], len(kinds)), kinds.pop())
    pieces = [Piece(file, name, region) for name, some in regions.items() for file, region in some]

    def read(place: Hashable, name: str) -> Tensor:
        slot = slots[str(place), name]
        return maps.view(str(place), slot.offset, slot.dtype, slot.shape)

    return OpenCheckpoint("hf", path, specs, tuple(pieces), read, maps.release, small=small_files(path))


def _files(path: Path) -> list[str]:
    return sorted(f.name for f in path.iterdir() if f.suffix == DATA and not NOT_MODELS.fullmatch(f.name))


def refuse_missing(path: Path, files: Collection[str]) -> None:
    """Raise UserError where of files that say "of 3" one is not there."""
    wanted: dict[tuple[str, int], set[int]] = {}
    ranks = {int(match[1]) for file in files if (match := _RANK.fullmatch(file))}
    for file in files:
        if (match := _COUNT.fullmatch(file)) and not ranks:
            wanted.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), there in wanted.items():
        missing = sorted(set(range(1, count + 1)) - there)
        if missing and 0 not in there:
            raise UserError(
                f'"{path}" is not whole: the file {missing[0]} of {count} by the name {name}... is not there'
            )
    gaps = sorted(set(range(1, max(ranks, default=0) + 1)) - ranks)
    if gaps:
        raise UserError(f'"{path}" is not whole: the shard {gaps[0]} of {max(ranks)} is not there')


def _offsets(file: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Where the parts that a file has begin in their tensors."""
    try:
        table: Any = json.loads(metadata.get(INFO, "{}"))
        rows = cast("Mapping[str, Mapping[str, list[int]]]", table)
        return {name: tuple(map(int, row["saved_offsets"])) for name, row in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f'"{file}" does not say where its parts begin: {error!r}') from None


def _full_shape(path: Path, name: str, parts: list[Region], kinds: int) -> tuple[int, ...]:
    """The shape that the parts of a tensor make."""
    filled = [region for region in parts if region]
    if len(parts) == 1 or not filled:
        shape = parts[0].local_shape or ()
    else:
        shape = tuple(max(hull[dim][1] for hull in (r.hull for r in filled)) for dim in range(len(filled[0].hull)))
    if kinds > 1 or (filled and not coverage(Region.full(shape), filled).exact):
        raise UserError(f'"{path}": the parts of {name} are no whole tensor: one is missing, or there twice')
    return shape
