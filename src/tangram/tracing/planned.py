"""The calls that a step of a plan makes, as far as they follow from the plan, and what it means that others come.

Whoever knows how plans run says which calls of a kind a step makes over which axes, in their order where that is known
(`training.parallel.due_calls`). Calls are held against them while a rank has no sequence of its own yet, so that it
learns none that is not the plan's, though all ranks agree on it. Later steps are held against what was learned
(`conformance`), which is then the same. Kinds of calls that a plan says nothing of are learned alone.

Models that are derived over axes say in each forward what moves in it and in its backward (`ProgramCheck`): in the
forward by the modules, in the order in which they run; in the backward, where autograd orders them, by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tangram.tracing.conformance import Deviation, Expected
from tangram.tracing.files.format import OPS, Phase
from tangram.tracing.sites import Site, call_words, size_words


class CallKind(NamedTuple):
    """Calls of one kind over one set of axes, in one part of a step."""

    axes: str
    op: int
    peer: int = -1
    """Of what goes to or comes from one rank of the group."""
    late: bool = False
    """Whether they come after the backward, with the optimiser."""


class PlannedCall(NamedTuple):
    """One of them."""

    nbytes: int
    """-1: any."""
    dtype: torch.dtype
    layer: str = ""
    """The module that it is for; "": any."""
    what: str = ""
    """The tensors, in words."""


@dataclass(frozen=True)
class CallsOfKind:
    """All of a kind that a step makes."""

    calls: Sequence[PlannedCall]
    ordered: bool = True
    alone: bool = True
    """Whether no other calls of the kind come; else only what is missing counts."""


PlannedCalls = Mapping[CallKind, CallsOfKind]


class DerivedCall(NamedTuple):
    """A call of a derived program."""

    axes: str
    op: int
    dtype: torch.dtype
    layer: str = ""
    """The module at whose border, or in whose code, it is; "" of a backward."""


@dataclass(frozen=True)
class DerivedCalls:
    """What a derived program moves."""

    forward: tuple[DerivedCall, ...]
    """In order."""
    backward: tuple[DerivedCall, ...]
    ordered: bool
    """Whether modules run once and of those here all calls are known: a call then comes after those before it."""


@dataclass
class ProgramCheck:
    """Holds the calls of forwards and their backwards against what their programs move. Others may come between."""

    axes: tuple[str, ...] = ()
    """That programs move tensors over."""
    active: bool = False
    _forward: list[DerivedCall] = field(default_factory=list[DerivedCall])
    _ordered: bool = True
    _lost: list[DerivedCall] = field(default_factory=list[DerivedCall])
    """Of forwards that are over."""
    _backward: Counter[DerivedCall] = field(default_factory=Counter[DerivedCall])

    def begin(self, active: bool) -> None:
        """A step begins. `active`: its calls are looked at."""
        self.active, self._forward, self._lost = active, [], []
        self._backward.clear()

    def forward(self, calls: DerivedCalls) -> None:
        """A forward with gradients begins."""
        self._lost += self._forward
        self._forward, self._ordered = [*calls.forward], calls.ordered
        self._backward.update(calls.backward)

    def came(self, came: Expected, axes: str, phase: Phase) -> list[DerivedCall]:
        """Take in a call; those that were due before it in the forward."""
        if not self.active or came.key.dtype is None:
            return []
        one = DerivedCall(axes, came.key.op, came.key.dtype, came.site.layer)
        if phase is Phase.BACKWARD and not one.layer:  # with a layer it is of what is recomputed
            self._backward[one] -= 1
        if phase is not Phase.FORWARD or one not in self._forward:
            return []
        at = self._forward.index(one)
        left = self._forward[:at] if self._ordered else []
        del self._forward[at - len(left) : at + 1]
        return left

    def missing(self) -> list[DerivedCall]:
        """What has not come at the end of the backward; of each kind once for each call."""
        found = [*self._lost, *self._forward, *(+self._backward).elements()] if self.active else []
        self.begin(False)
        return found


@dataclass
class PlanCheck:
    """Holds the calls of a step against the plan's."""

    planned: PlannedCalls
    program: ProgramCheck = field(default_factory=ProgramCheck)
    _left: dict[CallKind, list[PlannedCall]] = field(default_factory=dict[CallKind, list[PlannedCall]])
    _reported: set[CallKind] = field(default_factory=set[CallKind])
    """What has deviated is told of once: it does so in every step."""

    def begin(self, active: bool = True) -> None:
        """A step begins. `active`: its calls are held against the plan."""
        self.program.begin(active)
        self._left = {kind: [*of.calls] for kind, of in self.planned.items()}

    def came(self, came: Expected, axes: str, phase: Phase, step: int) -> Deviation | None:
        """Take in a call; what it means where it is not the plan's."""
        if skipped := self.program.came(came, axes, phase):
            more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
            kind, said = _kind(skipped[0]), _in_words(skipped[0])
            text = f"skipped {said}{more} in step {step}, which the plan has before "
            text += call_words(OPS[came.key.op], axes, came.site)
            return self._tell(kind, "skipped", step, text, Site("", skipped[0].layer, came.site.line), came.key.group)
        kind = CallKind(axes, came.key.op, came.key.peer, phase is Phase.OPTIMISER)
        left = self._left.get(kind)
        if left is None:
            return None
        at = next((i for i, one in enumerate(left) if _is(one, came)), None)
        if at is not None and (at == 0 or not (self.planned[kind].ordered and self.planned[kind].alone)):
            del left[at]
            return None
        if not self.planned[kind].alone:
            return None
        if not left:
            text = f"called {call_words(OPS[kind.op], axes, came.site)} in step {step} once more than the plan does"
            return self._tell(kind, "extra", step, text, came.site, came.key.group)
        due = left[0]
        site = Site(due.what, due.layer, came.site.line)
        said, called = (call_words(OPS[kind.op], axes, one) for one in (Site(due.what, due.layer), came.site))
        if at is not None:
            del left[: at + 1]
            more = f" and {at - 1} more" if at > 1 else ""
            text = f"skipped {said}{more} in step {step}, which the plan has before {called}"
            return self._tell(kind, "skipped", step, text, site, came.key.group)
        del left[0]
        sizes = (
            f"{size_words(came.key.nbytes, came.key.dtype)} instead of the plan's {size_words(due.nbytes, due.dtype)}"
        )
        text = f"called {said} in step {step} with {sizes}"
        return self._tell(kind, "mis-sized", step, text, site, came.key.group)

    def missing(self, late: bool, step: int, groups: Sequence[str]) -> list[Deviation]:
        """What has not come at the end of a part of a step."""
        found: list[Deviation] = []
        for kind, left in self._left.items():
            if kind.late == late and left:
                site = Site(left[0].what, left[0].layer)
                one = self.planned[kind].ordered
                said = call_words(OPS[kind.op], kind.axes, site if one else Site())
                text = f"ended {'' if late else 'the backward of '}step {step} without {said}"
                text += f": {len(left)} of {len(self.planned[kind].calls)} such calls of the plan have not come"
                group = next((i for i, axes in enumerate(groups) if axes == kind.axes), 0)
                told = self._tell(kind, "skipped", step, text, site, group)
                found += [told] if told else []
                left.clear()
        derived = Counter(self.program.missing() if not late else ())
        for one in derived:
            where = "" if one.layer else "in the backward "
            text = f"ended the backward of step {step} without {_in_words(one)}: {where}{derived[one]} of its calls"
            text += " by the plan have not come"
            group = next((i for i, axes in enumerate(groups) if axes == one.axes), 0)
            told = self._tell(_kind(one), "skipped", step, text, Site("", one.layer), group)
            found += [told] if told else []
        return found

    def _tell(self, kind: CallKind, what: str, step: int, text: str, site: Site, group: int) -> Deviation | None:
        if kind in self._reported:
            return None
        self._reported.add(kind)
        return Deviation(what, step, group, text, site)


def _is(one: PlannedCall, came: Expected) -> bool:
    known = one.layer and came.site.layer
    alike = one.nbytes in (-1, came.key.nbytes) and one.dtype == came.key.dtype
    return alike and (not known or one.layer == came.site.layer)


def _kind(one: DerivedCall) -> CallKind:
    return CallKind(one.axes, one.op)


def _in_words(one: DerivedCall) -> str:
    return call_words(OPS[one.op], one.axes, Site("", one.layer))


def planned_words(planned: PlannedCalls, derived: Sequence[str] = ()) -> list[str]:
    """Which kinds of calls a plan says, for readers: "9 all-gather over dp", "1 all-reduce over dp at the end"."""
    found: list[str] = []
    for kind, of in planned.items():
        peer = f" (rank {kind.peer} of it)" if kind.peer >= 0 else ""
        found.append(f"{len(of.calls)} {OPS[kind.op]} over {kind.axes}{peer}{' at the end' if kind.late else ''}")
    return [*found, *(f"what moves over {axis} as derived" for axis in derived)]
