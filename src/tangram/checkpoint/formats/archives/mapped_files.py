"""Files that are mapped and seen as tensors: nothing is read before it is used, and what was read can be let go.

Maps are read-only and shared with the page cache, so a file of any size costs no memory that the system could not take
back; `release` gives it back at once, for who works under a limit.
"""

import math
import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from tangram.checkpoint.store import safetensors_header
from tangram.checkpoint.store.manifest import DTYPES
from tangram.checkpoint.store.safetensors_header import TensorSlot
from tangram.errors import UserError

AHEAD = 256 << 20
"""Bytes that the disk is asked for at once; they lie in the page cache, not in the process."""
AT_LEAST = 64 << 20
"""Bytes that it is asked for where a tensor has fewer: what follows in the file is mostly wanted next."""


class Maps:
    """The files of one checkpoint, mapped when first asked for. Threads may share it once a file is mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, mmap.mmap] = {}
        self._bytes: dict[str, Tensor] = {}
        self._asked: dict[str, tuple[int, int]] = {}

    def data(self, file: str) -> mmap.mmap:
        """All bytes of a file. Raises UserError for one that is not there, or empty."""
        if file not in self._open:
            path = self.folder / file
            try:
                with path.open("rb") as stream:
                    self._open[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                raise missing(path) from None
            except ValueError:  # of length 0
                raise UserError(f'"{path}" is empty') from None
        return self._open[file]

    def header(self, file: str) -> tuple[tuple[TensorSlot, ...], dict[str, str]]:
        """The tensors and the metadata of a safetensors file. Raises ManifestError for one that is none."""
        data, where = self.data(file), str(self.folder / file)
        length = safetensors_header.header_length(data[:8], len(data), where)
        return safetensors_header.parse(data[: 8 + length], len(data), where)

    def below(self, folder: Path) -> "Maps":
        """The files of a folder inside, or of this one."""
        return self if folder == self.folder else Maps(folder)

    def ensure(self, file: str, start: int, stop: int) -> None:
        """See to it that bytes of a file are there before they are looked at. Of a local file they are."""

    def view(
        self, file: str, offset: int, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Tensor:
        """The elements that begin at a byte of a file, row by row or with strides in elements.

        Raises UserError where the file ends before them.
        """
        count, width, kind = math.prod(shape), DTYPES[dtype], getattr(torch, dtype)
        if not count:
            return torch.empty(shape, dtype=kind)
        if stride is not None:
            count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        data, nbytes = self.data(file), count * width
        self.ensure(file, offset, offset + nbytes)
        if offset < 0 or min(stride or (), default=0) < 0 or offset + nbytes > len(data):
            raise UserError(f'"{self.folder / file}" is cut off: it has {len(data):,} bytes, and more are asked for')
        self._ahead(file, data, offset, nbytes)
        if offset % width:
            flat = _bytes(data, offset, nbytes).view(kind)
        else:
            if file not in self._bytes:
                self._bytes[file] = _bytes(data, 0, len(data))
            flat = self._bytes[file][offset : offset + nbytes].view(kind)
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride, flat.storage_offset())

    def _ahead(self, file: str, data: mmap.mmap, offset: int, nbytes: int) -> None:
        """Have the disk read what is about to be used, in large requests; once, until it is let go."""
        first, last = self._asked.get(file, (0, 0))
        if not (first <= offset and offset + nbytes <= last):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            wanted = min(max(offset + nbytes - start, AT_LEAST), AHEAD, len(data) - start)
            data.madvise(mmap.MADV_WILLNEED, start, wanted)
            self._asked[file] = start, max(start + wanted, offset + nbytes)

    def release(self) -> None:
        """Let go of what was read; it is read again where it is used again."""
        for data in self._open.values():
            data.madvise(mmap.MADV_DONTNEED)
        self._asked.clear()


def _bytes(data: mmap.mmap, offset: int, count: int) -> Tensor:
    with warnings.catch_warnings():  # torch warns of read-only buffers; this one is only read
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=offset)


def missing(file: Path) -> UserError:
    """Of a file that should be there. A link to nothing is what the hub's cache has of a download that did not end."""
    what = "is a link to nothing: download it again" if file.is_symlink() else "is not there"
    return UserError(f'"{file.parent}" is not whole: its file {file.name} {what}')
