"""The table of codecs of quantised weights, and which of them a checkpoint's tensors are of. A new one is a row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorSpec
from tangram.relayout.quantised.grids import (
    Box,
    GroupCodec,
    GroupForm,
    Read,
    Settings,
    TensorGroup,
    bind_rows,
    bind_scaled,
    ceil,
    decode_rows,
    decode_scaled,
    gridded,
    numbers,
    of_blocks,
    schemes,
    spread,
    stored,
    unfit,
)

if TYPE_CHECKING:
    from torch import Tensor


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each 4-bit code of a word, from the lowest bits on."""


def _fields(words: Tensor, bits: int, dim: int) -> Tensor:
    """The codes of words of 32 bits, one stream of bits from the lowest on, along a dim: -1 or -2."""
    import torch

    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        shifts = shifts if dim == -1 else shifts[:, None]
        return ((words.unsqueeze(-1 if dim == -1 else -2) >> shifts) & ((1 << bits) - 1)).flatten(dim - 1, dim)
    wide = words.movedim(dim, 0).long() & 0xFFFFFFFF
    at = torch.arange(len(wide) * 32 // bits) * bits
    high = wide[(at // 32 + 1).clamp(max=len(wide) - 1)]  # where a code goes on in the next word
    shifts = (at % 32).view(-1, *[1] * (wide.ndim - 1))
    return (((wide[at // 32] | high << 32) >> shifts) & ((1 << bits) - 1)).int().movedim(0, dim)


def _of(first: int, last: int, bits: int, words: int) -> tuple[int, int]:
    """The words that have codes: 32 codes are as many words as each has bits."""
    return first // 32 * bits, min(ceil(last, 32) * bits, words)


def bind_packed(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    """compressed-tensors' `pack-quantized`."""
    shape = tuple(cast("list[int]", read(group.members["shape"], None).flatten().tolist()))
    codes = group.specs["codes"].shape
    if len(shape) != len(codes) or shape[:-1] != codes[:-1] or len(shape) < 2:
        raise unfit(group, "shape")
    widths = {int(one["num_bits"]) for one in schemes(settings) if one.get("num_bits")}
    fitting = [bits for bits in widths if 0 < bits <= 8 and ceil(shape[-1] * bits, 32) == codes[-1]]
    if len(fitting) != 1:
        raise RelayoutError(f"{group.members['codes']} is of none of {sorted(widths)} bits, or of several")
    form = gridded(group, shape, settings, fitting[0])
    rows = form.grid[-2]
    if "zero" in group.specs and group.specs["zero"].shape != (*shape[:-2], ceil(rows * form.bits, 32), form.grid[-1]):
        raise unfit(group, "zero")
    if 32 % form.bits and (shape[-1] % 32 or ("zero" in group.specs and rows % 32)):
        raise RelayoutError(
            f"{group.members['codes']}: codes of {form.bits} bits were packed in two ways, alike in size"
        )
    return form


def decode_packed(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    """Words go along rows, zero points' words along columns; codes are stored as unsigned numbers."""
    form, names = group.form, group.members
    words = read(names["codes"], (*box[:-1], (0, group.specs["codes"].shape[-1])))
    codes = _fields(words, form.bits, -1)[..., : form.shape[-1]].float()
    columns = None
    if "order" in names:
        order = read(names["order"], None).long()
        if order.numel() != form.shape[-1] or int(order.max()) >= form.grid[-1]:
            raise unfit(group, "order")
        columns = order if bool((order >= 0).all()) else None  # -1: not used
    blocks = of_blocks(form, box, columns is not None)
    if "zero" in names:
        first, last = blocks[-2]
        packed = _of(first, last, form.bits, group.specs["zero"].shape[-2])
        zero = _fields(read(names["zero"], (*blocks[:-2], packed, blocks[-1])), form.bits, -2)
        zero = zero[..., first % 32 :, :][..., : last - first, :]
        codes = codes - spread(zero.float(), form, box, columns)
    else:
        codes = codes - (1 << (form.bits - 1))
    return codes, spread(stored(group, read, "scale", blocks).float(), form, box, columns)


def bind_gptq(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    """A weight of a Linear layer, of which the inputs are stored first."""
    bits, form = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in (2, 3, 4, 8) or form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise RelayoutError(
            f"its GPTQ of {bits} bits in the format {form!r} is none of 2, 3, 4 or 8 bits in gptq's own"
        )
    (words, out), (groups, wide) = group.specs["codes"].shape, group.specs["scale"].shape
    inner = words * 32 // bits
    if wide != out or group.specs["zero"].shape != (groups, out * bits // 32):
        raise unfit(group, "scale" if wide != out else "zero")
    size = settings.get("group_size", -1)
    size = size if isinstance(size, int) and size > 0 else inner
    if "order" in group.specs and group.specs["order"].shape != (inner,):
        raise unfit(group, "order")
    if ceil(inner, size) != groups:
        raise unfit(group, "scale")
    facts = {"size": size, "less": form == "gptq", "even": settings.get("sym") is True}
    return GroupForm((out, inner), (groups, out), (1, 1), bits, facts)


def decode_gptq(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    """Words go along the inputs. Zero points are stored less one, but in the second version of the format."""
    import torch

    (first, last), bits, names = box[0], group.form.bits, group.members
    groups, facts = group.form.grid[0], group.form.facts
    words = read(names["codes"], ((0, group.specs["codes"].shape[0]), (first, last)))
    codes = _fields(words, bits, -2)
    packed = _of(first, last, bits, group.specs["zero"].shape[1])
    zero = _fields(read(names["zero"], ((0, groups), packed)), bits, -1)[:, first % 32 :][:, : last - first]
    # Tools write the second version under the first's name; symmetric codes have the middle as zero, which tells.
    middle = facts["even"] and bool((zero == 1 << (bits - 1)).all())
    zero = zero + int(facts["less"] and not middle)
    order = torch.arange(codes.shape[0]) // facts["size"]
    if "order" in names:
        order = read(names["order"], None).long()
        if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < groups:
            raise RelayoutError(f"{names['order']} names groups that {names['scale']} does not have")
    scale = read(names["scale"], ((0, groups), (first, last))).float()
    return (codes - zero[order]).float().T, scale[order].T


def bind_awq(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    """A weight of a Linear layer, of which the inputs are stored first."""
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise RelayoutError(f"its AWQ of {bits} bits in the version {version!r} is not of 4 bits in gemm's")
    (inner, words), (groups, out) = group.specs["codes"].shape, group.specs["scale"].shape
    size = settings.get("group_size", settings.get("q_group_size", -1))
    size = size if isinstance(size, int) and size > 0 else inner
    if words * 8 != out or ceil(inner, size) != groups:
        raise unfit(group, "scale")
    if group.specs["zero"].shape != (groups, words):
        raise unfit(group, "zero")
    return GroupForm((out, inner), (groups, out), (1, 1), 4, {"size": size})


def decode_awq(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    """Words go along the outputs, in an order of their own; zero points as they are."""
    import torch

    (first, last), (groups, _), inner = box[0], group.form.grid, group.form.shape[1]
    low, high = first // 8, ceil(last, 8)

    def columns(role: str, rows: int) -> Tensor:
        some = _fields(read(group.members[role], ((0, rows), (low, high))), 4, -1).view(rows, -1, 8)
        return some[..., torch.tensor(AWQ_ORDER).argsort()].flatten(-2)[:, first - low * 8 :][:, : last - first]

    order = torch.arange(inner) // group.form.facts["size"]
    scale = read(group.members["scale"], ((0, groups), (first, last))).float()
    return (columns("codes", inner) - columns("zero", groups)[order]).float().T, scale[order].T


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 without their sign, by code."""


def _fp4(packed: Tensor) -> Tensor:
    """Two E2M1 numbers a byte, the first in the low bits."""
    import torch

    table = torch.tensor([*FP4, *(-one for one in FP4)])
    codes = packed.view(torch.uint8)
    return table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]


def bind_fp4(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    """Blocks along rows; `times` or `under`: one more scale of all or of each expert, that multiplies or divides."""
    *lead, half = group.specs["codes"].shape
    form = gridded(group, (*lead, 2 * half), settings)
    for role in ("times", "under"):
        if role in group.specs and math.prod(group.specs[role].shape) not in (1, math.prod(lead[:-1])):
            raise unfit(group, role)
    return form


def decode_fp4(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    """Codes and scales of a box."""
    codes = _fp4(read(group.members["codes"], (*box[:-1], (0, group.form.shape[-1] // 2))))
    scale = numbers(stored(group, read, "scale", of_blocks(group.form, box)))
    if "times" in group.members:
        scale = scale * _of_experts(group, read, "times", box)
    if "under" in group.members:
        scale = scale / _of_experts(group, read, "under", box)
    return codes, spread(scale, group.form, box)


def _of_experts(group: TensorGroup, read: Read, role: str, box: Box) -> Tensor:
    every = read(group.members[role], None).float()
    if every.numel() == 1:
        return every.reshape(())
    return every.view(*group.form.shape[:-2], 1, 1)[tuple(slice(a, b) for a, b in box[:-2])]


def bind_mxfp4(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    """Experts of GPT-OSS: blocks of 32 along the inputs, which the module has before the outputs."""
    codes = group.specs["codes"].shape
    if len(codes) != 4 or codes[-1] != 16 or group.specs["scale"].shape != codes[:-1]:
        raise unfit(group, "scale")
    return GroupForm((codes[0], codes[2] * 32, codes[1]), codes[:-1], (32, 1))


def decode_mxfp4(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    expert, (first, last), outputs = box
    low, high = first // 32, -(-last // 32)
    codes = _fp4(read(group.members["codes"], (expert, outputs, (low, high), (0, 16)))).flatten(-2)
    scale = numbers(read(group.members["scale"], (expert, outputs, (low, high)))).repeat_interleave(32, -1)
    cut = slice(first - low * 32, last - low * 32)
    return codes[..., cut].transpose(-1, -2), scale[..., cut].transpose(-1, -2)


def bind_blockwise(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    """bitsandbytes' 4 bits: a JSON text among the tensors says the shape."""
    text = bytes(cast("list[int]", read(group.members["state"], None).tolist()))
    try:
        state: Any = json.loads(text)
        shape, size = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        facts: dict[str, Any] = {"size": size, "dtype": str(state.get("dtype", ""))}
        if "nested" in group.specs:
            facts |= {"nested": int(state["nested_blocksize"]), "offset": float(state["nested_offset"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RelayoutError(f"{group.members['state']} says no shape and blocks: {error}") from None
    codes, scale, count = group.specs["codes"], group.specs["scale"], math.prod(shape)
    width = _itemsize(codes.dtype)
    if not shape or math.prod(codes.shape) != ceil(ceil(count, 2), width):
        raise unfit(group, "state")
    if math.prod(scale.shape) != ceil(count, size) or ("nested" in group.specs) != (scale.dtype == "uint8"):
        raise unfit(group, "scale")
    if "nested" in group.specs and math.prod(group.specs["nested"].shape) != ceil(ceil(count, size), facts["nested"]):
        raise unfit(group, "nested")
    return GroupForm(shape, shape, (1, 1), 4, facts)


def _itemsize(dtype: str) -> int:
    import torch

    return getattr(torch, dtype).itemsize


def decode_blockwise(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    """Codes are stored flat, two a byte, the first in the high bits."""
    import torch

    shape, facts, names = group.form.shape, group.form.facts, group.members
    start = sum(a * math.prod(shape[dim + 1 :]) for dim, (a, _) in enumerate(box))
    stop = start + math.prod(b - a for a, b in box)
    rest, width = group.specs["codes"].shape[1:], _itemsize(group.specs["codes"].dtype)
    low = start // 2 // width if math.prod(rest) == 1 else 0
    part = ((low, ceil(ceil(stop, 2), width)), *((0, 1) for _ in rest)) if math.prod(rest) == 1 else None
    packed = read(names["codes"], part).contiguous().view(-1).view(torch.uint8)
    pairs = torch.stack([packed >> 4, packed & 15], -1).view(-1)[start - 2 * low * width :][: stop - start]
    codes = read(names["map"], None).float().view(-1)[pairs.int()]
    first, last = start // facts["size"], ceil(stop, facts["size"])
    scale = read(names["scale"], None).view(-1)[first:last]
    if "nested" in names:
        nested = read(names["nested"], None).float().view(-1)[torch.arange(first, last) // facts["nested"]]
        scale = read(names["nested_map"], None).float().view(-1)[scale.int()] * nested + facts["offset"]
    at = torch.arange(start, stop) // facts["size"] - first
    sides = [b - a for a, b in box]
    return codes.view(sides), scale.float()[at].view(sides)


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NF4 = {"scale": ".absmax", "map": ".quant_map"}
NESTED = {"nested": ".nested_absmax", "nested_map": ".nested_quant_map"}
STORAGE = ("uint8", "int8", "bfloat16", "float16", "float32")
"""Types that bitsandbytes keeps 4-bit codes in: FSDP wants that of the other parameters."""
SCALED = ("compressed-tensors", "fbgemm_fp8", "modelopt", "fp8")
GPTQ = {"scale": ".scales", "zero": ".qzeros"}

GROUP_CODECS: Mapping[str, GroupCodec] = {
    "nf4": GroupCodec(
        ("bitsandbytes",), "", "", STORAGE, {**NF4, "state": ".quant_state.bitsandbytes__nf4"},
        bind_blockwise, decode_blockwise, NESTED,
    ),
    "bnb_fp4": GroupCodec(
        ("bitsandbytes",), "", "", STORAGE, {**NF4, "state": ".quant_state.bitsandbytes__fp4"},
        bind_blockwise, decode_blockwise, NESTED,
    ),
    "bnb_int8": GroupCodec(
        ("bitsandbytes",), ".weight", ".weight", ("int8",), {"scale": ".SCB"}, bind_rows, decode_rows,
        {"format": ".weight_format"},
    ),
    "nvfp4": GroupCodec(
        ("modelopt",), "", "", ("uint8",), {"scale": "_scale", "times": "_scale_2"}, bind_fp4, decode_fp4,
    ),
    "nvfp4_packed": GroupCodec(
        ("compressed-tensors",), "_packed", "", ("uint8",), {"scale": "_scale", "under": "_global_scale"}, bind_fp4,
        decode_fp4,
    ),
    "mxfp4_packed": GroupCodec(
        ("compressed-tensors",), "_packed", "", ("uint8",), {"scale": "_scale"}, bind_fp4, decode_fp4,
    ),
    "mxfp4": GroupCodec(
        ("mxfp4",), "_blocks", "", ("uint8",), {"scale": "_scales"}, bind_mxfp4, decode_mxfp4,
    ),
    "fp4_inv": GroupCodec(("fp8",), "", "", ("int8",), {"scale": "_scale_inv"}, bind_fp4, decode_fp4),
    "fp8_inv": GroupCodec(("fp8",), "", "", FLOAT8, {"scale": "_scale_inv"}, bind_scaled, decode_scaled),
    "fp4_plain": GroupCodec(("fp8",), ".weight", ".weight", ("int8",), {"scale": ".scale"}, bind_fp4, decode_fp4),
    "fp8_plain": GroupCodec(("fp8",), ".weight", ".weight", FLOAT8, {"scale": ".scale"}, bind_scaled, decode_scaled),
    "scaled": GroupCodec(
        SCALED, "", "", (*FLOAT8, "int8"), {"scale": "_scale"}, bind_scaled, decode_scaled, {"zero": "_zero_point"},
    ),
    "packed": GroupCodec(
        ("compressed-tensors",), "_packed", "", ("int32",), {"scale": "_scale", "shape": "_shape"}, bind_packed,
        decode_packed, {"zero": "_zero_point", "order": "_g_idx"},
    ),
    "gptq": GroupCodec(
        ("gptq",), ".qweight", ".weight", ("int32",), GPTQ, bind_gptq, decode_gptq, {"order": ".g_idx"},
    ),
    "awq": GroupCodec(("awq",), ".qweight", ".weight", ("int32",), GPTQ, bind_awq, decode_awq),
}  # fmt: skip
"""By name; of each stored tensor the first that fits is it."""


def matched(specs: Mapping[str, TensorSpec], method: str | None = None) -> Iterator[TensorGroup]:
    """Groups by their names and types alone, of one method or of any; their tensors have no shape yet."""
    rows: dict[str, list[tuple[str, GroupCodec]]] = {}  # by the type of the codes: most tensors have one of no row
    for key, row in GROUP_CODECS.items():
        for dtype in row.dtypes if method is None or method in row.methods else ():
            rows.setdefault(dtype, []).append((key, row))
    for name, spec in specs.items():
        for key, row in rows.get(spec.dtype, ()):
            if not name.endswith(row.codes):
                continue
            stem = name[: len(name) - len(row.codes)]
            if all(stem + end in specs for end in row.needs.values()):
                others = {role: stem + end for role, end in {**row.needs, **row.may}.items()}
                members = {"codes": name, **{role: one for role, one in others.items() if one in specs}}
                yield TensorGroup(stem + row.decoded, key, members, {role: specs[one] for role, one in members.items()})
                break


def find_groups(specs: Mapping[str, TensorSpec], method: str, settings: Settings, read: Read) -> list[TensorGroup]:
    """The groups of a method with the shapes of their tensors. Raises RelayoutError for one that does not fit."""
    groups: list[TensorGroup] = []
    for group in matched(specs, method):
        if group.name in specs and group.name != group.members["codes"]:
            raise RelayoutError(f"{group.name} is there both quantised and by itself")
        form = GROUP_CODECS[group.codec].bind(group, settings, read)
        groups.append(TensorGroup(group.name, group.codec, group.members, group.specs, form))
    return groups
