"""From a checkpoint of any format and structure to another, as a stream: a mapping says what becomes of what.

    opened source -> mapping, bound: coverage proved before a byte moves -> boxes of each new tensor, filled by relayout
    -> blocks of the new files

Memory is what the buffers and the pages that were just read take, a setting; what was read is let go as it is used.
Everything is written under a temporary name and appears by one rename.

Trade-off: a tensor of the source is read where the new order of bytes wants it, through maps, not in its files' order;
where a mapping scatters (experts from many small tensors into one), the disk sees small requests.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram import __version__
from tangram.checkpoint.conversion.new_tensors import cast_specs
from tangram.checkpoint.conversion.object_store import placing
from tangram.checkpoint.formats.common.config_json import true_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import split
from tangram.checkpoint.formats.common.outgoing import WriteTask
from tangram.checkpoint.formats.common.side_files import side_files, small_files, with_provenance
from tangram.checkpoint.formats.detect import TARGETS, WriteFormat
from tangram.checkpoint.formats.hf_export import SHARD, with_dtype
from tangram.checkpoint.loading.scatter import cast_into
from tangram.checkpoint.saving.file_writer import RING
from tangram.checkpoint.store.digest import Bytes
from tangram.checkpoint.store.manifest import BLOCK, DTYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.layout.region import stretch
from tangram.models.building.directory import hub_hint
from tangram.relayout import BoundMapping, Piece, PieceIndex, TensorSpec, execute, plan
from tangram.relayout.mapping.codecs import ROUNDED, measured

__all__ = [
    "IDENTITY",
    "LEAST",
    "MEMORY",
    "TARGETS",
    "ConvertOptions",
    "Filler",
    "Restructured",
    "restructure",
]

IDENTITY = "{name*} -> {name*}"
"""The mapping that leaves everything as it is."""
MEMORY = 512 << 20
LEAST = RING * BLOCK + (64 << 20)
"""Bytes of memory without which nothing can be converted."""
CHUNK = 64 << 20
"""Bytes of a chunk of a DCP at most."""
_OUT = "out"


@dataclass(frozen=True)
class ConvertOptions:
    """How a checkpoint is converted, beside where to and in which format."""

    dtype: str | None = None
    """Floating-point tensors of the model are cast to it, as `bfloat16`; None: as they are."""
    rounded: bool = False
    """Whether a cast may lose bits."""
    shard: int = SHARD
    """Bytes of a data file at most, but for a larger tensor."""
    memory: int = MEMORY
    """Bytes for all buffers."""
    config: Path | None = None
    """A directory whose config.json and tokenizer are used in place of the checkpoint's own."""
    mapping: str | None = None
    """A mapping of the user's own in the notation, in place of the family's."""
    sizes: Mapping[str, int] | None = None
    """Of names in that mapping."""
    family: str | None = None
    """By name, in place of the one that the configuration names."""
    settings: Mapping[str, Any] | None = None
    """Of the optimiser, which Megatron-core needs to resume."""
    betas: tuple[float, float] | None = None
    """Of Adam, where a format keeps its powers and no step."""
    local_layers: bool = False
    """Write Megatron-core's layers without Transformer Engine."""
    pad_vocabulary: int = 1
    """The vocabulary is padded to a multiple of it."""
    stack: bool = True
    """Stack equal layers in a torch_dist, as Megatron-core does."""
    experts_apart: bool = True
    """Give experts an optimiser of their own in a torch_dist."""
    states: bool = True
    """With the optimiser's states, where the format has a place for them."""
    adapters: tuple[tuple[Path, float], ...] = ()
    """Directories of peft whose adapters are merged, one after the other, each times a number."""
    dequantise: bool = False
    """Make weights of quantised ones."""
    part: str | None = None
    """A key: what lies under it is converted, as a moving average, and not what is found to be the model."""


@dataclass(frozen=True)
class Restructured:
    """What has been written."""

    path: str
    format: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    cast: int
    configured: bool
    """Whether the configuration is there."""
    seconds: float
    changed: tuple[str, ...] = ()
    """What was changed in the configuration, so that it is true of the tensors."""
    left_beside: tuple[str, ...] = ()
    """What is beside the weights and was not carried along."""
    rounded: Mapping[str, float] = field(default_factory=dict[str, float])
    """Tensors that a sum or product of the mapping rounded: how far off a value comes back at most, of itself."""

    def as_json(self) -> dict[str, Any]:
        lists = {key: list(getattr(self, key)) for key in ("files", "changed", "left_beside")}
        return {**vars(self), **lists, "seconds": round(self.seconds, 3)}


