"""What somebody meant who typed a mark as another library has it: a sentence with the text to write instead.

Shard(0), [Replicate(), Shard(1)]      placements of torch, one for each axis of a mesh
P("tp", None), ("dp", ("tp", "cp"))    a partition of dims, one entry for each dim

As objects of these libraries, or typed as a text that looks so: `Shard(0)` would be read as two dims else.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any, cast

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

EXAMPLE = 'as "batch seq/tp hidden"'


def typed(text: str) -> object:
    """What a text is in Python that names something of another library, as `Shard(0)` or `[Replicate()]`; else None."""
    try:
        tree = ast.parse(text, mode="eval").body
        named = any(isinstance(node, ast.Call) for node in ast.walk(tree))
        return _value(tree) if named else None
    except (SyntaxError, ValueError, TypeError, KeyError):
        return None


class P(tuple[Any, ...]):
    """A partition that somebody typed."""

    __slots__ = ()


def _partition(*entries: Any) -> P:
    return P(entries)


_NAMED: Mapping[str, Any] = {
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
    **dict.fromkeys(("P", "PartitionSpec"), _partition),
}


def _value(node: ast.expr) -> Any:
    """Raises KeyError and ValueError for what is none of it."""
    match node:
        case ast.Call(ast.Name(name), args, []):
            return _NAMED[name](*map(_value, args))
        case ast.Call(ast.Name(name), [], [ast.keyword("dim", value)]):
            return _NAMED[name](_value(value))
        case ast.List(items) | ast.Tuple(items):
            return [*map(_value, items)]
        case _:
            return ast.literal_eval(node)


def kind(x: object) -> str:
    """`a Shard`, `None`."""
    return f"a {type(x).__name__}" if x is not None else "None"


def meant(layout: object, ndim: int | None, axes: Sequence[str], *, open_end: bool = False) -> str:
    """The end of a sentence: an example or, where that can be told, the very mark.

    `ndim`: of the tensor, None if it is not known; `axes`: of the mesh, or none where there is no mesh yet. `open_end`:
    the tensor may have more dims than are named.
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
    text += " ..." if open_end and text else ""
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
