"""The header of a safetensors file, written so that the tensors begin on a page, and read as a stranger's.

    8 bytes    the length of the rest of the header, little endian
    JSON       {"__metadata__": {...}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    spaces     up to the next page (the format allows them)

Why not the library's own writer: it takes all tensors as bytes at once, which doubles their memory, and begins them
anywhere. What is written here is read by it, which the tests do.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tangram.checkpoint.store.manifest import DTYPES, MAX_DIMS, ManifestError

PAGE = 4096
LARGEST = 100_000_000  # bytes of a header, which is the limit of the format's own library
METADATA = "__metadata__"
# torch's names of the types, and the format's. What has no name there is written as bytes.
NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
TYPES = {theirs: ours for ours, theirs in NAMES.items()}


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of a file; `offset` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


def build(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[TensorSlot, ...]]:
    """The header of a file with these tensors `(name, dtype, shape)`, in this order, and where each of them lies."""
    fields: dict[str, Any] = {METADATA: dict(metadata)}
    at, places = 0, list[int]()
    for name, dtype, shape in tensors:
        stored, size = (dtype, shape) if dtype in NAMES else ("uint8", (math.prod(shape) * DTYPES[dtype],))
        nbytes = math.prod(size) * DTYPES[stored]
        fields[name] = {"dtype": NAMES[stored], "shape": list(size), "data_offsets": [at, at + nbytes]}
        places.append(at)
        at += nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE
    head = (length - 8).to_bytes(8, "little") + text.ljust(length - 8)
    slots = tuple(TensorSlot(n, d, s, length + place) for (n, d, s), place in zip(tensors, places, strict=True))
    return head, slots


def parse(data: bytes, size: int, file: str) -> tuple[tuple[TensorSlot, ...], dict[str, str]]:
    """The tensors and the metadata that a header says. `data`: at least the header; `size`: of the whole file.

    Raises ManifestError where the header is no header, a tensor lies outside the file, or two overlap.
    """
    length = header_length(data, size, file)
    try:
        fields = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the header of {file} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ManifestError(f"the header of {file} is no table")
    rows = cast("dict[str, Any]", fields)
    metadata: Any = rows.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in cast("dict[str, Any]", metadata).values()):
        raise ManifestError(f"the metadata of {file} is no table of texts")
    slots = [_slot(name, row, 8 + length, size, file) for name, row in rows.items()]
    ordered = sorted((slot for slot in slots if slot.nbytes), key=lambda slot: slot.offset)
    for one, other in itertools.pairwise(ordered):
        if one.offset + one.nbytes > other.offset:
            raise ManifestError(f"{one.name} and {other.name} have bytes of {file} in common")
    return tuple(slots), cast("dict[str, str]", metadata)


def header_length(data: bytes, size: int, file: str) -> int:
    """How many bytes of JSON follow the first eight. Raises ManifestError for a length that cannot be."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(LARGEST, size - 8):
        raise ManifestError(f"{file} is damaged or cut off: its header cannot have {length} bytes")
    return length


def _slot(name: str, row: Any, begin: int, size: int, file: str) -> TensorSlot:
    fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    dtype, shape, span = TYPES.get(str(fields.get("dtype"))), fields.get("shape"), fields.get("data_offsets")
    if dtype is None:
        raise ManifestError(f"{name} in {file} has the type {fields.get('dtype')!r}, which this version does not read")
    sizes, places = _numbers(shape), _numbers(span)
    if sizes is None or len(sizes) > MAX_DIMS or places is None or len(places) != 2:
        raise ManifestError(f"{name} in {file} has no shape or no offsets")
    slot = TensorSlot(name, dtype, sizes, begin + places[0])
    if places[1] - places[0] != slot.nbytes or begin + places[1] > size:
        raise ManifestError(f"{name} in {file} has {slot.nbytes} bytes by its shape, but lies at {span} of {size}")
    return slot


def _numbers(value: Any) -> tuple[int, ...] | None:
    """A list of numbers of 0 or more, None for anything else."""
    if not isinstance(value, list):
        return None
    found = cast("list[Any]", value)
    good = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 60 for n in found)
    return tuple(found) if good else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ManifestError("a header names a tensor twice")
    return table
