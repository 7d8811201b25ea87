"""Export the model of a checkpoint as a Hugging Face directory, as a stream: memory is a setting, however large it is.

    a thread: read a window of the new file from wherever its elements lie, every byte proved by its block's checksum
    here:     sum it for the tensors' digests, write it past the page cache, file after file

Windows take turns in the memory that was given. Where nothing is cast, the digest of each tensor, taken from the bytes
on their way to the disk, must be the one in the checkpoint: the copy is proved, not believed. Everything is written
under a temporary name and appears by one rename.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tangram import __version__
from tangram.checkpoint.formats import read_ahead
from tangram.checkpoint.formats.common.config_json import true_of
from tangram.checkpoint.formats.common.side_files import of_checkpoint, side_files, with_provenance, write_side_files
from tangram.checkpoint.formats.read_ahead import Ahead
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.loading.read import in_file_order
from tangram.checkpoint.loading.scatter import holds, is_float
from tangram.checkpoint.saving.file_layout import Image, Outgoing, images
from tangram.checkpoint.saving.file_writer import RING, Ring, write_from
from tangram.checkpoint.saving.rank_parts import INDEX, MODEL
from tangram.checkpoint.store import commits, digest, safetensors_header
from tangram.checkpoint.store.commits import appearing
from tangram.checkpoint.store.digest import Bytes, Sums
from tangram.checkpoint.store.manifest import BLOCK, DTYPES, Manifest, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region
from tangram.models.building.directory import hub_hint
from tangram.relayout import TensorSpec

SINGLE = "model.safetensors"
MEMORY = 512 << 20
LEAST = RING * BLOCK + read_ahead.LEAST
"""Bytes of memory without which nothing can be converted."""
SHARD = 5_000_000_000
"""Bytes of tensors in a file, as transformers cuts them."""


@dataclass(frozen=True)
class Converted:
    """What has been written."""

    path: Path
    tensors: int
    nbytes: int
    """Of the tensors."""
    files: tuple[str, ...]
    """All, the small ones included."""
    cast: int
    """Tensors whose type was changed; all others have the digests of the checkpoint."""
    configured: bool
    """Whether there is a config.json, without which transformers loads nothing."""
    seconds: float
    changed: tuple[str, ...] = ()
    """What was changed in the configuration, so that it is true of the tensors."""
    left_beside: tuple[str, ...] = ()
    """What is beside the weights of `config` and was not copied."""

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "files": list(self.files),
            "proved_equal": self.tensors - self.cast,
            "cast": self.cast,
            "config": self.configured,
            "config_changed": list(self.changed),
            "left_beside": list(self.left_beside),
            "seconds": round(self.seconds, 3),
        }


def to_hugging_face(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    rounded: bool = False,
    shard: int = SHARD,
    memory: int = MEMORY,
    config: Path | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Converted:
    """Write the section `model` of the checkpoint `source` as the directory `target`.

    `dtype`: floating-point tensors are cast to it; `rounded` says that this may lose bits. `shard`: bytes of a file at
    most, but for a larger tensor. `memory`: bytes for all buffers. `config`: a directory to copy configuration and
    tokenizer from, before those that were saved in the checkpoint. `on_bytes` is called with how many more bytes are
    written. Raises UserError for what cannot be converted, DamagedError for bytes that are not those that were saved;
    nothing is left of the target then.
    """
    begin = time.perf_counter()
    if memory < LEAST:
        raise UserError(f"{memory:,} bytes of memory are too few: give {LEAST >> 20} MiB or more")
    manifest = commits.read_manifest(source)
    tensors = _model(source, manifest)
    specs = {tensor.name: TensorSpec(tensor.spec.shape, _type(tensor, dtype, rounded)) for tensor in tensors}
    small, changed, left = _small_files(source, manifest, config, dtype, specs)
    planned = planned_images(specs, shard, manifest.id)
    nbytes = sum(placed.piece.nbytes for image in planned for placed in image.placed)
    with appearing(target, nbytes) as partial:
        sums = _write(source, manifest, partial, planned, memory, on_bytes or (lambda count: None))
        _prove(source, manifest, specs, sums)
        if len(planned) > 1:
            small[INDEX] = index_of(planned)
        write_side_files(partial, small)
    return Converted(
        path=target,
        tensors=len(specs),
        nbytes=nbytes,
        files=(*(image.name for image in planned), *small),
        cast=sum(manifest.tensors[name].spec != spec for name, spec in specs.items()),
        configured="config.json" in small,
        seconds=time.perf_counter() - begin,
        changed=changed,
        left_beside=left,
    )


def size_of(source: Path, dtype: str | None = None, rounded: bool = False) -> int:
    """The bytes of tensors that the same conversion writes. Raises as it does."""
    tensors = _model(source, commits.read_manifest(source))
    return sum(tensor.nbytes // tensor.itemsize * DTYPES[_type(tensor, dtype, rounded)] for tensor in tensors)


def bytes_of(text: str) -> int:
    """A size as people write it: 512MiB, 5GB, 4096. Raises UserError."""
    match = re.fullmatch(r"([0-9]{1,12})(?:\.([0-9]{1,6}))? ?([KMGT]?i?)B?", text)
    if match is None or match[3] == "i":
        raise UserError(f"{text!r} is no size: write it as 512MiB or 5GB")
    number = float(f"{match[1]}.{match[2] or 0}")
    return int(number * (1024 if match[3].endswith("i") else 1000) ** " KMGT".index(match[3][:1] or " "))


# ---------------------------------------------------------------- what is written


def _model(source: Path, manifest: Manifest) -> list[StoredTensor]:
    found = [tensor for name, tensor in manifest.tensors.items() if name.startswith(f"{MODEL}.")]
    if not found:
        sections = ", ".join(sorted({name.partition(".")[0] for name in manifest.tensors})) or "no tensors at all"
        raise UserError(f'the checkpoint "{source}" has no section {MODEL!r} to export; it has {sections}')
    return in_file_order(found)


def _type(tensor: StoredTensor, dtype: str | None, rounded: bool) -> str:
    made = cast_of(tensor.name, tensor.spec.dtype, dtype, rounded)
    if made not in safetensors_header.NAMES:
        raise UserError(f"{tensor.name} is {made}, which safetensors has no name for: give a --dtype")
    return made


def cast_of(name: str, own: str, dtype: str | None, rounded: bool) -> str:
    """The type that a tensor gets where a floating-point type is asked for; others keep theirs.

    Raises UserError for what is no such type, and where it has not every value of the tensor's own: that must be said
    with `rounded`.
    """
    if dtype is None:
        return own
    if dtype not in DTYPES or not is_float(dtype):
        known = ", ".join(known for known in safetensors_header.NAMES if is_float(known))
        raise UserError(f"--dtype {dtype}: give one of {known}")
    if not is_float(own):
        return own
    if not rounded and not holds(dtype, own):
        raise UserError(f"{name} is {own}, of which {dtype} would lose bits: add --round where that is meant")
    return dtype


def planned_images(specs: Mapping[str, TensorSpec], shard: int, save_id: str) -> list[Image]:
    """The files: tensors in the order in which they are read, in as many files as `shard` asks for."""
    pieces = [Outgoing(name, spec, Region.full(spec.shape)) for name, spec in specs.items()]
    files = by_size(pieces, shard, lambda piece: piece.nbytes)
    made = [images(some, i, len(files), save_id)[0] for i, some in enumerate(files)]
    return made if len(made) > 1 else [replace(made[0], name=SINGLE)]


T = TypeVar("T")


def by_size(pieces: Iterable[T], most: int, nbytes: Callable[[T], int]) -> list[list[T]]:
    """Pieces in files of at most so many bytes, one after the other; a larger one has a file of its own."""
    files: list[list[T]] = [[]]
    room = most
    for piece in pieces:
        if nbytes(piece) > room and files[-1]:
            files.append([])
            room = most
        files[-1].append(piece)
        room -= nbytes(piece)
    return files


def index_of(planned: Sequence[Image]) -> bytes:
    table = {placed.piece.key: image.name for image in planned for placed in image.placed}
    size = sum(placed.piece.nbytes for image in planned for placed in image.placed)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(table.items()))}, indent=2).encode()


def _small_files(
    source: Path, manifest: Manifest, config: Path | None, dtype: str | None, specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, bytes], tuple[str, ...], tuple[str, ...]]:
    """Side files from the checkpoint and from a directory, what was changed in the configuration, and what was left."""
    found = of_checkpoint(source, manifest)
    left: tuple[str, ...] = ()
    if config is not None:
        if not (config / "config.json").is_file():
            raise UserError(f'--config "{config}": give a directory with a config.json{hub_hint(config)}')
        beside = side_files(config)
        found, left = {**found, **beside.files}, beside.left
    if dtype is not None and "config.json" in found:
        found["config.json"] = with_dtype(found["config.json"], dtype)
    names = {name.removeprefix(f"{MODEL}."): spec for name, spec in specs.items()}
    found, changed = true_of(found, names)
    made = {"from": "tangram", "folder": source.name, "to": "hf", "dtype": dtype, "tangram": __version__}
    origin = (source if config is None else config).resolve().name
    return with_provenance(found, made, origin, left), changed, left


def with_dtype(data: bytes, dtype: str) -> bytes:
    """A configuration that says the type of the weights, where it says any."""
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise UserError(f"the config.json cannot be read: {error}") from None
    for key in ("dtype", "torch_dtype"):
        if isinstance(fields, dict) and key in fields:
            fields[key] = dtype
    return json.dumps(fields, indent=2).encode()


def _prove(source: Path, manifest: Manifest, specs: Mapping[str, TensorSpec], sums: Mapping[str, Sums]) -> None:
    """That what was written of each tensor that was not cast is what was saved."""
    for name, spec in specs.items():
        stored = manifest.tensors[name]
        if not stored.digest:
            raise UserError(
                f'"{source}" is a snapshot in memory, without the digests that prove an export: give a checkpoint of '
                "the run's folder, into which `tangram launch --resume` brings it"
            )
        own = digest.digest(spec.dtype, spec.shape, sums.get(name, digest.NOTHING))
        if spec == stored.spec and own != stored.digest:
            raise DamagedError(f'{name} of the checkpoint "{source}" is not what was saved: its digest is another')


# ---------------------------------------------------------------- the stream


def _write(
    source: Path,
    manifest: Manifest,
    partial: Path,
    planned: Sequence[Image],
    memory: int,
    on_bytes: Callable[[int], None],
) -> dict[str, Sums]:
    """Write all files. Returns the sums of the tensors, of the bytes as they went to the disk."""
    ring = Ring()
    sums: dict[str, Sums] = {}
    with Ahead(source, manifest, planned, memory - RING * BLOCK) as reader:
        for image in planned:

            def take(start: int, out: Bytes) -> Bytes:
                reader.copy(start, out)
                on_bytes(len(out))
                return out

            for name, some in write_from(partial, image, take, ring, checked=False).sums.items():
                sums[name] = digest.add(sums.get(name, digest.NOTHING), some)
    return sums
