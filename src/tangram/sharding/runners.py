"""Calls that a rank carries out otherwise than by the operator on its part: a note of the rule says which.

    counted              random numbers belong to the elements of the whole tensor
    ragged(t e)          rows t come in groups e, whose ends are counted through all rows
    triangle(r c)        rows r above or below the diagonal of columns c, counted in the whole matrix

A runner has what the part holds of the factors, and the operator's arguments as the part has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tangram.layout.intervals import IntSet, elements, size
from tangram.sharding import draws, ragged, random
from tangram.sharding.calls import Call

if TYPE_CHECKING:
    from tangram.sharding.bind import Bound

Held = Mapping[str, IntSet]
Runner = Callable[[Call, "Bound", Held, Sequence[str], bool], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Otherwise(Call):
    """A call that is run by something else."""

    how: Callable[[Call, bool], tuple[Any, ...]]

    def run(self, *, in_place: bool = False) -> tuple[Any, ...]:
        """As `Call.run`."""
        return self.how(self, in_place)


def of(call: Call, bound: Bound, held: Held) -> Call:
    """A part's call as it is to be run: itself, where the rule says nothing else. `held`: of the cut factors."""
    for name, args in bound.rule.notes:
        if name in RUNNERS:
            return Otherwise(call.operator, call.arguments, partial(_run, RUNNERS[name], bound, held, args))
    return call


def _run(runner: Runner, bound: Bound, held: Held, args: Sequence[str], call: Call, in_place: bool) -> tuple[Any, ...]:
    return runner(call, bound, held, args, in_place)


def whole(call: Call, bound: Bound) -> Call:
    """A whole call as it is to be run, to compare parts with."""
    return of(call, bound, {}) if bound.rule.note("counted") is not None else call


def _counted(call: Call, bound: Bound, held: Held, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    tensors = [t for t in call.tensors if t is not None]
    local = cast("Sequence[int]", torch.broadcast_shapes(*[t.shape for t in tensors]))
    sets: list[IntSet] = []
    shape: list[int] = []
    for factors, n in zip(bound.outputs[0], local, strict=True):
        shape.append(math.prod(bound.sizes[f] for f in factors) if factors else n)
        sets.append(_product([held.get(f, _all(bound.sizes[f])) for f in factors], [bound.sizes[f] for f in factors])
                    if factors else _all(n))  # fmt: skip
    return draws.draw(call, random.numbered(sets, shape, tensors[0].device), in_place)


def _all(n: int) -> IntSet:
    return ((0, n),) if n else ()


def _product(sets: Sequence[IntSet], sizes: Sequence[int]) -> IntSet:
    """The indices into a product of factors, of which these are held; the last one moves fastest."""
    if len(sets) == 1:
        return sets[0]
    found = cast("list[int]", random.numbered([*sets], [*sizes]).flatten().tolist())
    return tuple((i, i + 1) for i in found)


def _ragged(call: Call, bound: Bound, held: Held, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    rows, groups = (held.get(name) for name in args)
    return ragged.run(call, rows, groups)


def _triangle(call: Call, bound: Bound, held: Held, args: Sequence[str], in_place: bool) -> tuple[Any, ...]:
    """A part that begins at a row, or a column, has its diagonal shifted; one of several runs is masked."""
    (x,) = call.tensors
    assert x is not None
    diagonal: int = call.arguments["diagonal"]
    rows, columns = (held.get(name, _all(n)) for name, n in zip(args, x.shape[-2:], strict=True))
    if len(rows) <= 1 and len(columns) <= 1:
        shift = (rows[0][0] if rows else 0) - (columns[0][0] if columns else 0)
        plain = Call(call.operator, {**call.arguments, "diagonal": diagonal + shift})
        return plain.run(in_place=in_place)
    above = _steps(columns, x)[None, :] - _steps(rows, x)[:, None] - diagonal
    keep = above <= 0 if "tril" in call.name else above >= 0
    if call.name.partition(".")[0].endswith("_"):
        return ((x if in_place else x.clone()).masked_fill_(~keep, 0),)
    return (torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device)),)


def _steps(held: IntSet, like: Tensor) -> Tensor:
    return torch.tensor(elements(held) if size(held) else [], dtype=torch.int64, device=like.device)


RUNNERS: Mapping[str, Runner] = {
    "counted": _counted,
    "ragged": _ragged,
    "triangle": _triangle,
}
"""By the note that asks for it."""
