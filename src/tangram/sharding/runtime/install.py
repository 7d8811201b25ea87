"""The runtime: a module's forward does what a program says at its borders, and around the functions that it calls.

Each module has its `forward` wrapped, which does nothing where a program does not name it; the code inside stays as it
is and works on plain local tensors. Where a function inside has to be done otherwise, calls of torch are looked at
while that module's own code runs, and not while its children's does: a model whose plan moves tensors at borders only
pays one more call for each module.

`Runtime` knows nothing of ranks: what brings a tensor from one state to another is given to it (`bring`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.capturing.called import caller, line_of, name_of, of_hooks
from tangram.models.capturing.stages import Stage, Through
from tangram.sharding.derive.transitions import Change
from tangram.sharding.runtime.program import CallKey, OpAction, Program

Bring = Callable[[Tensor, Change], Tensor]


class Instead(Protocol):
    """Runs the operators of a call one by one; gives what the function would have given."""

    def __call__(self, action: OpAction, leaves: Sequence[Any]) -> Any: ...


class AtOnce(Protocol):
    """Does a function and what moves before it at once; NotImplemented where it cannot."""

    def __call__(self, takes: Mapping[int, Change], args: Sequence[Any]) -> Any: ...


class CallGuard(Protocol):
    """What stands around every call of a rehearsal."""

    def __call__(
        self, run: int, key: CallKey, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], action: OpAction | None
    ) -> Any: ...


@dataclass
class Now:
    """What a runtime does in the forward that is under way."""

    program: Program
    bring: Bring
    instead: Instead
    around: CallGuard | None = None
    together: Mapping[str, AtOnce] = field(default_factory=dict[str, AtOnce])
    """By a function's name. What such a function takes is given by place."""
    runs: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """The runs of each module."""

    def __post_init__(self) -> None:
        found: dict[str, list[int]] = {}
        for i, run in enumerate(self.program.derived.folded.graph.runs):
            found.setdefault(run.module, []).append(i)
        self.runs = found


@dataclass
class _Slot:
    """What the wrapped forward of a module does in the forward that is under way.

    The code of a wrapper names no path and looks nothing up: torch's compiler then finds that equal blocks are equal,
    and compiles one of them.
    """

    takes: Mapping[int, Change] = field(default_factory=dict[int, Change])
    gives: Mapping[int, Change] = field(default_factory=dict[int, Change])
    looked_at: bool = False
    """Whether it takes more: functions inside are done otherwise, or the module runs several times."""
    runs: bool = False
    """Whether the module is called; else code may call its forward as a method, in which the caller goes on."""


class _OneModel:
    """What the forward of a parallel model is bound to. A copy of the model would run the parameters of the first."""

    def __deepcopy__(self, memo: object) -> _OneModel:
        raise UserError(
            "a parallel model has no copies, which would run its own parameters: make the other one (an average, a "
            "reference) of the model before it is parallel, and make that parallel, too"
        )


_ONE_MODEL = _OneModel()


def bound(run: Callable[..., Any]) -> Callable[..., Any]:
    """A forward, whose first argument is for nobody, as a method that no copy of its module has."""
    return MethodType(run, _ONE_MODEL)


class Runtime:
    """Wraps the modules of a model, and keeps what is to be done now."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._turns: Counter[str] = Counter()
        self._modes: list[_Calls] = []
        self._bring: Bring = lambda x, change: x
        self.now: Now | None = None
        # Functions are told apart by lines of code, which a compiler does not run.
        self._looked_at = cast("Callable[..., Any]", torch.compiler.disable(self._run))

    def begin(self, now: Now) -> None:
        """A forward begins."""
        self._turns.clear()
        if self.now is not now:
            self.now, self._bring = now, now.bring
            for path, slot in self._slots.items():
                _fill(slot, now, path)

    def wrap(self, model: nn.Module) -> None:
        """Wrap the forward of every module, once and before others wrap it: what is recomputed is done again so.

        What stands in the place of another stage's module has no run of its own: its caller's goes on in it.
        """
        if isinstance(model, Stage):
            model.in_parts = True
        for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
            if isinstance(module, Through):
                continue
            module.forward = self._around(path, module.forward)

    def _around(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        slot = self._slots[path] = _Slot()

        def run(_: object, *args: Any, **kwargs: Any) -> Any:
            if slot.looked_at:
                return self._looked_at(path, forward, args, kwargs)
            if self._modes and slot.runs:
                with self._paused():
                    return self._at_border(slot, forward, args, kwargs)
            return self._at_border(slot, forward, args, kwargs)

        return bound(run)

    def _at_border(self, slot: _Slot, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if slot.takes:
            args, kwargs = changed((args, kwargs), slot.takes, self._bring)
        found = forward(*args, **kwargs)
        return changed(found, slot.gives, self._bring) if slot.gives else found

    def _run(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        now = self.now
        assert now is not None  # it has filled the slot
        runs = now.runs[path]
        at = runs[self._turns[path] % len(runs)]  # what is recomputed in the backward is one of the same runs
        self._turns[path] += 1
        border, actions = now.program.borders.get(at), now.program.actions.get(at)
        answers = now.program.answers.get(at)
        with self._paused():
            if border is not None and border.takes:
                args, kwargs = changed((args, kwargs), border.takes, now.bring)
            if actions or answers or now.around:
                with self._calls(_Calls(now, at, actions or {}, answers or {})) as calls:
                    found = forward(*args, **kwargs)
                calls.refuse_left_out()
            else:
                found = forward(*args, **kwargs)
            return changed(found, border.gives, now.bring) if border is not None and border.gives else found

    @contextmanager
    def _paused(self) -> Generator[None]:
        outer = self._modes[-1] if self._modes else None
        if outer is None:
            yield
            return
        outer.paused += 1
        try:
            yield
        finally:
            outer.paused -= 1

    @contextmanager
    def _calls(self, mode: _Calls) -> Generator[_Calls]:
        self._modes.append(mode)
        try:
            with mode:
                yield mode
        finally:
            self._modes.pop()


def _fill(slot: _Slot, now: Now, path: str) -> None:
    """Say what a module's wrapper does, by the program of now."""
    runs = now.runs.get(path, ())
    slot.runs = bool(runs)
    inside = any(at in now.program.actions or at in now.program.answers for at in runs)
    slot.looked_at = len(runs) > 1 or inside or (slot.runs and bool(now.around))
    border = now.program.borders.get(runs[0]) if runs and not slot.looked_at else None
    slot.takes, slot.gives = (border.takes, border.gives) if border is not None else ({}, {})


