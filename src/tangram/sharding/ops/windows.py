"""Windows: which elements of an input's dim an element of the result's is made of, as arithmetic on one dim.

    window(1 stride padding dilation)       element o reads o * stride - padding + j * dilation, j below the extent
    spread(1 stride padding dilation ..)    element i is spread over i * stride - padding + j * dilation: transposed
    pad(pad)                                element o reads o less what is put before
    times(output_size scales)               element o reads o / times, if that is a whole number; else the dim is whole

The first argument of a note is the extent: an argument of the operator, or an input whose whole dims have it. The
others are arguments, one number for each such dim, or a number. What a window reads outside of the tensor is padding.
`window` may have a fifth, whether the result has a last window that is not full; `spread` may have a fifth, by how much
the result is longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tangram.layout.intervals import IntSet, span
from tangram.layout.rule import Rule

KINDS = ("window", "spread", "pad", "times")
"""The notes that say how what bears ' is read."""


@dataclass(frozen=True)
class SlidingWindow:
    """How the elements of one dim of a result read those of one dim of an input."""

    place: int
    """The input."""
    dim: int
    entry: int
    """Which number it has in arguments that have one for each dim."""
    n: int
    """Elements of the input's dim."""
    extent: int = 1
    stride: int = 1
    before: int = 0
    """Elements of padding in front."""
    dilation: int = 1
    behind: int = 0
    """Elements of padding behind; of `spread`, less what the result is longer by."""
    spread: bool = False
    ceil: bool = False
    uncut: bool = False
    """What reads what is not said by these numbers."""

    @property
    def reach(self) -> int:
        """From the first element of a window to its last."""
        return self.dilation * (self.extent - 1)

    @property
    def m(self) -> int:
        """Elements of the result's dim, as torch counts them."""
        if self.spread:
            return max(0, (self.n - 1) * self.stride - self.before - self.behind + self.reach + 1)
        room = self.n + self.before + self.behind - self.reach - 1
        count = (room + (self.stride - 1 if self.ceil else 0)) // self.stride + 1
        if self.ceil and (count - 1) * self.stride >= self.n + self.before:  # none begins behind all elements
            count -= 1
        return max(0, count)

    def hull(self, lo: int, hi: int) -> tuple[int, int]:
        """From the first to behind the last that elements `lo` to `hi` read; it may stick out of the tensor."""
        if self.spread:
            return -((self.reach - lo - self.before) // self.stride), (hi - 1 + self.before) // self.stride + 1
        return lo * self.stride - self.before, (hi - 1) * self.stride - self.before + self.reach + 1

    def run_on(self, lo: int, hi: int) -> tuple[int, int]:
        """What the operator is run on to give at least the elements `lo` to `hi`: the hull, with zeros around it."""
        start, stop = self.hull(lo, hi)
        if self.spread:
            start = min(start, (lo + self.before) // self.stride)
            stop = max(stop, -((self.reach + 1 - hi - self.before) // self.stride) + 1)
        return start, stop

    def first(self, start: int) -> int:
        """The first element of what the operator gives that is run on elements from `start` on."""
        return start * self.stride - self.before if self.spread else (start + self.before) // self.stride

    def reads(self, elements: IntSet) -> IntSet:
        """The elements of the tensor that one stretch of the result reads."""
        if not elements:
            return ()
        start, stop = self.hull(elements[0][0], elements[-1][1])
        return span(max(0, start), min(self.n, stop))

    def covered(self, o: int, *, padding: bool) -> int:
        """How many elements a window has that are not behind the padding; without `padding`, that are in the tensor."""
        start = o * self.stride - self.before
        stop = min(start + self.extent, self.n + self.behind)
        return stop - start if padding else min(stop, self.n) - max(start, 0)


def kind_of(rule: Rule) -> tuple[str, tuple[str, ...]]:
    """The note that says how a rule's windows read, and its arguments. Raises KeyError where there is none."""
    return next(note for note in rule.notes if note[0] in KINDS)


def entry_of(value: Any, entry: int) -> int:
    """The number of one dim in an argument: one for all, or one for each."""
    if isinstance(value, list | tuple):
        listed = cast("Sequence[int]", value)
        return int(listed[entry if len(listed) > 1 else 0])
    return int(value)


def window_of(
    rule: Rule, arguments: Mapping[str, Any], place: int, dim: int, entry: int, shapes: Sequence[Sequence[int] | None],
    extents: Mapping[int, int],
) -> SlidingWindow:  # fmt: skip
    """The window of one dim in a call. `extents`: of each input, its dim that has the extent."""
    kind, args = kind_of(rule)
    shape = shapes[place]
    assert shape is not None
    n = shape[dim]
    if kind == "pad":
        pad = cast("Sequence[int]", arguments[args[0]])
        at = 2 * (len(shape) - 1 - dim)
        before, behind = (pad[at], pad[at + 1]) if at < len(pad) else (0, 0)
        return SlidingWindow(place, dim, entry, n, before=before, behind=behind)
    if kind == "times":
        return _repeated(SlidingWindow(place, dim, entry, n), arguments, args)
    if args[0].isdigit():
        source = shapes[int(args[0])]
        assert source is not None
        extent = source[extents[int(args[0])]]
    else:
        extent = entry_of(arguments[args[0]], entry)

    def number(i: int, otherwise: int) -> int:
        if len(args) <= i:
            return otherwise
        if args[i].isdigit():
            return int(args[i])
        value = arguments[args[i]]
        return otherwise if value == [] else entry_of(value, entry)  # of pools, no stride is that of their windows

    stride, padding, dilation = number(1, extent), number(2, 0), number(3, 1)
    last = number(4, 0)
    if kind == "spread":
        return SlidingWindow(place, dim, entry, n, extent, stride, padding, dilation, padding - last, spread=True)
    return SlidingWindow(place, dim, entry, n, extent, stride, padding, dilation, padding, ceil=bool(last))


def _repeated(window: SlidingWindow, arguments: Mapping[str, Any], args: Sequence[str]) -> SlidingWindow:
    made, n = entry_of(arguments[args[0]], window.entry), window.n
    scale = arguments[args[1 + window.entry]]
    if not n or made % n or scale not in (None, made // n):
        return replace(window, behind=made - n, uncut=True)
    return replace(window, extent=made // n, stride=made // n, spread=True)
