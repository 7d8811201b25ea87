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
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from tangram.checkpoint.saving.file_layout import Image
from tangram.checkpoint.saving.file_writer import WrittenFile
from tangram.checkpoint.state.optimiser_groups import merged_groups
from tangram.checkpoint.store import commits, digest, safetensors_header
from tangram.checkpoint.store.commits import write_file
from tangram.checkpoint.store.digest import Sums
from tangram.checkpoint.store.manifest import (
    KeptTensors,
    Manifest,
    ManifestError,
    StoredFile,
    StoredPiece,
    StoredTensor,
    check,
    check_names,
    checksums,
    region_fields,
    region_of,
)
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import TensorSpec


@dataclass(frozen=True)
class Settings:
    """How saves are made."""

    policy: Literal["wait", "skip"] = "wait"
    """What a save does that comes while the last one is still being written: wait, or be left out and reported."""
    retries: int = 1
    """How often a save that failed is tried again, from the same copy."""
    pause: float = 5.0
    """Seconds before that."""
    limit: float = 600.0
    """Seconds without any progress after which storage, or another rank's writer, counts as stalled."""
    keep: tuple[str, ...] = ()
    """Rules of `tangram.checkpoint.store.retention`: which are kept after each commit. None: all."""
    node: tuple[int, int, int, int] | None = None
    """Of snapshots that stay on several machines: which of how many this is, its first rank, and how many it has.
    What the ranks of each have written is committed there, as a share."""
    digests: bool = True
    """Whether each tensor gets its digest; without, whoever copies a checkpoint of memory to a disk takes them."""


@dataclass(frozen=True)
class SaveResult:
    """What came of a save."""

    step: int
    path: Path | None
    """The checkpoint; None when there is none."""
    reason: str
    """Why not, in one sentence."""
    blocked: float
    """Seconds that training stood still: in `save` and in `fence`."""
    seconds: float
    """From `save` until the checkpoint was durable on this rank's word, or given up."""
    nbytes: int
    """That this rank's writer wrote."""
    cpu: float = 0.0
    """Seconds of a core that copying and writing took, on this rank."""
    notes: tuple[str, ...] = ()
    """What a person should know: a process that had to be replaced, an old checkpoint that could not be removed."""


INDEX = "model.safetensors.index.json"
MODEL = "model"
"""The section that other libraries read the weights from."""
KEPT = 1 << 16
"""Rows of tensors that are kept from one save to the next."""
KEPT_TEXT = 1 << 20
"""Bytes of a part's line that are."""


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
    created: str = ""
    """ISO 8601, UTC; empty: now."""


@dataclass(frozen=True, eq=False)
class PartTensors:
    """Where a rank writes what: the same from save to save, as long as the state lies as it did."""

    rows: Mapping[str, StoredTensor]
    """With an empty digest, and only this rank's pieces."""

    @cached_property
    def text(self) -> bytes:
        numbers = {piece.file: 0 for row in self.rows.values() for piece in row.pieces}
        numbers = {name: number for number, name in enumerate(numbers)}
        rows = {
            name: {
                "dtype": t.spec.dtype,
                "shape": list(t.spec.shape),
                "layout": t.layout,
                "pieces": [[numbers[p.file], p.offset, *region_fields(p.region)] for p in t.pieces],
            }
            for name, t in self.rows.items()
        }
        return json.dumps({"files": list(numbers), "tensors": rows}).encode()


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote: its files, and for each tensor its pieces and their sums."""

    files: Mapping[str, StoredFile]
    tensors: PartTensors
    sums: Mapping[str, Sums] | None
    """None: not taken, and no tensor gets a digest."""
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What is no tensor, by section and name."""


def tensors_of(images: Iterable[Image], empty: Mapping[str, TensorSpec] | None = None) -> PartTensors:
    """What a rank writes into its files. `empty`: tensors without elements, which no file has."""
    tensors = {name: StoredTensor(name, spec, "", ()) for name, spec in (empty or {}).items()}
    for image in images:
        for placed in image.placed:
            piece = placed.piece
            before = tensors[piece.name].pieces if piece.name in tensors else ()
            own = StoredPiece(piece.region, image.name, placed.offset)
            tensors[piece.name] = StoredTensor(piece.name, piece.spec, "", (*before, own), piece.layout)
    return PartTensors(tensors)


