"""The forms that an operand of a rule can have, and what each says of the dims of a tensor.

    a b, ... a, a ... b     letters from either end, and all other dims between
    ... {dim} ...           the dims that an argument names, and all others in their order
    ... i ...               a dim of its own where those were
    {all}                   every dim

A dim's `Key` says what it is of: a letter by its place in the operand, one of the others by its number, one of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tangram.layout.syntax import Slot
from tangram.sharding.ops.bind import ALL, KEPT
from tangram.sharding.ops.calls import DIM_ARGUMENTS, OpCall, schema_of

Key = tuple[str, int, int]
"""`letter`, operand and place; `rest` or `slot` with its number, of no operand."""


@dataclass(frozen=True)
class Context:
    """What the forms need of a call: the dims that a slot names, and how many others there are."""

    call: OpCall
    slot: Slot | None = None
    places: tuple[int, ...] = ()
    ndim: int = 0
    rest: int = 0
    """Without a slot: the most dims that `...` stands for."""

    @property
    def others(self) -> int:
        """How many dims the slot does not name."""
        return self.ndim - len(self.places)


def context(call: OpCall, slot: Slot | None) -> Context | None:
    """What a slot names in a call; None where it cannot be there."""
    if slot is None:
        return Context(call)
    ndims = [t.ndim for t in call.tensors if t is not None]
    if slot.argument == ALL:
        return Context(call, slot, tuple(range(max(ndims))), max(ndims))
    ndim = ndims[0]
    if slot.trailing:
        count = len(call.arguments[slot.argument] or ()) // slot.trailing
        return Context(call, slot, tuple(range(ndim - count, ndim)), ndim) if count <= ndim else None
    places = call.dims(slot.argument, ndim)
    return (
        Context(call, slot, places, ndim) if len(set(places)) == len(places) and max(places, default=0) < ndim else None
    )


def slots_of(calls: Sequence[OpCall]) -> list[Slot]:
    """The slots that the arguments of an operator allow."""
    arguments = calls[0].arguments
    found = [Slot(name) for name in arguments if name in DIM_ARGUMENTS]
    for argument in schema_of(calls[0].operator).arguments:
        if str(argument.type) in ("List[int]", "List[SymInt]") and argument.name not in DIM_ARGUMENTS:
            found += [Slot(argument.name, trailing=entries) for entries in (1, 2)]
    return [*found, Slot(ALL)]


@dataclass(frozen=True)
class OperandForm:
    """One operand's form."""

    before: int = 0
    rest: bool = False
    after: int = 0
    slot: Slot | None = None
    own: bool = False
    """A letter where the slot's dims were."""

    def keys(self, at: Context, operand: int, ndim: int | None) -> list[Key] | None:
        """What each dim is; `ndim` is None for an output, whose `...` are those of the inputs. None: it cannot be."""
        if self.slot is not None and self.slot.argument == ALL:
            found: list[Key] = [("slot", -1, i) for i in range(at.ndim)]
            return found if ndim is None else found[len(found) - ndim :] if ndim <= len(found) else None
        if at.slot is None:
            others = at.rest if ndim is None else ndim - self.before - self.after
            if others < 0 or (others and not self.rest):
                return None
            middle: list[Key] = [("rest", -1, others - i) for i in range(others)]
        else:
            middle = self._around(at, operand)
        lead: list[Key] = [("letter", operand, i) for i in range(self.before)]
        tail: list[Key] = [("letter", operand, self.before + i) for i in range(self.after)]
        found = [*lead, *middle, *tail]
        return found if ndim is None or len(found) == ndim else None

    def _around(self, at: Context, operand: int) -> list[Key]:
        others: list[Key] = [("rest", -1, i) for i in range(at.others)]
        if not self.rest and self.slot is None:
            return []
        if self.own:
            first = min(at.places, default=0)
            return [*others[:first], ("letter", operand, 0), *others[first:]]
        if self.slot is None:
            return others
        keep = self.slot.keep
        stay = not keep or keep == KEPT or bool(at.call.arguments[keep])
        found: list[Key] = []
        left = iter(others)
        for d in range(at.ndim):
            if d not in at.places:
                found += [next(left)] * self.rest
            elif stay:
                found.append(("kept" if keep else "slot", -1, at.places.index(d)))
        return found


def input_forms(slot: Slot | None, ndims: Sequence[int]) -> list[OperandForm]:
    """The forms that an input of these numbers of dims can have."""
    least, constant = min(ndims), len(set(ndims)) == 1
    letters = [OperandForm(before=least)] if constant else []
    if slot is None:
        ends = ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (2, 0), (1, 1))
        return letters + [
            OperandForm(b, True, a) for b, a in ends if b + a <= least and not (constant and b + a == least)
        ]
    if slot.argument == ALL:
        return [OperandForm(rest=True, slot=slot)]
    alone = [OperandForm(slot=slot)] if slot.trailing else []
    return [
        OperandForm(rest=True, slot=slot),
        *alone,
        OperandForm(rest=True),
        OperandForm(rest=True, own=True),
        *letters,
    ]


def output_forms(slot: Slot | None, ndims: Sequence[int], arguments: Sequence[str]) -> list[OperandForm]:
    """The forms that an output of these numbers of dims can have, likely ones first."""
    least, constant = min(ndims), len(set(ndims)) == 1
    letters = [OperandForm(before=least)] if constant else []
    if slot is None:
        ends = ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (2, 0), (1, 1), (1, 2), (2, 1))
        return [OperandForm(b, True, a) for b, a in ends if b + a <= least] + letters
    if slot.argument == ALL:
        return [OperandForm(rest=True, slot=slot), OperandForm()]
    kept = [
        OperandForm(rest=True, slot=Slot(slot.argument, name, slot.trailing))
        for name in ("keepdim", "keepdims")
        if name in arguments
    ]
    always = OperandForm(rest=True, slot=Slot(slot.argument, KEPT, slot.trailing))
    return [
        *kept,
        always,
        OperandForm(rest=True, slot=slot),
        OperandForm(rest=True),
        OperandForm(rest=True, own=True),
        *letters,
    ]
