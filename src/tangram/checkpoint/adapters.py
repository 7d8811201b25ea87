"""A LoRA adapter of peft's merged into a checkpoint while it is read: W + scale * (B @ A), block by block.

    opened source, adapter -> the same source, whose pieces of adapted weights are blocks of rows that are sums

It stands before the mapping, so every target and structure takes what it gives. A block is computed in float32 (float64
where a part of it is) and rounded once to its weight's type. What has no adapter is read as before, bit for bit.

What is merged is plain LoRA by the names in the adapter's file. Whatever else a configuration says is refused, also
what this version has never heard of: a merge that leaves something out gives weights that look right.

Trade-off: a block that the mapping comes back to after some others is computed again; only the last few are kept.
"""

import hashlib
import itertools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint import header
from tangram.checkpoint.commits import read_bounded
from tangram.checkpoint.formats.mapped import Maps
from tangram.checkpoint.formats.opened import Opened
from tangram.checkpoint.formats.small import LARGEST_SMALL
from tangram.checkpoint.structures import model_of
from tangram.errors import UserError
from tangram.layout import Region, intervals
from tangram.layout.intervals import IntSet, span
from tangram.layout.region import Box, box_size
from tangram.models.families import megatrons_embedding
from tangram.relayout import Piece

__all__ = ["BLOCK", "KEPT", "with_adapter"]

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BLOCK = 4 << 20
"""Bytes of a block at most, in the type that it is computed in; a row is never cut."""
KEPT = 8
"""Blocks that are kept: queries, keys and values are read in turns where a mapping fuses them."""
PREFIX = "base_model.model."
FLOATS = ("float16", "bfloat16", "float32", "float64")
HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "alpha_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
})  # fmt: skip
"""Keys of a configuration that are read, or that change nothing in a merge; all others have to say nothing."""
NOTHING: tuple[Any, ...] = (None, False, "", "none", 0, [], {})
BESIDE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Ways to begin A and B that leave the weights as they were; others (PiSSA, OLoRA, CorDA, LoftQ) change them."""


@dataclass(frozen=True)
class Config:
    """What a configuration says of scales."""

    rank: float
    alpha: float
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    root: bool
    """By the root of the rank (rsLoRA)."""
    parameters: tuple[str, ...]
    """Ends of names of parameters that are adapted by themselves, as fused experts are."""


@dataclass(frozen=True)
class Pair:
    """A and B of a weight of two dims, or for each expert of three."""

    a: Tensor
    b: Tensor
    scale: float
    experts: int = 0
    """0: a weight of two dims."""
    turned: bool = False
    """Each expert's matrix has its inputs as rows."""

    def factors(self, expert: int) -> tuple[Tensor, Tensor]:
        """Two matrices, as views, whose product is what is added."""
        if not self.experts:
            return self.b, self.a
        a = self.a.view(self.experts, -1, self.a.shape[1])[expert]
        b = self.b.view(self.b.shape[0], -1, self.experts)[:, :, expert]
        return (a.T, b.T) if self.turned else (b, a)


@dataclass(frozen=True)
class Block:
    """The place of a block: a part of a piece, in its buffer and in the tensor."""

    place: Hashable
    shape: tuple[int, ...]
    """Of the piece's buffer."""
    at: tuple[tuple[int, int], ...]
    box: Box


def with_adapter(source: Opened, folder: Path, *, block: int = BLOCK) -> Opened:
    """The same checkpoint with an adapter merged into its weights; states of the optimiser are of the old, and go.

    `block`: bytes of a block at most. Raises UserError for what is not merged: another kind of adapter than plain LoRA,
    tensors that fit nothing in the source, and a source with Megatron-core's names.
    """
    source, _ = model_of(source)
    if megatrons_embedding(source.specs) is not None:
        raise UserError(
            f'"{source.path}" has the names of Megatron-core, and adapters have those of transformers: convert it with '
            "--to hf first"
        )
    config = _config(folder)
    maps = Maps(folder)
    pairs = _pairs(source, config, folder, maps)
    pieces = [part for piece in source.pieces for part in _cut(piece, source, pairs.get(piece.tensor), block)]
    kept: OrderedDict[tuple[Hashable, str], Tensor] = OrderedDict()

    def read(place: Hashable, name: str) -> Tensor:
        if not isinstance(place, Block):
            return source.read(place, name)
        if (place, name) not in kept:
            values = source.read(place.place, name).view(place.shape)[tuple(slice(a, b) for a, b in place.at)]
            kept[place, name] = _merged(values, place.box, pairs[name], name)
            if len(kept) > KEPT:
                kept.popitem(last=False)
        kept.move_to_end((place, name))
        return kept[place, name]

    def release() -> None:
        maps.release()
        source.release()

    with (folder / WEIGHTS).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    about = {"folder": folder.resolve().name, "sha256": digest, "tensors": len(pairs)}
    objects = {**source.objects, "adapter": about}
    return replace(source, pieces=tuple(pieces), read=read, release=release, objects=objects)