def restructure(
    source: OpenCheckpoint,
    bound: BoundMapping,
    target: Path | str,
    to: str,
    options: ConvertOptions | None = None,
    *,
    small: Mapping[str, bytes] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Restructured:
    """Write what a mapping makes of a checkpoint as the new directory `target`, or at an address of an object store.

    `to`: one of TARGETS. Of `options` it takes what is about writing: types, sizes, and how Megatron-core has layers.
    `small`: side files, the source's own unless given; of the directory `options.config` then. `on_bytes` is called
    with how many more bytes are written. Raises UserError for what cannot be done and DamagedError for damage; nothing
    is left of the target then.
    """
    begin = time.perf_counter()
    options = options or ConvertOptions()
    writer, memory = target_of(to), options.memory
    if memory < LEAST:
        raise UserError(f"{memory:,} bytes of memory are too few: give {LEAST >> 20} MiB or more")
    beside = source.small if small is None else small
    specs = cast_specs(bound, options.dtype, source.states, options.rounded, beside.get("config.json"))
    if not specs:
        raise UserError(f'"{source.path}" has no tensors to convert')
    for name, spec in specs.items():
        if spec.dtype not in writer.dtypes:
            if spec.dtype.startswith("complex"):
                raise UserError(f"{name} is {spec.dtype}, which {writer.title} cannot hold: give --to dcp or tangram")
            raise UserError(f"{name} is {spec.dtype}, which {writer.title} cannot hold: give a --dtype")
    beside, changed, left = _side_files(source, bound, specs, to, options, beside)
    nbytes = sum(math.prod(spec.shape) * DTYPES[spec.dtype] for spec in specs.values())
    filler = Filler(source, bound, specs, max(1, memory // 4))
    chunk = min(CHUNK, (memory - LEAST) // 4 + BLOCK)
    with placing(str(target), nbytes + sum(map(len, beside.values()))) as (folder, done):
        task = WriteTask(
            folder, specs, source.states, filler.fill, filler.bytes_of, chunk, options.shard, options.stack,
            options.experts_apart, beside, source.objects, on_bytes or _deaf, done,
        )  # fmt: skip
        files = writer.write(task)
    cast = sum(bound.target.specs[name] != spec for name, spec in specs.items())
    configured = "config.json" in beside
    return Restructured(
        str(target), to, len(specs), nbytes, tuple(files), cast, configured, time.perf_counter() - begin, changed, left,
        filler.rounded,
    )  # fmt: skip


def _side_files(
    source: OpenCheckpoint,
    bound: BoundMapping,
    specs: Mapping[str, TensorSpec],
    to: str,
    options: ConvertOptions,
    small: Mapping[str, bytes],
) -> tuple[dict[str, bytes], tuple[str, ...], tuple[str, ...]]:
    """The files beside the weights, what was changed in the configuration, and what is not carried along."""
    beside, dtype = dict(small), options.dtype
    if dtype is not None and "config.json" in beside:
        beside["config.json"] = with_dtype(beside["config.json"], dtype)
    made = {"from": source.format, "folder": source.path.name, "to": to, "dtype": dtype, "tangram": __version__}
    made |= {key: source.objects[key] for key in ("dequantised", "adapter", "adapters") if key in source.objects}
    changed: tuple[str, ...] = ()
    if target_of(to).structure == "hf":
        owners = split(specs, source.states)
        beside, changed = true_of(beside, {name: spec for name, spec in specs.items() if not owners[name][1]})
    origin = source.path if options.config is None else options.config
    left = side_files(origin).left if origin.is_dir() else ()
    made = {**made, "mapping": _lines(bound)}
    return with_provenance(beside, made, origin.resolve().name if beside else "", left), changed, left


def target_of(to: str) -> WriteFormat:
    """How a format is written. Raises UserError for one that is not."""
    if to not in TARGETS:
        raise UserError(f"--to {to}: give one of {', '.join(TARGETS)}")
    return TARGETS[to]


def small_of(folder: Path) -> dict[str, bytes]:
    """Configuration and tokenizer of a directory. Raises UserError for one without a config.json."""
    if not (folder / "config.json").is_file():
        raise UserError(f'--config "{folder}": give a directory with a config.json{hub_hint(folder)}')
    return small_files(folder)


def config_of(small: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The configuration among small files. Raises UserError for one that is no table."""
    if "config.json" not in small:
        return None
    try:
        fields: Any = json.loads(small["config.json"])
    except ValueError as error:
        raise UserError(f"the config.json cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise UserError("the config.json is no table")
    return cast("dict[str, Any]", fields)


# ---------------------------------------------------------------- filling


def _deaf(_: int) -> None:
    """Nobody wants to hear."""


class Filler:
    """Boxes of new tensors, made of what a source's pieces have."""

    def __init__(self, source: OpenCheckpoint, bound: BoundMapping, specs: Mapping[str, TensorSpec], keep: int) -> None:
        """`keep`: bytes that are read before what was read is let go."""
        self._source, self._bound, self._specs, self._keep = source, bound, specs, keep
        self._holders = PieceIndex(source.pieces, bound.source)
        self._own = bound.target.specs
        self._direct = _copies_of(source, bound)
        self._read = 0
        self._summed = _summed_in(bound, specs)
        self.rounded: dict[str, float] = {}

    def fill(self, name: str, region: Region, out: Tensor) -> None:
        """A box of a tensor into memory of its shape."""
        own = getattr(torch, self._own[name].dtype)
        values = self._as_it_is(name)
        if values is not None and values.dtype == own:
            into = values[tuple(slice(a, b) for a, b in region.hull)]
            cast_into(name, into, out)
        else:
            into = out if out.dtype == own else torch.empty(out.shape, dtype=own)
            bound = self._bound
            if name in self._summed:
                bound = replace(bound, codecs=measured(bound.codecs, partial(self._heard, name)))
            steps = plan(bound, self._holders, [Piece(_OUT, name, region)])
            execute(steps, self._source.read, {(_OUT, name): into})
            if into is not out:
                cast_into(name, into, out)
        self._let_go(into.nbytes)

    def _heard(self, name: str, off: float) -> None:
        if off > self.rounded.get(name, 0.0):
            self.rounded[name] = off

    def _let_go(self, nbytes: int) -> None:
        """Count bytes that were read, and let go of them where they are many."""
        self._read += nbytes
        if self._read > self._keep:
            self._source.release()
            self._read = 0

    def _as_it_is(self, name: str) -> Tensor | None:
        """All values of a tensor that is one whole piece of the source: no plan says more."""
        piece = self._direct.get(name)
        values = self._source.read(piece.place, piece.tensor) if piece else None
        return values if values is not None and tuple(values.shape) == self._own[name].shape else None

    def values_of(self, name: str) -> Tensor:
        """All values of a tensor, until those of the next are asked for."""
        spec, own = self._specs[name], self._own[name]
        self._let_go(math.prod(own.shape) * DTYPES[own.dtype])
        values = self._as_it_is(name) if spec.dtype == own.dtype else None
        if values is None:
            values = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            self.fill(name, Region.full(spec.shape), values)
        return values

    def bytes_of(self, name: str, first: int, out: Bytes) -> None:
        """Bytes of a tensor in row-major order, from the byte `first` on."""
        spec = self._specs[name]
        itemsize = DTYPES[spec.dtype]
        values = self._as_it_is(name) if spec.dtype == self._own[name].dtype else None
        if values is not None and values.is_contiguous():
            torch.from_numpy(out).copy_(values.reshape(-1).view(torch.uint8)[first : first + len(out)])
            self._let_go(len(out))
            return
        flat = torch.from_numpy(out).view(getattr(torch, spec.dtype))
        at = 0
        for box in stretch(tuple(span(0, n) for n in spec.shape), first // itemsize, (first + len(out)) // itemsize):
            shape = [b - a for ((a, b),) in box]
            size = math.prod(shape)
            self.fill(name, Region.of([box]), flat[at : at + size].view(shape))
            at += size


def _lines(bound: BoundMapping) -> list[str]:
    """The statements of a mapping; one for all tensors that keep their names, as what takes the rest."""
    other = [s for s in bound.mapping.statements if s.source != s.target or s.options]
    kept = len(other) < len(bound.mapping.statements)
    return [*map(str, other), *([IDENTITY] if kept else [])]


def _summed_in(bound: BoundMapping, specs: Mapping[str, TensorSpec]) -> frozenset[str]:
    """The new tensors that a mapping adds to, or multiplies."""
    families = {
        name for name, cells in bound.cells.items() if any(key in ROUNDED for cell in cells for key, _ in cell.options)
    }
    if not families:
        return frozenset()
    owners = {name: bound.target.lift(name, Region.full(spec.shape))[0].name for name, spec in specs.items()}
    return frozenset(name for name, family in owners.items() if family in families)


def _copies_of(source: OpenCheckpoint, bound: BoundMapping) -> dict[str, Piece]:
    """The pieces that are a new tensor as they are: whole, alone, and of the same shape without any codec."""
    whole: dict[str, Piece | None] = {}
    for piece in source.pieces:
        alone = piece.tensor not in whole and piece.region.local_shape == source.specs[piece.tensor].shape
        whole[piece.tensor] = piece if alone else None
    found: dict[str, Piece] = {}
    for name, cells in bound.cells.items():
        target, cell = bound.target.families[name], cells[0]
        if len(cells) > 1 or cell.source is None or cell.tied or cell.options or target.family_dims:
            continue
        same = (cell.source.dims, cell.source.slots) == (cell.target.dims, cell.target.slots)
        piece = whole.get(cell.source.tensor) if same and cell.sizes == target.spec.shape else None
        if piece is not None and target.spec == source.specs[piece.tensor]:
            found[name] = piece
    return found
