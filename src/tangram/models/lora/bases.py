"""In what the frozen weights beside adapters may be kept: one row of a table for each.

    nf4     codes of 4 bits, scales of 8 bits for 64 numbers of a row (`models.lora.nf4`)        0.516 bytes a number
    int8    round(127 w / absmax) with the absmax of each row, as bitsandbytes' LLM.int8 without outliers
            (Dettmers et al. 2022)                                                               1 + 4 / in
    fp8     the bits of float8_e4m3fn of w / scale, with scale = absmax / 448 of each 128 x 128 numbers, as DeepSeek-V3
            has them (`weight_scale_inv`; DeepSeek-AI 2024)                                      1 + 4 / 128^2

Codes are integers and cut as their weight would be; scales of whole rows or of squares are so few that every rank has
those of all, so that these two may be cut anywhere.

The layers beside adapters whose frozen weights may be kept as codes of few bits (`models.lora.bases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from tangram.errors import UserError
from tangram.models.lora import nf4
from tangram.models.lora.adapters import named_by
from tangram.models.lora.expert_adapters import stacked_weights
from tangram.models.lora.nf4 import some_rows

SQUARE = 128
FP8 = torch.float8_e4m3fn
FP8_MOST = torch.finfo(FP8).max
INT8_MOST = 127

Picked = Callable[[str, Tensor], Tensor]
"""This rank's part of what the tensor of a name keeps, of all of it (of codes: of the whole weight)."""
Kept = Mapping[str, Tensor]


@dataclass(frozen=True)
class Base:
    """How a weight [out, in] is kept. Names are those of parameters and buffers of its layer."""

    tensors: Mapping[str, torch.dtype]
    """What is cut with the weight; `schema.tuning.COLUMNS` says for how many columns one of theirs is."""
    buffers: Callable[[int, int], Mapping[str, tuple[int, ...]]]
    """The shapes of what every rank has whole (float32), of a weight of this shape."""
    keep: Callable[[Tensor, Picked], Kept]
    """All of it, from a whole weight."""
    make: Callable[[Kept, Tensor, Tensor, int, torch.dtype], Tensor]
    """The weight again, of these rows and blocks of columns, of a whole one with so many columns."""
    nbytes: float
    """For each number of a large weight."""
    block: int = 1
    """Columns that are never cut apart."""


def _keep_nf4(whole: Tensor, picked: Picked) -> Kept:
    largest = nf4.largest(whole)
    found = nf4.scales_of(largest)
    codes = nf4.encode(picked("weight_nf4", whole), picked("weight_absmax", largest))
    scales = picked("weight_absmax", found.codes)
    return {"weight_nf4": codes, "weight_absmax": scales, "weight_groups": found.groups, "weight_mean": found.mean}


