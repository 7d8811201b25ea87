"""Where a file would have the very bytes that an earlier checkpoint of the folder has, as that of a frozen base has, it
gets a second name instead (a hard link): nothing is written, and it stays as long as any checkpoint has it. The
manifest says of which save its header is.

Trade-off: what checkpoints share rots in all of them. A file system without second names writes everything.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tangram.checkpoint.saving.file_layout import Image, add_sums
from tangram.checkpoint.saving.file_writer import WrittenFile
from tangram.checkpoint.saving.snapshot import with_id
from tangram.checkpoint.store.digest import Bytes, Sums
from tangram.checkpoint.store.manifest import BLOCK, StoredFile, checksum
from tangram.checkpoint.store.safetensors_header import PAGE

Earlier = tuple[Path, Mapping[str, StoredFile]]
"""A checkpoint, and files of it with the id of the save that each is of."""


def shared_file(
    partial: Path,
    file: Image,
    save_id: str,
    earlier: Earlier,
    take: Callable[[Image, int, int], Bytes],
    summed: bool = True,
) -> WrittenFile | None:
    """The file of an earlier checkpoint, under a second name in the folder under way, where it has the very same bytes.

    `take`: bytes of an image from one offset to another, at most a block. A file that has changed differs in its first
    bytes, nearly always, and costs no more than those.
    """
    path, files = earlier
    known = files.get(file.name)
    if known is None or known.size != file.size or len(known.save) != len(save_id):
        return None
    before = replace(file, head=with_id(file.head, save_id, known.save))
    begin = take(before, 0, min(len(file.head) + PAGE, BLOCK, file.size)).tobytes()
    try:
        with (path / file.name).open("rb", buffering=0) as stream:
            if stream.read(len(begin)) != begin:
                return None
    except OSError:  # it is gone
        return None
    sums: dict[str, Sums] = {}
    for start, expected in zip(range(0, file.size, BLOCK), known.sums, strict=True):
        data = take(before, start, min(start + BLOCK, file.size))
        if checksum(data.data) != expected:
            return None
        if summed:
            add_sums(file, start, data, sums)
    try:
        os.link(path / file.name, partial / file.name)
    except OSError:  # it is gone, or the file system has no second names
        return None
    return WrittenFile(file.name, known, sums)
