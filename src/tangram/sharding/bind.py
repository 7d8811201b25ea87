"""A rule and a call together: the factors that each dim of each tensor is made of, with their sizes.

    mm : m k, k n -> m n    of f32[4, 6], f32[6, 5]    ->    m=4, k=6, n=5; [m][k], [k][n] -> [m][n]

A dim of one element that another tensor has more of is broadcast: it has no factors, but where the note `equal` says
that nothing is broadcast (`gather` takes fewer indices than elements). A factor that tensors have in
different sizes can be no cut of both, and counts as whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from tangram.errors import UserError
from tangram.layout.rule import Operand, Piece, Rule, Slot
from tangram.layout.syntax import VOID, Dim
from tangram.sharding.calls import Call, schema_of

Dims = tuple[tuple[str, ...], ...]
"""For each dim its factors, major first; a dim without any is whole."""
KEPT = "kept"
"""The argument that says that dims always stay, with one element each."""
ALL = "all"
"""The slot that stands for every dim, of operators that have no argument for it."""


class RuleError(UserError):
    """A rule does not fit its operator."""


class _MisfitError(RuleError):
    """A rule does not fit the shapes of a call."""


@dataclass(frozen=True)
class Bound:
    """What can be cut in one call."""

    rule: Rule
    inputs: tuple[Dims | None, ...]
    """None: that tensor is absent."""
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str]
    """Factors that may not be cut."""
    pending: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Of a factor that an output lacks: for each output what is pending when it is cut, or nothing."""

    @property
    def cuttable(self) -> list[str]:
        """The factors that can be cut, in the order in which they come in the tensors."""
        found = dict.fromkeys(f for dims in (*self.inputs, *self.outputs) for dim in dims or () for f in dim)
        return [f for f in found if f not in self.whole and self.sizes[f] > 1]

    def after(self, factor: str, output: int) -> str:
        """What becomes of an output when a factor is cut: `cut`, or what is pending then."""
        if any(factor in dim for dim in self.outputs[output]):
            return "cut"
        return self.pending[factor][output]


@dataclass
class _Sizes:
    """Sizes of factors as they are found; those that disagree."""

    found: dict[str, int] = field(default_factory=dict[str, int])
    unlike: set[str] = field(default_factory=set[str])

    def see(self, factor: str, size: int) -> None:
        if self.found.setdefault(factor, size) != size:
            self.unlike.add(factor)


def bind(rule: Rule, call: Call) -> Bound:
    """The factors of a call's tensors. Raises RuleError where the rule does not fit the operator."""
    try:
        return _bind(rule, call)
    except _MisfitError:
        if any(t is not None and not (t.numel() and t.ndim) for t in call.tensors):  # of nothing, or a scalar for one
            return _uncut(rule, call)
        raise


def _uncut(rule: Rule, call: Call) -> Bound:
    inputs = [None if t is None else tuple(() for _ in t.shape) for t in call.tensors]
    return Bound(rule, tuple(inputs), tuple(() for _ in schema_of(call.operator).returns), {}, frozenset())


def _bind(rule: Rule, call: Call) -> Bound:
    given = call.tensors
    pattern = _pattern(rule, call)
    sizes = _Sizes()
    for argument in pattern.counted:  # a factor may be called as an argument that says its size
        value = call.arguments[argument]
        if isinstance(value, int) and not isinstance(value, bool):
            sizes.see(argument, value)
    shapes = [None if t is None else t.shape for t in given]
    largest: dict[str, int] = {}
    equal = rule.note("equal") is not None
    for dims, shape in zip(pattern.inputs, shapes, strict=True):
        for spot, n in zip(dims or (), shape or (), strict=True):
            if n != 1 and len(spot.factors) == 1 and not equal:
                largest[spot.factors[0]] = n
    inputs: list[Dims | None] = []
    for dims, shape in zip(pattern.inputs, shapes, strict=True):
        if dims is None or shape is None:
            inputs.append(None)
        else:
            inputs.append(tuple([_seen(spot, n, largest, sizes) for spot, n in zip(dims, shape, strict=True)]))
    outputs, found = pattern.outputs, sizes.found
    if not found.keys() >= pattern.made:
        lost = sorted(f for f in pattern.made - found.keys() if f[0] not in "{.")
        if lost:
            raise _MisfitError(f"the rule of {call.name} has {lost[0]} in a result and in no tensor given: {call}")
        outputs = tuple(tuple(tuple(f for f in factors if f in found) for factors in dims) for dims in outputs)
    whole = pattern.whole | sizes.unlike if sizes.unlike else pattern.whole
    pending = pattern.pending
    if outputs is not pattern.outputs or pending.keys() != found.keys():
        pending = {f: pending[f] for f in found}
        whole = whole.difference(f for f in pattern.unsaid if f not in found)
    return Bound(rule, tuple(inputs), outputs, found, whole, pending)


