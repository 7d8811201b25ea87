"""Quantised weights of a checkpoint: recognised, decoded while they are read, copied exactly, or refused.

    opened source, its quantization_config -> groups of tensors that mean something only together
    -> the same source, in which each group is one tensor whose pieces are blocks of rows, decoded where they are read

It stands before the mapping, so every target and structure takes what it gives. A block is computed in float32, as the
methods' own libraries do, and rounded once; how far that is off is measured while it is done. Codes are never cast.

Trade-off: a block that the mapping comes back to after some others is decoded again; only the last few are kept.
"""

import itertools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tangram.checkpoint.conversion.convert import IDENTITY, Filler, target_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.hf_export import with_dtype
from tangram.errors import UserError
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.relayout import Piece, RelayoutError, TensorSpec, bind
from tangram.relayout.quantised.grids import Box, GroupUnfitError, Settings, TensorGroup
from tangram.relayout.quantised.table import FLOAT8, GROUP_CODECS, find_groups, matched

BLOCK = 4 << 20
"""Bytes of a block in float32; one is at least as high as a block of scales."""
STRIP = 1 << 17
"""Elements that are decoded together."""
CACHED = 8
"""Decoded blocks in memory: queries, keys and values are read in turns where a mapping fuses them."""
KEEP = 64 << 20
"""Bytes that are read of stored tensors before what was read is let go."""
FLOATS = ("bfloat16", "float16", "float32", "float64")
KEYS = ("quantization_config", "compression_config", "quantization")
FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that say the settings where config.json does not, and their method."""
UNUSED = re.compile(
    r"[._](input|activation|output|[kvq]|prob)_(scale|zero_point|global_scale)$|_proj\.(k|v|q)_scale$|\.weight_format$"
)
"""Of activations and caches: a model in floating point has no use for them."""
BESIDE = re.compile(
    r"(weight_scale|proj_scale|_scale_inv|_scale_2|_scales|\.scales|scale_weight|pre_quant_scale|qzeros|qweight|g_idx"
    r"|absmax|quant_map|bitsandbytes__\w+|zero_point|SCB|_blocks|_packed)$"
)
"""How the names of tensors end that are parts of quantised weights."""
WEIGHT = re.compile(r"(weight|_proj)$")


@dataclass(frozen=True)
class Quantisation:
    """What is quantised in a checkpoint."""

    method: str
    """Empty where no configuration says one."""
    groups: tuple[TensorGroup, ...]
    unused: tuple[str, ...]
    """Tensors that are for codes alone."""
    problem: str
    """Why it cannot be decoded; empty where it can."""
    dtype: str
    """Which the weights had before, as far as that is said."""
    torn: bool = False
    """Whether the problem is that codes and scales do not fit together, or that one of them is missing."""

    @property
    def description(self) -> str:
        """In a sentence."""
        return f"quantised with {self.method}" if self.method else "quantised"


@dataclass
class Rounding:
    """What decoding did so far."""

    method: str
    tensors: int
    unused: int
    dtype: str
    error: float = 0.0
    """The largest |written - exact| / |exact|."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self)}

    def __str__(self) -> str:
        off = f"each value within {self.error:.2g} of itself" if self.error else "without rounding"
        left = f"; left out, as codes alone need them: {self.unused:,}" if self.unused else ""
        many = f"{self.tensors:,} weight{'s' if self.tensors > 1 else ''}"
        return f"{many} dequantised from {self.method} to {self.dtype}, {off}{left}"


# ---------------------------------------------------------------- recognising


