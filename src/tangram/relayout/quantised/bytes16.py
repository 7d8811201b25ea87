"""Codes of 4 bits that are places in a table of 16 numbers: FP4 with block scales, and bitsandbytes."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.quantised.grids import gridded, numbers, of_blocks, spread, stored
from tangram.relayout.quantised.groups import Box, GroupForm, Read, Settings, TensorGroup, ceil, unfit

if TYPE_CHECKING:
    from torch import Tensor

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
