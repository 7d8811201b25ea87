"""The files of one rank in save after save, from memory: what does not change is worked out once, and written once.

What an earlier checkpoint of the folder has, too, is shared with it (`saving.shared_files`).
"""

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tangram.checkpoint.saving import rank_parts
from tangram.checkpoint.saving.file_layout import Image, Outgoing
from tangram.checkpoint.saving.file_writer import WrittenFile, write_mapped
from tangram.checkpoint.saving.rank_parts import PartTensors, RankPart
from tangram.checkpoint.saving.shared_files import Earlier, shared_file
from tangram.checkpoint.saving.snapshot import FilePlaces, RankShare, places
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import StoredFile, region_fields, region_of
from tangram.relayout import TensorSpec

SPARES = ".spares"
"""A folder beside snapshots: files that are in none are written over."""


def share_fields(own: RankShare, index: int, writers: int) -> dict[str, Any]:
    """What a writer must know of the memory, as JSON."""
    return {
        "index": index,
        "writers": writers,
        "pieces": [
            [p.name, p.spec.dtype, list(p.spec.shape), p.layout, p.frozen, *region_fields(p.region)] for p in own.pieces
        ],
        "empty": {name: [spec.dtype, list(spec.shape)] for name, spec in own.empty.items()},
    }


class RankFiles:
    """What a rank writes, and what of it is on the disk already."""

    def __init__(self, fields: Any, before: "RankFiles | None" = None) -> None:
        """`fields`: as of `share_fields`. `before`: whose memory and whose files are at hand."""
        self.memory: Any = None if before is None else before.memory
        """The files as they will lie on the disk, but for their headers."""
        self.index, self.writers = int(fields["index"]), int(fields["writers"])
        self._pieces = tuple(
            Outgoing(name, TensorSpec(tuple(shape), dtype), region_of(region, name), layout, frozen)
            for name, dtype, shape, layout, frozen, *region in fields["pieces"]
        )
        self._empty = {name: TensorSpec(tuple(shape), dtype) for name, (dtype, shape) in fields["empty"].items()}
        self._laid: tuple[FilePlaces, PartTensors] | None = None
        self._earlier: Earlier | None = None if before is None else before._earlier
        self._written: dict[str, StoredFile] = {}

    def places(self, save_id: str) -> FilePlaces:
        """Where the files of a save lie in the memory."""
        return self._layout()[0].of_save(save_id)

    def write(self, partial: Path, save_id: str, objects: Mapping[str, Any], digests: bool) -> RankPart:
        """Write the files into a folder under way. Raises OSError as the disk does."""
        found, tensors = self.places(save_id), self._layout()[1]
        written = [self._file(partial, found, i, save_id, digests) for i in range(len(found.files))]
        self._written = {one.name: replace(one.file, save=one.file.save or save_id) for one in written}
        return rank_parts.part_of(tensors, written, objects, digests)

    def committed(self, path: Path) -> None:
        """What was written last is part of the checkpoint `path`."""
        self._earlier = path, self._written

    def _layout(self) -> tuple[FilePlaces, PartTensors]:
        laid = self._laid
        if laid is None:
            found = places(self._pieces, self.index, self.writers)
            laid = found, rank_parts.tensors_of(found.files, self._empty)
            if len(self._pieces) <= rank_parts.KEPT:
                self._laid = laid
        return laid

    def _file(self, partial: Path, found: FilePlaces, number: int, save_id: str, digests: bool) -> WrittenFile:
        file, start = found.files[number], found.starts[number]
        stop = found.starts[number + 1] if number + 1 < len(found.starts) else found.size
        memory = self.memory[start:stop]
        if self._earlier is None:
            self._earlier = commits.newest_files(partial.parent)

        def take(image: Image, begin: int, end: int) -> Bytes:
            if not begin:
                memory[: len(image.head)] = bytearray(image.head)
            return memory[begin:end]

        if (shared := shared_file(partial, file, save_id, self._earlier, take, digests)) is not None:
            return shared
        memory[: len(file.head)] = bytearray(file.head)
        return write_mapped(partial, file, memory, digests, over=not digests and _again(partial, file))


def discard(partial: Path, found: FilePlaces) -> None:
    """Remove what could be written of files, and their room."""
    for file in found.files:
        for path in (partial / file.name, *(partial.parent / SPARES).glob(f"*.{file.name}")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _again(partial: Path, file: Image) -> bool:
    """Give a file its name in this checkpoint whose own checkpoints are all gone, so that it may be written over.

    Pages that are there take a third of the time of new ones, and none to free: what is saved each step is memory. So
    each file of a snapshot has a second name in a folder of spares; where that is the only one left, no checkpoint has
    it. Whoever came upon it in this very moment would find other checksums.
    """
    spares = partial.parent / SPARES
    try:
        spares.mkdir(exist_ok=True)
        free = [one for one in sorted(spares.glob(f"*.{file.name}")) if one.stat().st_nlink == 1]
        for more in free[1:]:
            more.unlink()
        if free:
            os.link(free[0], partial / file.name)
            return True
        os.close(os.open(partial / file.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644))
        os.link(partial / file.name, spares / f"{secrets.token_hex(4)}.{file.name}")
    except OSError:  # no second names here, say
        return (partial / file.name).exists()
    return True
