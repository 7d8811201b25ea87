"""Torch's distributed checkpoint (DCP): a directory of `.metadata` and `.distcp` files, as pieces.

The metadata says for each tensor its shape and the chunks it is made of, and for each chunk the file, offset and length
of its bytes. That is all a relayout needs, so torch's planners, which want the DTensors of a running job on either
side, are not used: what is written are regions, and torch's own description of a DTensor is wrong for some uneven cuts.

The metadata is a pickle as torch writes it; it is read by an unpickler that knows torch's descriptions of tensors and
makes opaque objects of all else, so nothing of it is run.
"""

import io
import os
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]  what torch's own reader unpickles
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tangram.checkpoint.formats.archives.archive import UNPICKLE, Opaque, TensorPlace
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.small_archives import Archives, archived
from tangram.checkpoint.formats.common.model_part import model_part
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import Naming
from tangram.checkpoint.formats.common.outgoing import WriteTask, filled
from tangram.checkpoint.formats.common.side_files import small_files, write_side_files
from tangram.checkpoint.loading.page_memory import fetched
from tangram.checkpoint.saving.file_writer import FileStream, Ring
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

INDEX = ".metadata"
DATA = "__0_{}.distcp"
NAMING = Naming("state.{param}.{state}", front="optimizer.", lead=r"(?:(?:\w+\.){0,3}?\w*optim\w*\.|(?:\w+\.){0,4}?)")
"""As torch's `get_optimizer_state_dict` names states, under torchtitan's key, or any that a program has.

One that says `optim` goes first, as what holds it may be called `state` as well."""
ALIGNED = 64
"""Bytes of which each chunk begins at a multiple: elements then do as well, in a map of the file."""


@dataclass(frozen=True)
class ByteSpan:
    """Where the bytes of one chunk are."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpIndex:
    """The tensors of a checkpoint and the pieces they lie in; the place of a piece is its `ByteSpan`."""

    specs: Mapping[str, TensorSpec]
    pieces: tuple[Piece, ...]
    opaque: tuple[str, ...]
    """Entries that are no tensors: pickled Python objects, which are named but not read."""


def read_index(path: Path) -> DcpIndex:
    """Read the metadata of the checkpoint directory `path`."""
    metadata = _read_metadata(path)
    try:
        return _index(path, metadata)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f'the .metadata file of the DCP checkpoint "{path}" does not hold together: {error!r}'
        ) from None


def _index(path: Path, metadata: Metadata) -> DcpIndex:
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    opaque: list[str] = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            opaque.append(name)
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise UserError(f'"{name}" in "{path}" has the type {dtype}, which this version does not read')
        specs[name] = TensorSpec(shape=tuple(entry.size), dtype=dtype)
        for chunk in entry.chunks:
            region = Region.box(tuple(chunk.offsets), tuple(chunk.sizes))
            pieces.append(Piece(_span(path, metadata, name, chunk), name, region))
    return DcpIndex(specs, tuple(pieces), tuple(opaque))


def _read_metadata(path: Path) -> Metadata:
    file = path / INDEX
    try:
        found: Any = _Reader(io.BytesIO(file.read_bytes())).load()
    except FileNotFoundError:
        raise UserError(f'"{path}" is not a complete DCP checkpoint: it has no .metadata file') from None
    except (*UNPICKLE, RuntimeError) as error:
        raise UserError(f'the .metadata file of the DCP checkpoint "{path}" is damaged: {error}') from None
    if not isinstance(found, Metadata):
        raise UserError(f'the .metadata file of the DCP checkpoint "{path}" is no metadata of torch\'s')
    return found


class _Reader(pickle.Unpickler):
    """Makes torch's own descriptions, and opaque objects of everything else: nothing is imported or run."""

    def find_class(self, module: str, name: str) -> Any:
        """The few classes that describe tensors."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _DESCRIBING.get((module, name)) or type("Opaque", (Opaque,), {"kind": f"{module}.{name}"})


_DESCRIBING: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("builtins", "dict"): dict,
    ("collections", "OrderedDict"): dict,
    **{
        (one.__module__, one.__name__): one
        for one in (
            BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties,
            TensorStorageMetadata, _StorageInfo, StorageMeta, _MEM_FORMAT_ENCODING,
        )
    },
}  # fmt: skip


def _span(path: Path, metadata: Metadata, name: str, chunk: ChunkStorageMetadata) -> ByteSpan:
    stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    if stored.transform_descriptors:
        how = ", ".join(stored.transform_descriptors)
        raise UserError(
            f'"{name}" in "{path}" was written through the transform {how}, which this reader does not know'
        )
    return ByteSpan(stored.relative_path, stored.offset, stored.length)


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """A directory, whose chunks are mapped. Raises UserError for one that is not whole."""
    index = read_index(path)
    raw = OpenCheckpoint(
        "dcp", path, index.specs, index.pieces, mapped_chunks(maps), maps.release, index.opaque, small_files(path)
    )
    return model_part(raw, NAMING, index.opaque)


def mapped_chunks(maps: Maps) -> Callable[[Hashable, str], Tensor]:
    """A function from the place and tensor of a piece to a view of its values in the mapped file."""
    places: dict[ByteSpan, TensorPlace] = {}
    archives = Archives(maps)

    def read(span: Hashable, name: str) -> Tensor:
        assert isinstance(span, ByteSpan)
        if span not in places:
            found = archives.place(span.file, span.offset, span.length)
            if not isinstance(found, TensorPlace):
                raise UserError(f'"{name}" in "{maps.folder / span.file}" is no tensor')
            places[span] = found
        place = places[span]
        return maps.view(place.file, place.offset, place.dtype, place.shape, place.stride)

    return read


# ---------------------------------------------------------------- writing


def write(task: WriteTask) -> list[str]:
    """Write a directory that torch's own reader loads; the names of its files."""
    owners = task.owners
    names = {name: NAMING.write(*owners[name]) if owners[name][1] else name for name in task.specs}

    def chunks() -> Iterator[Chunk]:
        for name, own in names.items():
            for offsets, values in filled(task, name):
                yield Chunk(own, offsets, values)

    with fetched(chunks(), size_of) as made:
        written, files = stream_chunks(task, made)
    write_index(task.folder, {own: task.specs[name] for name, own in names.items()}, written)
    return [*files, INDEX, *write_side_files(task.folder, task.small)]  # which torch's reader does not look at


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, with memory of its own on the CPU."""

    name: str
    offsets: tuple[int, ...]
    values: Tensor


def size_of(chunk: Chunk) -> int:
    return chunk.values.nbytes


@dataclass(frozen=True)
class WrittenChunk:
    """A block that is on the disk."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: ByteSpan


