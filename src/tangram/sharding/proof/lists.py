"""Calls of all operators over lists that torch has, drawn from their schemas; the proof that they are their elements'.

Torch's database has samples of hundreds of tensors for them. Here lists are short and of uneven shapes, since an
element's operator is proved like any other.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.sharding.ops import foreach
from tangram.sharding.ops.calls import OpCall, is_written, name_of, schema_of
from tangram.sharding.proof.execute import Failure, differs

SHAPES = ((5, 3), (4,))
NUMBERS = (0.5, 1.5)
SCALARS = {"ord": (2, 1), "value": (0.75,), "scalar": (1.25,), "weight": (0.25,), "alpha": (2,), "exponent": (2,)}
"""What numbers are called, and what is given for them: a call each."""


def operators() -> list[OpOverload]:
    """Every operator over lists that torch has, but those that write to tensors that are given for it."""
    names = [n for n in cast(Any, torch)._C._dispatch_get_all_op_names() if n.startswith(f"aten::{foreach.PREFIX}")]
    found: list[OpOverload] = []
    for name in sorted(names):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        one = cast(OpOverload, getattr(getattr(torch.ops.aten, packet), overload or "default"))
        if not any(a.is_out for a in schema_of(one).arguments):
            found.append(one)
    return found


def calls_of(operator: OpOverload) -> list[OpCall]:
    """Calls of one operator: short lists of uneven tensors, of positive values, for logarithms are among them."""
    generator = torch.Generator().manual_seed(5)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1

    matrices = name_of(operator) == foreach.PREFIX + "mm"
    arguments: list[dict[str, Any]] = [{}]
    for a in schema_of(operator).arguments:
        kind = str(a.type)
        if kind == "List[Tensor]":
            second = matrices and a.name != "self"
            shapes = ((3, 4), (2, 5)) if second else ((5, 3), (4, 2)) if matrices else SHAPES
            values: list[Any] = [[some(*shape) for shape in shapes]]
        elif kind == "List[number]":
            values = [[*NUMBERS]]
        elif kind == "Tensor":
            values = [torch.tensor(NUMBERS, dtype=torch.float64) if a.name == "scalars" else some()]
        elif kind == "number":
            values = [*SCALARS.get(a.name, (1.5,))]
        else:
            values = [a.default_value]
        arguments = [{**before, a.name: value} for before in arguments for value in values]
    return [OpCall(operator, given) for given in arguments]


def recorded(names: tuple[str, ...] = ()) -> dict[str, list[OpCall]]:
    """Calls of these operators over lists by name, of all without names."""
    chosen = [op for op in operators() if not names or {name_of(op), name_of(op).partition(".")[0]} & {*names}]
    return {name_of(op): calls_of(op) for op in chosen}


def elements(call: OpCall) -> tuple[OpCall, ...]:
    """The calls of a list's elements. Raises UserError where they have none."""
    found = foreach.calls(call)
    if found is None:
        raise UserError(f"there is no operator for each element of {call.name}")
    return found


def check(call: OpCall) -> Failure | None:
    """Whether an operator over lists gives what its elements' calls give; a written list is its result."""
    written = [a.name for a in schema_of(call.operator).arguments if is_written(a)]
    copy = call.with_tensors([None if t is None else t.clone() for t in call.tensors])
    results = copy.run(in_place=True)
    whole = [t for name in written for t in copy.arguments[name]] if written else [*results]
    single = [one.run()[0] for one in elements(call)]
    if len(whole) != len(single):
        return Failure(str(call), "each element", "the list", f"has {len(whole)} results, not {len(single)}")
    for i, (found, want) in enumerate(zip(single, whole, strict=True)):
        if found.shape != want.shape or found.dtype != want.dtype or differs(found, want):
            return Failure(str(call), "each element", f"element {i}", differs(found, want) or "is another tensor")
    return None
