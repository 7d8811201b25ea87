"""What a rank tells its trace: collectives as they begin and end, steps, what it does, and what was not finite.

The time of a rank between the end of one collective and its wait for the next is its own, whatever the clocks of others
say: who has more of it than its peers is slow, who has less waits for them.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import resource
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import cast

import torch
from torch import Tensor, nn

from tangram.tracing.conformance import Cursor, Deviation, Expected, Key, deviation, left_out
from tangram.tracing.files.format import (
    AXES_AT_MOST,
    CHECKED,
    COUNTED,
    DEVIATED,
    DEVIATIONS_AT,
    ENDED_AT,
    EVENT,
    EVENTS,
    GRADIENT_NOT_FINITE,
    HEADER_BYTES,
    LOSS_NOT_FINITE,
    OPS,
    PHASE_AT,
    STEP_AT,
    WAITING_AT,
    End,
    Kind,
    Phase,
)
from tangram.tracing.files.heart import BEAT_SECONDS, Heart
from tangram.tracing.files.ring import Pending, Processor, TraceFiles
from tangram.tracing.planned import PlanCheck, PlannedCalls, ProgramCheck, planned_words
from tangram.tracing.sites import PARAMETERS, caller, site_of
from tangram.tracing.spikes import Spikes, StepNumbers
from tangram.tracing.trace import Trace
from tangram.tracing.weights import WeightGroup, WeightWatch, looks_finite

SHOWN_STEPS = 4
"""Steps after the begin whose calls are all written down."""
MOST_NAMED = 16
"""Ranks of a group that are written one by one."""
LOOKED_AT = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.PIPELINE})
"""The phases in which numbers are looked at."""
UNSETTLED = 16
"""Steps after which, were no two of them alike, calls are put down to the last place that made the same."""
_LONG, _INT = struct.Struct("<Q").pack_into, struct.Struct("<I").pack_into
_EVENT = EVENT.pack_into
_now, _thread = time.monotonic_ns, threading.get_ident


class Recorder(Trace):
    """Writes the trace of one rank. Steps and phases come from one thread, which is the one that is timed."""

    def __init__(self, files: TraceFiles, mesh: Mapping[str, object], digest_steps: int = 0) -> None:
        """`mesh`: what is written of the run, for readers. `digest_steps`: weights are summed each so many."""
        self.files, self._digest_steps = files, digest_steps
        self._weights: WeightWatch | None = None
        self._spikes = Spikes(())
        self._memory = files.memory
        self._waiting = memoryview(files.memory)[WAITING_AT : WAITING_AT + 8].cast("Q")
        self._numbers = itertools.count(1)
        self._thread = _thread()
        self._groups: list[str] = []
        self._slots: list[int] = []
        self._turns: list[int] = []
        self._axes: dict[str, int] = {}
        self._sites: dict[object, int] = {}
        self._seen: dict[Key, int] = {}
        self._labels: dict[int, str] = {}
        self._checked, self._others = Cursor(strict=True), {p: Cursor(strict=False) for p in Phase if p not in CHECKED}
        self._cursor, self._lengths = self._others[Phase.START], dict[int, Cursor]()
        self._varied, self._length = Cursor(strict=True, varied=True), 0
        self._learns = 0  # how many steps had ended when it began to learn
        self._step, self._rows, self._phase, self._flags, self._calls = 0, 0, Phase.START, 0, 0
        self._deviations, self._reported = 0, False
        self._peak = -(2**62), 0  # when the memory was asked for last, and how much it was at most
        self._pending = Pending()
        self._plan: PlanCheck | None = None
        self._plans = False  # whether this step's calls are held against the plan: there is no learned sequence yet
        self._mark = self._begun = _now()
        self._own, self._waits = [0] * len(Phase), [0] * AXES_AT_MOST
        self._processor, self._cpu = Processor(), (0, 0)
        self.looks, self._bad, self._usual = False, (), set[int]()  # whether to look at what calls are given
        self._gathers = set[int]()  # sites of FSDP's all-gathers
        files.name({"run": mesh})
        self._heart = Heart(files)

    # ------------------------------------------------------------ calls

    def group(self, name: str, axes: str, ranks: Sequence[int]) -> int:
        """A process group that this rank is in; its number. `axes`: of the mesh, "" where unknown."""
        number = len(self._groups)
        self._groups.append(axes or name)
        slot = self._axes.setdefault(axes or name, min(len(self._axes), AXES_AT_MOST - 1))
        self._slots.append(slot)
        self._turns.append(0)
        words = {"group": number, "name": name, "axes": axes or name, "ranks": _short(ranks), "slot": slot}
        self.files.name(words)
        return number

    def enter(self, group: int, op: int, nbytes: int, dtype: torch.dtype | None, peer: int) -> int:
        """A call of a collective begins, made by the caller's caller; the number of the event."""
        number = next(self._numbers)
        turns = self._turns
        turn = turns[group] = turns[group] + 1
        site = 0
        if _thread() == self._thread:
            key, cursor = (group, op, nbytes, dtype, peer), self._cursor
            at, quick = cursor.at, cursor.quick
            if at < len(quick) and quick[at][0] == key:
                cursor.at, site = at + 1, quick[at][1]
            else:
                one = cursor.due(key)
                site = self._unexpected(Key(*key), caller(2)) if one is None else one.number
            self._calls += 1
        at = HEADER_BYTES + number % EVENTS * 40
        size = nbytes if nbytes > 0 else 0
        _EVENT(self._memory, at, number, _now(), size, site, turn, group, 1, op, self._step)
        return number

    def gives(self, number: int, group: int, given: Tensor | Sequence[Tensor]) -> None:
        """What a call is given, before any rank has that of others; the first of a step that is not finite counts."""
        if _thread() != self._thread:
            return
        site = EVENT.unpack_from(self._memory, HEADER_BYTES + (number % EVENTS) * 40)[3]
        if self._phase is Phase.BACKWARD and site in self._gathers:
            return  # the parameters that the forward has gathered
        if not looks_finite(given if isinstance(given, Tensor) else given[0]) and site not in self._usual:
            self.looks, self._bad = False, (number, site, group, self._turns[group])

    def waits(self, number: int) -> int:
        """The rank waits for a call from now on; the time, for `waited`."""
        now = _now()
        if _thread() == self._thread:
            if self._pending.until:
                self._settle()
            self._own[self._phase] += now - self._mark
            self._mark = now
            self._waiting[0] = number
        return now

    def waited(self, number: int, group: int, op: int, since: int) -> None:
        """It has waited: the call has ended."""
        now = _now()
        lasted = now - since
        if _thread() == self._thread:
            self._waits[self._slots[group]] += lasted
            self._mark = now
            self._waiting[0] = 0
        event = next(self._numbers)
        at, turn = HEADER_BYTES + event % EVENTS * 40, self._turns[group]
        _EVENT(self._memory, at, event, now, lasted, number & 0xFFFFFFFF, turn, group, 2, op, self._step)

    def follows(self, number: int, group: int) -> None:
        """Somebody else will wait for a call that has begun, as torch's DDP, and tells nobody; `ended` follows."""
        if _thread() == self._thread:
            _LONG(self._memory, WAITING_AT, self._pending.begins(number, group, _now()))

    def ended(self, number: int, group: int, op: int) -> None:
        """Such a call has ended; on any thread."""
        now = _now()
        if (known := self._pending.ends(number, now)) is None:
            return
        event, turn, site = next(self._numbers), self._turns[group], number & 0xFFFFFFFF
        with suppress(ValueError):  # the memory has been given back
            _LONG(self._memory, WAITING_AT, known[1])
            at = HEADER_BYTES + (event % EVENTS) * 40
            _EVENT(self._memory, at, event, now, now - known[0], site, turn, group, 2, op, self._step)

    def _settle(self) -> None:
        """Count what was waited for in such calls as waiting."""
        if (waited := self._pending.settle()) is not None:
            group, since, until = waited
            since = max(since, self._mark)
            self._own[self._phase] += since - self._mark
            self._waits[self._slots[group]] += max(0, until - since)
            self._mark = max(since, until)

    def _unexpected(self, key: Key, start: FrameType) -> int:
        """The site of a call that was not found to be due; says where that is a deviation."""
        seen = self._seen.get(key) if self._rows >= self._learns + UNSETTLED and self._cursor.expected is None else None
        if seen is not None:  # steps are never alike, so that looking at the stack would be for each call
            return seen
        site, carrier = site_of(self._labels, start)
        known = key, site
        number = self._sites.get(known)
        if number is None:
            number = self._sites[known] = len(self._sites) + 1
            words = {"site": number, "op": OPS[key.op], "group": key.group, "bytes": key.nbytes, "peer": key.peer}
            dtype = str(key.dtype).removeprefix("torch.")
            self.files.name(words | {"dtype": dtype, "what": site.what, "layer": site.layer, "line": site.line})
            if site.what == PARAMETERS:
                self._gathers.add(number)
        self._seen[key] = number
        came = Expected(key, site, number, carrier)
        if self._plans and self._phase in CHECKED:
            assert self._plan is not None
            if (other := self._plan.came(came, self._groups[key.group], self._phase, self._step)) is not None:
                self._deviated(other)
        if self._cursor.came(came):
            self._deviated(deviation(self._cursor, came, self._step, self._groups))
        return number

    def _deviated(self, one: Deviation | None) -> None:
        self._flags |= DEVIATED
        if one is None:
            return
        self._deviations += 1
        words = {"deviation": self._deviations, "kind": one.kind, "step": one.step, "group": one.group}
        place = {"what": one.site.what, "layer": one.site.layer, "line": one.site.line, "learned": one.learned}
        self.files.name(words | {"text": one.text, "time": _now()} | place)
        self._event(Kind.DEVIATION, site=self._deviations, group=one.group)
        _INT(self._memory, DEVIATIONS_AT, self._deviations)

    def _event(self, kind: Kind, *, op: int = 0, site: int = 0, group: int = 0) -> None:
        number = next(self._numbers)
        at = HEADER_BYTES + (number % EVENTS) * 40
        _EVENT(self._memory, at, number, _now(), 0, site, 0, group, kind, op, self._step)

    # ------------------------------------------------------------ steps

    def step(self, number: int, length: int = 0) -> None:
        """A step begins, from 1, with its data, and so does what is expected of its calls."""
        self._end_step()
        before, self._step = self._step, number
        _INT(self._memory, STEP_AT, number)
        self._event(Kind.STEP)
        if 0 < self._rows < self._learns + SHOWN_STEPS or (self._rows and self._checked.strayed):
            self._write_sequence(before)
        self._checked = self._of_length(length)
        self._checked.begin()
        for cursor in self._others.values():
            cursor.begin()
        if self._plan is not None:
            self._plans = self._checked.expected is None and self._rows < self._learns + UNSETTLED
            self._plan.begin(self._plans)
        self.phase(Phase.DATA)

    def _of_length(self, length: int) -> Cursor:
        """What is expected of a step whose rows are so long: of a new length what all have in common."""
        if self._checked is self._varied and (calls := self._varied.conformed()) is not None:
            self._lengths[self._length] = own = Cursor(strict=True)
            own.expect(calls)
        self._length = length
        return self._lengths.get(length, self._varied) if length else self._lengths.setdefault(0, Cursor(strict=True))

    def phase(self, phase: Phase) -> None:
        if self._weights is not None:
            self._weigh(self._weights, phase)
        if self._plans and phase is Phase.OPTIMISER:
            self._miss(late=False)
        self._spend()
        self._phase, self.looks = phase, phase in LOOKED_AT and not self._bad
        if phase in CHECKED:
            self._cursor = self._checked
        else:
            self._cursor = self._others[phase]
            self._cursor.at = 0  # it comes several times in a step, or in some steps only
        _INT(self._memory, PHASE_AT, phase)
        self._event(Kind.PHASE, op=phase)

    def not_finite(self, flags: int) -> None:
        self._flags |= flags
        if self._bad:
            event, site, group, turn = self._bad
            words = {"not_finite": self._step, "event": event, "site_of": site, "group_of": group, "turn": turn}
            self.files.name(words)

    def first_not_finite(self, words: str, layer: str) -> None:
        self.files.name({"first_not_finite": words, "step": self._step, "layer": layer})

    def numbers(self, numbers: StepNumbers) -> None:
        for one in self._spikes.judge(self._step, numbers):
            self.files.name(one)

    def experts(self, loads: Mapping[str, Sequence[int]]) -> None:
        for one in self._spikes.experts(self._step, loads):
            self.files.name(one)

    def peaks(self, peaks: Mapping[str, tuple[float, float]]) -> None:
        """By layer the largest activation and attention logit of a step."""
        for one in self._spikes.peaks(self._step, peaks):
            self.files.name(one)

    def label(self, modules: Iterable[nn.Module]) -> None:
        for part in modules:
            modules_ = cast("Iterable[tuple[str, nn.Module]]", part.named_modules())
            self._labels |= {id(module): path for path, module in modules_ if path}
            self._labels |= {id(parameter): path for path, parameter in part.named_parameters()}

    def expect(self, planned: PlannedCalls, program: ProgramCheck | None = None) -> None:
        """The calls of a step that the plan says. What was learned before counts no more."""
        derived = ProgramCheck() if program is None else program
        self._plan = PlanCheck(planned, derived) if planned or derived.axes else None
        self._plans, self._checked, self._learns = False, Cursor(strict=True), self._rows
        self._varied, self._lengths = Cursor(strict=True, varied=True), {}
        self.files.name({"planned": planned_words(planned, derived.axes)})

    def weights(self, groups: Sequence[WeightGroup], trained: Sequence[str] = (), *, in_backward: bool = False) -> None:
        updates = frozenset({Phase.OPTIMISER} | ({Phase.BACKWARD} if in_backward else set()))
        self._spikes = Spikes(trained)
        if self._digest_steps:
            self._weights = WeightWatch(groups, self._digest_steps, updates)
            self.files.name({"layers": [[group.layer, [*group.axes]] for group in groups]})

    def _weigh(self, weights: WeightWatch, phase: Phase) -> None:
        sums, wrong = weights.enters(phase, self._step)
        if sums is not None:
            self.files.name({"sums": sums, "step": self._step})
        if wrong is not None:
            self._deviated(wrong)

    def _miss(self, late: bool) -> None:
        """At the end of a part of a step: what of the plan has not come."""
        assert self._plan is not None
        for one in self._plan.missing(late, self._step, self._groups):
            self._deviated(one)

    def failure(self) -> str:
        said, self._reported = self._reported, self._reported or bool(self.files.failure)
        return "" if said else self.files.failure

    def close(self, end: End) -> None:
        self._end_step(ended=end is End.FINISHED)
        self._heart.stop()
        _INT(self._memory, ENDED_AT, end)

    def _end_step(self, ended: bool = True) -> None:
        now = self._spend()
        if self._step:
            if self._plans and ended:
                self._miss(late=True)
            due = left_out(self._checked, self._step, self._groups) if ended else None
            if due is not None:
                self._deviated(due)
            if now - self._peak[0] > BEAT_SECONDS * 1e9:  # it takes some systems longer than many calls
                self._peak = now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            row = (self._step, self._flags, min(self._calls, 0xFFFF), self._begun, now - self._begun, self._peak[1])
            times = (min(t // 1000, 0xFFFFFFFF) for t in (*self._own, *self._waits, *self._cpu))
            self.files.row(self._rows, (*row, *times))
            self._rows += 1
        self._own, self._waits, self._cpu = [0] * len(Phase), [0] * AXES_AT_MOST, (0, 0)
        if self._bad and not self._flags & (LOSS_NOT_FINITE | GRADIENT_NOT_FINITE):
            self._usual.add(self._bad[1])  # as of what is masked
        self._bad = ()
        self._begun, self._flags, self._calls = now, 0, 0

    def _spend(self) -> int:
        """At the end of a phase, now: its own time, how long the thread ran in it, and how long it could have."""
        self._settle()
        now = _now()
        self._own[self._phase] += now - self._mark
        self._mark = now
        ran, ready = self._processor.since()
        if self._phase in COUNTED:
            self._cpu = self._cpu[0] + ran, self._cpu[1] + ready
        return now

    def _write_sequence(self, step: int) -> None:
        """What was called in a step, for who compares ranks: the number of each call's site, in order."""
        cursor = self._checked
        calls = cursor.learned if cursor.strayed or cursor.expected is None else cursor.expected
        self.files.name({"sequence": [one.number for one in calls], "step": step})


def _short(ranks: Sequence[int]) -> object:
    """Many ranks in equal steps by their first, step and count; else all of them."""
    step = ranks[1] - ranks[0] if len(ranks) > MOST_NAMED else 0
    if step > 0 and [*ranks] == [*range(ranks[0], ranks[0] + step * len(ranks), step)]:
        return {"first": ranks[0], "step": step, "count": len(ranks)}
    return [*ranks]
