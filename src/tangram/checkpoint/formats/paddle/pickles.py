"""Paddle's pickles, read and written without Paddle and without running anything: its metadata, and its arrays.

    ID.metadata        Metadata(state_dict_metadata, storage_metadata, flat_mapping), dataclasses by their names
    RANK_ID.distcp     {name: numpy array, ...}, what `paddle.save` writes where safetensors are not asked for

What is read goes through an unpickler that imports nothing: a class is an `Opaque`, whose fields are looked at. What is
written names Paddle's classes in opcodes of our own, as a pickler would have to import what it names.

Trade-off: arrays are found by Python's own unpickler in Python, which lets the bytes of large ones lie where they are;
the one in C would read all of a file.
"""

import io
import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tangram.checkpoint.formats.archives.archive import UNPICKLE, Opaque
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.store.commits import read_bounded
from tangram.checkpoint.store.manifest import DTYPES, MAX_DIMS
from tangram.errors import UserError

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
LARGEST = 1 << 30
"""Bytes of a metadata file that is read: several million pieces."""
SKIPPED = 1 << 18
"""Bytes of an array from which on it is left in its file. A pickle's frames are shorter."""
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "LocalTensorMetadata": (
        "global_offset", "local_shape", "dtype", "global_shape", "is_flattened", "flattened_range",
    ),
    "LocalTensorIndex": (
        "tensor_key", "global_offset", "is_flattened", "flattened_range", "replica_id", "local_shape",
    ),
    "Metadata": ("state_dict_metadata", "storage_metadata", "flat_mapping"),
}  # fmt: skip
"""In their order, for objects that were made by a call."""


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor: a block, or with `flat` elements of that block in row-major order."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    full_shape: tuple[int, ...] | None
    """The shape of the tensor, None where an older version did not say it."""
    flat: tuple[int, int] | None
    file: str
    copy: int = 0
    """Which of the equal ones on several ranks it is."""


# ---------------------------------------------------------------- metadata


def read_metadata(path: Path) -> tuple[Stored, ...]:
    """The pieces that a metadata file names. Raises UserError for what is none, or does not hold together."""
    data = read_bounded(path, LARGEST)
    try:
        root = _Unpickler(io.BytesIO(data)).load()
    except UNPICKLE as error:
        raise UserError(f'"{path}" is damaged, or no metadata of Paddle: {error}') from None
    try:
        return tuple(_stored(_fields(root, "Metadata")))
    except _WrongError as error:
        raise UserError(f'"{path}" does not hold together: {error}') from None


class _WrongError(Exception):
    """What is wrong in a tree."""


class _Unpickler(pickle.Unpickler):
    """Makes opaque objects of whatever a pickle names; never an import."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of its own each time, so that nothing is kept of what a pickle does to it."""
        return type("Opaque", (Opaque,), {"kind": f"{module}.{name}"})


def _fields(one: Any, kind: str) -> dict[str, Any]:
    """What an object of one of Paddle's classes says, by the names of its fields."""
    if not isinstance(one, Opaque) or not one.kind.startswith("paddle.") or not one.kind.endswith(f".{kind}"):
        raise _WrongError(f"there is no {kind} where there should be one")
    state = cast("dict[str, Any]", one.state) if isinstance(one.state, dict) else {}
    return {**dict(zip(_FIELDS[kind], one.args, strict=False)), **state}


_Where = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int] | None]
"""Offset, shape and flat range of a piece."""


