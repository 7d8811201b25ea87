"""Tangram's own checkpoints as one of the formats: their model, every block proved when it is first looked at."""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tangram.checkpoint import commits
from tangram.checkpoint.formats.mapped import Maps
from tangram.checkpoint.formats.opened import Opened
from tangram.checkpoint.manifest import BLOCK, StoredPiece, checksum, checksums
from tangram.checkpoint.parts import INDEX, MODEL
from tangram.checkpoint.source import DamagedError
from tangram.relayout import Piece, TensorSpec

DATA = ".safetensors"
LARGEST_SMALL = 1 << 28
"""Bytes of a configuration or tokenizer file that is read."""


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int


def is_own(path: Path) -> bool:
    """Whether a directory has the mark of a commit."""
    return (path / commits.MARKER).exists()


def open_folder(path: Path) -> Opened:
    """The section `model` of a checkpoint, by the names that the module has. Raises UserError for a torn one."""
    manifest = commits.read_manifest(path)
    maps = Maps(path)
    proved: set[tuple[str, int]] = set()
    found: dict[tuple[_Place, str], tuple[StoredPiece, str]] = {}
    specs, pieces = dict[str, TensorSpec](), list[Piece]()
    for full, tensor in manifest.tensors.items():
        section, _, name = full.partition(".")
        if section != MODEL:
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

    small: dict[str, bytes] = {}
    for name, file in manifest.files.items():
        if name.endswith(DATA) or name == INDEX:
            continue
        data = commits.read_bounded(path / name, LARGEST_SMALL)
        if checksums(data) != file.sums:
            raise DamagedError(f'the checkpoint "{path}" is damaged: its file "{name}" is not the one that was saved')
        small[name] = data
    return Opened("tangram", path, specs, tuple(pieces), read, maps.release, small=small)