def part_of(
    tensors: PartTensors, written: Sequence[WrittenFile], objects: Mapping[str, Any] | None = None, summed: bool = True
) -> RankPart:
    sums: dict[str, Sums] = {}
    for file in written:
        for name, some in file.sums.items():
            sums[name] = digest.add(sums.get(name, digest.NOTHING), some)
    return RankPart({file.name: file.file for file in written}, tensors, sums if summed else None, objects or {})


def merged(parts: Iterable[RankPart], *, partly: bool = False, **fields: Any) -> Manifest:
    """The manifest of all that was written; `fields` are its others: id, step, created, mesh. `partly`: these are the
    parts of one of several machines.

    Ranks may have different objects, as stages of a pipeline do; one that several have is as the first of them has it,
    but that the groups of an optimiser have the parameters of all. Raises ManifestError where some elements of a
    tensor were written by nobody, or by two.
    """
    files: dict[str, StoredFile] = {}
    sums: dict[str, Sums] | None = {}
    objects: dict[str, Any] = {}
    laid: list[PartTensors] = []
    for part in parts:
        files |= part.files
        laid.append(part.tensors)
        for name, value in part.objects.items():
            objects[name] = merged_groups(objects[name], value) if name in objects else value
        if part.sums is None or sums is None:
            sums = None
            continue
        for name, some in part.sums.items():
            sums[name] = digest.add(sums.get(name, digest.NOTHING), some)
    few = sum(len(one.rows) for one in laid) <= KEPT
    join = _joined if few else _joined.__wrapped__
    tensors = join(tuple(laid), tuple((name, file.size) for name, file in files.items()), partly)
    check_names(objects)
    manifest = Manifest(tensors=tensors, files=files, objects=objects, **fields)
    return manifest if sums is None else with_digests(manifest, sums)


@lru_cache(2)
def _joined(laid: tuple[PartTensors, ...], sizes: tuple[tuple[str, int], ...], partly: bool) -> KeptTensors:
    """The tensors of all ranks, whose pieces are proved to cover them; kept, as a state is saved again and again."""
    known: dict[str, StoredTensor] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for part in laid:
        for name, tensor in part.rows.items():
            one = known.setdefault(name, tensor)
            if one.spec != tensor.spec:
                raise ManifestError(f"one rank has {name} as {one.spec}, another as {tensor.spec}")
            pieces.setdefault(name, []).extend(tensor.pieces)
    whole = {name: replace(tensor, pieces=tuple(pieces[name])) for name, tensor in sorted(known.items())}
    tensors = KeptTensors(whole)
    check(Manifest("", 0, "", tensors, {name: StoredFile(size, ()) for name, size in sizes}), partly=partly)
    return tensors


def with_digests(manifest: Manifest, sums: Mapping[str, Sums]) -> Manifest:
    """The manifest with the digest of each tensor, from the sums of its elements."""
    tensors = {
        name: StoredTensor(
            name,
            tensor.spec,
            digest.digest(tensor.spec.dtype, tensor.spec.shape, sums.get(name, digest.NOTHING)),
            tensor.pieces,
            tensor.layout,
        )
        for name, tensor in manifest.tensors.items()
    }
    return replace(manifest, tensors=tensors)


def with_small_files(
    partial: Path, manifest: Manifest, beside: Mapping[str, str | bytes], indexed: bool = True
) -> Manifest:
    """Write the small files beside the data, and the index that makes the model loadable where it lies whole."""
    small = dict(beside)
    if indexed and (index := hugging_face_index(manifest)) is not None:
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
    if not model or not all(_stored_unsharded(t) for t in model):
        return None
    table = {t.name.partition(".")[2]: t.pieces[0].file for t in model}
    return json.dumps({"metadata": {"total_size": sum(t.nbytes for t in model)}, "weight_map": table}, indent=1)


def _stored_unsharded(tensor: StoredTensor) -> bool:
    """Whether a file has it under its own name, with its own type."""
    regions = [piece.region for piece in tensor.pieces]
    return regions == [Region.full(tensor.spec.shape)] and tensor.spec.dtype in safetensors_header.NAMES


# ---------------------------------------------------------------- as files