def _make_nf4(kept: Kept, rows: Tensor, blocks: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    group = nf4.group_of(rows, blocks, columns // nf4.BLOCK)
    scales = nf4.values_of(kept["weight_absmax"], kept["weight_groups"], kept["weight_mean"], group)
    return nf4.decode(kept["weight_nf4"], scales, dtype)


def _keep_int8(whole: Tensor, picked: Picked) -> Kept:
    absmax = whole.abs().amax(1).float()
    codes = torch.empty(whole.shape, dtype=torch.int8, device=whole.device)
    for some in some_rows(whole):
        times = torch.where(absmax[some] > 0, INT8_MOST / absmax[some], 0.0)
        codes[some] = (whole[some].float() * times[:, None]).round_().to(torch.int8)
    return {"weight_int8": picked("weight_int8", codes), "weight_rows": absmax}


def _make_int8(kept: Kept, rows: Tensor, columns: Tensor, whole: int, dtype: torch.dtype) -> Tensor:
    codes, scales = kept["weight_int8"], kept["weight_rows"][rows] / INT8_MOST
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for some in some_rows(weight):
        weight[some] = (codes[some].float() * scales[some, None]).to(dtype)
    return weight


def _squares(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // SQUARE), -(-columns // SQUARE)


def _keep_fp8(whole: Tensor, picked: Picked) -> Kept:
    rows, columns = whole.shape
    down, across = _squares(rows, columns)
    padded = pad(whole.abs(), (0, across * SQUARE - columns, 0, down * SQUARE - rows))
    scales = padded.view(down, SQUARE, across, SQUARE).amax((1, 3)).float() / FP8_MOST
    scales = torch.where(scales > 0, scales, 1.0)
    codes = torch.empty(whole.shape, dtype=torch.uint8, device=whole.device)
    own, beside = (torch.arange(n, device=whole.device) // SQUARE for n in whole.shape)
    for some in some_rows(whole):
        values = whole[some].float() / scales[own[some]][:, beside]
        codes[some] = values.clamp_(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
    return {"weight_fp8": picked("weight_fp8", codes), "weight_squares": scales}


def _make_fp8(kept: Kept, rows: Tensor, columns: Tensor, whole: int, dtype: torch.dtype) -> Tensor:
    codes, scales = kept["weight_fp8"], kept["weight_squares"]
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for some in some_rows(weight):
        own = scales[rows[some] // SQUARE][:, columns // SQUARE]
        weight[some] = (codes[some].view(FP8).float() * own).to(dtype)
    return weight


BASES: Mapping[str, Base] = MappingProxyType(
    {
        "nf4": Base(
            {"weight_nf4": torch.uint8, "weight_absmax": torch.uint8},
            lambda rows, columns: {
                "weight_groups": (-(-rows * (columns // nf4.BLOCK) // nf4.GROUP),),
                "weight_mean": (),
            },
            _keep_nf4, _make_nf4, nf4.BYTES, nf4.BLOCK,
        ),
        "int8": Base(
            {"weight_int8": torch.int8}, lambda rows, columns: {"weight_rows": (rows,)}, _keep_int8, _make_int8, 1.0
        ),
        "fp8": Base(
            {"weight_fp8": torch.uint8}, lambda rows, columns: {"weight_squares": _squares(rows, columns)},
            _keep_fp8, _make_fp8, 1.0 + 4 / SQUARE**2,
        ),
    }
)  # fmt: skip
"""By the name that `lora.base` has."""


BASE = ".base_layer"
"""What peft puts after the name of a layer that has an adapter."""


def base_layers(model: nn.Module, skip: Sequence[str] = (), block: int = 1) -> dict[str, nn.Module]:
    """Frozen linear layers by name, of a model or a stage with adapters, but for the head and those that `skip` names.

    `skip`: ends of names or patterns. Raises UserError where a weight has rows that blocks of so many numbers do not
    fill, a name fits no layer, or experts lie in one tensor and are not skipped.
    """
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
    named = {name.removesuffix(BASE): one for name, one in modules.items() if ".lora_" not in name}
    skipped = {name for one in skip for name in named_by(one, "base_skip", named)}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    found: dict[str, nn.Module] = {}
    for name, layer in modules.items():
        plain = name.removesuffix(BASE)
        if type(layer) not in (nn.Linear, Conv1D) or layer is head or plain in (*skipped, "lm_head"):
            continue
        if ".lora_" in name or ".modules_to_save." in name or name.endswith(".original_module"):
            continue
        weight = cast(nn.Parameter, layer.weight)
        if weight.requires_grad:
            continue
        if weight.shape[1] % block:
            raise UserError(
                f"{plain} has rows of {weight.shape[1]} numbers, which are no whole blocks of {block}: name it in "
                "lora.base_skip"
            )
        found[name] = layer
    for weight in stacked_weights(model):
        experts = weight.rpartition(".")[0].removesuffix(BASE)
        if experts not in skipped:
            raise UserError(
                f"{experts} has all experts of a layer in one tensor, which lora.base does not quantise: leave it out, "
                'or have experts as they are by lora.base_skip = ["experts"]'
            )
    return found
