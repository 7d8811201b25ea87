"""A tensor that shows the size of the whole, and holds one rank's plain part with the layout that it is in.

Why not plain local parts with layouts in a table beside: a model's code works out numbers from sizes
(`torch.arange(x.shape[1])`, `x.view(b, s, -1, d)`), which of a part's sizes come out wrong in silence. Here it reads
those of the whole, and every function of torch that it calls goes to the session instead. Why not a tensor whose
operators are dispatched below autograd, as DTensor: backward operators would need rules of their own; here autograd
sees plain parts and what moves them, and the backward of a move is the move between the duals.

So a `ShardedTensor` has no gradient history: its part has. What no session is asked about, as code of a library that
takes tensors apart, ends in an error and never in a number.

What one operator does when nothing is known but what it is given is over each axis the move that sends least. The moves
are those of a derivation, and so are the prices, forward and backward. But where a derivation weighs the whole graph,
here each operator takes the cheapest for itself: it goes on with a cut that it is given, or undoes it, and begins none
of its own. That can send more bytes; it cannot give other values. A parameter is used where it lies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.layout import Layout
from tangram.sharding.derive.collectives_between import Comm, Label, comms, labels
from tangram.sharding.derive.layouts import layout_of
from tangram.sharding.derive.problem.states import SAME, SEVERAL, SUM, State, price, received
from tangram.sharding.eager.trace_function import TracedOperator
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.propagation.axis_choices import ALL_REDUCE, REDUCE_SCATTER

States = Mapping[str, State]
Key = tuple[tuple[str, State], ...]


class Deriving(Protocol):
    """A session in which operators are derived as they run, as its tensors see it."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of its axes."""
        ...

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch gives."""
        ...

    def number_of(self, x: Tensor) -> Any:
        """The number that a tensor of one element is."""
        ...

    def brought(self, part: Tensor, source: States, target: States, trained: bool) -> Tensor:
        """This rank's part where it lies as `target`, given it where it lies as `source`."""
        ...


