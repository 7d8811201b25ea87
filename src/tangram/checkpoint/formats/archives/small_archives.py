"""Archives of one small tensor each, as a DCP has them by the hundred thousand: each kind is made and read once.

What `torch.save` writes of two tensors of one type and shape differs in the bytes of their elements and in the checksum
of those, which stands behind them twice. So the library writes an archive of each kind once, and further ones are that
with other elements; and an archive that begins as another of the same length has its tensor at the same place in it.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.formats.archives.archive import TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps

LARGEST = 1 << 16
"""Bytes of elements of a small one."""
LONGEST = 1 << 12
"""Bytes before the elements that are compared at most."""
KINDS = 1 << 10
"""Kinds that are kept."""
_DATA = "archive/data/0"
_BEHIND = b"PK\x07\x08"


@dataclass(frozen=True)
class _Kind:
    """An archive before and after the elements; `sums` are the places of the checksum in what comes after."""

    head: bytes
    tail: bytes
    sums: tuple[int, ...]


def archived(values: Tensor) -> bytes | None:
    """What `torch.save` writes of a contiguous tensor on the CPU; None of one that is not small, or not so written."""
    if not 0 < values.nbytes <= LARGEST or not values.is_contiguous() or values.is_conj() or values.is_neg():
        return None
    kind = _kind(values.dtype, tuple(values.shape))
    if kind is None:
        return None
    elements = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    tail, checksum = bytearray(kind.tail), zlib.crc32(elements)
    for at in kind.sums:
        struct.pack_into("<I", tail, at, checksum)
    return b"".join((kind.head, elements, tail))


@lru_cache(KINDS)
def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> _Kind | None:
    """Made of two archives that the library wrote: of zeros, and of ones bits, which must come out of the first."""
    zeros, ones = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    ones.view(-1).view(torch.uint8).fill_(1)
    first, second = (_saved(values) for values in (zeros, ones))
    with zipfile.ZipFile(io.BytesIO(first)) as found:
        member = next((one for one in found.infolist() if one.filename == _DATA), None)
    if member is None:
        return None
    name, extra = struct.unpack_from("<HH", first, member.header_offset + 26)
    begin = member.header_offset + 30 + name + extra
    tail = first[begin + zeros.nbytes :]
    entry = tail.rfind(_DATA.encode()) - 46  # in the directory at the end, whose entries have 46 bytes before the name
    if not tail.startswith(_BEHIND) or tail[entry : entry + 4] != b"PK\x01\x02":
        return None
    kind = _Kind(first[:begin], tail, (4, entry + 16))
    made = bytearray(tail)
    for at in kind.sums:
        struct.pack_into("<I", made, at, zlib.crc32(bytes([1]) * ones.nbytes))
    same = first[:begin] == second[:begin] and _unlike(made, second[begin + ones.nbytes :]) <= _IDENTITY
    return kind if same else None


_IDENTITY = 48
"""Bytes of a name that the library makes of all checksums, and of its own checksum twice; its reader ignores it."""


def _unlike(a: bytes | bytearray, b: bytes) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True)) if len(a) == len(b) else _IDENTITY + 1


def _saved(values: Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


@dataclass(frozen=True)
class Archives:
    """Where the tensors of many archives lie, each of which is one tensor."""

    maps: Maps
    known: dict[int, dict[int, dict[bytes, TensorPlace]]] = field(
        default_factory=dict[int, "dict[int, dict[bytes, TensorPlace]]"]
    )
    """By the archive's length and that of its head: what is before the elements, and the tensor's place from there."""

    def place(self, file: str, start: int, length: int) -> Any:
        """The tree of the archive at a byte of a file: a `TensorPlace` where it is a tensor. Raises as
        `read_archive`."""
        there = start + length <= len(self.maps.data(file))  # one that is cut off is told by who reads it whole
        heads: Mapping[int, Mapping[bytes, TensorPlace]] = self.known.get(length, {}) if there else {}
        for size, places in heads.items():
            self.maps.ensure(file, start, start + size)
            found = places.get(self.maps.data(file)[start : start + size])
            if found is not None:
                return replace(found, file=file, offset=found.offset + start)
        tree = read_archive(self.maps, file, start, length)
        if isinstance(tree, TensorPlace) and tree.file == file and 0 < tree.offset - start <= LONGEST:
            size = tree.offset - start
            places = self.known.setdefault(length, {}).setdefault(size, {})
            if len(places) < KINDS:
                places[self.maps.data(file)[start : tree.offset]] = replace(tree, offset=size)
        return tree
