"""An adapter of peft's merged into a checkpoint while it is read: W + scale * (B @ A), block by block.

    opened source, adapter -> the same source, whose pieces of adapted weights are blocks of rows that are sums

It stands before the mapping, so every target and structure takes what it gives. A block is computed in float32 (float64
where a part of it is) and rounded once to its weight's type. What has no adapter is read as before, bit for bit. DoRA
(Liu et al., 2024: weight-decomposed low-rank adaptation) scales each output of the sum to a length that it has trained;
the lengths are summed over all pieces once, when a weight's first block is read. Tensors that the adapter has in full
(`modules_to_save`, biases, embeddings of more tokens) take the old ones' places; a head that was tied and is no longer
the same gets a tensor, and the configuration says so.

Trade-off: a block that the mapping comes back to after some others is recomputed; only the last few are kept. A
weight under DoRA is read twice.
"""

import hashlib
import itertools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.conversion.adapter_config import CONFIG
from tangram.checkpoint.conversion.adapter_files import (
    PREFIX,
    WEIGHTS,
    Changes,
    LowRankPair,
    WeightChange,
    changes_of,
)
from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.conversion.find_mapping import model_of
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.model_part import only
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import named_without, renamed
from tangram.checkpoint.loading.scatter import cast_into
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tangram.layout.intervals import IntSet, span
from tangram.layout.region import Box, box_size
from tangram.models.families import megatrons_embedding
from tangram.relayout import Piece, TensorSpec, bind

BLOCK = 4 << 20
"""Bytes of a block at most, in the type that it is computed in; a row is never cut."""
KEPT = 8
"""Blocks that are kept: queries, keys and values are read in turns where a mapping fuses them."""


@dataclass(frozen=True)
class WeightBlock:
    """The place of a block: a part of a piece, in its buffer and in the tensor."""

    place: Hashable
    shape: tuple[int, ...]
    """Of the piece's buffer."""
    at: tuple[tuple[int, int], ...]
    box: Box


@dataclass(frozen=True)
class Full:
    """The place of a tensor that the adapter has in full."""


def with_adapter(
    source: OpenCheckpoint,
    folder: Path,
    inner: Mapping[str, Tensor] | None = None,
    *,
    block: int = BLOCK,
    weight: float = 1.0,
) -> OpenCheckpoint:
    """The same checkpoint with an adapter merged into its weights; states of the optimiser are of the old, and go.

    `inner`: the adapter's tensors by the names of its file, where they are not in the folder. `block`: bytes of a
    block at most; `weight`: by what A and B are multiplied. Raises UserError for what is not merged: another kind of
    adapter than LoRA and DoRA, tensors that fit nothing in the source, and a source with Megatron-core's names.
    """
    source, _ = model_of(source)
    if megatrons_embedding(source.specs) is not None:
        raise UserError(
            f'"{source.path}" has the names of Megatron-core, and adapters have those of transformers: convert it with '
            "--to hf first"
        )
    maps = Maps(folder)
    found = changes_of(source, folder, maps, inner)
    changes = found.tensors if weight == 1 else _weighed(found.tensors, weight, folder)
    specs = {**source.specs, **{name: _spec(source, change) for name, change in changes.items()}}
    pieces = [piece for piece in source.pieces if piece.tensor not in changes]
    for name, change in changes.items():
        before = _pieces_of(source, name, change)
        pieces += [part for piece in before for part in _cut(piece, source, specs[name], change.pair, block)]
    merge = _Merge(source, changes, specs, pieces)

    def release() -> None:
        maps.release()
        source.release()

    with (folder / (CONFIG if inner else WEIGHTS)).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    about = {"folder": folder.resolve().name, "sha256": digest, "tensors": len(changes)}
    about |= {"weight": weight} if weight != 1 else {}
    before = source.objects.get("adapters") or [one for one in (source.objects.get("adapter"),) if one]
    objects = {**source.objects, "adapter": about, **({"adapters": [*before, about]} if before else {})}
    small = _small(source, specs, found)
    return replace(
        source, specs=specs, pieces=tuple(pieces), read=merge.read, release=release, objects=objects, small=small
    )


def _weighed(changes: Mapping[str, WeightChange], weight: float, folder: Path) -> dict[str, WeightChange]:
    """Changes of which a part, or more, is made. Raises UserError for what is no sum."""
    found: dict[str, WeightChange] = {}
    for name, change in changes.items():
        if change.full is not None or change.pair is None or change.pair.magnitude is not None:
            raise UserError(
                f'"{folder}" has {name} in full, or its lengths: only A and B can be merged times {weight}, so leave '
                "the number out"
            )
        found[name] = replace(change, pair=replace(change.pair, scale=change.pair.scale * weight))
    return found


