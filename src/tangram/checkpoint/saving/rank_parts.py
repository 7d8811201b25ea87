"""What each rank wrote, as a small file beside its data, and all of them put together into the manifest.

A rank that is done leaves `part-00002.json` in the folder under way, one that cannot leaves `failed-00002.json`. Who
commits needs nothing but these files: no message, so writers that outlive their ranks still finish a checkpoint.
"""

import contextlib
import datetime
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tangram.checkpoint.saving.file_layout import Image
from tangram.checkpoint.saving.file_writer import WrittenFile
from tangram.checkpoint.state.optimiser_groups import merged_groups
from tangram.checkpoint.store import commits, digest, safetensors_header
from tangram.checkpoint.store.commits import write_file
from tangram.checkpoint.store.digest import Sums
from tangram.checkpoint.store.manifest import (
    Manifest,
    ManifestError,
    StoredFile,
    StoredPiece,
    StoredTensor,
    check,
    checksums,
    region_fields,
    region_of,
)
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import TensorSpec

INDEX = "model.safetensors.index.json"
MODEL = "model"
"""The section that other libraries read the weights from."""


class SaveError(UserError):
    """A checkpoint could not be written; what was good before still is."""


@dataclass(frozen=True)
class About:
    """What is written beside the tensors."""

    step: int = 0
    mesh: str = ""
    """Text of the mesh that the state lies on, for people."""
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    """Small files by name, as `config.json`: with it and a model that lies whole, others load the folder as it is."""


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote: its files, and for each tensor its pieces and their sums."""

    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    """With an empty digest, and only this rank's pieces."""
    sums: Mapping[str, Sums]
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What is no tensor, by section and name."""


def part_of(
    images: Sequence[Image],
    written: Sequence[WrittenFile],
    empty: Mapping[str, TensorSpec] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> RankPart:
    """What a rank wrote, from its files. `empty`: tensors without elements, which no file has."""
    tensors = {name: StoredTensor(name, spec, "", ()) for name, spec in (empty or {}).items()}
    for image in images:
        for placed in image.placed:
            piece = placed.piece
            before = tensors[piece.name].pieces if piece.name in tensors else ()
            own = StoredPiece(piece.region, image.name, placed.offset)
            tensors[piece.name] = StoredTensor(piece.name, piece.spec, "", (*before, own), piece.layout)
    sums: dict[str, Sums] = {}
    for file in written:
        for name, some in file.sums.items():
            sums[name] = digest.add(sums.get(name, digest.NOTHING), some)
    return RankPart({file.name: file.file for file in written}, tensors, sums, objects or {})


def merged(parts: Iterable[RankPart], **fields: Any) -> Manifest:
    """The manifest of all that was written; `fields` are its others: id, step, created, mesh.

    Ranks may have different objects, as stages of a pipeline do; one that several have is as the first of them has it,
    but that the groups of an optimiser have the parameters of all. Raises ManifestError where some elements of a
    tensor were written by nobody, or by two.
    """
    files: dict[str, StoredFile] = {}
    known: dict[str, StoredTensor] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    sums: dict[str, Sums] = {}
    objects: dict[str, Any] = {}
    for part in parts:
        files |= part.files
        for name, value in part.objects.items():
            objects[name] = merged_groups(objects[name], value) if name in objects else value
        for name, tensor in part.tensors.items():
            one = known.setdefault(name, tensor)
            if one.spec != tensor.spec:
                raise ManifestError(f"one rank has {name} as {one.spec}, another as {tensor.spec}")
            pieces.setdefault(name, []).extend(tensor.pieces)
        for name, some in part.sums.items():
            sums[name] = digest.add(sums.get(name, digest.NOTHING), some)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in sorted(known.items()):
        own = digest.digest(tensor.spec.dtype, tensor.spec.shape, sums.get(name, digest.NOTHING))
        tensors[name] = StoredTensor(name, tensor.spec, own, tuple(pieces[name]), tensor.layout)
    manifest = Manifest(tensors=tensors, files=files, objects=objects, **fields)
    check(manifest)
    return manifest


def with_small_files(partial: Path, manifest: Manifest, beside: Mapping[str, str | bytes]) -> Manifest:
    """Write the small files beside the data, and the index that makes the model loadable where it lies whole."""
    small = dict(beside)
    index = hugging_face_index(manifest)
    if index is not None:
        small[INDEX] = index
    files = dict(manifest.files)
    for name, text in small.items():
        data = text.encode() if isinstance(text, str) else text
        write_file(partial / name, data)
        files[name] = StoredFile(len(data), checksums(data))
    return replace(manifest, files=files)


def hugging_face_index(manifest: Manifest) -> str | None:
    """The index of the model's files; None unless there is a model and each tensor of it lies whole in one file."""
    model = [t for name, t in manifest.tensors.items() if name.startswith(f"{MODEL}.")]
    if not model or not all(_stands_whole(t) for t in model):
        return None
    table = {t.name.partition(".")[2]: t.pieces[0].file for t in model}
    return json.dumps({"metadata": {"total_size": sum(t.nbytes for t in model)}, "weight_map": table}, indent=1)


