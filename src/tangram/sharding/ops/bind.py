"""A rule and a call together: the factors that each dim of each tensor is made of, with their sizes.

    mm : m k, k n -> m n    of f32[4, 6], f32[6, 5]    ->    m=4, k=6, n=5; [m][k], [k][n] -> [m][n]

A dim of one element that another tensor has more of is broadcast: it has no factors, but where the note `equal` says
that nothing is broadcast (`gather` takes fewer indices than elements). A factor that tensors have in
different sizes can be no cut of both, and counts as whole. What bears ' is a factor of the result, with its size there:
the input's dim is cut in the same way, and has another size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from tangram.layout.rule import Rule
from tangram.layout.syntax import Dim
from tangram.sharding.ops.calls import OpCall, count_returns, schema_of
from tangram.sharding.ops.dim_positions import (
    ALL,
    KEPT,
    Beyond,
    DimPosition,
    MisfitError,
    RuleError,
    Spots,
    beyond,
    operands,
)
from tangram.sharding.ops.windows import SlidingWindow, window_of

__all__ = ["ALL", "KEPT", "BoundOp", "Dims", "RuleError", "bind", "lines"]

Dims = tuple[tuple[str, ...], ...]
"""For each dim its factors, major first; a dim without any is whole."""


@dataclass(frozen=True)
class BoundOp:
    """What can be cut in one call."""

    rule: Rule
    inputs: tuple[Dims | None, ...]
    """None: that tensor is absent."""
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    uncut: frozenset[str]
    """Factors that may not be cut."""
    pending: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Of a factor that an output lacks: for each output what is pending when it is cut, or nothing."""
    windows: Mapping[str, SlidingWindow] = field(default_factory=dict[str, SlidingWindow])
    """Of a factor of which a part reads what other parts hold: how."""
    scans: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of a factor of which a part's result counts those of the parts before: by which reduction."""

    @property
    def linked(self) -> frozenset[str]:
        """The factors whose parts need something of each other: they run together, or not at all."""
        return self._linked if self.windows or self.scans else frozenset()

    @cached_property
    def _linked(self) -> frozenset[str]:
        return frozenset((*self.windows, *self.scans))

    @property
    def cuttable(self) -> list[str]:
        """The factors that can be cut, in the order in which they come in the tensors."""
        found = dict.fromkeys(f for dims in (*self.inputs, *self.outputs) for dim in dims or () for f in dim)
        return [f for f in found if f not in self.uncut and self.sizes[f] > 1]

    def waiting(self, call: OpCall) -> list[tuple[int, ...]]:
        """The sets of inputs on which a pending sum may wait together: `linear`, `linear(0 1)`, `each(0 1)`."""
        found: list[tuple[int, ...]] = []
        for name, args in self.rule.notes:
            if name == "linear":
                found.append(tuple(map(int, args)) or tuple([i for i, t in enumerate(call.tensors) if t is not None]))
            elif name == "each":
                found += [(int(a),) for a in args]
        return [places for places in found if all(call.tensors[i] is not None for i in places)]

    def after(self, factor: str, output: int) -> str:
        """What becomes of an output when a factor is cut: `cut`, or what is pending then."""
        if any(factor in dim for dim in self.outputs[output]):
            return "cut"
        return self.pending[factor][output]


@dataclass
class _Sizes:
    """Sizes of factors as they are found; those that disagree."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    unlike: set[str] = field(default_factory=set[str])

    def see(self, factor: str, size: int) -> None:
        if self.sizes.setdefault(factor, size) != size:
            self.unlike.add(factor)


def bind(rule: Rule, call: OpCall) -> BoundOp:
    """The factors of a call's tensors. Raises RuleError where the rule does not fit the operator."""
    try:
        return _bind(rule, call)
    except MisfitError:
        if any(t is not None and not (t.numel() and t.ndim) for t in call.tensors):  # of nothing, or a scalar for one
            return _uncut(rule, call)
        raise


def _uncut(rule: Rule, call: OpCall) -> BoundOp:
    inputs = [None if t is None else tuple(() for _ in t.shape) for t in call.tensors]
    return BoundOp(rule, tuple(inputs), tuple(() for _ in schema_of(call.operator).returns), {}, frozenset())


