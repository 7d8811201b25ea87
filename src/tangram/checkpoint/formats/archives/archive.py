"""What `torch.save` wrote, as a tree in which tensors are places in the file: nothing is loaded, and nothing is run.

A file is a zip archive without compression: a pickle of the tree, and a member for each storage. The pickle is read by
an unpickler that knows tensors and plain containers; every other class becomes an `Opaque` with its name and what the
pickle says of it, so a checkpoint that has some framework's objects in it is read without that framework, and one from
a stranger cannot execute anything. That is what `torch.load(weights_only=True)` refuses; here it is only not made.

Trade-off: storages are found by the layout of the archive (documented by torch as a zip file), not by torch's reader,
which takes whole files only.
"""

import collections
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError

LOCAL = 30
"""Bytes of the head of a zip member before its name."""
SUMMED = 1 << 25
"""Bytes that are summed together."""


# What the two libraries raise for bytes that are not theirs.
_UNZIP = (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError, struct.error)
UNPICKLE = (
    pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError, MemoryError,
    RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file; strides are in elements."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Opaque:
    """An object of a class that is not looked at."""

    kind = ""

    args: tuple[Any, ...]
    more: dict[str, Any]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **more: Any) -> "Opaque":
        """Pickle makes some without calling them."""
        made = super().__new__(cls)
        made.args, made.more, made.state, made.items = args, more, None, []
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is there already."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.items.extend(values)

    def add(self, value: Any) -> None:
        self.items.append(value)

    def __repr__(self) -> str:
        return f"Opaque({self.kind})"


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str
    offset: int
    nbytes: int


def read_archive(maps: Maps, file: str, start: int = 0, length: int | None = None) -> Any:
    """The tree of an archive that begins at a byte of a file. Raises UserError where there is none."""
    data = maps.data(file)
    stop = len(data) if length is None else start + length
    path = maps.folder / file
    if stop > len(data):
        raise UserError(f'"{path}" is cut off: it has {len(data):,} bytes, not {stop:,}')
    try:
        with zipfile.ZipFile(_Part(maps, file, start, stop)) as found:
            members = {one.filename.partition("/")[2]: one for one in found.infolist()}
            if "data.pkl" not in members:
                raise UserError(f'"{path}" is not what torch.save writes: it has no data.pkl')
            if any(one.compress_type for one in members.values()):
                raise UserError(f'"{path}" is a compressed archive, which torch.save does not write')
            tree = _member(maps, file, start, members["data.pkl"])
            if "byteorder" in members and _member(maps, file, start, members["byteorder"]) != b"little":
                raise UserError(f'"{path}" was written on a machine with another order of bytes')
    except _UNZIP as error:
        old = data[start : start + 1] == b"\x80"
        legacy = " (what torch before 1.6 wrote is not read: save it again)" if old else ""
        raise UserError(f'"{path}" is damaged, or nothing that torch.save wrote: {error}{legacy}') from None
    places = {name: _begin(maps, file, start + one.header_offset) for name, one in members.items()}
    sizes = {name: one.file_size for name, one in members.items()}
    try:
        return _Reader(io.BytesIO(tree), file, places, sizes).load()
    except UNPICKLE as error:
        raise UserError(f'the tree of "{path}" cannot be read: {error}') from None


def _member(maps: Maps, file: str, start: int, member: zipfile.ZipInfo) -> bytes:
    _compare_sum(maps, file, start, member)
    begin = _begin(maps, file, start + member.header_offset)
    return maps.data(file)[begin : begin + member.file_size]


def _compare_sum(maps: Maps, file: str, start: int, member: zipfile.ZipInfo) -> None:
    """Raises BadZipFile where a member's bytes are not those of its checksum; 0 is that of one written without."""
    if not member.CRC:
        return
    begin, found = _begin(maps, file, start + member.header_offset), 0
    stop = begin + member.file_size
    for at in range(begin, stop, SUMMED):
        end = min(at + SUMMED, stop)
        maps.ensure(file, at, end)
        found = zlib.crc32(maps.data(file)[at:end], found)
        if end < stop:
            maps.release()
    if found != member.CRC:
        raise zipfile.BadZipFile(f"the bytes of {member.filename} are not those of its checksum")