@dataclass
class _Merge:
    """Reads what an adapter makes of a source."""

    source: OpenCheckpoint
    changes: Mapping[str, WeightChange]
    specs: Mapping[str, TensorSpec]
    pieces: Sequence[Piece]
    last: OrderedDict[tuple[Hashable, str], Tensor] = field(default_factory=OrderedDict[tuple[Hashable, str], Tensor])
    lengths: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def read(self, place: Hashable, name: str) -> Tensor:
        """As `OpenCheckpoint.read`."""
        change = self.changes.get(name)
        if change is None:
            return self.source.read(place, name)
        if not isinstance(place, WeightBlock) or change.pair is None:
            return self._values(place, name)
        key = place, name
        if key not in self.last:
            made = self._sum(place, name, change.pair)
            if change.pair.magnitude is not None:
                made *= _factor(change.pair, self._lengths(name, change.pair), place.box).to(made.dtype)
            self.last[key] = _rounded(made, place.box, self.specs[name], name)
            if len(self.last) > KEPT:
                self.last.popitem(last=False)
        self.last.move_to_end(key)
        return self.last[key]

    def _values(self, place: Hashable, name: str) -> Tensor:
        change = self.changes[name]
        if isinstance(place, Full):
            assert change.full is not None
            made = torch.empty_like(change.full, dtype=getattr(torch, self.specs[name].dtype))
            cast_into(name, change.full, made)
            return made
        return self.source.read(place, change.base)

    def _sum(self, place: WeightBlock, name: str, pair: LowRankPair) -> Tensor:
        own = self._values(place.place, name).view(place.shape)[tuple(slice(a, b) for a, b in place.at)]
        return _sum(own, place.box, pair)

    def _lengths(self, name: str, pair: LowRankPair) -> Tensor:
        """Of each output, the length of its weights with what the adapter adds: [out], float64."""
        if name not in self.lengths:
            squares = torch.zeros(len(cast(Tensor, pair.magnitude)), dtype=torch.float64)
            for place in (piece.place for piece in self.pieces if piece.tensor == name):
                if isinstance(place, WeightBlock):
                    rows, columns = place.box
                    made = self._sum(place, name, pair).double().square()
                    squares[_index(columns if pair.turned else rows)] += made.sum(0 if pair.turned else 1)
            self.lengths[name] = squares.sqrt()
        return self.lengths[name]


def _spec(source: OpenCheckpoint, change: WeightChange) -> TensorSpec:
    """Of the source's type: what was trained in more bits is rounded to it."""
    spec = source.specs[change.base]
    return spec if change.full is None else TensorSpec(tuple(change.full.shape), spec.dtype)


def _pieces_of(source: OpenCheckpoint, name: str, change: WeightChange) -> list[Piece]:
    if change.full is not None:
        return [Piece(Full(), name, Region.full(tuple(change.full.shape)))]
    return [replace(piece, tensor=name) for piece in source.pieces if piece.tensor == change.base]


def _small(source: OpenCheckpoint, specs: Mapping[str, TensorSpec], found: Changes) -> Mapping[str, bytes]:
    """The small files, with a configuration that is true of the tensors: whether the head is tied, how many tokens."""
    resized = [n for n, c in found.tensors.items() if c.full is not None and c.full.shape != source.specs[c.base].shape]
    if "config.json" not in source.small or not (resized or found.untied):
        return source.small
    fields = cast("dict[str, Any]", json.loads(source.small["config.json"]))
    if found.untied:
        fields["tie_word_embeddings"] = False
    if resized:
        fields["vocab_size"] = specs[resized[0]].shape[0]
    return {**source.small, "config.json": json.dumps(fields, indent=2).encode()}


# ---------------------------------------------------------------- blocks


