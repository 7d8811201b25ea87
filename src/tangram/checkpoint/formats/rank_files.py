"""One file of `torch.save` for each rank, as verl writes FSDP's sharded state: `model_world_size_8_rank_3.pt`.

A tensor is plain, or a DTensor: its local part, its placements, and where the rank stands in the mesh. Nothing of torch
runs: the description is read as a tree, parts are regions by the rule that `torch.chunk` has, and each must have the
shape that its region says. How large a mesh is follows from where all ranks say that they stand.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.formats.archives.archive import Opaque, TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.state_dicts import leaves, listed, plain_names, tensor_kind, view
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.side_files import small_files
from tangram.errors import UserError
from tangram.layout import Region, coverage
from tangram.relayout import Piece, TensorSpec

NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
OTHERS = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
"""Files of the optimiser and of the run, by the same rule."""
SOURCE = "huggingface"
"""A folder with the configuration and the tokenizer."""
PLACEMENTS = "torch.distributed.tensor.placement_types.", "torch.distributed._tensor.placement_types."
DTENSORS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor.DTensor",
)


@dataclass(frozen=True)
class _Part:
    """What a rank has of a tensor. `cuts`: the dim of each axis of its mesh, None where it has the same as others."""

    place: TensorPlace
    shape: tuple[int, ...]
    cuts: tuple[int | None, ...]
    at: tuple[int, ...]
    """Where the rank stands in the mesh."""


def is_rank_files(path: Path) -> bool:
    """Whether a directory has such files."""
    return path.is_dir() and any(NAME.fullmatch(file.name) for file in path.iterdir())


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """The model of all ranks. Raises UserError where a rank's file is missing or its parts do not fit together."""
    files = _files(path)
    parts: dict[str, list[_Part]] = {}
    skipped: list[str] = [file.name for file in sorted(path.iterdir()) if OTHERS.fullmatch(file.name)]
    for file in files:
        tree = read_archive(maps, file)
        if not isinstance(tree, Mapping):
            raise UserError(f'"{path / file}" is no state dict')
        for name, value in leaves(tree):
            part = _part(value, f'{name} in "{path / file}"')
            if part is None:
                skipped.append(name)
            else:
                parts.setdefault(name, []).append(part)
    names = plain_names(parts)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for raw, some in parts.items():
        specs[names[raw]] = TensorSpec(some[0].shape, some[0].place.dtype)
        pieces += _pieces(path, maps, names[raw], some)

    def read(place: Hashable, name: str) -> Tensor:
        return view(maps, place)

    beside = path / SOURCE if (path / SOURCE).is_dir() else path
    return OpenCheckpoint("ranks", path, specs, tuple(pieces), read, maps.release, tuple(skipped), small_files(beside))


def _files(path: Path) -> list[str]:
    """The file of each rank. Raises UserError where one is missing."""
    found: dict[int, dict[int, str]] = {}
    for file in sorted(path.iterdir()):
        if match := NAME.fullmatch(file.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = file.name
    if len(found) > 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise UserError(f'"{path}" has files of {sizes} ranks: keep those of one save in a directory of their own')
    ((world, ranks),) = found.items()
    missing = [rank for rank in range(world) if rank not in ranks]
    if missing:
        raise UserError(f'"{path}" is not whole: model_world_size_{world}_rank_{missing[0]}.pt is not there')
    return [ranks[rank] for rank in range(world)]


def _part(value: Any, what: str) -> _Part | None:
    """What an entry is; None of one that is no tensor. Raises UserError for a tensor of another kind."""
    if isinstance(value, TensorPlace):
        return _Part(value, value.shape, (), ())
    kind = tensor_kind(value)
    if kind is None:
        return None
    if kind not in DTENSORS or len(value.args) < 4:
        raise UserError(f"{what} is a {kind}, which is not read: save it as a plain tensor or a DTensor")
    fields, size = _fields(value.args[3]), value.args[2][2]
    spec = _fields(getattr(fields.get("_spec"), "state", None))
    mesh = _fields(getattr(spec.get("mesh"), "state", None))
    local, at = fields.get("_local_tensor"), mesh.get("_coordinate_on_dim")
    placements = listed(spec.get("placements"))
    if not isinstance(local, TensorPlace) or not isinstance(at, list | tuple) or len(placements) != len(listed(at)):
        raise UserError(f"{what} is a DTensor that does not say where its rank stands in the mesh")
    return _Part(local, tuple(size), tuple(_cut(one, what) for one in placements), tuple(listed(at)))


def _cut(placement: Any, what: str) -> int | None:
    kind = getattr(placement, "kind", "")
    name = next((kind.removeprefix(one) for one in PLACEMENTS if kind.startswith(one)), kind)
    if name == "Replicate":
        return None
    dim = (
        _fields(placement.state).get("dim", next(iter(placement.args), None)) if isinstance(placement, Opaque) else None
    )
    if name != "Shard" or not isinstance(dim, int):
        raise UserError(f"{what} has the placement {name}, which is not read: save it as Shard or Replicate")
    return dim


def _fields(state: Any) -> Mapping[str, Any]:
    """The attributes of an object as pickles have them: a table, or two of which the second is of slots."""
    tables = cast("tuple[Any, ...]", state) if isinstance(state, tuple) else (state,)
    found: dict[str, Any] = {}
    for table in tables:
        found.update(cast("Mapping[str, Any]", table) if isinstance(table, Mapping) else {})
    return found


def _pieces(path: Path, maps: Maps, name: str, parts: Sequence[_Part]) -> list[Piece]:
    """The parts of one tensor, each region once. Raises UserError where they make no whole, or copies differ."""
    first = parts[0]
    if any((p.shape, p.place.dtype, p.cuts) != (first.shape, first.place.dtype, first.cuts) for p in parts):
        raise UserError(f'"{path}": the ranks say unlike things of {name}: its shape, type or placements')
    sizes = [1 + max(part.at[axis] for part in parts) for axis in range(len(first.cuts))]
    found: dict[Region, _Part] = {}
    for part in parts:
        region = _region(part, sizes)
        shape = region.local_shape if region.local_shape is not None else (0,)
        if 0 not in part.place.shape and part.place.shape != shape:
            raise UserError(f'"{path}": a part of {name} has shape {list(part.place.shape)}, not {list(shape)}')
        known = found.setdefault(region, part)
        if known is not part and not _same(maps, known.place, part.place):
            raise UserError(f'"{path}": {name} differs between {known.place.file} and {part.place.file}')
    whole = [region for region in found if region]
    if first.shape and not coverage(Region.full(first.shape), whole).exact:
        raise UserError(f'"{path}": the parts of {name} do not make it whole')
    return [Piece(part.place, name, region) for region, part in found.items() if region]


def _region(part: _Part, sizes: Sequence[int]) -> Region:
    """What a rank has: each axis cuts what the axes before it have left, as `torch.chunk` does."""
    spans = [(0, n) for n in part.shape]
    for dim, at, size in zip(part.cuts, part.at, sizes, strict=True):
        if dim is not None:
            low, high = spans[dim]
            step = -(-(high - low) // size)
            spans[dim] = min(low + at * step, high), min(low + (at + 1) * step, high)
    return Region.box([a for a, _ in spans], [b - a for a, b in spans])


def _same(maps: Maps, one: TensorPlace, other: TensorPlace) -> bool:
    a, b = (view(maps, place).reshape(-1).contiguous().view(torch.uint8) for place in (one, other))
    return torch.equal(a, b)