# ---------------------------------------------------------------- blocks


def _cut(piece: Piece, source: Opened, pair: Pair | None, most: int) -> Iterator[Piece]:
    """A piece of an adapted weight in blocks of rows, any other as it is."""
    if pair is None or not piece.region:
        yield piece
        return
    spec = source.specs[piece.tensor]
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
                yield Piece(Block(piece.place, shape, where, part), piece.tensor, Region.of([part]))
                start += box_size(part)


def _in_order(piece: Piece, shape: tuple[int, ...], source: Opened) -> list[Box]:
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


def _merged(values: Tensor, box: Box, pair: Pair, name: str) -> Tensor:
    """A block's values with what the adapter adds, in their type."""
    *experts, rows, columns = box
    left, right = pair.factors(experts[0][0][0] if experts else 0)
    kind = reduce(torch.promote_types, (values.dtype, left.dtype, right.dtype), torch.float32)
    sums = values.reshape(intervals.size(rows), intervals.size(columns)).to(kind, copy=True)
    sums.addmm_(left[_index(rows)].to(kind), right[:, _index(columns)].to(kind), alpha=pair.scale)
    made = sums.to(values.dtype)
    if not made.isfinite().all() and values.isfinite().all():
        raise UserError(f"{name} with the adapter has numbers that its type {values.dtype} does not: give a wider one")
    return made.view([intervals.size(one) for one in box])


def _index(one: IntSet) -> Any:
    return slice(*one[0]) if len(one) == 1 else torch.tensor(intervals.elements(one))


# ---------------------------------------------------------------- what an adapter's files say


def _config(folder: Path) -> Config:
    """The configuration. Raises UserError for one that says more than plain LoRA."""
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f'the adapter "{folder}" has no {CONFIG}: give a directory that peft has written')
    try:
        raw: Any = json.loads(read_bounded(file.resolve(), LARGEST_SMALL))
    except ValueError as error:
        raise UserError(f'"{file}" cannot be read: {error}') from None
    if not isinstance(raw, dict):
        raise UserError(f'"{file}" is no table')
    fields = cast("dict[str, Any]", raw)
    if fields.get("peft_type") != "LORA":
        raise UserError(f'the adapter "{folder}" is of the type {fields.get("peft_type")!r}: only LORA is merged')
    for key, value in fields.items():
        if key not in HARMLESS and value not in NOTHING:
            raise UserError(
                f'the adapter "{folder}" has {key} = {json.dumps(value)[:60]}, and only plain LoRA is merged: merge it '
                "with peft's merge_and_unload"
            )
    if (begun := fields.get("init_lora_weights")) not in BESIDE:
        raise UserError(
            f'the adapter "{folder}" began with init_lora_weights = {json.dumps(begun)[:60]}, which may have '
            "changed the weights beside it: save it with peft's path_initial_model_for_weight_conversion"
        )
    named = cast("list[Any]", fields.get("target_parameters") or [])
    ranks, alphas = (_numbers(fields.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
    usual = _numbers({key: fields.get(key) for key in ("r", "lora_alpha")})
    if usual is None or ranks is None or alphas is None or not all(isinstance(one, str) for one in named):
        raise UserError(f'"{file}" does not say ranks and alphas as numbers: r, lora_alpha and their patterns')
    return Config(usual["r"], usual["lora_alpha"], ranks, alphas, bool(fields.get("use_rslora")), tuple(named))


def _numbers(table: Any) -> dict[str, float] | None:
    """A table of numbers, None for anything else."""
    if not isinstance(table, dict):
        return None
    found = cast("dict[str, Any]", table)
    good = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in found.values())
    return found if good else None


def _scale(config: Config, name: str, rank: int, folder: Path) -> float:
    """By what a product is multiplied. Raises UserError where A and B have another rank than the configuration says."""

    def said(patterns: Mapping[str, float], usual: float) -> float:
        try:
            key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), None)
        except re.error as error:
            raise UserError(f'"{folder / CONFIG}" has a pattern that is none: {error}') from None
        return usual if key is None else patterns[key]

    expected = said(config.ranks, config.rank)
    if expected != rank or not rank:
        raise UserError(f'the adapter "{folder}" has rank {rank} for {name}, and its {CONFIG} says {expected}')
    return said(config.alphas, config.alpha) / (math.sqrt(rank) if config.root else rank)