class _Calls(TorchFunctionMode):
    """Looks at the functions that the code of one run calls."""

    def __init__(self, now: Now, run: int, actions: Mapping[CallKey, OpAction], answers: Mapping[CallKey, Any]) -> None:
        super().__init__()
        self._now, self._run, self._actions, self._answers = now, run, actions, answers
        self._named = {name for _, name, _ in (*actions, *answers)}
        self._turns: Counter[tuple[str, str]] = Counter()
        self._met: set[CallKey] = set()
        self.paused = 0

    def refuse_left_out(self) -> None:
        """Raise UserError where the code went another way than when it was captured, past what was to be done."""
        left = () if self._now.around is not None else self._now.program.sure.get(self._run, frozenset()) - self._met
        for line, function, _ in sorted(left):
            raise UserError(
                f"{line}: {function} was called when the model was captured, and is not now, so a tensor that it gives "
                "would lie otherwise than the others: let the code go one way, whatever the values"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        name = name_of(func)
        if self.paused or not name or (self._now.around is None and name not in self._named):
            return func(*args, **given)
        if name == "view_as" and of_hooks():
            return func(*args, **given)
        frame = caller(sys._getframe(1), _RUN)  # pyright: ignore[reportPrivateUsage]
        # Code outside of the run is another one where a backward computes it again, or another loop calls the model.
        line = line_of(frame) if frame is not None else self._now.program.derived.folded.graph.runs[self._run].line
        key = line, name, self._turns[line, name]
        self._turns[line, name] += 1
        action = self._actions.get(key)
        self._met.add(key)
        if self._now.around is not None:
            return self._now.around(self._run, key, func, args, given, action)
        if key in self._answers and func(*args, **given) != self._answers[key]:
            raise UserError(
                f"{line}: {name} reads another number out of a tensor than when the model was captured, "
                f"{self._answers[key]}: choose with torch.where"
            )
        return func(*args, **given) if action is None else done(self._now, action, func, args, given)


_RUN = Runtime._run.__code__  # pyright: ignore[reportPrivateUsage]


def done(now: Now, action: OpAction, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an action says, around a function or in its stead."""
    if action.why:
        return now.instead(action, tree_flatten((args, kwargs))[0])
    own = now.together.get(getattr(func, "__name__", ""))
    found = own(action.takes, args) if own is not None else NotImplemented
    if found is NotImplemented:
        if action.takes:
            args, kwargs = changed((args, kwargs), action.takes, now.bring)
        found = func(*args, **kwargs)
    return changed(found, action.gives, now.bring) if action.gives else found


def changed(tree: Any, changes: Mapping[int, Change], bring: Bring) -> Any:
    """A tree with some of its leaves brought to how they are needed. A leaf that is no tensor, as None, stays.

    One tensor in several places stays one: code may ask whether its query is its key.
    """
    flat, form = cast("tuple[list[Any], Any]", tree_flatten(tree))
    done: list[tuple[Tensor, Change, Tensor]] = []
    for leaf, change in changes.items():
        x = flat[leaf]
        if isinstance(x, Tensor):
            known = next((there for one, own, there in done if one is x and own == change), None)
            flat[leaf] = bring(x, change) if known is None else known
            done.append((x, change, flat[leaf]))
    return tree_unflatten(flat, form)
