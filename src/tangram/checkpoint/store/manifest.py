"""The manifest of a checkpoint: which tensors there are, where each piece of them lies, and what every block sums to.

It is read as a stranger's: every number is checked against the others before anything is done with it, so that no
manifest makes a reader leave the folder, take memory for what is not there, or fill a tensor from the wrong bytes.
`docs/checkpoint-format.md` describes the format for people.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import xxhash

from tangram.errors import UserError
from tangram.layout import Box, IntSet, LayoutError, Region, coverage
from tangram.relayout import TensorSpec

FORMAT = 2
"""1 was torch's distributed checkpoint in a folder of ours."""
BLOCK = 1 << 22
"""Bytes of a file under one checksum. Elements never lie across a border: offsets are multiples of their size."""
LARGEST = 1 << 28
"""Bytes of the largest manifest that is read: some two million pieces."""
MAX_DIMS = 64
MAX_BOXES = 4096

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_NAMES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 complex128
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
DTYPES: Mapping[str, int] = {name: getattr(torch, name).itemsize for name in _NAMES.split()}
"""Bytes of an element, by torch's name of the type."""


class ManifestError(UserError):
    """A manifest that does not hold together; the sentence says where."""


@dataclass(frozen=True)
class StoredPiece:
    """Some elements of a tensor, in ascending row-major order of the whole tensor, without gaps."""

    region: Region
    file: str
    offset: int
    """Of the first byte, from the beginning of the file."""


