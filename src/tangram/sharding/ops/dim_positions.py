"""What stands at each dim of each tensor of a call: the factors that its rule names there.

A letter is a factor, `{dim}` one for each dim that the argument names, `...` one for each dim that is left. Where a
rule's pattern is for other numbers of dims than the call's, it does not fit, and that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from tangram.errors import UserError
from tangram.layout.rule import Rule
from tangram.layout.syntax import VOID, Dim, Operand, Piece, Slot
from tangram.sharding.ops.calls import OpCall, schema_of
from tangram.sharding.ops.windows import KINDS

KEPT = "kept"
"""The argument that says that dims always stay, with one element each."""
ALL = "all"
"""The slot that stands for every dim, of operators that have no argument for it."""


class RuleError(UserError):
    """A rule does not fit its operator."""


class MisfitError(RuleError):
    """A rule does not fit the shapes of a call."""


class DimPosition(NamedTuple):
    """What one dim is made of."""

    factors: tuple[str, ...]
    uncut: bool = False
    dim: Dim | None = None
    beyond: bool = False


class Spots:
    """Works out what stands at each dim of each operand."""

    def __init__(self, rule: Rule, call: OpCall, operands: Sequence[Operand]) -> None:
        self._rule, self._call = rule, call
        self._slots = {slot.argument: slot for slot in reversed(rule.slots)}
        for name in self._slots:
            if name != ALL and name not in call.arguments:
                raise RuleError(
                    f"the rule of {call.name} speaks of {{{name}}}, which is no argument of {schema_of(call.operator)}"
                )
        self.rest = 0
        if not self._slots:  # the usual case: nothing but letters and `...`
            for op, t in zip(operands, call.tensors, strict=True):
                if t is not None and (n := self._count_rest(op, t.ndim)) > self.rest:
                    self.rest = n
            return
        self._ndim = next(
            (t.ndim for op, t in zip(operands, call.tensors, strict=True) if t is not None and op.slots),
            max((t.ndim for t in call.tensors if t is not None), default=0) + (not any(op.slots for op in operands)),
        )
        self._at = {name: self._places(slot) for name, slot in self._slots.items()}
        taken = {d for places in self._at.values() for d in places}
        self._others = self._ndim - len(taken)
        counts = [self._count_rest(op, t.ndim) for op, t in zip(operands, call.tensors, strict=True) if t is not None]
        self.rest = max(counts, default=0)

    def _places(self, slot: Slot) -> tuple[int, ...]:
        if slot.argument == ALL:
            return tuple(range(self._ndim))
        if slot.trailing:
            return tuple(range(self._ndim - len(self._call.arguments[slot.argument]) // slot.trailing, self._ndim))
        return self._call.dims(slot.argument, self._ndim)

    def named(self, text: str) -> list[str]:
        """The factors that a note names: a letter, or a slot as in the text."""
        return self.factors_of(text.strip("{}")) if text[0] == "{" else [text]

    def factors_of(self, slot: str) -> list[str]:
        """The factors of a slot, by its name."""
        return [f"{{{slot}}}{i}" for i in range(len(self._at[slot]))]

    @staticmethod
    def _count_rest(operand: Operand, ndim: int) -> int:
        """How many dims `...` is of an operand without slots."""
        return 0 if operand.slots or operand.fixed == len(operand.pieces) else max(0, ndim - operand.fixed)

    def dims(self, operand: Operand, ndim: int | None) -> list[DimPosition]:
        """What each dim of a tensor is; `ndim` is None for an output."""
        if self._slots:
            around = self._around_slots(operand)
            if ndim is None or len(around) == ndim:
                return around
            broadcast = not ndim or (self._slots.keys() == {ALL} and ndim < len(around))
            return around[len(around) - ndim :] if broadcast else self.misfit(operand, ndim)
        found: list[DimPosition] = []
        rest = self.rest if ndim is None else self._count_rest(operand, ndim)
        for piece in operand.pieces:
            if piece.rest:
                found += _rests(rest, piece.uncut, piece.beyond)
            else:
                found.append(_spot(piece))
        if ndim is None or len(found) == ndim:
            return found
        return found[len(found) - ndim :] if len(found) > ndim else self.misfit(operand, ndim)

    def misfit(self, operand: Operand, ndim: int) -> list[DimPosition]:
        """Raise that an operand is no tensor of so many dims."""
        raise MisfitError(f"the rule of {self._call.name} has {operand} for a tensor of {ndim} dims: {self._call}")

    def _around_slots(self, operand: Operand) -> list[DimPosition]:
        """Slots stand at the dims that they name; `...` is what is left, before, between and behind them."""
        others = iter([DimPosition((f".{i}",)) for i in range(self._others)])
        placed: dict[int, DimPosition] = {}
        for slot in operand.slots:
            whole = next(p.uncut for p in operand.pieces if p.what == slot)
            for factor, at in zip(self.factors_of(slot.argument), self._at[slot.argument], strict=True):
                if not slot.keep:
                    placed[at] = DimPosition((factor,), whole)
                elif slot.keep == KEPT or self._call.arguments[slot.keep]:
                    placed[at] = DimPosition((), whole)
        named = [piece for piece in operand.pieces if not piece.rest and not isinstance(piece.what, Slot)]
        rests = [i for i, piece in enumerate(operand.pieces) if piece.rest]
        if not operand.slots and len(rests) == 2 and named:  # a dim of its own where the slot was
            before = min((d for places in self._at.values() for d in places), default=0)
            listed = list(others)
            return [*listed[:before], *(_spot(piece) for piece in named), *listed[before:]]
        if not operand.slots and not rests:
            return [_spot(piece) for piece in named]
        body: list[DimPosition] = []
        whole = any(piece.rest and piece.uncut for piece in operand.pieces)
        for at in range(self._ndim):
            if at in placed:
                body.append(placed[at])
            elif at not in self._all_places and rests:
                body.append(DimPosition(next(others).factors, whole))
        first = rests[0] if rests else len(operand.pieces)
        lead = [_spot(p) for p in operand.pieces[:first] if not isinstance(p.what, Slot)]
        return [*lead, *body]

    @property
    def _all_places(self) -> set[int]:
        return {d for places in self._at.values() for d in places}


@lru_cache(1 << 8)
def _rests(count: int, full: bool, beyond: bool) -> tuple[DimPosition, ...]:
    """So many dims that are left, counted from the right."""
    return tuple([DimPosition((f".{i}",), full, None, beyond) for i in range(count, 0, -1)])


def _spot(piece: Piece) -> DimPosition:
    """What a dim is made of that a rule names: read once for each piece of a rule."""
    known = vars(piece)
    if "_spot" not in known:
        known["_spot"] = _read_spot(piece)
    return known["_spot"]


def _read_spot(piece: Piece) -> DimPosition:
    dim = piece.what
    assert isinstance(dim, Dim)
    if len(dim.terms) > 1:
        raise RuleError(f"a rule multiplies factors and adds none: {dim}")
    names = tuple(leaf.name for leaf in dim.leaves if leaf.name and leaf.name != VOID)
    if dim.terms:  # as the 2 of (2 f), by which blocks of f lie one after the other
        names = tuple(leaf.name or str(leaf.n) for leaf in dim.leaves)
        if VOID in names:
            raise RuleError(f"a rule has {dim}, and of {VOID} in it nobody knows the size: name it, or write a number")
    return DimPosition(names, piece.uncut, dim if dim.terms else None, piece.beyond)


def operands(patterns: Sequence[Operand], count: int) -> list[Operand]:
    """One for each tensor: the last stands for all further ones."""
    return [patterns[min(i, len(patterns) - 1)] for i in range(count)]


class Beyond(NamedTuple):
    """A dim of an input that is read by windows."""

    factor: str
    place: int
    dim: int
    entry: int
    extents: Mapping[int, int]
    """Of another input, its dim that is as long as a window."""


def beyond(
    rule: Rule, inputs: Sequence[tuple[DimPosition, ...] | None]
) -> tuple[list[tuple[DimPosition, ...] | None], tuple[Beyond, ...]]:
    """The dims that are read by windows; in other inputs, what bears ^ in their place is as long as the windows."""
    if not rule.reads_beyond:
        return [*inputs], ()
    places = [(i, d, spot) for i, dims in enumerate(inputs) for d, spot in enumerate(dims or ()) if spot.beyond]
    if not any(name in KINDS for name, _ in rule.notes):
        raise RuleError(f"the rule of {' '.join(rule.operators)} has a ' and none of the notes {', '.join(KINDS)}")
    names = {f for _, _, spot in places for f in spot.factors}
    extents: dict[str, dict[int, int]] = {f: {} for f in names}
    made: list[tuple[DimPosition, ...] | None] = []
    for i, dims in enumerate(inputs):
        own: list[DimPosition] = []
        for d, spot in enumerate(dims or ()):
            for f in names.intersection(spot.factors if spot.uncut else ()):
                extents[f][i] = d
                spot = spot._replace(factors=())
            own.append(spot)
        made.append(None if dims is None else tuple(own))
    found: list[Beyond] = []
    for i, d, spot in places:
        if len(spot.factors) != 1:
            raise RuleError(f"the rule of {' '.join(rule.operators)} has a ' on what is not one factor")
        entry = sum(1 for j, e, _ in places if j == i and e < d)
        found.append(Beyond(spot.factors[0], i, d, entry, extents[spot.factors[0]]))
    return made, tuple(found)
