"""A call of an operator with its arguments by the names of its schema: every default filled in, dims counted from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from tangram.models.capturing.graph import flat

DIM_ARGUMENTS = frozenset({"dim", "dims", "dim0", "dim1", "axis", "start_dim", "end_dim", "dim2"})
"""Arguments that name dims, as the schemas of aten call them."""


@dataclass(frozen=True, eq=False)
class OpCall:
    """An operator and what it is called with."""

    operator: OpOverload
    arguments: Mapping[str, Any]
    """By name, in the schema's order."""

    @staticmethod
    def of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
        """The call `operator(*args, **kwargs)`."""
        found: dict[str, Any] = {}
        for i, (name, default) in enumerate(_arguments(operator)):
            found[name] = args[i] if i < len(args) else kwargs.get(name, default)
        return OpCall(operator, found)

    @cached_property
    def name(self) -> str:
        """Without the namespace: `sum.dim_IntList`."""
        return name_of(self.operator)

    @cached_property
    def places(self) -> tuple[tuple[str, int | None], ...]:
        """Where its tensors stand: the argument, and the place in it where that is a list. An absent one counts."""
        found: list[tuple[str, int | None]] = []
        for name in tensor_arguments(self.operator):
            value = self.arguments[name]
            if isinstance(value, list | tuple):
                found += [(name, i) for i in range(len(cast("Sequence[Any]", value)))]
            else:
                found.append((name, None))
        return tuple(found)

    @cached_property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Its tensors, in the order of `places`."""
        return tuple(self._at(name, i) for name, i in self.places)

    def _at(self, name: str, i: int | None) -> Tensor | None:
        value = self.arguments[name] if i is None else self.arguments[name][i]
        return value if isinstance(value, Tensor) else None

    def dims(self, argument: str, ndim: int) -> tuple[int, ...]:
        """The dims that an argument names of a tensor of `ndim` dims, from 0 on; all where it is None or empty."""
        value = self.arguments[argument]
        if value is None or (isinstance(value, list | tuple) and not value):
            return tuple(range(ndim))
        listed: list[int] = [value] if isinstance(value, int) else [*value]
        return tuple(d % ndim if ndim else 0 for d in listed)

    def with_tensors(self, tensors: Sequence[Tensor | None], **others: Any) -> OpCall:
        """The same with other tensors, in the order of `places`, and some other arguments."""
        found: dict[str, Any] = {
            name: [*cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value
            for name, value in self.arguments.items()
        }
        for (name, i), tensor, before in zip(self.places, tensors, self.tensors, strict=True):
            if before is None:
                continue
            if i is None:
                found[name] = tensor
            else:
                found[name][i] = tensor
        return replace(self, arguments={**found, **others})

    def run(self, *, in_place: bool = False) -> tuple[Any, ...]:
        """What the operator gives, always as a tuple, lists of tensors flattened into it.

        `in_place`: write the tensors that it writes; else it writes copies.
        """
        schema = schema_of(self.operator).arguments
        copied = {a.name for a in schema if is_written(a) and not in_place}
        given = {
            a.name: _copied(self.arguments[a.name]) if a.name in copied else self.arguments[a.name] for a in schema
        }
        positional = [given[a.name] for a in schema if not a.kwarg_only]
        named = {a.name: given[a.name] for a in schema if a.kwarg_only}
        return tuple(flat(self.operator(*positional, **named)))

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, Tensor):
                return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if isinstance(value, list | tuple):
                return "[" + ", ".join(map(text, cast("list[Any]", value))) + "]"
            return repr(value)

        given = {a.name: a.default_value for a in schema_of(self.operator).arguments if a.has_default_value()}
        shown = [
            f"{name}={text(value)}"
            for name, value in self.arguments.items()
            if isinstance(value, Tensor) or name not in given or value != given[name]
        ]
        return f"{self.name}({', '.join(shown)})"


def schema_of(operator: OpOverload) -> Any:
    """What an operator takes and gives, as torch knows it."""
    return cast(Any, operator)._schema


def is_written(argument: Any) -> bool:
    """Whether an operator writes an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(one) for one in cast("list[Any]", value)]
    return value.clone() if isinstance(value, Tensor) else value


@lru_cache(1 << 12)
def count_returns(operator: OpOverload) -> int:
    """How many results an operator's schema has."""
    return len(schema_of(operator).returns)


@lru_cache(1 << 12)
def name_of(operator: OpOverload) -> str:
    """`sum.dim_IntList`, `mm`: aten's own without the namespace and without `default`; others with their namespace."""
    space, _, rest = operator.name().partition("::")
    return rest if space == "aten" else f"{space}.{rest}"


@lru_cache(1 << 12)
def _arguments(operator: OpOverload) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema_of(operator).arguments)


@lru_cache(1 << 12)
def tensor_arguments(operator: OpOverload) -> tuple[str, ...]:
    """The arguments of a schema that are tensors, or lists of them; not those that results are written to."""
    return tuple(
        a.name
        for a in schema_of(operator).arguments
        if "Tensor" in str(a.type) and not (a.is_out or (a.kwarg_only and a.alias_info is not None))
    )


@lru_cache(1 << 12)
def is_view(operator: OpOverload) -> bool:
    """Whether its result may be a view of its first argument."""
    schema = schema_of(operator)
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    ) and operator.name() not in ("aten::_reshape_alias",)


POINTWISE = torch.Tag.pointwise
