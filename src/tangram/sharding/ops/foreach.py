"""Operators over lists: `_foreach_add.List` is `add.Tensor` of each element, whatever the lengths of its lists.

Which operator each element gets follows from the schema: that of the same name whose arguments take one entry of each
list, in their order. So a list's operator needs no line: it is cut as its elements are, each by itself, and each may
lie otherwise. The trade-off: what a fused kernel saves is no matter of the rules, which speak of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.sharding.ops.calls import OpCall, name_of, schema_of

PREFIX = "_foreach_"
NAMES: Mapping[str, tuple[str, ...]] = {
    "norm": ("linalg_vector_norm",),
    "powsum": ("linalg__powsum",),
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
}
"""Of lists' operators that are called otherwise than their elements': by a number, the larger of two is a clamp."""


class _ElementArgument(NamedTuple):
    """Where an argument of an element comes from."""

    name: str
    source: str
    how: str
    """`each` an entry of a list, `same` for all, or `number` of a tensor of numbers."""


class ForeachBase(NamedTuple):
    """The operator that each element gets, and its arguments."""

    operator: OpOverload
    arguments: tuple[_ElementArgument, ...]


@lru_cache(1 << 10)
def base_of(operator: OpOverload) -> ForeachBase | None:
    """What an operator over lists does to each element; None where it is none, or its element has no operator."""
    packet = name_of(operator).partition(".")[0]
    if not packet.startswith(PREFIX):
        return None
    plain = packet.removeprefix(PREFIX)
    inplace = "_" * plain.endswith("_")
    for name in NAMES.get(plain.rstrip("_"), (plain.rstrip("_"),)):
        found: Any = getattr(torch.ops.aten, name + inplace, None)
        for overload in found.overloads() if found is not None else ():
            one = cast(OpOverload, getattr(found, overload))
            given = _element_arguments(schema_of(operator).arguments, schema_of(one).arguments)
            if given is not None and [str(r.type) for r in schema_of(one).returns] == ["Tensor"]:
                return ForeachBase(one, given)
    return None


def _element_arguments(lists: Sequence[Any], own: Sequence[Any]) -> tuple[_ElementArgument, ...] | None:
    """The arguments of an element in the lists' order, those between them by default; None where they do not fit."""
    if any(a.is_out for a in lists) != any(a.is_out for a in own):
        return None
    pairs: list[_ElementArgument] = []
    rest = iter(own)
    for argument in lists:
        kinds = _kinds(argument)
        for other in rest:
            how = kinds.get(_plain(other))
            if how is not None and argument.is_out == other.is_out:
                pairs.append(_ElementArgument(other.name, argument.name, how))
                break
            if not other.has_default_value():
                return None
        else:
            return None
    return tuple(pairs) if all(other.has_default_value() for other in rest) else None


def _plain(argument: Any) -> str:
    return str(argument.type).removeprefix("Optional[").removesuffix("]" * str(argument.type).startswith("Optional["))


def _kinds(argument: Any) -> Mapping[str, str]:
    """What an element may take of an argument, by type, and how."""
    kind = _plain(argument)
    if kind.startswith("List["):
        return {kind.removeprefix("List[").removesuffix("]"): "each"}
    return {"number": "number"} if kind == "Tensor" and argument.name == "scalars" else {kind: "same"}


def calls(call: OpCall) -> tuple[OpCall, ...] | None:
    """The calls of the elements; None where the operator is none over lists, or its elements have none.

    Numbers that come as a tensor are read; of tensors without memory they are 1, since no rule depends on them.
    Raises UserError where lists have different lengths.
    """
    base = base_of(call.operator)
    if base is None:
        return None
    lengths = {one.source: len(call.arguments[one.source]) for one in base.arguments if one.how == "each"}
    if len({*lengths.values()}) > 1:
        raise UserError(f"{call.name} is given lists of different lengths: {lengths}")
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in schema_of(base.operator).arguments}
    return tuple(
        OpCall(base.operator, {**defaults, **{one.name: _entry(call, one, i) for one in base.arguments}})
        for i in range(next(iter(lengths.values())))
    )


def _entry(call: OpCall, one: _ElementArgument, i: int) -> Any:
    value = call.arguments[one.source]
    if one.how == "number":
        return 1 if cast(Tensor, value).is_meta else value[i].item()
    return value[i] if one.how == "each" else value


def places(call: OpCall) -> tuple[tuple[int, ...], ...]:
    """Of each element's call, where its tensors stand among the tensors of the whole one: whose layouts they have.

    Raises UserError where the elements have no operator.
    """
    found = calls(call)
    base = base_of(call.operator)
    if found is None or base is None:
        raise UserError(f"{call.name} is no operator over lists, or its elements have none")
    at = {place: k for k, place in enumerate(call.places)}
    source = {one.name: one for one in base.arguments}
    rows: list[tuple[int, ...]] = []
    for i, one in enumerate(found):
        made = [source[name] for name, _ in one.places]
        rows.append(tuple(at[given.source, i if given.how == "each" else None] for given in made))
    return tuple(rows)
