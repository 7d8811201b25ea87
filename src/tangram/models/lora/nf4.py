"""NF4 (Dettmers et al. 2023): weights as codes of 4 bits and scales of 8 bits, as bitsandbytes has them to the bit.

    a weight        whole rows of blocks of 64 numbers; a block is 64 places in a table of 16 and the largest of its
                    absolute values, its scale
    two codes       to a byte, the first in the high half: [out, in / 2]
    scales          less their mean, in groups of 256 of the whole weight, as places in a table of 256: [out, in / 64]
    for each group  the largest of its absolute values in float32, and for each weight the mean: 0.516 bytes a number

Codes and scales are integers, and cut with their weight in whole blocks. Groups cross rows, so a part has to know which
blocks of the weight it has. They are so few that every rank has those of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tangram.models.lora import dynamic_codes

BLOCK = 64
"""Numbers of a scale."""
GROUP = 256
"""Scales that are kept by one largest value."""
AT_ONCE = 1 << 20
"""Numbers that are encoded or decoded at a time, in float32."""
BYTES = 0.5 + (1 + 4 / GROUP) / BLOCK
"""For each number of a weight."""
NORMAL = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The middles of 16 parts of a normal distribution that are alike in weight, with 0 and both ends among them."""


@dataclass(frozen=True)
class Scales:
    """Of all blocks of a weight."""

    codes: Tensor
    """uint8, [out, in / 64]."""
    groups: Tensor
    """float32, [blocks / 256], rounded up."""
    mean: Tensor
    """float32, []."""


def largest(weight: Tensor) -> Tensor:
    """The largest absolute value of each block, float32 [..., in / 64], of a weight [..., in]."""
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    return cast(Tensor, torch.linalg.vector_norm(blocks, torch.inf, dim=-1)).float()  # of which nothing is rounded


def scales_of(found: Tensor) -> Scales:
    """How the largest values of all blocks of a weight are kept."""
    mean, flat = found.mean(), found.reshape(-1)
    rest = flat - mean
    padded = torch.nn.functional.pad(rest, (0, -rest.numel() % GROUP)).view(-1, GROUP)
    groups = padded.abs().amax(dim=1)
    codes = dynamic_codes.places(dynamic_codes.shares(padded, groups), dynamic_codes.table(rest.device))
    return Scales(codes.reshape(-1)[: rest.numel()].view(found.shape), groups, mean)


def values_of(codes: Tensor, groups: Tensor, mean: Tensor, group: Tensor) -> Tensor:
    """Scales as float32, of codes (uint8) that are of these groups (`group`: a number for each)."""
    return dynamic_codes.table(codes.device)[codes.int()] * groups[group] + mean


def group_of(rows: Tensor, columns: Tensor, across: int) -> Tensor:
    """The group of each block in some rows and columns of blocks, of which a weight has `across` in a row."""
    return (rows[:, None] * across + columns) // GROUP


def encode(weight: Tensor, found: Tensor) -> Tensor:
    """The codes of a part of a weight in whole blocks, whose largest values these are: uint8, [out, in / 2]."""
    codes = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows in some_rows(weight):
        blocks = weight[rows].float().reshape(-1, BLOCK)
        places = dynamic_codes.places(
            dynamic_codes.shares(blocks, found[rows].reshape(-1)), _table(weight.device)
        ).view(-1, 2)
        codes[rows] = ((places[:, 0] << 4) | places[:, 1]).view(-1, weight.shape[1] // 2)
    return codes


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that codes [out, in / 2] and scales (float32, [out, in / 64]) stand for."""
    weight = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    for rows in some_rows(weight):
        both = _pairs(codes.device)[codes[rows].int()]  # [rows, in / 2, 2]
        weight[rows] = (both.view(*scales[rows].shape, BLOCK) * scales[rows].unsqueeze(-1)).view(-1, weight.shape[1])
    return weight


def some_rows(weight: Tensor) -> Iterator[slice]:
    """As many rows as are encoded or decoded at a time."""
    step = max(1, AT_ONCE // max(1, weight.shape[1]))
    return (slice(first, first + step) for first in range(0, weight.shape[0], step))


def _table(device: torch.device) -> Tensor:  # never kept: one that is made in a run without memory has no values
    return torch.tensor(NORMAL, dtype=torch.float32, device=device)


def _pairs(device: torch.device) -> Tensor:
    """The two numbers of each byte."""
    table, byte = _table(device), torch.arange(256, device=device)
    return torch.stack([table[byte >> 4], table[byte & 15]], dim=1)