def compare_sums(maps: Maps, file: str, start: int = 0, length: int | None = None) -> bool:
    """Whether an archive has checksums, all of which are compared. Raises UserError for bytes that are not theirs.

    torch writes a CRC-32 for each member unless it is told not to, and looks at none of them when it loads.
    """
    data = maps.data(file)
    stop = len(data) if length is None else start + length
    try:
        with zipfile.ZipFile(_Part(maps, file, start, stop)) as found:
            members = found.infolist()
        for one in members:
            _compare_sum(maps, file, start, one)
    except _UNZIP as error:
        raise UserError(f'"{maps.folder / file}" is damaged: {error}') from None
    return all(one.CRC or not one.file_size for one in members)


def _begin(maps: Maps, file: str, head: int) -> int:
    """The first byte of a member's contents."""
    maps.ensure(file, head, head + LOCAL)
    data = maps.data(file)
    name, extra = (int.from_bytes(data[head + at : head + at + 2], "little") for at in (26, 28))
    return head + LOCAL + name + extra


class _Part(io.RawIOBase):
    """Some bytes of a map as a file."""

    def __init__(self, maps: Maps, file: str, start: int, stop: int) -> None:
        self._maps, self._file, self._start, self._stop, self._at = maps, file, start, stop, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._start

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (self._start, self._at, self._stop)[whence]
        self._at = max(self._start, min(base + offset, self._stop))
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        stop = self._stop if size is None or size < 0 else min(self._at + size, self._stop)
        self._maps.ensure(self._file, self._at, stop)
        found = bytes(self._maps.data(self._file)[self._at : stop])
        self._at = stop
        return found


def _plain_dict(*_: object) -> dict[Any, Any]:
    return {}


def _first(tensor: Any, *_: object) -> Any:
    return tensor


def _opaque(kind: str) -> type[Opaque]:
    return type("Opaque", (Opaque,), {"kind": kind})


def _typed(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor of a class of its own, or one with attributes: only where the class is torch's own is it a place."""
    if getattr(kind, "kind", "") in _WHOLE:
        return rebuild(*args)
    return _opaque("torch._tensor._rebuild_from_type_v2")(rebuild, kind, args, state)


_PLAIN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): _plain_dict,
    ("torch", "Size"): tuple,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
}
_STORAGES: Mapping[str, str] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_WHOLE = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
"""Classes of tensors that are no more than their elements."""


class _Reader(pickle.Unpickler):
    """Makes places of tensors and opaque objects of what it does not know."""

    def __init__(self, stream: io.BytesIO, file: str, places: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        super().__init__(stream, encoding="utf-8")
        self._file, self._places, self._sizes = file, places, sizes

    def find_class(self, module: str, name: str) -> Any:
        """The few that are known by their full names; never an import."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if module == "torch._utils" and name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return _first
        if module == "torch._tensor" and name == "_rebuild_from_type_v2":
            return _typed
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in DTYPES:
            return name
        return _opaque(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _ = pid
        member = f"data/{key}"
        if isinstance(dtype, type) and issubclass(dtype, Opaque):
            return dtype()
        if not isinstance(dtype, str) or member not in self._places:
            raise pickle.UnpicklingError(f"there is no storage {key!r} of a known type")
        return _Storage(str(key), dtype, self._places[member], self._sizes[member])

    def _tensor(self, storage: Any, offset: int, shape: Any, stride: Any, *more: Any) -> Any:
        if not isinstance(storage, _Storage):
            return _opaque(f"torch._utils._rebuild_tensor of {getattr(storage, 'kind', storage)}")(storage)
        signs = [cast("dict[str, Any]", one) for one in more if isinstance(one, dict)]
        if any(one.get("conj") or one.get("neg") for one in signs):
            return _opaque("torch._utils._rebuild_tensor that is conjugated or negated when it is read")(storage)
        dtype = next((one for one in more if isinstance(one, str) and one in DTYPES), storage.dtype)
        place = TensorPlace(self._file, storage.offset + offset * DTYPES[dtype], dtype, tuple(shape), tuple(stride))
        last = 1 + sum((n - 1) * s for n, s in zip(place.shape, place.stride, strict=True))
        if 0 not in place.shape and (offset + last) * DTYPES[dtype] > storage.nbytes:
            raise pickle.UnpicklingError(f"a tensor lies outside its storage {storage.key!r}")
        return place
