"""Tangram's own checkpoints as one of the formats: model and optimiser, every block proved when it is first looked at.

What is written is a checkpoint like one that was saved: checksums, digests, marker; `tangram.checkpoint.load` and
`verify` take it.
"""

import datetime
import secrets
import tomllib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import SETTINGS, OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import Naming, named
from tangram.checkpoint.formats.common.outgoing import WriteTask, taking
from tangram.checkpoint.formats.common.side_files import of_checkpoint, packed
from tangram.checkpoint.formats.hf_export import by_size
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.saving.file_layout import Outgoing, images
from tangram.checkpoint.saving.file_writer import Ring, WrittenFile, write_from
from tangram.checkpoint.saving.rank_parts import MODEL, merged, part_of, tensors_of, with_small_files
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.manifest import BLOCK, StoredPiece, checksum
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec

NAMING = Naming("{param}.{state}", front="optim.")


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int


def is_own(path: Path) -> bool:
    """Whether a directory has the mark of a commit."""
    return (path / commits.MARKER).exists()


def open_folder(path: Path, maps: Maps) -> OpenCheckpoint:
    """Model and optimiser of a checkpoint, by the names that the module has. Raises UserError for a torn one.

    Other sections, and states of optimisers that are not known, are skipped.
    """
    manifest = commits.read_manifest(path)
    proved: set[tuple[str, int]] = set()
    found: dict[tuple[_Place, str], tuple[StoredPiece, str]] = {}
    specs, pieces = dict[str, TensorSpec](), list[Piece]()
    skipped: list[str] = []
    for name, tensor in manifest.tensors.items():
        if not (name.startswith(f"{MODEL}.") or NAMING.read(name)):
            skipped.append(name)
            continue
        specs[name] = tensor.spec
        for piece in tensor.pieces:
            place = _Place(piece.file, piece.offset)
            pieces.append(Piece(place, name, piece.region))
            found[place, name] = piece, tensor.spec.dtype

    def read(place: Hashable, name: str) -> Tensor:
        assert isinstance(place, _Place)
        piece, dtype = found[place, name]
        shape = piece.region.local_shape if piece.region.local_shape is not None else (piece.region.size,)
        view = maps.view(place.file, place.offset, dtype, shape)
        data, stored = memoryview(maps.data(place.file)), manifest.files[place.file]
        maps.ensure(place.file, place.offset // BLOCK * BLOCK, -(-(place.offset + view.nbytes) // BLOCK) * BLOCK)
        for block in range(place.offset // BLOCK, -(-(place.offset + view.nbytes) // BLOCK)):
            if (place.file, block) in proved:
                continue
            if checksum(data[block * BLOCK : (block + 1) * BLOCK]) != stored.sums[block]:
                raise DamagedError(
                    f'the checkpoint "{path}" is damaged: its file "{place.file}", with {name}, has other bytes from '
                    f"{block * BLOCK} to {min((block + 1) * BLOCK, stored.size)} than were written"
                )
            proved.add((place.file, block))
        return view

    small = of_checkpoint(path, manifest)
    raw = OpenCheckpoint("tangram", path, specs, tuple(pieces), read, maps.release, tuple(skipped), small)
    settings = _settings(manifest.objects)
    return replace(named(raw, NAMING, f"{MODEL}."), objects={"settings": settings} if settings else {})


def _settings(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Of the optimiser: its groups of parameters say them, the plan of the run, or what was converted."""
    groups, about, imported = (objects.get(key) for key in ("optim.param_groups", "about", "imported"))
    known: dict[str, Any] = {}
    if isinstance(groups, list) and groups and all(isinstance(group, dict) for group in cast("list[Any]", groups)):
        known = max(cast("list[dict[str, Any]]", groups), key=lambda group: float(group.get("weight_decay") or 0))
    elif isinstance(about, dict) and "plan" in about:
        known = tomllib.loads(str(cast("dict[str, Any]", about)["plan"])).get("optimiser", {})
    elif isinstance(imported, dict):
        known = cast("dict[str, Any]", imported).get("settings", {})
    return {key: known[key] for key in SETTINGS if key in known}


# ---------------------------------------------------------------- writing


def write(task: WriteTask) -> list[str]:
    """Write a checkpoint of one rank, whole but for its name; the names of its files."""
    owners = task.owners
    names = {name: NAMING.write(*owners[name]) if owners[name][1] else f"{MODEL}.{name}" for name in task.specs}
    specs = {names[name]: spec for name, spec in task.specs.items()}
    empty = {name: spec for name, spec in specs.items() if 0 in spec.shape}
    save_id, ring, back = secrets.token_hex(16), Ring(), {own: name for name, own in names.items()}
    pieces = [Outgoing(name, spec, Region.full(spec.shape)) for name, spec in specs.items() if name not in empty]
    parts = by_size(pieces, task.shard, lambda piece: piece.nbytes)
    files = [image for i, some in enumerate(parts) for image in images(some, i, len(parts), save_id)]
    written: list[WrittenFile] = []
    for image in files:
        written.append(write_from(task.folder, image, taking(image, task, back), ring))
        task.done(image.name)
    manifest = merged(
        [part_of(tensors_of(files, empty), written, {"imported": dict(task.objects)})],
        id=save_id,
        step=int(max(task.steps().values(), default=0)),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    manifest = with_small_files(task.folder, manifest, packed(task.small))
    commits.seal(task.folder, manifest)
    return [*manifest.files, commits.MANIFEST, commits.MARKER]
