"""Scales of blocks, rows, parts of rows or all of a tensor, and codes that are one number each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from tangram.relayout.quantised.groups import Box, GroupForm, Read, Settings, TensorGroup, ceil, unfit

if TYPE_CHECKING:
    from torch import Tensor


def _blocks(settings: Settings) -> list[tuple[int, int]]:
    """The blocks that settings speak of, which shapes alone do not say where they do not divide."""
    sizes = [settings.get("weight_block_size", [128, 128]), *(one.get("block_structure") for one in schemes(settings))]
    pairs = [cast("list[int]", one) for one in sizes if isinstance(one, list | tuple)]
    return [(int(one[0]), int(one[1])) for one in pairs if len(one) == 2]


def schemes(settings: Settings) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of weights, for each group of its configuration."""
    groups = cast("Mapping[str, Mapping[str, Any]]", settings.get("config_groups") or {})
    return [cast("Mapping[str, Any]", one["weights"]) for one in groups.values() if one.get("weights")]


def gridded(group: TensorGroup, shape: tuple[int, ...], settings: Settings, bits: int = 0) -> GroupForm:
    """Which elements share a scale, by the shape of the scales: blocks, rows, parts of rows, or all."""
    *lead, rows, columns = shape
    scales = group.specs["scale"].shape
    for down, along in _blocks(settings):
        if scales == (*lead, ceil(rows, down), ceil(columns, along)):
            return GroupForm(shape, scales, (down, along), bits)
    if math.prod(scales) == 1:
        return GroupForm(shape, (1,) * len(shape), (rows, columns), bits)
    if scales in ((*lead, rows, 1), (*lead, rows)):
        return GroupForm(shape, (*lead, rows, 1), (1, columns), bits)
    if scales == (*lead, 1, columns):
        return GroupForm(shape, scales, (rows, 1), bits)
    if lead and scales in ((*lead,), (*lead, 1), (*lead, 1, 1)):
        return GroupForm(shape, (*lead, 1, 1), (rows, columns), bits)
    if scales[:-1] == (*lead, rows) and scales[-1] and columns % scales[-1] == 0:
        return GroupForm(shape, scales, (1, columns // scales[-1]), bits)
    raise unfit(group, "scale")


def numbers(values: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents (E8M0)."""
    import torch

    return (values.view(torch.float8_e8m0fnu) if values.dtype == torch.uint8 else values).float()


def spread(values: Tensor, form: GroupForm, box: Box, columns: Tensor | None = None) -> Tensor:
    """Values of blocks, from the block on in which the box begins, for each element; dims of one block stay 1.

    `columns`: which block of its row each column has, where that is no matter of its place.
    """
    import torch

    for dim, size in ((-1, form.block[1]), (-2, form.block[0])):  # few rows are repeated along, then down
        first, last = box[dim]
        if columns is not None and dim == -1:
            values = values.index_select(-1, columns)
        elif form.grid[dim] > 1:
            values = values.index_select(dim, torch.arange(first, last) // size - first // size)
    return values


def of_blocks(form: GroupForm, box: Box, all_columns: bool = False) -> Box:
    """The blocks that a box touches."""
    ranges = [(0, 1) if n == 1 else one for n, one in zip(form.grid[:-2], box[:-2], strict=True)]
    for dim, size in ((-2, form.block[0]), (-1, form.block[1])):
        every = form.grid[dim] == 1 or (all_columns and dim == -1)
        ranges.append((0, form.grid[dim]) if every else (box[dim][0] // size, ceil(box[dim][1], size)))
    return tuple(ranges)


def stored(group: TensorGroup, read: Read, role: str, box: Box) -> Tensor:
    """A box of blocks of scales or zero points, which may be stored with fewer dims."""
    if group.specs[role].shape == group.form.grid:
        return read(group.members[role], box)
    return read(group.members[role], None).reshape(group.form.grid)[tuple(slice(a, b) for a, b in box)]


# ---------------------------------------------------------------- one number a code


def bind_scaled(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    if len(group.specs["codes"].shape) < 2:
        raise unfit(group, "scale")
    form = gridded(group, group.specs["codes"].shape, settings)
    if "zero" in group.specs and group.specs["zero"].shape != group.specs["scale"].shape:
        raise unfit(group, "zero")
    return form


def decode_scaled(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    codes, blocks = read(group.members["codes"], box).float(), of_blocks(group.form, box)
    if "zero" in group.members:
        codes = codes - spread(stored(group, read, "zero", blocks).float(), group.form, box)
    return codes, spread(numbers(stored(group, read, "scale", blocks)), group.form, box)


def bind_rows(group: TensorGroup, settings: Settings, read: Read) -> GroupForm:
    shape = group.specs["codes"].shape
    if len(shape) != 2 or group.specs["scale"].shape not in ((shape[0],), (shape[0], 1)):
        raise unfit(group, "scale")
    return GroupForm(shape, (shape[0], 1), (1, shape[1]))


def decode_rows(group: TensorGroup, read: Read, box: Box) -> tuple[Tensor, Tensor]:
    """bitsandbytes' 8 bits: the largest number of a row is the code 127."""
    scale = stored(group, read, "scale", of_blocks(group.form, box)).float() / 127
    return read(group.members["codes"], box).float(), scale