def _stands_whole(tensor: StoredTensor) -> bool:
    """Whether a file has it under its own name, with its own type."""
    regions = [piece.region for piece in tensor.pieces]
    return regions == [Region.full(tensor.spec.shape)] and tensor.spec.dtype in safetensors_header.NAMES


# ---------------------------------------------------------------- as files


def leave_part(partial: Path, writer: int, part: RankPart) -> None:
    """Leave what this writer did in the folder under way."""
    numbers = {name: i for i, name in enumerate(part.files)}
    rows = {
        name: {
            "dtype": t.spec.dtype,
            "shape": list(t.spec.shape),
            "layout": t.layout,
            "sums": list(part.sums.get(name, digest.NOTHING)),
            "pieces": [[numbers[p.file], p.offset, *region_fields(p.region)] for p in t.pieces],
        }
        for name, t in part.tensors.items()
    }
    files = {name: {"size": f.size, "sums": list(f.sums)} for name, f in part.files.items()}
    fields = {"files": files, "tensors": rows, "objects": dict(part.objects)}
    _appear(partial / f"part-{writer:05d}.json", json.dumps(fields).encode())


def leave_failure(partial: Path, writer: int, reason: str) -> None:
    """Say in the folder under way that this writer cannot."""
    _appear(partial / f"failed-{writer:05d}.json", json.dumps({"reason": reason}).encode())


def _appear(file: Path, data: bytes) -> None:
    """Write a file that is seen whole or not at all."""
    hidden = file.with_name(f".{file.name}")
    hidden.unlink(missing_ok=True)
    write_file(hidden, data)
    hidden.rename(file)


def found_parts(partial: Path, writers: int) -> list[RankPart] | None:
    """The parts of all writers, or None while some are missing. Raises OSError with the reason of one that cannot."""
    failed = sorted(partial.glob("failed-*.json"))
    if failed:
        raise OSError(json.loads(failed[0].read_text())["reason"])
    files = [partial / f"part-{writer:05d}.json" for writer in range(writers)]
    if not all(file.exists() for file in files):
        return None
    return [_read_part(file) for file in files]


def remove_words(partial: Path) -> None:
    """Remove the small files of the writers, once they are merged, and those of one that spoke too late."""
    for kind in ("part", "failed"):
        for file in (*partial.glob(f"{kind}-*.json"), *partial.glob(f".{kind}-*.json")):
            file.unlink()


def _read_part(file: Path) -> RankPart:
    fields = json.loads(file.read_text())
    names = list(fields["files"])
    tensors = {
        name: StoredTensor(
            name,
            TensorSpec(tuple(row["shape"]), row["dtype"]),
            "",
            tuple(StoredPiece(region_of(rest, name), names[number], offset) for number, offset, *rest in row["pieces"]),
            row["layout"],
        )
        for name, row in fields["tensors"].items()
    }
    files = {name: StoredFile(row["size"], tuple(row["sums"])) for name, row in fields["files"].items()}
    sums = {name: tuple(row["sums"]) for name, row in fields["tensors"].items()}
    return RankPart(files, tensors, sums, fields["objects"])


def new_id() -> str:
    """The id of a new save."""
    return secrets.token_hex(16)


def sentence(error: BaseException) -> str:
    """An error in one sentence, without a trace."""
    if isinstance(error, OSError) and error.strerror:
        return f'"{error.filename}": {error.strerror}' if error.filename else error.strerror
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def finish(partial: Path, path: Path, writers: int, save_id: str, about: About) -> Manifest:
    """Put the parts of all writers together and commit them as `path`."""
    found = found_parts(partial, writers)
    if found is None:
        raise SaveError("a rank left no part, though it said that all went well")
    manifest = merged(
        found,
        id=save_id,
        step=about.step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        mesh=about.mesh,
    )
    closing = commits.closing_path(partial)
    partial.rename(closing)
    try:
        manifest = with_small_files(closing, manifest, about.beside)
        remove_words(closing)
        commits.commit(closing, path, manifest)
    except BaseException:
        with contextlib.suppress(OSError):
            closing.rename(partial)
        raise
    return manifest