def leave_part(partial: Path, writer: int, part: RankPart) -> None:
    """Leave what this writer did in the folder under way: a line that is the same each time, and one that is not."""
    files = {name: {"size": f.size, "sums": list(f.sums), "save": f.save} for name, f in part.files.items()}
    fields = {"files": files, "sums": part.sums, "objects": dict(part.objects)}
    _appear(partial / f"part-{writer:05d}.json", part.tensors.text + b"\n" + json.dumps(fields).encode())


def leave_failure(partial: Path, writer: int, reason: str) -> None:
    """Say in the folder under way that this writer cannot. Without a reason the file is empty: a full disk takes it."""
    _appear(partial / f"failed-{writer:05d}.json", json.dumps({"reason": reason}).encode() if reason else b"")


def left_failure(partial: Path) -> str:
    """Why the first writer that has said so cannot; empty where none has."""
    for file in sorted(partial.glob("failed-*.json")):
        text = file.read_text()
        return json.loads(text)["reason"] if text else f"rank {int(file.stem[7:])} has no room to write, nor to say why"
    return ""


def _appear(file: Path, data: bytes) -> None:
    """Write a file that is seen whole or not at all."""
    hidden = file.with_name(f".{file.name}")
    hidden.unlink(missing_ok=True)
    write_file(hidden, data)
    hidden.rename(file)


def complete_parts(partial: Path, writers: Iterable[int]) -> list[RankPart] | None:
    """The parts of all writers, or None while some are missing. Raises OSError with the reason of one that cannot."""
    if reason := left_failure(partial):
        raise OSError(reason)
    files = [partial / f"part-{writer:05d}.json" for writer in writers]
    if not all(file.exists() for file in files):
        return None
    return [_read_part(file) for file in files]


def remove_words(partial: Path) -> None:
    """Remove the small files of the writers, once they are merged, and those of one that spoke too late."""
    for kind in ("part", "failed"):
        for file in (*partial.glob(f"{kind}-*.json"), *partial.glob(f".{kind}-*.json")):
            file.unlink()


def _read_part(file: Path) -> RankPart:
    first, _, second = file.read_bytes().partition(b"\n")
    fields = json.loads(second)
    tensors = (_parsed if len(first) <= KEPT_TEXT else _parsed.__wrapped__)(first)
    files = {name: StoredFile(row["size"], tuple(row["sums"]), row["save"]) for name, row in fields["files"].items()}
    sums = None if fields["sums"] is None else {name: tuple(some) for name, some in fields["sums"].items()}
    return RankPart(files, tensors, sums, fields["objects"])


@lru_cache(64)
def _parsed(text: bytes) -> PartTensors:
    fields = json.loads(text)
    names = fields["files"]
    rows = {
        name: StoredTensor(
            name,
            TensorSpec(tuple(row["shape"]), row["dtype"]),
            "",
            tuple(StoredPiece(region_of(rest, name), names[number], offset) for number, offset, *rest in row["pieces"]),
            row["layout"],
        )
        for name, row in fields["tensors"].items()
    }
    return PartTensors(rows)


def new_id() -> str:
    return secrets.token_hex(16)


def finish(
    partial: Path,
    path: Path,
    writers: int,
    save_id: str,
    about: About,
    found: Sequence[RankPart] | None = None,
    share: tuple[int, int] | None = None,
) -> Manifest:
    """Put the parts of all writers together and commit them as `path`. `found`: the parts, where they are read.
    `share`: which of how many machines these writers are on, where they are those of one."""
    found = found or complete_parts(partial, range(writers))
    if found is None:
        raise SaveError("a rank left no part, though it said that all went well")
    manifest = merged(
        found,
        id=save_id,
        step=about.step,
        created=about.created or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        mesh=about.mesh,
        partly=share is not None,
    )
    closing = commits.closing_path(partial)
    partial.rename(closing)
    try:
        indexed = any(part.sums is not None for part in found)  # else whoever copies it from memory adds both
        manifest = with_small_files(closing, manifest, about.beside, indexed)
        remove_words(closing)
        commits.commit(closing, path, manifest, share=share)
    except BaseException:
        with contextlib.suppress(OSError):
            closing.rename(partial)
        raise
    return manifest
