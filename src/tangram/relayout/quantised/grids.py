"""Quantised weights: codes, scales and maps that mean something only together. What a codec says of them, and the
codecs of scales of blocks, rows, parts of rows or all of a tensor, and codes that are one number each.

    names, types and shapes, settings of the method -> groups, each of which is one tensor -> its values, by boxes

A row of the table says by which names a group is recognised, how the shape of its tensor follows from theirs, and how a
box of it is decoded: into codes and scales of the box's shape, whose products are the values. Codes are exact in
float32 (integers less their zero point, entries of a table). What a row does not understand is refused: a scale that is
left out gives weights that look right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""First and last + 1 of each dim."""
Read = Callable[[str, "Box | None"], "Tensor"]
"""A box of a stored tensor by its name, or all of it."""
Settings = Mapping[str, Any]
"""The table `quantization_config`."""


@dataclass(frozen=True)
class GroupForm:
    """What a row says of the tensor of a group."""

    shape: tuple[int, ...]
    grid: tuple[int, ...] = ()
    """Shape of the scales, with as many dims as the tensor."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share a scale."""
    bits: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class TensorGroup:
    """Stored tensors that are one tensor together."""

    name: str
    codec: str
    members: Mapping[str, str]
    """Names of the stored tensors by their role."""
    specs: Mapping[str, TensorSpec]
    """The same tensors' types and shapes."""
    form: GroupForm = GroupForm(())


@dataclass(frozen=True)
class GroupCodec:
    """One row. `bind` and `decode` raise RelayoutError for what does not fit together."""

    methods: tuple[str, ...]
    """Values of `quant_method`."""
    codes: str
    """How the name of the codes ends."""
    decoded: str
    """How the name of the tensor ends instead."""
    dtypes: tuple[str, ...]
    """Of the codes."""
    needs: Mapping[str, str]
    """Roles of the other tensors, and how their names end."""
    bind: Callable[[TensorGroup, Settings, Read], GroupForm]
    decode: Callable[[TensorGroup, Read, Box], tuple[Tensor, Tensor]]
    """Codes and scales of a box, in float32; the last dim of the box is all of it."""
    may: Mapping[str, str] = field(default_factory=dict[str, str])
    """Roles that may be missing."""


class GroupUnfitError(RelayoutError):
    """Tensors of a group whose shapes do not fit together."""


def unfit(group: TensorGroup, role: str) -> GroupUnfitError:
    codes, other = group.specs["codes"], group.specs[role]
    return GroupUnfitError(
        f"{group.members[role]} of shape {list(other.shape)} does not fit {group.members['codes']} of shape "
        f"{list(codes.shape)}"
    )


def ceil(number: int, by: int) -> int:
    """How many parts of a size a number has, the last one perhaps shorter."""
    return -(-number // by)


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