@dataclass(frozen=True)
class StoredTensor:
    """One logical tensor; its pieces are disjoint and cover it."""

    name: str
    """With its section in front: `model.lm_head.weight`."""
    spec: TensorSpec
    digest: str
    """Empty in a snapshot in memory, where nobody has taken it; whoever copies that to a disk does."""
    pieces: tuple[StoredPiece, ...]
    layout: str = ""
    """How it lay over the mesh when it was saved, for people; empty where nobody said."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.spec.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * self.itemsize


@dataclass(frozen=True)
class StoredFile:
    """One file of the checkpoint."""

    size: int
    sums: tuple[int, ...]
    """The `checksum` of every `BLOCK` of it, from its first byte; the last block may be shorter."""
    save: str = ""
    """The id of the save that wrote it, where that is an earlier one: this one has found the same bytes, and shares
    the file."""


@dataclass(frozen=True)
class Manifest:
    """All that is in a checkpoint but the elements."""

    id: str
    """Of the save; every file of it has it, so files of two saves never mix."""
    step: int
    created: str
    """ISO 8601, UTC."""
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The user's own: anything that JSON can say."""
    mesh: str = ""
    """That it was saved from, as text; empty where nobody said."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class KeptTensors(dict[str, StoredTensor]):
    """Tensors of one save after another, always in the same files: their rows of text are made once."""

    rows: str = ""


def blocks_of(size: int) -> int:
    """How many blocks a file of this size has."""
    return -(-size // BLOCK)


def checksum(data: bytes | memoryview) -> int:
    """The checksum of one block: XXH3 of 64 bits without a seed. Other threads run meanwhile, unless it is tiny.

    A third of the time that memory takes to copy, and a tenth of a crc32. It finds faults, not forgeries.
    """
    return xxhash.xxh3_64_intdigest(data)


def checksums(data: bytes) -> tuple[int, ...]:
    return tuple(checksum(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))


# ---------------------------------------------------------------- as text


def to_json(manifest: Manifest) -> str:
    """The text of a manifest, a line for each tensor and each file."""
    numbers = {name: i for i, name in enumerate(manifest.files)}
    files = {name: _file_fields(file) for name, file in manifest.files.items()}
    head = {
        "format": FORMAT,
        "id": manifest.id,
        "step": manifest.step,
        "created": manifest.created,
        "mesh": manifest.mesh,
        "block": BLOCK,
        "objects": manifest.objects,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines += [f'"files": {_table(files)}', f'"tensors": {_tensor_rows(manifest.tensors, numbers)}']
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _file_fields(file: StoredFile) -> dict[str, Any]:
    fields: dict[str, Any] = {"size": file.size, "xxh3": "".join(f"{one:016x}" for one in file.sums)}
    return fields | ({"save": file.save} if file.save else {})


def _tensor_rows(tensors: Mapping[str, StoredTensor], numbers: Mapping[str, int]) -> str:
    kept = tensors if isinstance(tensors, KeptTensors) else None
    text = kept.rows if kept is not None else ""
    text = text or _table({name: tensor_fields(tensor, numbers) for name, tensor in tensors.items()})
    if kept is not None:
        kept.rows = text
    return text


def _table(rows: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()) + "\n}"


def tensor_fields(tensor: StoredTensor, numbers: Mapping[str, int]) -> dict[str, Any]:
    """A tensor as JSON says it; files by their numbers."""
    fields: dict[str, Any] = {"dtype": tensor.spec.dtype, "shape": list(tensor.spec.shape), "digest": tensor.digest}
    if tensor.layout:
        fields["layout"] = tensor.layout
    return fields | {"pieces": [[numbers[p.file], p.offset, *region_fields(p.region)] for p in tensor.pieces]}


def region_fields(region: Region) -> list[Any]:
    """A region as JSON says it: `[offsets], [sizes]` of a block, else its boxes: of each dim the ends of its runs."""
    if len(region.boxes) == 1 and all(len(s) == 1 for s in region.boxes[0]):
        return [[s[0][0] for s in region.boxes[0]], [s[0][1] - s[0][0] for s in region.boxes[0]]]
    return [[[[end for run in runs for end in run] for runs in box] for box in region.boxes]]


# ---------------------------------------------------------------- read from a stranger


def parse(text: str | bytes, *, partly: bool = False) -> Manifest:
    """The manifest that a text says; `partly`: of what one of several machines has written.

    Raises ManifestError, with one sentence, where it does not hold together.
    """
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest is no JSON: {error}") from None
    _require(isinstance(fields, dict), "the manifest is no table")
    known = cast("dict[str, Any]", fields)
    if known.get("format") != FORMAT:
        raise ManifestError(f"the manifest has the format {known.get('format')!r}; this version reads {FORMAT}")
    _require(known.get("block") == BLOCK, f"the manifest's blocks have {known.get('block')!r} bytes, not {BLOCK}")
    files = {name: _file(name, row) for name, row in _rows(known, "files")}
    names = list(files)
    tensors = {name: _tensor(name, row, names) for name, row in _rows(known, "tensors")}
    manifest = Manifest(
        id=_text(known, "id", 64),
        step=_count(known.get("step"), "the step"),
        created=_text(known, "created", 64),
        tensors=tensors,
        files=files,
        objects=dict(row for row in _rows(known, "objects")),
        mesh=_text(known, "mesh", 10_000),
    )
    check(manifest, partly=partly)
    return manifest


def check(manifest: Manifest, *, partly: bool = False) -> None:
    """That names can be printed, and pieces lie inside their files without overlapping and cover their tensors.

    `partly`: they need not cover them.
    """
    check_names((*manifest.tensors, *manifest.objects))
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            stop = piece.offset + piece.region.size * tensor.itemsize
            size = manifest.files[piece.file].size
            _require(stop <= size, f"a piece of {name} ends at byte {stop} of {piece.file}, which has {size}")
            _require(piece.offset % tensor.itemsize == 0, f"a piece of {name} begins at the odd byte {piece.offset}")
            spans.setdefault(piece.file, []).append((piece.offset, stop, name))
        _check_covered(tensor, partly=partly)
    for file, some in spans.items():
        some.sort()
        for (_, stop, one), (start, _, other) in itertools.pairwise(some):
            _require(start >= stop, f"{one} and {other} have bytes of {file} in common")


def check_names(names: Iterable[str]) -> None:
    """That names of tensors and objects can be printed."""
    for name in names:
        _require(name.isprintable(), f"the name {name!r} has letters that cannot be printed")


def _check_covered(tensor: StoredTensor, *, partly: bool) -> None:
    whole = Region.full(tensor.spec.shape)
    regions = [piece.region for piece in tensor.pieces]
    if regions == [whole] or (not regions and not whole):
        return
    for region in regions:
        _require(region.within(tensor.spec.shape), f"a piece of {tensor.name} is outside of it: {region}")
    found = coverage(whole, regions)
    wrong = f"lack {found.missing}" if found.missing else f"have {found.doubled} twice"
    _require(found.exact or (partly and not found.doubled), f"the pieces of {tensor.name} {wrong}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ManifestError(f"the manifest says {twice!r} twice")
    return table


def _rows(known: Mapping[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    table = known.get(key)
    _require(isinstance(table, dict), f"the manifest has no table {key!r}")
    return cast("dict[str, Any]", table).items()


def _file(name: str, row: Any) -> StoredFile:
    _require(bool(FILE_NAME.fullmatch(name)), f"the manifest names the file {name!r}, which is no plain name")
    _require(isinstance(row, dict), f"the row of the file {name} is no table")
    size, text = _count(row.get("size"), f"the size of {name}"), row.get("xxh3")
    if not isinstance(text, str) or len(text) != 16 * blocks_of(size) or not re.fullmatch(r"[0-9a-f]*", text):
        raise ManifestError(f"the file {name} has {size} bytes, so it needs {blocks_of(size)} checksums of 16 digits")
    save = row.get("save", "")
    if not isinstance(save, str) or not re.fullmatch(r"[0-9a-f]{0,64}", save):
        raise ManifestError(f"the file {name} is of the save {save!r}, which is no id")
    return StoredFile(size, tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16)), save)


def _tensor(name: str, row: Any, files: list[str]) -> StoredTensor:
    _require(isinstance(row, dict), f"the row of {name} is no table")
    fields = cast("dict[str, Any]", row)
    dtype, pieces = fields.get("dtype"), fields.get("pieces")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ManifestError(f"{name} has the dtype {dtype!r}, which this version does not know")
    shape = _counts(fields.get("shape"), f"the shape of {name}")
    digest = _text(fields, "digest", 32)
    _require(bool(re.fullmatch(r"([0-9a-f]{32})?", digest)), f"{name} has the digest {digest!r}, not 32 digits")
    if not isinstance(pieces, list):
        raise ManifestError(f"{name} has no list of pieces")
    found = tuple(_piece(name, piece, files, len(shape)) for piece in cast("list[Any]", pieces))
    layout = fields.get("layout", "")
    _require(isinstance(layout, str), f"the layout of {name} is no text")
    return StoredTensor(name, TensorSpec(shape, dtype), digest, found, layout)


def _piece(name: str, row: Any, files: list[str], dims: int) -> StoredPiece:
    parts = cast("list[Any]", row) if isinstance(row, list) else []
    if len(parts) not in (3, 4):
        raise ManifestError(f"a piece of {name} is not [file, offset, region]")
    number, offset = _count(parts[0], f"a file of {name}"), _count(parts[1], f"an offset of {name}")
    _require(number < len(files), f"a piece of {name} is in file {number} of {len(files)}")
    region = region_of(parts[2:], f"a piece of {name}")
    _require(all(len(box) == dims for box in region.boxes), f"a piece of {name} has not {dims} dims")
    _require(bool(region), f"a piece of {name} is empty")
    return StoredPiece(region, files[number], offset)


def region_of(fields: Sequence[Any], what: str) -> Region:
    """The region that `region_fields` said. Raises ManifestError, naming `what`."""
    if len(fields) == 2:
        at, sizes = _counts(fields[0], f"the place of {what}"), _counts(fields[1], f"the size of {what}")
        _require(len(at) == len(sizes), f"{what} has {len(at)} offsets and {len(sizes)} sizes")
        return Region.box(at, sizes)
    boxes = cast("list[Any]", fields[0]) if isinstance(fields[0], list) else []
    _require(0 < len(boxes) <= MAX_BOXES, f"{what} has no boxes, or more than {MAX_BOXES}")
    try:
        return Region.of([_box(box, what) for box in boxes])
    except LayoutError as error:
        raise ManifestError(f"{what} is no region: {error}") from None


def _box(box: Any, what: str) -> Box:
    dims = cast("list[Any]", box) if isinstance(box, list) else []
    _require(0 < len(dims) <= MAX_DIMS, f"a box of {what} is no list of dims")
    out: list[IntSet] = []
    for dim in dims:
        ends = cast("list[Any]", dim) if isinstance(dim, list) else []
        _require(len(ends) > 0 and len(ends) % 2 == 0, f"the runs of {what} are no pairs")
        numbers = [_count(end, f"an end of {what}") for end in ends]
        _require(all(a < b for a, b in itertools.pairwise(numbers)), f"the runs of {what} do not go up")
        out.append(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
    return tuple(out)


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(cast("list[Any]", value)) > MAX_DIMS:
        raise ManifestError(f"{what} is no list of numbers")
    return tuple(_count(n, what) for n in cast("list[Any]", value))


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise ManifestError(f"{what} is {value!r}, not a number of 0 or more")
    return value


def _text(fields: Mapping[str, Any], key: str, longest: int) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise ManifestError(f"the manifest's {key!r} is no text of at most {longest} letters")
    return value


def _require(true: bool, sentence: str) -> None:
    if not true:
        raise ManifestError(sentence)