class ShardedTensor(Tensor):
    """One rank's part of a tensor. `shape`, `stride()` and `dtype` are those of the whole."""

    _session: Deriving
    _states: dict[str, State]
    _parts: dict[Key, Tensor]
    """What this rank has of it, by how it lies."""
    _actual: dict[str, State]
    """How it lies in truth: what is said to be whole is gathered when it is read, with the gradient that its reader
    has."""
    _family: list[weakref.ref[ShardedTensor]]
    """Those that share memory on one process."""
    _stale: str
    standing: str
    """Of a parameter, and of what is made of parameters alone, its name."""
    by: dict[str, tuple[State, object]]
    """Over which axes a mark says how it lies, and which."""

    @staticmethod
    def of(
        session: Deriving,
        like: Tensor,
        part: Tensor,
        states: States,
        standing: str = "",
        base: ShardedTensor | None = None,
    ) -> ShardedTensor:
        """A tensor of the size and strides of `like`, of which this rank has `part`."""
        wrapped: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
            ShardedTensor,
            like.shape,
            like.stride(),
            dtype=part.dtype,
            device=part.device,
            requires_grad=part.requires_grad,
        )
        found: ShardedTensor = wrapped
        found._session, found.standing, found.by, found._stale = session, standing, {}, ""
        found._states = found._actual = {
            a: s if part.requires_grad or s != SEVERAL else SAME for a, s in states.items()
        }
        found._parts = {_key(found._states): part}
        found._family = base._family if base is not None else []
        found._family.append(weakref.ref(found))
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch is the session's."""
        from torch.utils._pytree import tree_leaves

        leaves: list[Any] = tree_leaves((args, kwargs))
        session = next((x._session for x in leaves if isinstance(x, ShardedTensor)), None)
        if session is None:
            return cast(Any, super()).__torch_function__(func, types, args, kwargs or {})
        return session.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes here went past the session."""
        raise UserError(
            f"{func} runs on a tensor with a layout where no layout can be derived: give it the whole tensor, as "
            "`relayout(x, ...)` with no axis in it"
        )

    def __repr__(self, **_: Any) -> str:
        """Its layout, and this rank's part."""
        return f"ShardedTensor({self.notation}, this rank has {self.part!r})"

    def __format__(self, spec: str) -> str:
        return format(self._session.number_of(self), spec) if self.ndim == 0 else repr(self)

    __hash__ = object.__hash__

    # ------------------------------------------------------------ how it lies

    @property
    def states(self) -> States:
        """Over each axis of the mesh with more than one rank."""
        return self._states

    @property
    def notation(self) -> Layout:
        """How it lies, in the notation."""
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return layout_of(self.shape, self._states)

    @property
    def part(self) -> Tensor:
        """What this rank has of it, a plain tensor."""
        return self.as_(self._states)

    def mark_as(self, states: States, by: Mapping[str, tuple[State, object]]) -> None:
        """It lies so from now on, by these marks. What is to be whole is moved when it is read, for its reader."""
        self._states = {**self._states, **states}
        own, key = _key(self._actual), _key(self._states)
        later = any(state == SAME != self._actual[axis] for axis, state in self._states.items())
        if not (self.trained and (later or not torch.is_grad_enabled())):
            self._parts = {key: self.as_(self._states)}
            self._actual = self._states
        else:
            self._parts = {k: x for k, x in self._parts.items() if k in (own, key)}
        self.by.update(by)

    def copied(self) -> ShardedTensor:
        """The same elements, to be said to lie otherwise."""
        found = ShardedTensor.of(self._session, self, self._parts[_key(self._actual)], self._actual, base=self)
        found._states, found._parts, found._stale = dict(self._states), {**self._parts}, self._stale
        found.by = dict(self.by)
        return found

    def price(self, axis: str, target: State) -> float:
        """Bytes that a rank receives to have it so over an axis, there and back; infinite where there is no way."""
        k, trained, now, truly = self._session.sizes[axis], self.trained, self._states[axis], self._actual[axis]
        if target == now or (not trained and target == SEVERAL and now == SAME):
            return 0.0
        if self.standing and "cut" in (target.kind, now.kind):
            return NEVER
        n = self._nbytes(axis)
        if (now, target) == (SAME, SEVERAL):  # from where it is in truth, beside what it would have cost as it is said
            ways = [price(truly, state, n, k, differentiable=trained) for state in (target, now)]
            return max(0.0, ways[0] - ways[1])
        if (now.kind, target.kind) == ("cut", "sum"):  # a part among zeros: nothing is sent
            return 0.0
        return price(now, target, n, k, differentiable=trained)

    @property
    def trained(self) -> bool:
        """Whether gradients flow through it."""
        return next(iter(self._parts.values())).requires_grad

    def _nbytes(self, axis: str) -> float:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            n = float(self.numel() * self.element_size())
        for other, state in self._states.items():
            if other != axis and state.kind == "cut":
                n /= self._session.sizes[other]
        return n

    def as_(self, target: States) -> Tensor:
        """This rank's part where it lies as `target`: brought there, once for all who want it so."""
        if self._stale:
            raise UserError(
                f"{self._stale} writes into a tensor that shares memory with this one, but not on parts: write it as "
                "an operator that gives a new tensor"
            )
        target = self._plain(target)
        key = _key(target)
        if key in self._parts:
            return self._parts[key]
        source = self._actual if _as_marked(self._states, target) else self._states
        whole = self._parts[_key(source)] if _key(source) in self._parts else self.as_(source)
        part = self._session.brought(whole, source, target, self.trained)
        if self.trained and not torch.is_grad_enabled():
            return part  # what has no gradient is not kept for those who want one
        self._parts[key] = part
        if _is_added_up(self._actual, target):  # and stays so
            if _is_added_up(self._states, target):
                self._states = dict(target)
            self._actual, self._parts = dict(target), {key: part}
        return part

    def _plain(self, target: States) -> States:
        """Without a gradient, what each rank has all of is the same, whatever it is used for."""
        return target if self.trained else {a: SAME if state == SEVERAL else state for a, state in target.items()}

    # ------------------------------------------------------------ writes

    @property
    def alone(self) -> bool:
        """Whether no other tensor shares its memory on one process, which then would have to move with it."""
        return all(one is None or one is self for one in (ref() for ref in self._family))

    def for_writing(self, target: States) -> Tensor:
        """This rank's part where it lies as `target`, which it does from now on; to be written in place."""
        part, target = self.as_(target), self._plain(target)
        if _key(target) != _key(self._actual):
            part = part.clone()  # what a move gives may be a view
            self._states = self._actual = dict(target)
            self._parts = {_key(target): part}
        return part

    def wrote(self, part: Tensor, line: str) -> None:
        """Its part has been written in place; others that share its memory on one process may not on this rank."""
        self._actual = self._states
        self._parts = {_key(self._states): part}
        for one in (ref() for ref in self._family):
            if one is None or one is self:
                continue
            own = one._parts.get(_key(one._actual))
            if own is None or memory_of(own) != memory_of(part):
                one._stale = line
            else:
                one._parts = {_key(one._actual): own}


def tied(x: Tensor, local: Sequence[Tensor | None]) -> Tensor:
    """What is no function of this rank's part, as of an index that is elsewhere, with a gradient of zeros to it all the
    same: the other ranks' gradients move, and all have to."""
    for one in local:
        if one is not None and one.requires_grad:
            x = x + one.reshape(-1)[:0].sum().to(x.dtype)
    return x


def _as_marked(states: States, target: States) -> bool:
    """Whether it is wanted as it is said to lie, but for what its gradient is: then one move will do."""
    return all(target[a] == s or (s == SAME and target[a] == SEVERAL) for a, s in states.items())


def _is_added_up(states: States, target: States) -> bool:
    return any(state == SUM and target[axis] != SUM for axis, state in states.items())


def _key(states: States) -> Key:
    return tuple(states.items())


