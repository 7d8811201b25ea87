"""What somebody meant who typed a mark as another library has it: a sentence with the text to write instead.

Shard(0), [Replicate(), Shard(1)]      placements of torch, one for each axis of a mesh
P("tp", None), ("dp", ("tp", "cp"))    a partition of dims, one entry for each dim
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, cast

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

EXAMPLE = 'as "batch seq/tp hidden"'


def kind(x: object) -> str:
    """`a Shard`, `None`."""
    return f"a {type(x).__name__}" if x is not None else "None"


def meant(layout: object, ndim: int | None, axes: Sequence[str]) -> str:
    """The end of a sentence: an example or, where that can be told, the very mark.

    `ndim`: of the tensor, None if it is not known; `axes`: of the mesh, or none where there is no mesh yet.
    """
    placements = [layout] if isinstance(layout, Placement) else _items(layout)
    if placements and all(isinstance(one, Placement) for one in placements):
        text = _of_placements(cast("Sequence[Placement]", placements), ndim, axes)
        shown = ", ".join(map(_shown, placements))
        shown = shown if isinstance(layout, Placement) else f"[{shown}]"
    elif placements and all(one is None or isinstance(one, str) or _axes(one) for one in placements):
        text = _of_partition(placements, ndim)
        name = "" if type(layout) in (tuple, list) else type(layout).__name__
        shown = f"{name}({', '.join(map(repr, placements))})"
    else:
        return f"{EXAMPLE}, and not {kind(layout)}"
    return f'and not {shown}: write "{text}"' if text else f"{EXAMPLE}, and not {shown}"


def _items(layout: object) -> list[Any]:
    if isinstance(layout, str | bytes | dict) or not (hasattr(layout, "__iter__") and hasattr(layout, "__len__")):
        return []
    return list(cast("Sequence[Any]", layout))


def _axes(entry: object) -> tuple[str, ...]:
    """The axes that an entry of a partition names."""
    some = (entry,) if isinstance(entry, str) else tuple(_items(entry))
    return cast("tuple[str, ...]", some) if all(isinstance(one, str) for one in some) else ()


def _of_partition(entries: Sequence[object], ndim: int | None) -> str:
    if ndim is not None and len(entries) > ndim:
        return ""
    cuts = [_axes(one) if one is not None else () for one in entries]
    return _text([*cuts, *[()] * ((ndim or len(entries)) - len(cuts))])


def _of_placements(placements: Sequence[Placement], ndim: int | None, axes: Sequence[str]) -> str:
    axes = axes or ("dp", "tp")[-len(placements) :]
    if len(axes) != len(placements):
        return ""
    dims = [int(cast(Any, one).dim) for one in placements if isinstance(one, Shard)]
    count = ndim if ndim is not None else max((d + 1 if d >= 0 else -d for d in dims), default=0)
    if any(not isinstance(one, Shard | Replicate | Partial) for one in placements) or not all(
        -count <= d < count for d in dims
    ):
        return ""
    cuts: list[tuple[str, ...]] = [()] * count
    sums: list[str] = []
    for axis, one in zip(axes, placements, strict=True):
        if isinstance(one, Shard):
            dim = int(cast(Any, one).dim)
            cuts[dim] = (*cuts[dim], axis)
        elif isinstance(one, Partial):
            sums.append(f"{cast(Any, one).reduce_op}:{axis}")
    return " ".join([_text(cuts), *sums])


def _text(cuts: Sequence[Sequence[str]]) -> str:
    return " ".join("/".join([name, *own]) for name, own in zip(ascii_lowercase, cuts, strict=False))


def _shown(one: object) -> str:
    if isinstance(one, Shard):
        return f"Shard({one.dim})"
    return "Replicate()" if isinstance(one, Replicate) else "Partial()" if isinstance(one, Partial) else repr(one)