def _cut(
    piece: Piece, source: OpenCheckpoint, spec: TensorSpec, pair: LowRankPair | None, most: int
) -> Iterator[Piece]:
    """A piece of an adapted weight in blocks of rows, any other as it is."""
    if pair is None or not piece.region:
        yield piece
        return
    width = max(4, getattr(torch, spec.dtype).itemsize)
    flat = len(piece.region.boxes) > 1
    start = 0
    for box in _in_order(piece, spec.shape, source):
        *experts, rows, columns = box
        step = max(1, most // width // intervals.size(columns))
        for at, one in enumerate(intervals.elements(experts[0]) if experts else [0]):
            for first in range(0, intervals.size(rows), step):
                some = intervals.take(rows, span(first, first + step))
                part = (*([span(one, one + 1)] if experts else []), some, columns)
                where = ((first, first + intervals.size(some)), (0, intervals.size(columns)))
                where = (*([(at, at + 1)] if experts else []), *where)
                if flat:
                    where = ((start, start + box_size(part)),)
                shape = piece.region.local_shape or (piece.region.size,)
                yield Piece(WeightBlock(piece.place, shape, where, part), piece.tensor, Region.of([part]))
                start += box_size(part)


def _in_order(piece: Piece, shape: tuple[int, ...], source: OpenCheckpoint) -> list[Box]:
    """The boxes of a piece, of which each has to end before the next begins: so they stand in its buffer."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def ends(box: Box) -> tuple[int, int]:
        first, last = ([s[0][0] for s in box], [s[-1][1] - 1 for s in box])
        return sum(map(int.__mul__, first, strides)), sum(map(int.__mul__, last, strides))

    boxes = sorted(piece.region.boxes, key=ends)
    for one, other in itertools.pairwise(boxes):
        if ends(one)[1] >= ends(other)[0]:
            raise UserError(
                f'"{source.path}" has a piece of {piece.tensor}, {piece.region}, whose parts lie among each other: '
                "no adapter is merged into such, so convert it with --to hf first"
            )
    return boxes


def _sum(values: Tensor, box: Box, pair: LowRankPair) -> Tensor:
    """A block's values with what the adapter adds, as a matrix, in float32 or float64."""
    *experts, rows, columns = box
    left, right = pair.factors(experts[0][0][0] if experts else 0)
    kind = reduce(torch.promote_types, (values.dtype, left.dtype, right.dtype), torch.float32)
    sums = values.reshape(intervals.size(rows), intervals.size(columns)).to(kind, copy=True)
    return sums.addmm_(left[_index(rows)].to(kind), right[:, _index(columns)].to(kind), alpha=pair.scale)


def _rounded(sums: Tensor, box: Box, spec: TensorSpec, name: str) -> Tensor:
    """A block in its weight's type. Raises UserError for numbers that the type does not have."""
    made = sums.to(getattr(torch, spec.dtype))
    if not made.isfinite().all() and sums.isfinite().all():
        raise UserError(f"{name} with the adapter has numbers that its type {made.dtype} does not: give a wider one")
    return made.view([intervals.size(one) for one in box])


def _factor(pair: LowRankPair, lengths: Tensor, box: Box) -> Tensor:
    """What DoRA multiplies a block with: magnitude over length, of each of its outputs."""
    assert pair.magnitude is not None
    at = _index(box[1] if pair.turned else box[0])
    factor = pair.magnitude[at].double() / lengths[at]
    return factor if pair.turned else factor[:, None]


def _index(one: IntSet) -> Any:
    return slice(*one[0]) if len(one) == 1 else torch.tensor(intervals.elements(one))


# An adapter that lies in a checkpoint beside its weights, as the state of a model of peft's has it:
#     q_proj.base_layer.weight, q_proj.lora_A.default.weight ... -> q_proj.weight, and pairs as peft's files name them
# Only what peft's files have no names for is decided: which tensors are the base's, and that one adapter is there.
PART = re.compile(r"(.+\.lora_(?:embedding_)?(?:[AB]|magnitude_vector))\.([^.]+)(\.weight)?")
FULL = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
BASE = re.compile(r"\.(?:base_layer|original_module)(?=\.)")


@dataclass(frozen=True)
class Adapted:
    """A checkpoint's base by the names of its model, and the adapter that was in it, by the names of peft's files."""

    source: OpenCheckpoint
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def without_adapter(source: OpenCheckpoint, read: bool) -> Adapted:
    """The base and the adapter of a checkpoint that has both; any other as it is. Without states of an optimiser.

    `read`: whether the adapter's values are needed. Raises UserError where several adapters are there.
    """
    lead = next(iter(source.specs), "").partition(PREFIX)[0] + PREFIX  # a program's own holder may stand before it
    if all(name.startswith(lead) for name in source.specs):
        source = named_without(source, lead)
    parts = {name: match for name in source.specs if (match := PART.fullmatch(name) or FULL.fullmatch(name))}
    if not parts:
        return Adapted(source)
    if len(adapters := sorted({match[2] for match in parts.values()})) > 1:
        raise UserError(f'"{source.path}" has {len(adapters)} adapters ({", ".join(adapters)}), and one can be merged')
    base = only(source, source.specs.keys() - parts.keys())
    base = renamed(base, {name: BASE.sub("", name) for name in base.specs})
    if not read:
        return Adapted(base)
    inner, base = only(source, parts.keys()), replace(base, beside=source.beside)
    filler = Filler(inner, bind(IDENTITY, inner.specs), inner.specs, 64 << 20)
    return Adapted(base, {f"{PREFIX}{match[1]}{_end(match)}": filler.values_of(name) for name, match in parts.items()})


def _end(match: re.Match[str]) -> str:
    return f".{match[3]}" if match.re is FULL else match[3] or ""