def memory_of(x: Tensor) -> int:
    """Where its elements lie."""
    return x.untyped_storage().data_ptr()


def see_writes(
    operator: TracedOperator,
    inputs: Sequence[ShardedTensor | None],
    trained: bool,
    written: set[str],
    parameters: Callable[[], Mapping[int, str]],
) -> None:
    """Note parameters, by their memory, that are written into; refuse a use after it, for autograd knows no such write.

    Raises UserError.
    """
    for place, x in enumerate(inputs):
        if x is None or not x.standing:
            continue
        if place in operator.written:
            written |= {name for memory, name in parameters().items() if memory == memory_of(x.part)}
        elif trained and x.standing in written and not operator.call.name.startswith("detach"):
            raise UserError(
                f"a forward writes into {x.standing}, which is trained: write into it after the optimiser's step "
                "instead"
            )


def blocked(called: str, inputs: Sequence[ShardedTensor | None]) -> str:
    """Why an operator that is called so can do nothing with these."""
    names = dict.fromkeys(f"{x.standing} (`{x.notation}`)" for x in inputs if x is not None and x.standing)
    lies = ", ".join(f"`{x.notation}`" for x in inputs if x is not None and not x.standing)
    if not names:
        return f"{called} writes into a tensor that has to lie otherwise for it, of {lies}: relayout it first"
    others = f" beside {lies}" if lies else ""
    return f"{called} cannot use {' and '.join(names)} where it lies{others}: mark it otherwise, or relayout it"


NEVER = float("inf")


def decide(
    operator: TracedOperator,
    bound: BoundOp,
    inputs: Sequence[ShardedTensor | None],
    sizes: Mapping[str, int],
    nbytes: Sequence[float],
    differentiable: bool,
    fixed: Collection[int] = (),
) -> dict[str, Comm] | None:
    """Over each axis what the operator does; None where all that it can do moves a parameter or what is `fixed`.

    `sizes`: of the axes; `nbytes`: of the whole results; `fixed`: places that are written, and have to stay.
    """
    found: dict[str, Comm] = {}
    for axis, k in sizes.items():
        there = [() if one is None else (one.states[axis],) for one in inputs]
        if all(state == SAME for some in there for state in some):
            needs = tuple(SAME if one is not None else None for one in inputs)
            found[axis] = Comm(None, needs, (SAME,) * len(bound.outputs), 1.0)
            continue
        some = labels(bound, [*there, *[()] * len(bound.outputs)], k)
        fitting = [one for one in some if _is_even(bound, one, k, found, sizes)]
        # Axes are decided one after the other, as in a derivation: a cut has to be even beside those before it.
        options = comms(operator.call, bound, fitting, k, [differentiable] * len(bound.outputs))
        best = min(options, key=lambda one: _cost(operator, one, inputs, axis, k, nbytes, differentiable, fixed))
        if _cost(operator, best, inputs, axis, k, nbytes, differentiable, fixed)[0] == NEVER:
            return None
        found[axis] = best
    return found


def _cost(
    operator: TracedOperator,
    move: Comm,
    inputs: Sequence[ShardedTensor | None],
    axis: str,
    k: int,
    nbytes: Sequence[float],
    differentiable: bool,
    fixed: Collection[int],
) -> tuple[float, int, float]:
    """Bytes; of equal ones what passes on a sum alone, and last what others have to wait with; then what works less."""
    total = 0.0
    own = [one.states[axis] for one in inputs if one is not None]
    for place, (one, need) in enumerate(zip(inputs, move.inputs, strict=True)):
        if one is None or need is None:
            continue
        if place in operator.written:
            now = one.states[axis]
            moves_nothing = {now.kind, need.kind} <= {"same", "several"}  # would be a view, and written through it
            if now != need and (differentiable or not moves_nothing) and (place in fixed or moves_nothing):
                return NEVER, 0, 0.0
            back = [out for out, v in zip(move.outputs, operator.results, strict=False) if v == operator.inputs[place]]
            if any(out != need for out in back):
                return NEVER, 0, 0.0
        total += one.price(axis, need)
    waits = move.label is None and SUM in move.outputs
    for out, n in zip(move.outputs, nbytes, strict=False):
        if out == SUM:
            total += received(ALL_REDUCE if waits else REDUCE_SCATTER, n, k)
    order = 0 if not waits else 1 if any(state != SUM for state in own) else -1
    return total, order, move.share


def _is_even(bound: BoundOp, label: Label, k: int, done: Mapping[str, Comm], sizes: Mapping[str, int]) -> bool:
    """Whether a cut is even beside those of the axes before."""
    n = bound.sizes[label.factor] // label.inner
    for axis, move in done.items():
        own = move.label
        if own is None or own.factor != label.factor:
            continue
        if own.inner == label.inner:
            n //= sizes[axis]
        elif own.inner < label.inner:
            if label.inner % (own.inner * sizes[axis]):
                return False
        elif (own.inner // label.inner) % k:
            return False
    return n % k == 0