def _stored(root: Mapping[str, Any]) -> Iterable[Stored]:
    known = _known(root)
    shapes = {(name, where[0]): where[1] for name, where in known}
    names = set[str]()  # of files, each looked at once
    for index, file in _table(root.get("storage_metadata"), "storage_metadata").items():
        fields = _fields(index, "LocalTensorIndex")
        name, copy = fields.get("tensor_key"), fields.get("replica_id")
        if not isinstance(name, str):
            raise _WrongError(f"{name!r} is no name of a tensor")
        if fields.get("local_shape") is None:  # an older version, which tells pieces by their offsets alone
            fields["local_shape"] = shapes.get((name, _sizes(fields.get("global_offset"), name)), ())
        where = _where(fields, name)
        if (name, where) not in known:
            raise _WrongError(f"{name} has a piece at {list(where[0])} in {file!r}, but no word on what it is")
        if not isinstance(file, str) or (file not in names and not _is_beside(file)):
            raise _WrongError(f"{name} is in {file!r}, which is no name of a file beside it")
        names.add(file)
        if not (copy is None or (isinstance(copy, int) and copy >= 0)):
            raise _WrongError(f"{name} has the copy {copy!r}")
        dtype, whole = known[name, where]
        yield Stored(name, where[0], where[1], dtype, whole, where[2], file, int(copy or 0))


def _is_beside(file: str) -> bool:
    return Path(file).name == file and Path(file).suffix in (".safetensors", ".distcp")


def _known(root: Mapping[str, Any]) -> dict[tuple[str, _Where], tuple[str, tuple[int, ...] | None]]:
    """Type and whole shape of every piece."""
    known: dict[tuple[str, _Where], tuple[str, tuple[int, ...] | None]] = {}
    for name, metas in _table(root.get("state_dict_metadata"), "state_dict_metadata").items():
        if not isinstance(name, str) or not isinstance(metas, list):
            raise _WrongError(f"{name!r} is no name with a list of pieces")
        for meta in cast("list[Any]", metas):
            fields = _fields(meta, "LocalTensorMetadata")
            where, dtype, whole = _where(fields, name), fields.get("dtype"), fields.get("global_shape")
            if not isinstance(dtype, str) or dtype not in DTYPES:
                raise _WrongError(f"{name} has the type {dtype!r}, which this version does not read")
            found = (dtype, None if whole is None else _sizes(whole, name))
            if known.setdefault((name, where), found) != found:
                raise _WrongError(f"{name} has two pieces at {list(where[0])} that are not alike")
    return known


def _where(fields: Mapping[str, Any], name: str) -> _Where:
    offset, shape = _sizes(fields.get("global_offset"), name), _sizes(fields.get("local_shape"), name)
    if len(shape) != len(offset):
        raise _WrongError(f"{name} has {len(offset)} offsets but {len(shape)} sizes")
    if not fields.get("is_flattened"):
        return offset, shape, None
    flat = _sizes(fields.get("flattened_range"), name)
    if len(flat) != 2 or flat[0] > flat[1]:
        raise _WrongError(f"{name} has the flat range {list(flat)}")
    return offset, shape, (flat[0], flat[1])


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    found = tuple(cast("list[Any]", value)) if isinstance(value, list | tuple) else ()
    good = isinstance(value, list | tuple) and len(found) <= MAX_DIMS
    if not good or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 60 for n in found):
        raise _WrongError(f"{name} has {value!r} where there should be sizes")
    return found


