"""Operators derived as they run: every function of torch that meets a tensor with a layout comes here.

    record    which operators the function runs, on the sizes of the whole
    decide    over each axis, what each of them does with how its tensors lie
    run       its tensors brought there, the operator on this rank's parts by its rule

The parts are plain tensors and autograd's; what moves them is given (`bring`), so a session knows nothing of groups.
An operator without a rule is an error, and nothing is made whole but by a move that was chosen.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.locate import indices_of_rank
from tangram.layout.syntax import Cut
from tangram.models.capturing.called import caller, line_of
from tangram.models.capturing.graph import Ref
from tangram.sharding.derive.collectives_between import Comm
from tangram.sharding.derive.derive import ConflictError
from tangram.sharding.derive.layouts import layout_of, sharded_dim
from tangram.sharding.derive.marking.marks import states as states_of
from tangram.sharding.derive.problem.states import SAME, State, cut
from tangram.sharding.derive.transitions import Change, change_of
from tangram.sharding.eager import api
from tangram.sharding.eager.api import WrittenMark
from tangram.sharding.eager.sharded_tensor import ShardedTensor, States, blocked, decide, memory_of, see_writes, tied
from tangram.sharding.eager.surroundings import MADE, OWN, REFUSED, VALUES, VIEWS, refuse_surroundings
from tangram.sharding.eager.trace_function import Like, TracedOperator, TraceRecorder
from tangram.sharding.local_ops import random_numbers
from tangram.sharding.local_ops.local_call import run
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.rank_part import RankPart
from tangram.sharding.ops.rule_table import RuleTable, builtin

Bring = Callable[[Tensor, Change, bool], Tensor]
"""Moves a part; the last says whether gradients flow through it."""


@dataclass(frozen=True)
class ParameterPart:
    """A parameter of which this rank has a part."""

    name: str
    shape: tuple[int, ...]
    states: States


@dataclass(frozen=True)
class MetMark:
    """A mark or relayout that was met, and how the tensor lies after it."""

    by: str
    layout: Layout


class Eager:
    """A session in which each operator is derived as it runs (`api.Session`).

    `part_of`: what this rank has of a parameter, as a plain tensor that gives its gradient to it.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        bring: Bring,
        part_of: Callable[[nn.Parameter], Tensor],
        table: RuleTable | None = None,
    ) -> None:
        self.mesh, self._rank, self._bring, self._part_of = mesh, rank, bring, part_of
        self.sizes = {axis: n for axis, n in mesh.views[0] if n > 1}
        self.parameters: dict[nn.Parameter, ParameterPart] = {}
        self._written = set[str]()
        """Names of those that this forward has written into."""
        self.names: dict[nn.Parameter, str] = {}
        self.seen: list[MetMark] = []
        self._recorder = TraceRecorder(table or builtin())
        self._kept: dict[nn.Parameter, ShardedTensor] | None = None
        self._whole = dict.fromkeys(self.sizes, SAME)

    @contextmanager
    def entered(self) -> Generator[None]:
        """The code that runs means this session."""
        token = api.current.set(self)
        try:
            with DrawMode(), Mode(self):  # what is drawn is the same on all ranks, of tensors with a layout or without
                yield
        finally:
            api.current.reset(token)

    # ------------------------------------------------------------ what code says

    def mark(self, x: Tensor, written: WrittenMark) -> Tensor:
        """`x` lies so from now on. Raises UserError where it cannot, ConflictError for another mark of it."""
        states = self._marked_states(x, written)
        if isinstance(x, nn.Parameter):
            lies = self._placed(x).states
            if any(lies[axis] != state for axis, state in states.items()):
                name = self._name_of(x)
                raise UserError(
                    f"{written}: {name} lies as `{layout_of(x.shape, lies)}` since the model was made parallel: mark "
                    "it before that, as in __init__, or use relayout"
                )
            return x
        placed = self._placed(x)
        for axis, state in states.items():
            before = placed.by.get(axis)
            if before is not None and before[0] != state:
                raise ConflictError(f"{before[1]} and {written} contradict each other over {axis}", axis)
        return self._note_mark(placed, states, written)

    def relayout(self, x: Tensor, written: WrittenMark) -> Tensor:
        """The same elements, lying so. Raises UserError where they cannot."""
        states = self._marked_states(x, written)
        return self._note_mark(self._placed(x).copied(), states, written)

    def _note_mark(self, placed: ShardedTensor, states: States, written: WrittenMark) -> ShardedTensor:
        placed.mark_as(states, {axis: (state, written) for axis, state in states.items()})
        self.seen.append(MetMark(str(written), placed.notation))
        return placed

    def layout_of(self, x: Tensor) -> Layout:
        """How a tensor lies; one without a layout is whole on every rank."""
        return self._placed(x).notation

    def _marked_states(self, x: Tensor, written: WrittenMark) -> dict[str, State]:
        shape = tuple(x.shape)
        try:
            states = states_of(written.layout, shape, self.mesh) or dict.fromkeys(self.mesh.axes, SAME)
            states = {axis: state for axis, state in states.items() if axis in self.sizes}
            for d, n in enumerate(shape):
                own = [(axis, state) for axis, state in states.items() if (state.kind, state.dim) == ("cut", d)]
                uneven = any(state.parts or (n // state.outer) % self.sizes[axis] for axis, state in own)
                if uneven or n % math.prod(self.sizes[axis] for axis, _ in own):
                    over = " and ".join(f"{axis} of {self.sizes[axis]}" for axis, _ in own)
                    raise UserError(f"dim {d} of {list(shape)} cannot be cut into even parts over {over}")
        except UserError as error:
            raise UserError(f"{written}: {error}") from None
        return states

    # ------------------------------------------------------------ tensors

    def _placed(self, x: Tensor) -> ShardedTensor:
        """A tensor with how it lies: whole on every rank, where nothing else is said."""
        if isinstance(x, ShardedTensor):
            return x
        if not isinstance(x, nn.Parameter):
            return ShardedTensor.of(self, x, x, self._whole)
        if self._kept is not None and x in self._kept:
            return self._kept[x]
        lying = self.parameters.get(x)
        states = self._whole if lying is None else {axis: lying.states[axis] for axis in self.sizes}
        found = ShardedTensor.of(self, x, self._part_of(x), states, standing=self._name_of(x))
        if self._kept is not None:
            self._kept[x] = found
        return found

    def _name_of(self, x: nn.Parameter) -> str:
        return self.names.get(x) or (self.parameters[x].name if x in self.parameters else "a parameter")

    def _memories(self) -> dict[int, str]:
        return {memory_of(self._part_of(p)): self._name_of(p) for p in self.parameters if p.requires_grad}

    def begin(self) -> None:
        """A forward of the whole model begins: what a parameter is brought to is kept until it ends."""
        self._kept = {}
        self._written.clear()

    def end(self, output: Any) -> Any:
        """A forward has ended: what it gives is whole where no mark says otherwise, and then a plain tensor."""
        self._kept = None
        leaves, form = tree_flatten(output)
        return tree_unflatten([self._plain_input(x) for x in leaves], form)

    def _plain_input(self, x: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return x
        free = {axis: SAME for axis in self.sizes if axis not in x.by}
        part = x.as_({**x.states, **free}) if any(s != SAME for s in x.states.values()) else x.part
        if all(axis in free or state == SAME for axis, state in x.states.items()):
            return part
        found = x.copied()
        found.mark_as(free, {})
        return found

    def full_tensor(self, x: Tensor) -> Tensor:
        """A plain tensor of all that `x` is: of one number, or of what every rank has whole already."""
        if not isinstance(x, ShardedTensor):
            return x
        if any(state.kind in ("cut", "sum") for state in x.states.values()) and math.prod(x.shape) > 1:
            raise UserError(f"a value is read of what lies as `{x.notation}`: relayout it whole first")
        return x.as_(self._whole)

    def number_of(self, x: Tensor) -> Any:
        """The number that a tensor of one element is."""
        return self.full_tensor(x).item()

    def brought(self, part: Tensor, source: States, target: States, trained: bool) -> Tensor:
        """This rank's part where it lies as `target`, given it where it lies as `source`."""
        return self._bring(part, change_of(part, source, target, self.mesh, differentiable=trained), trained)

    # ------------------------------------------------------------ functions

    def concerns(self, leaves: Sequence[Any]) -> bool:
        """Whether a function is given something that this rank has a part of."""
        return any(
            isinstance(x, ShardedTensor) or (isinstance(x, nn.Parameter) and x in self.parameters) for x in leaves
        )

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch gives. Raises UserError with the line of the code that calls it."""
        try:
            refuse_surroundings(func, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
            return self._call(func, args, dict(kwargs))
        except UserError as error:
            line = line_of(caller(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]
            if line in str(error):
                raise
            raise UserError(f"{line}: {error}") from None

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if func in (api.mark, api.relayout):
            written = WrittenMark.in_code(name, args[1], line_of(caller(sys._getframe(1))))  # pyright: ignore[reportPrivateUsage]
            return self.mark(args[0], written) if func is api.mark else self.relayout(args[0], written)
        if name == "__get__":
            attribute = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__
            if attribute in OWN and isinstance(args[0], ShardedTensor):
                return getattr(args[0].part, attribute)
            if attribute not in MADE:
                with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                    return func(*args)
        if name in REFUSED or name == "grad":
            raise UserError(f"{name} needs a tensor with memory of its own, and this one is a part of another")
        if name == "backward":
            return self._backward(*args, **kwargs)
        if name == "requires_grad_":
            getattr(args[0], "part", args[0]).requires_grad_(*args[1:], **kwargs)  # of a parameter: itself
            return args[0]
        if name == "__iter__":
            return iter(self._call(Tensor.unbind, (args[0], 0), {}))
        if name in VALUES:
            return self._on_wholes(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _on_wholes(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        some, named = tree_unflatten([self.full_tensor(x) if isinstance(x, Tensor) else x for x in leaves], form)
        return func(*some, **named)

    def _backward(self, x: Tensor, gradient: Tensor | None = None, *rest: Any, **kwargs: Any) -> None:
        if gradient is not None or math.prod(x.shape) != 1:
            raise UserError("backward begins at one number: take a mean or a sum of it")
        self.full_tensor(x).backward(None, *rest, **kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves: list[Any] = tree_leaves((args, kwargs))
        given = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        like = {i: self._like(x) for i, x in given.items()}
        try:
            found = self._recorder.recorded(func, args, kwargs, like)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._on_wholes(func, args, kwargs)
        values: dict[int, Tensor] = dict(enumerate(given.values())) | dict(found.constants)
        for operator in found.operators:
            values.update(self._operator(operator, values, found.made))
        return tree_unflatten([values[x.value] if isinstance(x, Ref) else x for x in found.gives], found.form)

    def _like(self, x: Tensor) -> Like:
        if not isinstance(x, ShardedTensor):
            if type(x) not in (Tensor, nn.Parameter) and not self.concerns([x]):
                raise UserError(
                    f"a {type(x).__name__} comes from code that ran outside of the session, as what is recomputed "
                    "in a backward does: give it plain tensors"
                )
            own = tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad
            return Like(*own, x.requires_grad and x.is_leaf)
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            if x.grad_fn is not None:
                raise UserError("an autograd.Function has made this of a part: write it as functions of torch")
            return Like(tuple(x.shape), x.stride(), x.dtype, x.device, x.trained)

    # ------------------------------------------------------------ operators

    def _operator(
        self, operator: TracedOperator, values: Mapping[int, Tensor], made: Mapping[int, Tensor]
    ) -> dict[int, Any]:
        """What one operator gives, by value."""
        call, bound = operator.call, operator.bound
        plain = [None if v is None else values[v] for v in operator.inputs]
        if bound is None or not self.concerns(plain):
            results = call.with_tensors(plain).run(in_place=True)
            return {v: x for v, x in zip(operator.results, results, strict=True) if v is not None}
        given = [None if x is None else self._placed(x) for x in plain]
        trained = torch.is_grad_enabled() and any(x is not None and x.trained for x in given)
        see_writes(operator, given, trained, self._written, self._memories)
        nbytes = [_nbytes(made.get(v)) if v is not None else 0.0 for v in operator.results]
        fixed = [i for i in operator.written if not (isinstance(own := plain[i], ShardedTensor) and own.alone)]
        chosen = decide(operator, bound, given, self.sizes, nbytes, trained, fixed)
        if chosen is None:
            raise UserError(blocked(operator.call.name, given))
        local: list[Tensor | None] = []
        for place, x in enumerate(given):
            if x is None:
                local.append(None)
                continue
            needs = {axis: move.inputs[place] or x.states[axis] for axis, move in chosen.items()}
            local.append(x.for_writing(needs) if place in operator.written else x.as_(needs))
        part = self._part(bound, chosen)
        draws = bound.rule.note("counted") is not None
        try:
            with random_numbers.using(random_numbers.fresh()) if draws else nullcontext():
                results = run(call, bound, part, local, in_place=True)
        except RuntimeError:
            if call.name not in VIEWS:
                raise
            local = [None if t is None else t.contiguous() for t in local]  # moved parts have strides of their own
            results = run(call, bound, part, local)
        found: dict[int, Any] = {}
        for k, (v, x) in enumerate(zip(operator.results, results, strict=True)):
            if v is not None:
                if trained and v in made and made[v].requires_grad and not x.requires_grad:
                    x = tied(x, local)
                states = {axis: move.outputs[k] for axis, move in chosen.items()}
                found[v] = self._result(operator, v, x, states, plain, given, made)
        return found

    def _result(
        self,
        operator: TracedOperator,
        v: int,
        x: Tensor,
        states: States,
        plain: Sequence[Tensor | None],
        inputs: Sequence[ShardedTensor | None],
        made: Mapping[int, Tensor],
    ) -> Tensor:
        place = next((i for i, own in enumerate(operator.inputs) if own == v), None)
        there = None if place is None else inputs[place]
        if place is not None and there is not None:  # it gives what it took
            if place in operator.written:
                if memory_of(x) != memory_of(there.part):
                    raise UserError(
                        f"{operator.call.name} cannot write into a part: write it as one that gives a new tensor"
                    )
                there.wrote(x, line_of(caller(sys._getframe(1))))  # pyright: ignore[reportPrivateUsage]
            own = plain[place]
            assert own is not None
            return own
        standing = all(one is None or one.standing for one in inputs)
        base = inputs[0] if operator.shares else None
        name = next((one.standing for one in inputs if one is not None), "") if standing else ""
        return ShardedTensor.of(self, made[v], x, states, name, base)

    def _part(self, bound: BoundOp, chosen: Mapping[str, Comm]) -> RankPart:
        """Where this rank stands in an operator."""
        cuts: dict[str, list[tuple[str, State]]] = {}
        for axis, move in chosen.items():
            if move.label is not None:
                cuts.setdefault(move.label.factor, []).append((axis, cut(0, move.label.inner)))
        at = self.mesh.coords(self._rank)
        sets = {f: indices_of_rank(sharded_dim(bound.sizes[f], own), self.mesh, at) for f, own in cuts.items()}
        return RankPart(
            self.mesh, self._rank, sets, {f: tuple(Cut(axis) for axis, _ in own) for f, own in cuts.items()}
        )


class Mode(TorchFunctionMode):
    """Gives a session the functions that meet parameters of which a rank has a part."""

    def __init__(self, session: Eager) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves: list[Any] = tree_leaves((args, kwargs))
        if self._session.concerns(leaves):
            return self._session.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _nbytes(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.numel() * x.element_size())
