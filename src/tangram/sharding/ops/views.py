"""Views and reshapes: their factors follow from the strides of what they give.

The operator is run on a tensor without memory whose elements lie densely. The strides of the result then say which of
the input's elements each of its dims runs over. All strides together cut the input's elements into a chain of factors:
a dim of either side is a product of those between its own stride and its end. What does not divide, what is used twice
or not at all (`diagonal`, `unfold`, the dim of a `slice`) is whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tangram.layout.rule import Rule
from tangram.layout.syntax import Note, Operand
from tangram.sharding.ops.bind import BoundOp, Dims
from tangram.sharding.ops.calls import OpCall, is_view, name_of

LIKE_VIEWS = {
    "_unsafe_view": "view",
    "unsafe_split.Tensor": "split.Tensor",
    "unsafe_split_with_sizes": "split_with_sizes",
    "transpose_": "transpose.int",
    "swapaxes_": "transpose.int",
}
"""Operators that are views but for what their schema says; so are each `..._copy` of a view and each `..._`."""
NO_FACTORS = frozenset({"as_strided", "_reshape_alias", "view.dtype", "view_as_real", "view_as_complex", "resize_"})
"""Whose arguments are strides, or whose elements are of another size."""
SIZES = ("size", "shape")
Segment = tuple[int, int]


def view_of(operator: OpOverload) -> OpOverload | None:
    """The view that an operator is, or copies: `permute` of `permute_copy`. None where it is none."""
    name = name_of(operator)
    packet, _, overload = name.partition(".")
    if packet in NO_FACTORS or name in NO_FACTORS:
        return None
    if is_view(operator):
        return operator
    packet, _, overload = LIKE_VIEWS.get(name, f"{packet.removesuffix('_copy').rstrip('_')}.{overload}").partition(".")
    other = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return other if other is not None and other is not operator and is_view(other) else None


def bind(call: OpCall, view: OpOverload) -> BoundOp:
    """The factors of a view of the first tensor of a call. Raises what the operator raises."""
    first = call.tensors[0]
    assert first is not None
    shape = tuple(first.shape)
    meta = torch.empty(shape, dtype=first.dtype, device="meta")
    results = OpCall(view, call.with_tensors([meta, *call.tensors[1:]]).arguments).run()
    dense = meta.stride()
    outputs = [list(zip(r.stride(), r.shape, strict=True)) for r in results]
    segments, valid = _segments([*zip(dense, shape, strict=True)] if math.prod(shape) else [], outputs)
    inputs = [_inside(segments, stride, n) for stride, n in zip(dense, shape, strict=True)]
    used = [_used(segments, output) for output in outputs]
    kept = {
        seg
        for segs in inputs
        if segs and all(seg in valid and all(one.get(seg) == 1 for one in used) for seg in segs)
        for seg in segs
    }
    which, within = _halves(call, view, inputs, used, valid)
    kept |= {*which, *within}
    everywhere = [*inputs, *(_inside(segments, stride, n) for output in outputs for stride, n in output)]
    while torn := {seg for segs in everywhere if not kept.issuperset(segs) for seg in segs if seg in kept}:
        kept -= torn  # a dim is factors altogether or not at all
    named = any(isinstance(call.arguments.get(name), list | tuple) for name in SIZES)
    minor = {seg for segs in inputs for seg in segs[1:] if not named}  # as windows are to `unfold`
    fixed = frozenset(map(_name, minor.difference(within).union(which)))
    sizes = {_name(seg): seg[1] // seg[0] for seg in kept}
    shapes = tuple(map(str, results[0].shape)) if results else ()
    notes: list[Note] = [
        ("size", (name, *shapes)) for name in SIZES if isinstance(call.arguments.get(name), list | tuple)
    ]
    if not notes:
        notes.append(("filled", ()))
    notes.append(("linear", ("0",)))
    if within:
        notes.append(("product", ("split_size", *map(_name, within))))
    if "squeeze" in call.name and "un" not in call.name and math.prod(shape):  # of nothing, nothing is cut
        notes.append(("shape", ()))
    rule = Rule((call.name,), (Operand(()),), (Operand(()),), tuple(notes))
    made: list[Dims | None] = [_dims(inputs, kept), *(None for _ in call.tensors[1:])]
    outs = [_dims([_inside(segments, stride, n) for stride, n in output], kept) for output in outputs]
    return BoundOp(rule, tuple(made), tuple(outs), sizes, fixed, {f: ("",) * len(outs) for f in sizes})


def _halves(
    call: OpCall,
    view: OpOverload,
    inputs: Sequence[tuple[Segment, ...]],
    used: Sequence[Mapping[Segment, int]],
    valid: Collection[Segment],
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Of a dim that is split in pieces of one size: which piece, and what is in it, which may be cut in all alike."""
    if name_of(view) != "split.Tensor":
        return (), ()
    segs = inputs[call.dims("dim", len(inputs))[0]]
    which = tuple(seg for seg in segs if not any(seg in one for one in used))
    within = segs[len(which) :]
    alike = all(seg in valid and all(one.get(seg) == 1 for one in used) for seg in within)
    return (which, within) if which and within and alike and segs[: len(which)] == which else ((), ())


def _segments(dense: Sequence[tuple[int, int]], outputs: Sequence[Any]) -> tuple[list[Segment], set[Segment]]:
    """The stretches between all strides and ends, and those that divide."""
    strides = itertools.chain(dense, *(outputs if dense else ()))
    points = {p for stride, n in strides if stride and n > 1 for p in (stride, stride * n)}
    ordered = sorted(points)
    segments = list(itertools.pairwise(ordered))
    return segments, {(a, b) for a, b in segments if b % a == 0}


def _inside(segments: Sequence[Segment], stride: int, n: int) -> tuple[Segment, ...]:
    """Those that a dim is made of, major first."""
    if n == 1 or not stride:
        return ()
    return tuple(seg for seg in reversed(segments) if stride <= seg[0] and seg[1] <= stride * n)


def _used(segments: Sequence[Segment], output: Sequence[tuple[int, int]]) -> dict[Segment, int]:
    found: dict[Segment, int] = {}
    for stride, n in output:
        for seg in _inside(segments, stride, n):
            found[seg] = found.get(seg, 0) + 1
    return found


def _dims(listed: Sequence[tuple[Segment, ...]], kept: set[Segment]) -> Dims:
    return tuple(tuple(map(_name, segs)) if segs and all(s in kept for s in segs) else () for segs in listed)


def _name(segment: Segment) -> str:
    return f"v{segment[0]}"