def _table(value: Any, name: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _WrongError(f"{name} is no table")
    return cast("dict[Any, Any]", value)


def metadata(pieces: Iterable[Stored]) -> bytes:
    """The bytes of a metadata file with these pieces: a pickle that `paddle.load` makes Paddle's own objects of."""
    metas: dict[str, list[bytes]] = {}
    stored: list[bytes] = []
    for one in pieces:
        flat = (one.flat is not None, one.flat)
        meta = _plain((one.offset, one.shape, one.dtype, one.full_shape, *flat))
        if not one.copy:
            metas.setdefault(one.name, []).append(b"h\x00" + meta + b"R")
        index = _plain((one.name, one.offset, *flat, one.copy or None, one.shape))
        stored += [b"h\x01" + index + b"R", _plain(one.file)]
    lists = [b for name, some in metas.items() for b in (_plain(name), b"](" + b"".join(some) + b"e")]
    paths = [b for name in metas for b in (_plain(name), _plain((name,)))]
    kinds = ("LocalTensorMetadata", "LocalTensorIndex")  # by which number they are asked for above
    known = b"".join(_named(name) + b"q" + bytes([i]) + b"0" for i, name in enumerate(kinds))
    tables = b"".join(b"}(" + b"".join(some) + b"u" for some in (lists, stored, paths))
    return b"\x80\x02" + known + _named("Metadata") + b"(" + tables + b"tR."


def _named(name: str) -> bytes:
    return f"c{MODULE}\n{name}\n".encode()


def _plain(value: Any) -> bytes:
    """The opcodes of numbers, texts and tuples of them; without memos, so that they may stand anywhere."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


# ---------------------------------------------------------------- arrays


@dataclass(frozen=True)
class Array:
    """A numpy array in a pickle: where its bytes lie, or they themselves."""

    kind: str
    """numpy's: f4, u2 ..."""
    shape: tuple[int, ...]
    data: "bytes | BytesInFile"


@dataclass(frozen=True)
class BytesInFile:
    """Bytes that were left in their file."""

    offset: int
    size: int

    def __len__(self) -> int:
        return self.size


def read_arrays(maps: Maps, file: str) -> dict[str, Array]:
    """The arrays of a file by name, large ones left where they are. Raises UserError where there is no such table."""
    path = maps.folder / file
    maps.ensure(file, 0, len(maps.data(file)))
    try:
        tree = _ArrayUnpickler(_Leaving(maps.data(file))).load()
    except (*UNPICKLE, struct.error, AssertionError) as error:
        raise UserError(f'"{path}" is damaged, or nothing that Paddle wrote: {error}') from None
    if not isinstance(tree, dict):
        raise UserError(f'"{path}" has no table of tensors')
    found: dict[str, Array] = {}
    for name, one in cast("dict[Any, Any]", tree).items():
        if isinstance(one, _Array) and isinstance(name, str):
            found[name] = one.array(f'{name} in "{path}"')
    return found


class _Leaving:
    """A file whose long stretches are not read."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = data, 0

    def read(self, size: int) -> Any:
        start = self._at
        if size < 0 or start + size > len(self._data):
            raise EOFError("it is cut off")
        self._at += size
        return BytesInFile(start, size) if size >= SKIPPED else self._data[start : self._at]

    def readline(self) -> bytes:
        stop = self._data.find(b"\n", self._at, self._at + SKIPPED) + 1
        if not stop:
            raise EOFError("it is cut off")
        line = self._data[self._at : stop]
        self._at = stop
        return line


class _Array:
    """An array as its pickle makes it."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self, what: str) -> Array:
        """What it is. Raises UserError where it is none that Paddle writes."""
        state: tuple[Any, ...] = cast("tuple[Any, ...]", self.state) if isinstance(self.state, tuple) else ()
        if len(state) != 5 or not isinstance(state[2], _Dtype) or not isinstance(state[4], bytes | BytesInFile):
            raise UserError(f"{what} is no array of numbers that is read")
        try:
            shape = _sizes(state[1], what)
        except _WrongError as error:
            raise UserError(str(error)) from None
        if state[3] and len(shape) > 1:
            raise UserError(f"{what} has its columns one behind the other, which Paddle does not write")
        return Array(state[2].kind, shape, state[4])


class _Dtype:
    """A type of numpy's as its pickle makes it."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._order = kind, "|"

    def __setstate__(self, state: Any) -> None:
        self._order = state[1]

    @property
    def kind(self) -> str:
        """As f4; with its order of bytes where that is another."""
        return f"{self._kind}" if self._order in ("<", "|", "=") else f"{self._order}{self._kind}"


def _array(*_: object) -> _Array:
    return _Array()


def _dtype(kind: Any, *_: object) -> _Dtype:
    return _Dtype(kind)


class _ArrayUnpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """Knows numpy's arrays and their types; makes opaque objects of all else."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy._core.multiarray", "numpy.core.multiarray"):
            return _array
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        return type("Opaque", (Opaque,), {"kind": f"{module}.{name}"})