@dataclass(frozen=True)
class _Pattern:
    """What a rule says of tensors of so many dims each, whatever their sizes."""

    inputs: tuple[tuple[_Spot, ...] | None, ...]
    outputs: tuple[Dims, ...]
    made: frozenset[str]
    """The factors of the outputs."""
    counted: tuple[str, ...]
    """Arguments that factors are called as."""
    whole: frozenset[str]
    unsaid: frozenset[str]
    """Factors that are whole because no output says anything of them."""
    pending: Mapping[str, tuple[str, ...]]


_KEPT_PATTERNS = 256


def _pattern(rule: Rule, call: Call) -> _Pattern:
    """Worked out once for each operator, number of dims, and dims that arguments name: no size is in it."""
    known: dict[object, _Pattern] = vars(rule).setdefault("_patterns", {})  # beside the rule: it is slow to hash
    named = [call.arguments.get(name) for slot in rule.slots for name in (slot.argument, slot.keep)]
    key = (
        call.operator,
        tuple([-1 if t is None else t.ndim for t in call.tensors]),
        tuple([tuple(cast("list[int]", value)) if isinstance(value, list) else value for value in named]),
    )
    pattern = known.get(key)
    if pattern is None:
        if len(known) >= _KEPT_PATTERNS:
            known.clear()
        pattern = known[key] = _new_pattern(rule, call)
    return pattern


def _new_pattern(rule: Rule, call: Call) -> _Pattern:
    given = call.tensors
    operands = _operands(rule.inputs, len(given))
    spots = _Spots(rule, call, operands)
    inputs = [None if t is None else tuple(spots.dims(op, t.ndim)) for op, t in zip(operands, given, strict=True)]
    count = len(schema_of(call.operator).returns)
    outputs = [spots.dims(op, None) for op in _operands(rule.outputs, max(count, 1))]
    everywhere = [spot for dims in (*inputs, *outputs) for spot in dims or ()]
    whole = {*(rule.note("whole") or ()), *(f for spot in everywhere if spot.whole for f in spot.factors)}
    made = tuple(tuple(spot.factors for spot in dims) for dims in outputs)
    counted = tuple([argument for argument in call.arguments if argument in _named(rule)])
    pending: dict[str, tuple[str, ...]] = {}
    for factor in dict.fromkeys([*(f for spot in everywhere for f in spot.factors), *counted]):
        pending[factor] = tuple(_pending(rule, factor, i, dims, spots) for i, dims in enumerate(made))
    unsaid = frozenset(f for f, found in pending.items() if "?" in found) - whole
    factors = frozenset(f for dims in made for dim in dims for f in dim)
    return _Pattern(tuple(inputs), made, factors, counted, frozenset(whole) | unsaid, unsaid, pending)


def _named(rule: Rule) -> frozenset[str]:
    """The names of all factors of a rule."""
    known = vars(rule)
    if "_named" not in known:
        pieces = [piece.what for operand in (*rule.inputs, *rule.outputs) for piece in operand.pieces]
        known["_named"] = frozenset(leaf.name for what in pieces if isinstance(what, Dim) for leaf in what.leaves)
    return known["_named"]


def _operands(patterns: Sequence[Operand], count: int) -> list[Operand]:
    """One for each tensor: the last stands for all further ones."""
    return [patterns[min(i, len(patterns) - 1)] for i in range(count)]


class _Spot(NamedTuple):
    """What one dim is made of."""

    factors: tuple[str, ...]
    whole: bool = False
    dim: Dim | None = None