def stream_chunks(task: WriteTask, chunks: Iterator[Chunk]) -> tuple[list[WrittenChunk], list[str]]:
    """Write blocks one behind the other past the page cache, in files of a task's size, whose names come back, too."""
    written: list[WrittenChunk] = []
    files: list[str] = []
    ring, first = Ring(), next(chunks, None)
    while first is not None:
        name, after = DATA.format(len(files)), list[Chunk]()
        with FileStream(task.folder / name, ring) as stream:
            written += write_chunks(stream, name, _until(stream, first, chunks, task.shard, after))
            stream.finish()
        task.done(name)
        files.append(name)
        first = after[0] if after else None
    return written, files


def _until(stream: FileStream, first: Chunk, chunks: Iterator[Chunk], most: int, after: list[Chunk]) -> Iterator[Chunk]:
    """A chunk and those that follow it, until a file has its size; the one that no longer fits is left in `after`."""
    yield first
    for chunk in chunks:
        if stream.tell() + chunk.values.nbytes > most:
            after.append(chunk)
            return
        yield chunk


def write_chunks(stream: FileStream, name: str, chunks: Iterable[Chunk]) -> list[WrittenChunk]:
    """Write blocks into the file `name`, each as `torch.save` would. Raises OSError as the disk does."""
    found: list[WrittenChunk] = []
    for chunk in chunks:
        stream.write(bytes(-stream.tell() % ALIGNED))
        start = stream.tell()
        sink, small = _Sink(stream), archived(chunk.values)
        if small is not None:
            sink.write(small)
        else:
            torch.save(chunk.values, cast(IO[bytes], sink))
        if sink.error is not None:
            raise sink.error
        span = ByteSpan(name, start, sink.size)
        found.append(WrittenChunk(chunk.name, chunk.offsets, tuple(chunk.values.shape), span))
    return found


class _Sink:
    """The stream that torch.save writes into: adds up its size.

    An error of the disk is kept for after torch.save, whose writer in C++ is not made to be left in the middle.
    """

    def __init__(self, stream: FileStream) -> None:
        self.stream = stream
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        n = memoryview(data).nbytes
        if self.error is None:
            try:
                self.stream.write(data)
            except OSError as error:
                self.error = error
            self.size += n
        return n

    def flush(self) -> None:
        """Nothing to do here: the file is flushed once, at its end."""


def write_object(file: Path, value: object) -> ByteSpan:
    """Write something that is no tensor into a new file, as DCP has it."""
    with file.open("xb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
        return ByteSpan(file.name, 0, stream.tell())


def write_index(
    path: Path,
    specs: Mapping[str, TensorSpec],
    written: Iterable[WrittenChunk],
    objects: Mapping[str, ByteSpan] | None = None,
) -> None:
    """Write the `.metadata` of the directory `path`, as torch's own reader wants it.

    `objects`: what is no tensor, by name; several may lie in the same bytes.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in specs}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    kinds = {spec.dtype: TensorProperties(getattr(torch, spec.dtype)) for spec in specs.values()}
    for block in written:
        offsets = torch.Size(block.offsets)
        chunks[block.name].append(ChunkStorageMetadata(offsets, torch.Size(block.sizes)))
        stored[MetadataIndex(block.name, offsets)] = _StorageInfo(block.span.file, block.span.offset, block.span.length)
    entries = {
        name: TensorStorageMetadata(kinds[spec.dtype], torch.Size(spec.shape), chunks[name])
        for name, spec in specs.items()
    }
    known: dict[str, Any] = dict(entries)
    for name, at in (objects or {}).items():
        known[name] = BytesStorageMetadata()
        stored[MetadataIndex(name)] = _StorageInfo(at.file, at.offset, at.length)
    data = pickle.dumps(Metadata(known, {name: (name,) for name in known}, stored, version=CURRENT_DCP_VERSION))
    with (path / INDEX).open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