def _bind(rule: Rule, call: OpCall) -> BoundOp:
    given = call.tensors
    pattern = _pattern(rule, call)
    sizes = _Sizes()
    for argument in pattern.counted:  # a factor may be called as an argument that says its size
        value = call.arguments[argument]
        if isinstance(value, int) and not isinstance(value, bool):
            sizes.see(argument, value)
    shapes = [None if t is None else t.shape for t in given]
    if pattern.plain:
        return _of_plain(rule, call, pattern, shapes, sizes)
    largest: dict[str, int] = {}
    equal = rule.note("equal") is not None
    for dims, shape in zip(pattern.inputs, shapes, strict=True):
        for spot, n in zip(dims or (), shape or (), strict=True):
            if len(spot.factors) == 1 and not equal and not spot.beyond:
                largest[spot.factors[0]] = n if n != 1 else largest.get(spot.factors[0], 1)
    windows = {one.factor: window_of(rule, call.arguments, *one[1:4], shapes, one.extents) for one in pattern.beyond}
    for factor, window in windows.items():
        sizes.see(factor, window.m)
    inputs: list[Dims | None] = []
    for dims, shape in zip(pattern.inputs, shapes, strict=True):
        if dims is None or shape is None:
            inputs.append(None)
        else:
            inputs.append(tuple([_seen(spot, n, largest, sizes) for spot, n in zip(dims, shape, strict=True)]))
    alone = _alone(call, pattern, windows) if windows or pattern.scans else ()
    return _bound(rule, call, pattern, inputs, sizes, windows, alone)


def _of_plain(
    rule: Rule, call: OpCall, pattern: _Pattern, shapes: Sequence[Sequence[int] | None], sizes: _Sizes
) -> BoundOp:
    """As `_bind` goes on, where every dim is one factor at most, which is the usual case: only faster."""
    largest: dict[str, int] = {}
    if rule.note("equal") is None:
        for dims, shape in zip(pattern.inputs, shapes, strict=True):
            if dims is not None and shape is not None:
                for (factors, _, _, _), n in zip(dims, shape, strict=True):
                    if factors and (n != 1 or factors[0] not in largest):
                        largest[factors[0]] = n
    found, unlike = sizes.sizes, sizes.unlike
    inputs: list[Dims | None] = []
    for dims, shape in zip(pattern.inputs, shapes, strict=True):
        if dims is None or shape is None:
            inputs.append(None)
            continue
        own: list[tuple[str, ...]] = []
        for (factors, _, _, _), n in zip(dims, shape, strict=True):
            if factors:
                factor = factors[0]
                if n == 1 and largest.get(factor, 1) != 1:  # broadcast
                    factors = ()
                elif found.setdefault(factor, n) != n:
                    unlike.add(factor)
            own.append(factors)
        inputs.append(tuple(own))
    return _bound(rule, call, pattern, inputs, sizes, {}, _alone(call, pattern, {}) if pattern.scans else ())


def _bound(
    rule: Rule,
    call: OpCall,
    pattern: _Pattern,
    inputs: Sequence[Dims | None],
    sizes: _Sizes,
    windows: Mapping[str, SlidingWindow],
    alone: Collection[str],
) -> BoundOp:
    """What can be cut, with the sizes that were found."""
    outputs, found = pattern.outputs, sizes.sizes
    if not found.keys() >= pattern.made:
        lost = sorted(f for f in pattern.made - found.keys() if f[0] not in "{.")
        if lost:
            raise MisfitError(f"the rule of {call.name} has {lost[0]} in a result and in no tensor given: {call}")
        outputs = tuple(tuple(tuple(f for f in factors if f in found) for factors in dims) for dims in outputs)
    whole = pattern.uncut | sizes.unlike if sizes.unlike else pattern.uncut
    pending = pattern.pending
    if outputs is not pattern.outputs or pending.keys() != found.keys():
        pending = {f: pending[f] for f in found}
        whole = whole.difference(f for f in pattern.unsaid if f not in found)
    return BoundOp(
        rule, tuple(inputs), outputs, found, whole.union(alone) if alone else whole, pending, windows, pattern.scans
    )


def _alone(call: OpCall, pattern: _Pattern, windows: Mapping[str, SlidingWindow]) -> set[str]:
    """Factors whose parts need each other, and cannot have it."""
    found = {f for f, window in windows.items() if not window.n or window.uncut}
    if any(t is not None and t.is_complex() for t in call.tensors):  # how often a logarithm turns depends on the order
        found |= {f for f, op in pattern.scans.items() if op == "logsumexp"}
    return found


@dataclass(frozen=True)
class _Pattern:
    """What a rule says of tensors of so many dims each, whatever their sizes."""

    inputs: tuple[tuple[DimPosition, ...] | None, ...]
    outputs: tuple[Dims, ...]
    made: frozenset[str]
    """The factors of the outputs."""
    counted: tuple[str, ...]
    """Arguments that factors are called as."""
    uncut: frozenset[str]
    unsaid: frozenset[str]
    """Factors that are whole because no output says anything of them."""
    pending: Mapping[str, tuple[str, ...]]
    beyond: tuple[Beyond, ...]
    scans: Mapping[str, str]
    plain: bool
    """Whether every dim of an input is one factor at most, which is read by no windows."""


