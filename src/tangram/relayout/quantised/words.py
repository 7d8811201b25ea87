"""Codes of a few bits in words of 32: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.quantised.grids import gridded, of_blocks, schemes, spread, stored
from tangram.relayout.quantised.groups import Box, GroupForm, Read, Settings, TensorGroup, ceil, unfit

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