class _Spots:
    """Works out what stands at each dim of each operand."""

    def __init__(self, rule: Rule, call: Call, operands: Sequence[Operand]) -> None:
        self._rule, self._call = rule, call
        self._slots = {slot.argument: slot for slot in reversed(rule.slots)}
        for name in self._slots:
            if name != ALL and name not in call.arguments:
                raise RuleError(
                    f"the rule of {call.name} speaks of {{{name}}}, which is no argument of {schema_of(call.operator)}"
                )
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

    def factors_of(self, slot: str) -> list[str]:
        """The factors of a slot, by its name."""
        return [f"{{{slot}}}{i}" for i in range(len(self._at[slot]))]

    @staticmethod
    def _count_rest(operand: Operand, ndim: int) -> int:
        """How many dims `...` is of an operand without slots."""
        fixed = len([piece for piece in operand.pieces if not piece.rest])
        return 0 if operand.slots or fixed == len(operand.pieces) else max(0, ndim - fixed)

    def dims(self, operand: Operand, ndim: int | None) -> list[_Spot]:
        """What each dim of a tensor is; `ndim` is None for an output."""
        if self._slots:
            around = self._around_slots(operand)
            if ndim is None or len(around) == ndim:
                return around
            broadcast = not ndim or (self._slots.keys() == {ALL} and ndim < len(around))
            return around[len(around) - ndim :] if broadcast else self.misfit(operand, ndim)
        found: list[_Spot] = []
        rest = self.rest if ndim is None else self._count_rest(operand, ndim)
        for piece in operand.pieces:
            if piece.rest:
                found += [_Spot((f".{i}",), piece.whole) for i in range(rest, 0, -1)]
            else:
                found.append(_spot(piece))
        return (
            found if ndim is None else found[len(found) - ndim :] if len(found) >= ndim else self.misfit(operand, ndim)
        )

    def misfit(self, operand: Operand, ndim: int) -> list[_Spot]:
        """Raise that an operand is no tensor of so many dims."""
        raise _MisfitError(f"the rule of {self._call.name} has {operand} for a tensor of {ndim} dims: {self._call}")

    def _around_slots(self, operand: Operand) -> list[_Spot]:
        """Slots stand at the dims that they name; `...` is what is left, before, between and behind them."""
        others = iter([_Spot((f".{i}",)) for i in range(self._others)])
        placed: dict[int, _Spot] = {}
        for slot in operand.slots:
            whole = next(p.whole for p in operand.pieces if p.what == slot)
            for factor, at in zip(self.factors_of(slot.argument), self._at[slot.argument], strict=True):
                if not slot.keep:
                    placed[at] = _Spot((factor,), whole)
                elif slot.keep == KEPT or self._call.arguments[slot.keep]:
                    placed[at] = _Spot((), whole)
        named = [piece for piece in operand.pieces if not piece.rest and not isinstance(piece.what, Slot)]
        rests = [i for i, piece in enumerate(operand.pieces) if piece.rest]
        if not operand.slots and len(rests) == 2 and named:  # a dim of its own where the slot was
            before = min((d for places in self._at.values() for d in places), default=0)
            listed = list(others)
            return [*listed[:before], *(_spot(piece) for piece in named), *listed[before:]]
        if not operand.slots and not rests:
            return [_spot(piece) for piece in named]
        body: list[_Spot] = []
        whole = any(piece.rest and piece.whole for piece in operand.pieces)
        for at in range(self._ndim):
            if at in placed:
                body.append(placed[at])
            elif at not in self._all_places and rests:
                body.append(_Spot(next(others).factors, whole))
        first = rests[0] if rests else len(operand.pieces)
        lead = [_spot(p) for p in operand.pieces[:first] if not isinstance(p.what, Slot)]
        return [*lead, *body]

    @property
    def _all_places(self) -> set[int]:
        return {d for places in self._at.values() for d in places}


def _spot(piece: Piece) -> _Spot:
    """What a dim is made of that a rule names: read once for each piece of a rule."""
    known = vars(piece)
    if "_spot" not in known:
        known["_spot"] = _read_spot(piece)
    return known["_spot"]


def _read_spot(piece: Piece) -> _Spot:
    dim = piece.what
    assert isinstance(dim, Dim)
    if len(dim.terms) > 1:
        raise RuleError(f"a rule multiplies factors and adds none: {dim}")
    names = tuple(leaf.name for leaf in dim.leaves if leaf.name and leaf.name != VOID)
    return _Spot(names, piece.whole, dim if dim.terms else None)


def _seen(spot: _Spot, n: int, largest: Mapping[str, int], sizes: _Sizes) -> tuple[str, ...]:
    """The factors of a dim of `n` elements, and note their sizes."""
    if not spot.factors:
        return ()
    if len(spot.factors) == 1:
        (factor,) = spot.factors
        if n == 1 and largest.get(factor, 1) != 1:  # broadcast
            return ()
        sizes.see(factor, n)
        return (factor,)
    unknown = [f for f in spot.factors if f not in sizes.found]
    known = math.prod(sizes.found[f] for f in spot.factors if f in sizes.found)
    if len(unknown) > 1 or not known or n % known:
        return ()
    for factor in unknown:
        sizes.see(factor, n // known)
    if math.prod(sizes.found[f] for f in spot.factors) != n:
        sizes.unlike.update(spot.factors)
    return spot.factors


def _pending(rule: Rule, factor: str, i: int, dims: Dims, spots: _Spots) -> str:
    if any(factor in dim for dim in dims):
        return ""
    for op, text in rule.outputs[min(i, len(rule.outputs) - 1)].pending:
        if text == factor or (text.startswith("{") and factor in spots.factors_of(text.strip("{}"))):
            return op
    return "sum" if factor[0] not in "{." else "?"


def lines(bound: Bound) -> Iterator[str]:
    """The factor table, for people: tensor by factor."""
    for kind, tensors in (("in", bound.inputs), ("out", bound.outputs)):
        for i, dims in enumerate(tensors):
            shown = (
                "absent" if dims is None else " ".join("(" + " ".join(d) + ")" if len(d) != 1 else d[0] for d in dims)
            )
            yield f"{kind} {i}: {shown}"
