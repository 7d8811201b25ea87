"""Quantised weights: codes, scales and maps that mean something only together. What a codec says of them.

    names, types and shapes, settings of the method -> groups, each of which is one tensor -> its values, by boxes

A row of the table says by which names a group is recognised, how the shape of its tensor follows from theirs, and how a
box of it is decoded: into codes and scales of the box's shape, whose products are the values. Codes are exact in
float32 (integers less their zero point, entries of a table). What a row does not understand is refused: a scale that is
left out gives weights that look right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
