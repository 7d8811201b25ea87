"""Torch's distributed checkpoint (DCP): a directory of `.metadata` and `.distcp` files, read as pieces.

The metadata says for each tensor its shape and the chunks it is made of, and for each chunk the file, offset and length
of its bytes. That is all a relayout needs, so torch's load planner, which wants the tensors of a running job, is not
used.

Trade-off: the metadata is a pickle that torch writes, and unpickling runs code. Read directories that you trust. The
tensors themselves are read with `weights_only`, which runs none.
"""

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec


@dataclass(frozen=True)
class Span:
    """Where the bytes of one chunk are."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpIndex:
    """The tensors of a checkpoint and the pieces they lie in; the place of a piece is its `Span`."""

    specs: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]
    opaque: tuple[str, ...]
    """Entries that are no tensors: pickled Python objects, which are named but not read."""


def read_index(path: Path) -> DcpIndex:
    """Read the metadata of the checkpoint directory `path`."""
    metadata = _read_metadata(path)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    opaque: list[str] = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            opaque.append(name)
            continue
        specs[name] = TensorSpec(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))
        pieces += [Piece(_span(path, metadata, name, chunk), name, _region(chunk)) for chunk in entry.chunks]
    return DcpIndex(specs, tuple(pieces), tuple(opaque))


def _read_metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(str(path)).read_metadata()
    except FileNotFoundError:
        raise UserError(f'"{path}" is not a complete DCP checkpoint: it has no .metadata file') from None
    except (pickle.UnpicklingError, EOFError) as error:
        raise UserError(f'the .metadata file of the DCP checkpoint "{path}" is damaged: {error}') from None


def _span(path: Path, metadata: Metadata, name: str, chunk: ChunkStorageMetadata) -> Span:
    stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    if stored.transform_descriptors:
        how = ", ".join(stored.transform_descriptors)
        raise UserError(
            f'"{name}" in "{path}" was written through the transform {how}, which this reader does not know'
        )
    return Span(stored.relative_path, stored.offset, stored.length)


def _region(chunk: ChunkStorageMetadata) -> Region:
    return Region.box(tuple(chunk.offsets), tuple(chunk.sizes))


def chunk_reader(path: Path) -> Callable[[Hashable, str], Tensor]:
    """A function from the place and tensor of a piece to its values, read when asked for."""

    def read(place: Hashable, name: str) -> Tensor:
        assert isinstance(place, Span)
        file = path / place.file
        with file.open("rb") as stream:
            stream.seek(place.offset)
            data = stream.read(place.length)
        if len(data) != place.length:
            raise UserError(f'"{name}" in "{file}" is cut off: it has {len(data)} of {place.length} bytes')
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    return read
