"""In what the frozen weights beside adapters may be kept: one row of a table for each.

    nf4     codes of 4 bits, scales of 8 bits for 64 numbers of a row (`models.lora.nf4`)        0.516 bytes a number
    int8    round(127 w / absmax) with the absmax of each row, as bitsandbytes' LLM.int8 without outliers
            (Dettmers et al. 2022)                                                               1 + 4 / in
    fp8     the bits of float8_e4m3fn of w / scale, with scale = absmax / 448 of each 128 x 128 numbers, as DeepSeek-V3
            has them (`weight_scale_inv`; DeepSeek-AI 2024)                                      1 + 4 / 128^2

Codes are integers and cut as their weight would be; scales of whole rows or of squares are so few that every rank has
those of all, so that these two may be cut anywhere. Experts that lie in one tensor (experts, out, in) are rows of one
weight, as bitsandbytes has them of a parameter that is no layer's; squares are of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
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
"""This rank's part of what the tensor of a kind keeps, of all of it (of codes: of the whole weight)."""
Kept = Mapping[str, Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """How a weight [out, in], or [experts, out, in], is kept: as tensors of its layer, by what stands behind its name
    and a line."""

    tensors: Mapping[str, torch.dtype]
    """What is cut with the weight; `schema.tuning.COLUMNS` says for how many columns one of theirs is."""
    buffers: Callable[[Shape], Mapping[str, Shape]]
    """The shapes of what every rank has whole (float32), of a weight of this shape."""
    keep: Callable[[Tensor, Picked], Kept]
    """All of it, from a whole weight."""
    make: Callable[[Kept, Tensor, Tensor, Shape, torch.dtype], Tensor]
    """The weight again, [rows, columns], of these rows (of all experts) and blocks of columns, of a whole one of this
    shape. Tensors that are cut have rows and columns, too."""
    nbytes: float
    """For each number of a large weight."""
    block: int = 1
    """Columns that are never cut apart."""


def _keep_nf4(whole: Tensor, picked: Picked) -> Kept:
    largest = nf4.largest(whole)
    found = nf4.scales_of(largest)
    some = picked("nf4", whole)
    codes = nf4.encode(some.flatten(0, -2), picked("absmax", largest).flatten(0, -2))
    codes = codes.view(*some.shape[:-1], codes.shape[-1])  # of which a rank may have no row: -1 would be any number
    return {"nf4": codes, "absmax": picked("absmax", found.codes), "groups": found.groups, "mean": found.mean}


def _make_nf4(kept: Kept, rows: Tensor, blocks: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    group = nf4.group_of(rows, blocks, shape[-1] // nf4.BLOCK)
    scales = nf4.values_of(kept["absmax"], kept["groups"], kept["mean"], group)
    return nf4.decode(kept["nf4"], scales, dtype)


def _keep_int8(whole: Tensor, picked: Picked) -> Kept:
    rows = whole.flatten(0, -2)
    absmax = rows.abs().amax(1).float()
    codes = torch.empty(rows.shape, dtype=torch.int8, device=whole.device)
    for some in some_rows(rows):
        times = torch.where(absmax[some] > 0, INT8_MOST / absmax[some], 0.0)
        codes[some] = (rows[some].float() * times[:, None]).round_().to(torch.int8)
    return {"int8": picked("int8", codes.view(whole.shape)), "rows": absmax}


def _make_int8(kept: Kept, rows: Tensor, columns: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    codes, scales = kept["int8"], kept["rows"][rows] / INT8_MOST
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for some in some_rows(weight):
        weight[some] = (codes[some].float() * scales[some, None]).to(dtype)
    return weight


def _squares(shape: Shape) -> Shape:
    return *shape[:-2], -(-shape[-2] // SQUARE), -(-shape[-1] // SQUARE)


def _square_of(rows: Tensor, shape: Shape) -> Tensor:
    """The row of squares of each row, of all experts."""
    return rows // shape[-2] * _squares(shape)[-2] + rows % shape[-2] // SQUARE


def _keep_fp8(whole: Tensor, picked: Picked) -> Kept:
    (*_, rows, columns), (*experts, down, across) = whole.shape, _squares(tuple(whole.shape))
    padded = pad(whole.abs(), (0, across * SQUARE - columns, 0, down * SQUARE - rows))
    scales = padded.view(*experts, down, SQUARE, across, SQUARE).amax((-3, -1)).float() / FP8_MOST
    scales = torch.where(scales > 0, scales, 1.0)
    flat = whole.flatten(0, -2)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=whole.device)
    own = _square_of(torch.arange(len(flat), device=whole.device), tuple(whole.shape))
    beside = torch.arange(columns, device=whole.device) // SQUARE
    for some in some_rows(flat):
        values = flat[some].float() / scales.view(-1, across)[own[some]][:, beside]
        codes[some] = values.clamp_(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
    return {"fp8": picked("fp8", codes.view(whole.shape)), "squares": scales}


def _make_fp8(kept: Kept, rows: Tensor, columns: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    codes, scales = kept["fp8"], kept["squares"].flatten(0, -2)
    weight, squares = torch.empty(codes.shape, dtype=dtype, device=codes.device), _square_of(rows, shape)
    for some in some_rows(weight):
        own = scales[squares[some]][:, columns // SQUARE]
        weight[some] = (codes[some].view(FP8).float() * own).to(dtype)
    return weight


BASES: Mapping[str, Base] = MappingProxyType(
    {
        "nf4": Base(
            {"nf4": torch.uint8, "absmax": torch.uint8},
            lambda shape: {"groups": (-(-prod(shape) // (nf4.BLOCK * nf4.GROUP)),), "mean": ()},
            _keep_nf4, _make_nf4, nf4.BYTES, nf4.BLOCK,
        ),
        "int8": Base(
            {"int8": torch.int8}, lambda shape: {"rows": (prod(shape[:-1]),)}, _keep_int8, _make_int8, 1.0
        ),
        "fp8": Base(
            {"fp8": torch.uint8}, lambda shape: {"squares": _squares(shape)}, _keep_fp8, _make_fp8,
            1.0 + 4 / SQUARE**2,
        ),
    }
)  # fmt: skip
"""By the name that `lora.base` has."""


BASE = ".base_layer"
"""What peft puts after the name of a layer that has an adapter."""


def base_weights(model: nn.Module, skip: Sequence[str] = (), block: int = 1) -> dict[str, Shape]:
    """The shapes of the frozen weights of linear layers, but for the head, and of experts that lie in one tensor, by
    name, of a model or a stage with adapters; without those of layers that `skip` names.

    `skip`: ends of names or patterns. Raises UserError where a weight has rows that blocks of so many numbers do not
    fill, or a name fits no layer.
    """
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
    named = {name.removesuffix(BASE): one for name, one in modules.items() if ".lora_" not in name}
    skipped = {name for one in skip for name in named_by(one, "base_skip", named)}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [f"{name}.weight" for name, one in modules.items() if type(one) in (nn.Linear, Conv1D) and one is not head]
    found: dict[str, Shape] = {}
    for name in (*linear, *stacked_weights(model)):
        layer = name.rpartition(".")[0]
        plain = layer.removesuffix(BASE)
        if plain in (*skipped, "lm_head") or ".lora_" in layer:
            continue
        if ".modules_to_save." in layer or layer.endswith(".original_module"):
            continue
        weight = model.get_parameter(name)
        if weight.requires_grad:
            continue
        if weight.shape[-1] % block:
            raise UserError(
                f"{plain} has rows of {weight.shape[-1]} numbers, which are no whole blocks of {block}: name it in "
                "lora.base_skip"
            )
        found[name] = tuple(weight.shape)
    return found
