"""Which call a rank has to make next, and what it means when it makes another one.

A step of a plan calls the same collectives every time. The sequence is taken from the rank's own first steps: as soon
as two of them after the first are equal (the first may do more: checks, buffers) it is the sequence, and every later
call is held against it when it is made. What the ranks of a group have learned is compared between them by who reads
the trace (`blame`), so that a rank that errs from its first step on is seen, too.

    the call that is due comes                  nothing
    of the same kind and group, another size    mis-sized
    a later one of the few that follow          those between were skipped, until one comes after all: reordered
    none of these                               extra

Where two steps are equal but for some sizes, as with rows that are as long as each step needs, these sizes are not
expected until two are equal in them, too: what is skipped, extra or reordered is seen all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tangram.tracing.files.format import OPS
from tangram.tracing.sites import Carrier, Site, call_words, caller, size_words

AHEAD = 32
"""Calls that are looked through for the one that came instead."""
KEPT = 8
"""Sequences that are known beside the usual one."""
CALLERS = 3
"""Between who calls a collective and `Cursor.due`: the process group, and the recorder."""
AT_MOST = 4
"""Deviations of a step that are told of: one mistake makes others."""


class Key(NamedTuple):
    """What two calls have in common that are the same call of two steps."""

    group: int
    op: int
    nbytes: int
    """-1: depends on the data."""
    dtype: torch.dtype | None
    peer: int
    """Of what goes to or comes from one rank; -1: all."""


_NONE = Key(-1, -1, -1, None, -1)
"""Of no call."""


@dataclass(frozen=True)
class Expected:
    """A call that is due at some place of a step."""

    key: Key
    site: Site
    number: int
    """Of the site in the trace."""
    carrier: Carrier | None


@dataclass(frozen=True)
class Deviation:
    """A call that was not the one that was due."""

    kind: str
    """skipped, extra, reordered, mis-sized or misplaced."""
    step: int
    group: int
    text: str
    site: Site
    learned: bool = False
    """Whether what was due had been learned of earlier steps, and is not what the plan says."""


@dataclass
class Cursor:
    """The place of a rank in the sequence of calls of one kind of phase."""

    strict: bool
    """Whether a call that is not due is a deviation; else it is only looked up anew."""
    expected: list[Expected] | None = None
    learned: list[Expected] = field(default_factory=list[Expected])
    before: list[Expected] | None = None
    at: int = 0
    passed: list[int] = field(default_factory=list[int])
    """Places that were skipped in this step."""
    deviations: int = 0
    strayed: bool = False
    others: list[list[Expected]] = field(default_factory=list[list[Expected]])
    """Sequences of steps that deviated and came to their end, told of once: some steps do more than others."""
    alike: list[bool] = field(default_factory=list[bool])
    """Of each expected call: whether only the place in the code tells it from the next one."""
    varied: bool = False
    """Whether steps have sizes of their own by nature."""
    loose: bool = False
    """Whether of some expected calls no size is."""
    quick: Sequence[tuple[Key, int]] = ()
    """Of each expected call its key and number, where that is all that is asked of it: in a step that has gone right so
    far, of known sizes."""

    def due(self, key: tuple[object, ...], above: int = CALLERS) -> Expected | None:
        """The expected call, where it is this one; moves on. `key`: the fields of a `Key`.

        `above`: how many calls above this one it was made, which is looked at where only its place tells calls apart.
        """
        expected, at = self.expected, self.at
        if expected is None or at >= len(expected):
            return None
        one = expected[at]
        if one.key != key and not _fits(one.key, key):
            return None
        if self.alike[at] and one.carrier is not None and not one.carrier.same(caller(above)):
            return None
        self.at = at + 1
        if self.loose:
            self.learned.append(one if one.key == key else replace(one, key=Key._make(key)))
        elif self.strayed or not self.strict:
            self.learned.append(one)
        return one

    def came(self, one: Expected) -> bool:
        """Take in a call that was not found to be due; whether it deviates."""
        expected = self.expected
        if expected is None or not self.strict:
            self.learned.append(one)
            return False
        due = expected[self.at] if self.at < len(expected) else None
        if due is not None and _fits(due.key, one.key) and self.later(one, elsewhere=False) is None:
            self.at += 1  # another module object, and nothing that says which
            if self.loose:
                self.learned.append(one)
            return False
        if not self.strayed and self._switch(one):
            return False
        if not self.strayed:
            self.learned = self.learned if self.loose else expected[: self.at]
            self.strayed, self.quick = True, ()
        self.learned.append(one)
        return True

    def later(self, came: Expected, *, elsewhere: bool = True) -> int | None:
        """Which of the few calls behind the one that is due has come: of that place or, at last, of another line."""
        expected = self.expected or []
        near = range(self.at + 1, min(len(expected), self.at + 1 + AHEAD))
        alike = [i for i in near if _same(expected[i], came)]
        here = (i for i in alike if _place(expected[i]) == _place(came))
        return next(here, alike[0] if alike and elsewhere else None)

    def _switch(self, one: Expected) -> bool:
        """Go on by another known sequence, where this call is its next; whether there is one."""
        for other in self.others:
            if self.at < len(other) and _same(other[self.at], one) and _alike(other[: self.at], self._done()):
                self.expect(other, loose=self.loose)
                self.at += 1
                if self.loose:
                    self.learned.append(one)
                return True
        return False

    def conformed(self) -> list[Expected] | None:
        """The calls of a step that is over with their sizes, where they were those expected without sizes."""
        return self.learned if self.expected and self.loose and not self.strayed and self.ends() else None

    def ends(self) -> bool:
        expected = self.expected
        return expected is None or self.at >= len(expected) or any(_alike(o, self._done()) for o in self.others)

    def _done(self) -> list[Expected]:
        return (self.expected or [])[: self.at]

    def expect(self, sequence: list[Expected], *, loose: bool = False) -> None:
        """From now on these calls are due in a step."""
        self.expected, self.loose = sequence, loose
        pairs = zip(sequence, [*sequence[1:], None], strict=True)
        self.alike = [b is not None and _fits(a.key, b.key) and _place(a) != _place(b) for a, b in pairs]
        self._quicken()

    def _quicken(self) -> None:
        sure = self.strict and not self.loose and not self.strayed
        by_place = zip(self.alike, self.expected or (), strict=True)
        self.quick = [(_NONE if alike else one.key, one.number) for alike, one in by_place] if sure else ()

    def begin(self) -> None:
        """A step begins: what the last one was like decides what is expected of this one."""
        if self.strayed and self.expected is not None:
            self.others = [self.expected, *self.others, self.learned][-KEPT:]
        if self.expected is None or self.strayed or self.loose:
            self._learn()
        elif self.before is not None:
            self.before = None
        self.learned, self.at, self.deviations = [], 0, 0
        self.passed.clear()
        if self.strayed:
            self.strayed = False
            self._quicken()

    def _learn(self) -> None:
        """Of the step that is over and the one before it."""
        before, self.before, learned = self.before or [], self.learned, self.learned
        alike = bool(learned) and _alike(before, learned)
        if self.loose and not self.strayed:
            # Two steps of equal sizes, or of rows of other lengths, say which of them count.
            if self.varied and not alike and (common := _in_common(before, learned)):
                self.expect(common, loose=True)
            elif alike and not self.varied:
                self.expect(learned)
        elif alike and not self.varied:
            self.expect(learned)
        elif common := _in_common((self.loose and self.expected) or [], learned) or _in_common(before, learned):
            self.expect(common, loose=True)


def _alike(some: list[Expected], others: list[Expected]) -> bool:
    """But for sizes that are not expected of `some`."""
    return len(some) == len(others) and all(_fits(a.key, b.key) for a, b in zip(some, others, strict=True))


def _in_common(some: list[Expected], others: list[Expected]) -> list[Expected]:
    """Those calls without the sizes that differ, or without all where none does; nothing where they differ in more."""
    if len(some) != len(others) or not all(_but_for_size(a.key, b.key) for a, b in zip(some, others, strict=True)):
        return []
    equal = _alike(some, others)
    pairs = zip(some, others, strict=True)
    return [b if a.key == b.key and not equal else replace(b, key=b.key._replace(nbytes=-1)) for a, b in pairs]


def _fits(due: Key, key: tuple[object, ...]) -> bool:
    return due == key or (due.nbytes < 0 and _but_for_size(due, key))


def _but_for_size(one: Key, other: tuple[object, ...]) -> bool:
    return one[:2] == other[:2] and one[3:] == other[3:]


def _same(one: Expected, came: Expected) -> bool:
    known = one.site.layer and came.site.layer and one.carrier is not None and came.carrier is not None
    return _fits(one.key, came.key) and (not known or one.site.layer == came.site.layer)


def _place(one: Expected) -> str:
    """What tells calls of a kind apart: the module, else the line."""
    return one.site.layer or one.site.line


def deviation(cursor: Cursor, came: Expected, step: int, groups: list[str]) -> Deviation | None:
    """What it means that `came` was called where another was due; puts the cursor behind it.

    None where enough has been told of this step.
    """
    expected = cursor.expected or []
    due = expected[cursor.at] if cursor.at < len(expected) else None
    passed = next((i for i in cursor.passed if _same(expected[i], came)), None)
    later = None if due is None else cursor.later(came)
    kind, site, call = "extra", came.site, expected_words(came, groups)
    text = f"called {call} in step {step}, which is not due" + (
        f": due is {expected_words(due, groups)}" if due else ""
    )
    if passed is not None:
        cursor.passed.remove(passed)
        kind, site = "reordered", expected[passed].site
        text = f"called {expected_words(expected[passed], groups)} in step {step} after calls that follow it"
    elif due is not None and later is not None:
        kind, site = "skipped", due.site
        text = f"skipped {_left(expected, cursor.at, later, groups)} in step {step} and called {call}"
        cursor.passed += range(cursor.at, later)
        cursor.at = later + 1
    elif due is not None and due.key[:2] == came.key[:2] and due.key.peer == came.key.peer:
        kind, site = "mis-sized", due.site
        sizes = [size_words(one.key.nbytes, one.key.dtype) for one in (came, due)]
        text = f"called {expected_words(due, groups)} in step {step} with {sizes[0]} instead of {sizes[1]}"
        cursor.at += 1
    cursor.deviations += 1
    if cursor.deviations > AT_MOST:
        return None
    group = came.key.group if kind == "extra" or due is None else due.key.group
    return Deviation(kind, step, group, text, site, learned=True)


def left_out(cursor: Cursor, step: int, groups: list[str]) -> Deviation | None:
    """At the end of a step: the calls that were due and have not come."""
    expected = cursor.expected
    if expected is None or not cursor.strict or cursor.ends():
        return None
    if not cursor.strayed:
        cursor.learned, cursor.strayed = cursor.learned if cursor.loose else expected[: cursor.at], True
    due, text = expected[cursor.at], _left(expected, cursor.at, len(expected), groups)
    return Deviation("skipped", step, due.key.group, f"ended step {step} without {text}", due.site, learned=True)


def _left(expected: list[Expected], start: int, stop: int, groups: list[str]) -> str:
    more = stop - start - 1
    return _one_of(expected, start, groups) + (f" and {more} more" if more else "")


def _one_of(expected: list[Expected], at: int, groups: list[str]) -> str:
    """The call that is due, and which others it cannot be told from: equal ones just before it that differ in place."""
    first = at
    while first and expected[first - 1].key == expected[at].key:
        first -= 1
    others = {expected[i].site for i in range(first, at)} - {expected[at].site}
    some = expected[first : at + 1]
    known = all(one.carrier is not None for one in some)
    known = known and (all(one.site.layer for one in some) or len({_place(one) for one in some}) == len(some))
    more = f" or one of the {len(others)} equal calls before it" if others and not known else ""
    return expected_words(expected[at], groups) + more


def expected_words(one: Expected, groups: list[str]) -> str:
    return call_words(OPS[one.key.op], groups[one.key.group], one.site)