def settings_of(small: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The settings of the method, with its name as `quant_method`. None where no file says any."""
    tables = {name: _table(small[name]) for name in ("config.json", *FILES) if name in small}
    config = tables.get("config.json", {})
    inner = [cast("dict[str, Any]", one) for one in config.values() if isinstance(one, dict)]
    for table, key in itertools.product([config, *inner], KEYS):
        if isinstance(table.get(key), dict) and table[key]:
            said = cast("dict[str, Any]", table[key])
            bits = any(said.get(name) for name in ("load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit"))
            mlx = "bits" in said and "group_size" in said
            method = said.get("quant_method") or ("bitsandbytes" if bits else "mlx" if mlx else "an unknown method")
            return {**said, "quant_method": str(method).lower()}
    for name, method in FILES.items():
        if tables.get(name):
            return {**tables[name], **tables[name].get("quantization", {}), "quant_method": method}
    return None


def _table(data: bytes) -> dict[str, Any]:
    try:
        fields: Any = json.loads(data)
    except ValueError:
        return {}
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}


def quantisation_of(source: OpenCheckpoint, small: Mapping[str, bytes] | None = None) -> Quantisation | None:
    """What is quantised; None where nothing is. `small`: the configuration, where it is not that of the source."""
    settings = settings_of(small or {}) or settings_of(source.small)
    if settings is None:
        return _unsaid(source)
    method = settings["quant_method"]
    dtype = _dtype(_table((small or source.small).get("config.json", b"{}")))
    if not any(method in row.methods for row in GROUP_CODECS.values()):
        return Quantisation(
            method, (), (), f"{method} is not among what is decoded, so let its own library do it", dtype
        )
    read = _Reader(source)
    try:
        groups = tuple(find_groups(source.specs, method, settings, read))
        problem, torn = _understood(settings), False
    except RelayoutError as error:
        groups, problem, torn = tuple(matched(source.specs, method)), str(error), isinstance(error, GroupUnfitError)
    members = {name for group in groups for name in group.members.values()}
    others = [name for name in source.specs if name not in members]
    left = [name for name in others if _is_part(name, source.specs[name]) and not UNUSED.search(name)]
    if left and not problem:
        left.sort(key=lambda name: not _is_code(name, source.specs[name]))
        problem, torn = f"{left[0]} is there, of which {method} says nothing", _is_code(left[0], source.specs[left[0]])
    if not groups and not left:
        return None  # weights in floating point, with settings for who loads them
    unused = tuple(name for name in others if UNUSED.search(name))
    before = next((group.form.facts["dtype"] for group in groups if group.form.facts.get("dtype") in FLOATS), dtype)
    return Quantisation(method, groups, unused, problem, before, torn)


def _unsaid(source: OpenCheckpoint) -> Quantisation | None:
    """By the names and types alone."""
    name = next((group.members["codes"] for group in matched(source.specs)), None)
    if name is None:
        modules = {name.rpartition(".")[0] for name in source.specs if "scale" in name.rpartition(".")[2]}
        codes = (name for name, spec in source.specs.items() if _is_code(name, spec))
        name = next((one for one in codes if one.rpartition(".")[0] in modules), None)
    if name is None:
        return None
    problem = f"no quantization_config says how {name} is (--config DIR gives a directory whose config.json does)"
    return Quantisation("", (), (), problem, "bfloat16")


def _is_part(name: str, spec: TensorSpec) -> bool:
    """Whether a tensor looks like one of codes or scales."""
    return _is_code(name, spec) or BESIDE.search(name) is not None


def _is_code(name: str, spec: TensorSpec) -> bool:
    integer = spec.dtype in ("uint8", "int8", "int32", "uint32") and WEIGHT.search(name)
    return spec.dtype in FLOAT8 or bool(integer)


def _understood(settings: Settings) -> str:
    """What settings say that is more than codes and scales."""
    sparse = cast("Mapping[str, Any]", settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        return f"its weights are sparse ({sparse})"
    return "its weights are rotated (transform_config)" if settings.get("transform_config") else ""


def _dtype(config: Mapping[str, Any]) -> str:
    inner = [cast("dict[str, Any]", one) for one in config.values() if isinstance(one, dict)]
    for table in (config, *inner):
        for key in ("dtype", "torch_dtype"):
            if table.get(key) in FLOATS:
                return table[key]
    return "bfloat16"


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class DecodedBlock:
    """The place of a block."""

    box: Box


class _Reader:
    """Boxes of stored tensors, through the engine of copies, whatever pieces they lie in."""

    def __init__(self, source: OpenCheckpoint) -> None:
        self._source = source
        self._pieces: dict[str, list[Piece]] = {}
        for piece in source.pieces:
            self._pieces.setdefault(piece.tensor, []).append(piece)

    def __call__(self, name: str, box: Box | None) -> Tensor:
        spec, pieces = self._source.specs[name], self._pieces[name]
        box = box if box is not None else tuple((0, n) for n in spec.shape)
        if len(pieces) == 1 and pieces[0].region == Region.full(spec.shape):
            whole = self._source.read(pieces[0].place, name).view(spec.shape)
            return whole[tuple(slice(a, b) for a, b in box)]
        values = torch.empty([b - a for a, b in box], dtype=getattr(torch, spec.dtype))
        one = replace(self._source, specs={name: spec}, pieces=tuple(pieces), release=lambda: None)
        Filler(one, bind(IDENTITY, one.specs), one.specs, KEEP).fill(name, _region(box), values)
        return values


def _region(box: Box) -> Region:
    return Region.of([tuple(span(a, b) for a, b in box)])


def dequantised(
    source: OpenCheckpoint, quantised: Quantisation, dtype: str | None = None, *, block: int = BLOCK
) -> tuple[OpenCheckpoint, Rounding]:
    """The same checkpoint with weights instead of codes and scales, and what is measured while they are read.

    `block`: bytes of a block in float32. Raises UserError where it cannot be decoded: now or, for numbers that a type
    does not have, while reading.
    """
    kind = dtype or quantised.dtype
    if quantised.problem:
        raise UserError(
            f'"{source.path}" is {quantised.description}, and cannot be dequantised here: {quantised.problem}'
        )
    if kind not in FLOATS:
        raise UserError(f"--dtype {kind}: weights are dequantised to one of {', '.join(FLOATS)}")
    groups = {group.name: group for group in quantised.groups}
    gone = {name for group in quantised.groups for name in group.members.values()} | set(quantised.unused)
    specs: dict[str, TensorSpec] = {}
    made = {group.members["codes"]: group for group in quantised.groups}
    for name, spec in source.specs.items():
        if name in made:
            specs[made[name].name] = TensorSpec(made[name].form.shape, kind)
        elif name not in gone:
            specs[name] = spec
    pieces = [piece for piece in source.pieces if piece.tensor not in gone]
    pieces += [
        Piece(DecodedBlock(box), name, _region(box)) for name, group in groups.items() for box in _boxes(group, block)
    ]
    rounding = Rounding(quantised.method, len(groups), len(quantised.unused), kind)
    decoded: OrderedDict[tuple[DecodedBlock, str], Tensor] = OrderedDict()
    stored = _Reader(source)

    def read(place: Hashable, name: str) -> Tensor:
        if not isinstance(place, DecodedBlock):
            return source.read(place, name)
        if (place, name) not in decoded:
            decoded[place, name] = _decoded(groups[name], stored, place.box, kind, rounding)
            if len(decoded) > CACHED:
                decoded.popitem(last=False)
        decoded.move_to_end((place, name))
        return decoded[place, name]

    about = {"method": quantised.method, "dtype": kind, "tensors": len(groups), "left_out": list(quantised.unused)}
    objects = {**source.objects, "dequantised": about}
    return replace(source, specs=specs, pieces=tuple(pieces), read=read, objects=objects), rounding


def _boxes(group: TensorGroup, block: int) -> Iterator[Box]:
    """Blocks of rows of a tensor, or of each expert's matrix."""
    *lead, rows, columns = group.form.shape if len(group.form.shape) > 1 else (1, *group.form.shape)
    step = max(1, group.form.block[0] if group.form.block[0] < rows else 1, 32 if rows > 32 else 1)
    step *= max(1, block // 4 // max(1, columns) // step)
    for experts in itertools.product(*(range(n) for n in lead)):
        for first in range(0, rows if columns else 0, step):
            box = (*((e, e + 1) for e in experts), (first, min(first + step, rows)), (0, columns))
            yield box if len(group.form.shape) > 1 else box[1:]


def _decoded(group: TensorGroup, stored: _Reader, box: Box, dtype: str, rounding: Rounding) -> Tensor:
    """A block in its type, made strip by strip, as what fits in a cache is several times faster."""
    made = torch.empty([b - a for a, b in box], dtype=getattr(torch, dtype))
    rows = max(0, len(box) - 2)
    (first, last), width = box[rows], math.prod(b - a for a, b in box[rows + 1 :])
    step = max(1, STRIP // width // 32 * 32 or STRIP // width)
    for at in range(first, last, step):
        part = (at, min(at + step, last))
        values, error = _strip(group, stored, (*box[:rows], part, *box[rows + 1 :]), dtype)
        made.narrow(rows, at - first, part[1] - at).copy_(values)
        rounding.error = max(rounding.error, error)
    return made


def _strip(group: TensorGroup, stored: _Reader, box: Box, dtype: str) -> tuple[Tensor, float]:
    """Values of a box in a type, and how far they are off at most."""
    try:
        codes, scale = GROUP_CODECS[group.codec].decode(group, stored, box)
    except RelayoutError as error:
        raise UserError(f"{group.name} cannot be dequantised: {error}") from None
    exact = codes * scale
    made = exact.to(getattr(torch, dtype))
    off = 0.0 if made.itemsize > 2 else _off(made, exact)
    if not off:  # float32 is not exact enough to tell
        off = _off(made, codes.double() * scale.double())
    if math.isinf(off):
        raise UserError(f"{group.name} has numbers that {dtype} does not: give a wider one with --dtype")
    return made, off


def _off(made: Tensor, exact: Tensor) -> float:
    """The largest |made - exact| / |exact|: 0 where both are 0 or no number, infinite where one alone is no number."""
    off = made.to(exact.dtype, copy=True).sub_(exact).div_(exact)
    low, high = off.nan_to_num_(0.0, math.inf, -math.inf).aminmax()
    return float(torch.maximum(high, -low))


# ---------------------------------------------------------------- what a conversion does with it


def prepared(
    source: OpenCheckpoint,
    small: Mapping[str, bytes],
    to: str,
    *,
    dequantise: bool,
    dtype: str | None,
    also: Sequence[str],
) -> tuple[OpenCheckpoint, dict[str, bytes], Rounding | None]:
    """A source to convert: as it is where nothing is quantised or all of it is copied exactly, else dequantised.

    `also`: what else is asked that changes tensors, in words. Raises UserError for what is neither.
    """
    quantised = quantisation_of(source, small)
    if quantised is None:
        if dequantise:
            raise UserError(f'nothing in "{source.path}" is quantised: leave --dequantise out')
        return source, dict(small), None
    if dequantise:
        made, rounding = dequantised(source, quantised, dtype)
        return made, without_settings(small, rounding.dtype), rounding
    reasons = [f"a cast to {dtype}"] if dtype else []
    reasons += also
    if target_of(to).structure not in ("", "hf"):
        reasons.append(f"the structure of {target_of(to).title}")
    if reasons:
        how = f"add --dequantise, which makes {quantised.dtype} of them"
        if reasons == [f"a cast to {quantised.dtype}"]:
            how = f"give --dequantise in place of --dtype, which makes {quantised.dtype} of them"
        raise UserError(
            f'"{source.path}" is {quantised.description}, and {reasons[0]} would tear codes and scales apart: '
            f"{f'copy it with --to hf alone ({quantised.problem})' if quantised.problem else how}"
        )
    if settings_of(source.small) is not None and settings_of(small) is None:
        raise UserError(f'"{source.path}" is {quantised.description}; the --config says nothing of it: leave it out')
    return replace(source, objects={**source.objects, "quantised": quantised.description}), dict(small), None


def by_weights(source: OpenCheckpoint) -> OpenCheckpoint:
    """A checkpoint with weights, of which codes and scales are decoded where they are read."""
    quantised = quantisation_of(source)
    return source if quantised is None else dequantised(source, quantised)[0]


def without_settings(small: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Small files that say nothing of quantisation, and the type of the weights."""
    files = {name: data for name, data in small.items() if name not in FILES}
    if config := _table(files.get("config.json", b"{}")):
        tables = [config, *(cast("dict[str, Any]", one) for one in config.values() if isinstance(one, dict))]
        for table, key in itertools.product(tables, KEYS):
            table.pop(key, None)
        files["config.json"] = with_dtype(json.dumps(config, indent=2).encode(), dtype)
    return files