def _pairs(source: Opened, config: Config, folder: Path, maps: Maps) -> dict[str, Pair]:
    """A and B by the names of the source's weights. Raises UserError for what fits none."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in _tensors(folder, maps).items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise UserError(f'the adapter "{folder}" has {name}, which is no A or B of a linear layer\'s LoRA')
        if str(value.dtype).removeprefix("torch.") not in FLOATS or value.ndim != 2:
            raise UserError(
                f'the adapter "{folder}" has {name} as {value.dtype} {list(value.shape)}: no matrix of LoRA'
            )
        if not value.isfinite().all():
            raise UserError(
                f'the adapter "{folder}" has numbers in {name} that are not finite: its training went wrong'
            )
        found.setdefault(match[1], {})[match[2]] = value
    pairs: dict[str, Pair] = {}
    for module, both in found.items():
        if len(both) < 2:
            raise UserError(f'the adapter "{folder}" has {module}.lora_{min(both)} without the other of A and B')
        name, pair = _fitted(source, config, module, both["A"], both["B"], folder)
        if name in pairs:
            raise UserError(f'the adapter "{folder}" has two pairs that could be for {name}')
        if name == "lm_head.weight" and _tied(source):
            raise UserError(
                f'the adapter "{folder}" is also of lm_head, which is tied to the embeddings: untie it first'
            )
        pairs[name] = pair
    if not pairs:
        raise UserError(f'the adapter "{folder}" has no tensors')
    return pairs


def _tensors(folder: Path, maps: Maps) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = f" (its {PICKLED} is pickled and is not read)" if (folder / PICKLED).is_file() else ""
        raise UserError(f'the adapter "{folder}" has no {WEIGHTS}{pickled}')
    data, size = maps.data(WEIGHTS), file.stat().st_size
    length = header.header_length(data[:8], size, str(file))
    slots, _ = header.parse(data[: 8 + length], size, str(file))
    return {slot.name: maps.view(WEIGHTS, slot.offset, slot.dtype, slot.shape) for slot in slots}


def _fitted(source: Opened, config: Config, module: str, a: Tensor, b: Tensor, folder: Path) -> tuple[str, Pair]:
    """Which weight A and B of a module are for. Raises UserError where none fits, or it is not plain."""
    plain = f"{module}.weight"
    owner = module.removesuffix(".base_layer")
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
    ends = [f"{owner}.{one.rpartition('.')[2]}" for one in config.parameters]
    named = {n for n, one in zip(ends, config.parameters, strict=True) if n == one or n.endswith(f".{one}")}
    candidates = [plain] if plain in source.specs else sorted(named & source.specs.keys())
    if not candidates:
        apart = any(name.startswith(f"{owner}.0.") for name in source.specs)
        why = "; there the experts lie one by one, and the adapter is of all together" if apart and named else ""
        raise UserError(f'the adapter "{folder}" has {module}, and "{source.path}" no weight of it{why}')
    fits: list[tuple[str, int, bool]] = []
    for name in candidates:
        shape = source.specs[name].shape
        experts = shape[0] if len(shape) == 3 else 0
        if not all(shape) or len(shape) not in (2, 3) or a.shape[0] != b.shape[1] or a.shape[0] % (experts or 1):
            continue
        if (b.shape[0], a.shape[1]) == shape[-2:]:
            fits.append((name, experts, False))
        if experts and (a.shape[1], b.shape[0]) == shape[-2:]:
            fits.append((name, experts, True))
    if not fits:
        shapes = ", ".join(f"{name} {list(source.specs[name].shape)}" for name in candidates)
        raise UserError(
            f'the adapter "{folder}" has A {list(a.shape)} and B {list(b.shape)} for {module}, and {shapes} is of '
            "another shape"
        )
    if len(fits) > 1:
        said = ", ".join(sorted({name for name, *_ in fits}))
        raise UserError(
            f'the shapes of {module} in the adapter "{folder}" do not tell how they fit {said}: merge by peft'
        )
    name, experts, turned = fits[0]
    if source.specs[name].dtype not in FLOATS:
        raise UserError(f"{name} is {source.specs[name].dtype}, into which nothing is merged: dequantise it first")
    rank = a.shape[0] // (experts or 1)
    key = name if experts else module
    return name, Pair(a, b, _scale(config, key, rank, folder), experts, turned)


def _tied(source: Opened) -> bool:
    """Whether the configuration says that the head is the embeddings."""
    try:
        fields: Any = json.loads(source.small.get("config.json", b"{}"))
    except ValueError:
        return False
    return isinstance(fields, dict) and bool(cast("dict[str, Any]", fields).get("tie_word_embeddings"))