_KEPT_PATTERNS = 256


def _pattern(rule: Rule, call: OpCall) -> _Pattern:
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


def _new_pattern(rule: Rule, call: OpCall) -> _Pattern:
    given = call.tensors
    patterns = operands(rule.inputs, len(given))
    spots = Spots(rule, call, patterns)
    dims = [None if t is None else tuple(spots.dims(op, t.ndim)) for op, t in zip(patterns, given, strict=True)]
    inputs, windowed = beyond(rule, dims)
    outputs = [spots.dims(op, None) for op in operands(rule.outputs, max(count_returns(call.operator), 1))]
    every: dict[str, None] = {}
    whole = {*(rule.note("whole") or ())}
    for dims in (*inputs, *outputs):
        for spot in dims or ():
            for f in spot.factors:
                every[f] = None
                if spot.uncut or f.isdecimal():
                    whole.add(f)
    made = tuple([tuple([spot.factors for spot in dims]) for dims in outputs])
    counted = () if _named(rule).isdisjoint(call.arguments) else tuple([a for a in call.arguments if a in _named(rule)])
    own = [frozenset([f for dim in dims for f in dim]) for dims in made]
    none = ("",) * len(made)
    pending: dict[str, tuple[str, ...]] = {}
    unsaid: set[str] = set()
    for factor in (*every, *counted):
        if all([factor in some for some in own]):  # noqa: C419  (a list is faster)
            pending[factor] = none
            continue
        after = tuple(["" if factor in some else _pending(rule, factor, i, spots) for i, some in enumerate(own)])
        pending[factor] = after
        if "?" in after and factor not in whole:
            unsaid.add(factor)
    scans = {f: args[1] for name, args in rule.notes if name == "scan" for f in spots.named(args[0])}
    left, factors = frozenset(unsaid), frozenset[str]().union(*own)
    plain = all([len(spot.factors) < 2 and not spot.beyond for dims in inputs for spot in dims or ()])  # noqa: C419
    return _Pattern(tuple(inputs), made, factors, counted, left.union(whole), left, pending, windowed, scans, plain)


def _named(rule: Rule) -> frozenset[str]:
    """The names of all factors of a rule."""
    known = vars(rule)
    if "_named" not in known:
        pieces = [piece.what for operand in (*rule.inputs, *rule.outputs) for piece in operand.pieces]
        known["_named"] = frozenset(leaf.name for what in pieces if isinstance(what, Dim) for leaf in what.leaves)
    return known["_named"]


def _seen(spot: DimPosition, n: int, largest: Mapping[str, int], sizes: _Sizes) -> tuple[str, ...]:
    """The factors of a dim of `n` elements, and note their sizes."""
    if not spot.factors:
        return ()
    if spot.beyond:  # its size is that of the result
        return spot.factors
    if len(spot.factors) == 1:
        (factor,) = spot.factors
        if n == 1 and largest.get(factor, 1) != 1:  # broadcast
            return ()
        sizes.see(factor, n)
        return (factor,)
    for factor in spot.factors:  # as other tensors have it by itself, or as a number is written
        if factor.isdecimal():
            sizes.see(factor, int(factor))
        elif factor in largest:
            sizes.see(factor, largest[factor])
    unknown = [f for f in spot.factors if f not in sizes.sizes]
    known = math.prod(sizes.sizes[f] for f in spot.factors if f in sizes.sizes)
    if len(unknown) > 1 or not known or n % known:
        return ()
    for factor in unknown:
        sizes.see(factor, n // known)
    if math.prod(sizes.sizes[f] for f in spot.factors) != n:
        sizes.unlike.update(spot.factors)
    return spot.factors


def _pending(rule: Rule, factor: str, i: int, spots: Spots) -> str:
    """What is pending on a result that lacks a factor when it is cut; `?` where the rule does not say."""
    for op, text in rule.outputs[min(i, len(rule.outputs) - 1)].pending:
        if text == factor or (text.startswith("{") and factor in spots.factors_of(text.strip("{}"))):
            return op
    same = rule.note("same")  # from this result on, every rank has the same
    if same is not None and i >= int(same[0]):
        return ""
    return "sum" if factor[0] not in "{." else "?"


def lines(bound: BoundOp) -> Iterator[str]:
    """The factor table, for people: tensor by factor."""
    for kind, tensors in (("in", bound.inputs), ("out", bound.outputs)):
        for i, dims in enumerate(tensors):
            shown = (
                "absent" if dims is None else " ".join("(" + " ".join(d) + ")" if len(d) != 1 else d[0] for d in dims)
            )
            yield f"{kind} {i}: {shown}"
