"""A Hugging Face directory: `model.safetensors`, or shard files with an index, read as pieces.

Every tensor lies whole in one file, and the files are mapped into memory: a rank that wants some rows reads the pages
that they are on and nothing else. Nothing is unpickled, so a directory from elsewhere cannot run code; one that has
only pickled weights is refused.
"""

import json
import secrets
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tangram.checkpoint.formats.archives.mapped_files import Maps, missing
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.outgoing import WriteTask, taking
from tangram.checkpoint.formats.common.side_files import small_files, write_side_files
from tangram.checkpoint.formats.hf_export import index_of, planned_images
from tangram.checkpoint.saving.file_writer import Ring, write_from
from tangram.checkpoint.saving.rank_parts import MODEL
from tangram.checkpoint.store.safetensors_header import TYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class HuggingFaceIndex:
    """The tensors of a directory; the place of a piece is the name of its file."""

    specs: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]
    beside: tuple[str, ...] = ()
    """Tensors that another file has by the index, and the file that has them, too."""


def has_weights(path: Path) -> bool:
    """Whether a directory has safetensors weights, be they sound or not."""
    return (path / SINGLE).exists() or (path / INDEX).exists()


def read_index(path: Path) -> HuggingFaceIndex:
    """Read what tensors a directory has from the headers of its files. Raises UserError for one that is not whole."""
    named = weight_map(path / INDEX) if (path / INDEX).exists() else {}
    if (path / SINGLE).exists() and not chooses_index(path, SINGLE, set(named.values())):
        named = {}
    files = sorted(set(named.values())) or [SINGLE]
    if not named and not (path / SINGLE).exists():
        pickled = [name for name in PICKLED if (path / name).exists()]
        why = f" (its {pickled[0]} is pickled and is not read: convert it to safetensors)" if pickled else ""
        raise UserError(f'"{path}" has no {SINGLE} and no {INDEX}{why}')
    specs: dict[str, TensorSpec] = {}
    home: dict[str, str] = {}
    beside: list[str] = []
    for file in files:
        for name, spec in _header(path / file).items():
            if name in home and named.get(name) not in (home[name], file):
                raise UserError(f'"{path}" has the tensor {name} twice, in {home[name]} and in {file}')
            if name in home:
                beside.append(f"{name} in {home[name] if named[name] == file else file}")
            if named.get(name, file) == file or name not in home:
                specs[name], home[name] = spec, file
    for name, file in named.items():
        if home.get(name) != file:
            raise UserError(f'the index "{path / INDEX}" says that {name} is in {file}, but it is not')
    pieces = tuple(Piece(home[name], name, Region.full(spec.shape)) for name, spec in specs.items())
    return HuggingFaceIndex(specs, pieces, tuple(beside))


def chooses_index(path: Path, single: str, files: Collection[str]) -> bool:
    """Whether an index says what a directory has that has the file `single`, too; `files`: those that it lists.

    One of which no file is there is left over from before. Raises UserError where both have weights of their own.
    """
    if single in files:
        return True
    others = sorted(file for file in files if (path / file).exists())
    if others:
        raise UserError(
            f'"{path}" has weights twice, in {single} and in {others[0]} and others by the index: move one of them away'
        )
    return False


def weight_map(file: Path) -> dict[str, str]:
    """Which file each tensor is in, by an index. Raises UserError for one that is none."""
    try:
        fields: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f'the index "{file}" cannot be read: {error}') from None
    table: Any = cast(dict[str, Any], fields).get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(table, dict) or not table:
        raise UserError(f'the index "{file}" has no table weight_map')
    named: dict[str, str] = {}
    for name, home in cast(dict[str, Any], table).items():
        if not isinstance(home, str) or Path(home).name != home:
            raise UserError(f'the index "{file}" says that {name} is in {home!r}, which is no name of a file beside it')
        named[name] = home
    return named


def _header(file: Path) -> dict[str, TensorSpec]:
    with _opened(file) as stream:
        specs: dict[str, TensorSpec] = {}
        for name in stream.keys():  # noqa: SIM118  it is no dict
            part = stream.get_slice(name)
            dtype = str(part.get_dtype())
            if dtype not in TYPES:
                raise UserError(
                    f'{name} in "{file}" has the type {dtype}, and those that are read are {", ".join(TYPES)}: have '
                    "the program that wrote it write one of these"
                )
            specs[name] = TensorSpec(tuple(part.get_shape()), TYPES[dtype])
    return specs


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise missing(file) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f'"{file}" is damaged or cut off: {error}') from None


def mapped_reader(path: Path) -> Callable[[Hashable, str], Tensor]:
    """A function from the place and name of a piece to its values: a view of the mapped file, read where it is used."""
    files: dict[str, Any] = {}

    def read(place: Hashable, name: str) -> Tensor:
        assert isinstance(place, str)
        if place not in files:
            files[place] = _opened(path / place)
        return files[place].get_tensor(name)

    return read


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """A directory with its configuration. Raises UserError for one that is not whole."""
    index = read_index(path)
    files = dict.fromkeys(str(piece.place) for piece in index.pieces)
    slots = {(file, slot.name): slot for file in files for slot in maps.header(file)[0]}

    def read(place: Hashable, name: str) -> Tensor:
        slot = slots[str(place), name]
        return maps.view(str(place), slot.offset, slot.dtype, slot.shape)

    places = {str(piece.place) for piece in index.pieces}
    others = [_unlisted(file, index) for file in sorted(path.glob("*.safetensors")) if file.name not in places]
    small = small_files(path)
    return OpenCheckpoint(
        "hf", path, index.specs, index.pieces, read, maps.release, small=small, beside=(*index.beside, *others)
    )


def _unlisted(file: Path, index: HuggingFaceIndex) -> str:
    """A file beside those that are read, and how many tensors of the same names are in it: what ranks wrote has some in
    each, and so has what an index was made anew for."""
    try:
        again = len(_header(file).keys() & index.specs.keys())
    except UserError:  # damaged, or of types that are not read
        again = 0
    return f"{file.name} (which has {again:,} of the same names again)" if again else file.name


def write(task: WriteTask) -> list[str]:
    """Write safetensors, with an index where they are several, and the small files; the names of all."""
    ring = Ring()
    names = {f"{MODEL}.{name}": name for name in task.specs}
    planned = planned_images({own: task.specs[name] for own, name in names.items()}, task.shard, secrets.token_hex(8))
    for image in planned:
        write_from(task.folder, image, taking(image, task, names), ring, checked=False, summed=False)
        task.done(image.name)
    files = [image.name for image in planned]
    small = {**task.small, **({INDEX: index_of(planned)} if len(planned) > 1 else {})}
    return [*files, *write_side_files(task.folder, small)]
