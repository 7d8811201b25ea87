"""A rehearsal: the model run without memory on the parts of a rank, every operator compared with what was derived.

The code of a model works out sizes, from tensors that are now parts: mostly that is right (`x.view(*x.shape[:-1], -1,
d)`), sometimes it is not (`torch.arange(x.shape[1])`, a size that stands in the configuration). What a function of
torch does on parts is compared with what the derivation says, operator by operator: sizes of results and literal
arguments. Where they are unlike, the program gets an action that runs the operators in the function's stead, and the
rehearsal goes on with what they give. So whatever a run meets later has been met here.

Code may also take another way on a part: it asks whether two sizes are equal, and calls a function or does not. What
that code sees is then derived once more so that it is whole there, and rehearsed again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_unflatten  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.building.twin import fake_twin
from tangram.models.capturing.answers import ASKING
from tangram.models.capturing.called import ChecksHold, caller, line_of
from tangram.models.capturing.capture import quiet
from tangram.models.capturing.graph import Called, Graph, Ref
from tangram.models.capturing.opened import Opening, plainly
from tangram.models.capturing.reasons import place_and_reason
from tangram.sharding.derive.derive import ConflictError, Derived, derive
from tangram.sharding.derive.layouts import (
    called,
    input_states,
    local_shape,
    made,
    needed,
    unlike,
    used,
)
from tangram.sharding.derive.transitions import Change, sizes_after
from tangram.sharding.local_ops.local_call import arguments_of
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.runtime.install import Now, Runtime, done
from tangram.sharding.runtime.lower import cut_classes, lower, places_of
from tangram.sharding.runtime.operators import Operators
from tangram.sharding.runtime.program import CallKey, OpAction, Program, draws, draws_full_tensor
from tangram.sharding.runtime.writes import lost_views, refuse_called_again, refuse_lost_writes, refuse_parts_again

PASSING = frozenset(
    {"clone", "detach", "alias", "lift_fresh", "view", "_unsafe_view", "_reshape_alias"}
    | {"tangram.mark", "tangram.relayout"}
)
"""Operators that give what they take: code may need more or fewer of them on a part."""
SIZES = frozenset({"size", "sizes", "shape", "split_size", "split_sizes", "normalized_shape", "repeats", "output_size"})
"""Arguments that are right where the result has the right size."""
OF_NO_SIZE = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})
"""Operators that take nothing of a tensor but its type and device."""


def rehearsed(found: Derived, model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> Program:
    """The program of a derivation, with all that its code needs. `model` (on meta or not) is not changed.

    Raises UserError for what cannot be run, with the line of the model.
    """
    inside = False
    while True:
        try:
            return _rehearsed(lower(found, inside=inside), model, inputs, dtype)
        except _OtherWayError as error:
            whole = found.replicated | cut_classes(found, error.run)
            if inside and whole == found.replicated:
                raise UserError(f"{type(model).__name__} cannot be run on parts: {error}") from error
            inside = whole == found.replicated  # code may still see what a module's border cuts for a function in it
            try:
                found = derive(found.folded.graph, found.marks, found.mesh, whole=whole)
            except ConflictError:
                raise UserError(f"{type(model).__name__} cannot be run on parts: {error}") from error


class _OtherWayError(Exception):
    """The code of a run does something else on parts than on the whole."""

    def __init__(self, said: str, run: int) -> None:
        super().__init__(said)
        self.run = run


def _rehearsed(program: Program, model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> Program:
    """The same for one program. Raises _OtherWayError, too."""
    found = program.derived
    # What one of them needs, all do: it sends nothing.
    unfit = [_rehearsed_by(rank, program, model, inputs, dtype) for rank in unlike(found)]
    for action in (action for own in program.actions.values() for action in own.values()):
        _see_what_is_written(found.folded.graph, action)
        refuse_called_again(found.folded.graph, found.folded.graph.calls[action.call])
    refuse_parts_again(found)
    for rank in unlike(found):
        for said, run in lost_views(program, Operators(found, rank).as_it_is):
            raise _OtherWayError(said, run)
    for error in unfit:  # last: a write that was lost may be why
        if error is not None:
            raise error
    return program


def _rehearsed_by(
    rank: int, program: Program, model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype
) -> _OtherWayError | None:
    """Run the code on the parts of one rank. Adds what it needs to the program; gives what would not fit."""
    found = program.derived
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_twin(model, dtype, fake)
    with fake:
        _cut(twin, found, rank)
        given = {name: _input(found, name, x, rank) for name, x in inputs.items()}
    rehearsal = _Rehearsal(program, rank)
    runtime = Runtime()
    runtime.wrap(twin)
    runtime.begin(Now(program, rehearsal.bring, rehearsal.instead, rehearsal.around))
    try:
        with quiet(), plainly(), ChecksHold(), fake, rehearsal.record:  # gradients are on or off as in the capture
            results = twin.forward(**given)  # as in the capture, without hooks of the whole model
    except (UserError, _OtherWayError):
        raise
    except Exception as error:
        raise _OtherWayError(place_and_reason(error), rehearsal.last) from error
    rehearsal.refuse_left_out()
    rehearsal.refuse_other_results(results)
    return rehearsal.unfit


def _see_what_is_written(graph: Graph, action: OpAction) -> None:
    """Raise _OtherWayError where a write would be lost: whole, what the code of that run sees may be written."""
    call = graph.calls[action.call]
    try:
        refuse_lost_writes(graph, call, action)
    except UserError as error:
        raise _OtherWayError(str(error), call.run) from error


def _cut(twin: nn.Module, found: Derived, rank: int) -> None:
    """Give every parameter the size of its part, as it is used."""
    graph, folded = found.folded.graph, found.folded
    states = {value.name: used(found, folded.classes[v]) for v, value in graph.of_kind("parameter")}
    seen: dict[Tensor, nn.Parameter] = {}
    for name, parameter in [*twin.named_parameters(remove_duplicate=False)]:
        if parameter not in seen and name in states:
            shape = local_shape(found, parameter.shape, states[name], rank)
            part = torch.empty(shape, dtype=parameter.dtype, device="cpu")
            seen[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        if parameter in seen:
            path, _, key = name.rpartition(".")
            twin.get_submodule(path).register_parameter(key, seen[parameter])


def _input(found: Derived, name: str, x: Any, rank: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    graph = found.folded.graph
    v = next(i for i, value in graph.of_kind("input") if value.name == name)
    states = input_states(found, found.folded.classes[v])
    return torch.empty(local_shape(found, x.shape, states, rank), dtype=x.dtype, device="cpu")


class _Record(Opening):
    """Keeps what runs; what is read out of tensors is what the capture has read in the same line."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.ran: list[tuple[OpCall, list[Any]]] = []
        self._reads: dict[str, list[Any]] = {}
        for one in reversed(graph.reads):
            self._reads.setdefault(one.line, []).append(one.answer)

    def ran_below(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and keep it."""
        waiting = self._reads.get(line_of(caller(sys._getframe(1)))) if func in ASKING else None  # pyright: ignore
        if waiting:
            return waiting.pop()
        found = func(*args, **kwargs)
        leaves: list[Any] = tree_leaves(found)
        if func.namespace != "prim" and any(isinstance(x, Tensor) for x in leaves):
            self.ran.append((OpCall.of(func, args, kwargs), leaves))
        return found


class _Rehearsal:
    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.found, self.rank = program, program.derived, rank
        self.graph = self.found.folded.graph
        self.operators = Operators(self.found, rank)
        self.record = _Record(self.graph)
        self._now = Now(program, self.bring, self.instead)
        self.sizes = {over.axis: over.k for over in self.found.axes}
        self.calls = {(c.run, (c.line, c.function, c.turn)): i for i, c in enumerate(self.graph.calls)}
        self.met: set[int] = set()
        """The calls that the code has made."""
        self.last = 0
        """The run whose code has called last."""
        self.unfit: _OtherWayError | None = None
        """What the operators that run in a function's stead would not fit."""

    def bring(self, x: Tensor, change: Change) -> Tensor:
        """What would come, of the size that it has then."""
        _refuse_transforms()
        sizes = sizes_after(x.shape, change, self.sizes, self.found.mesh.coords(self.rank))
        before = [*self.record.ran]
        part = x.new_empty(sizes)
        self.record.ran[:] = before  # nothing that the model's code has run
        return part

    def instead(self, action: OpAction, leaves: Sequence[Any]) -> Any:
        """What the operators on parts would give, of the sizes that it has then."""
        _refuse_transforms()
        call = self.graph.calls[action.call]
        _see_what_is_written(self.graph, action)
        self.operators.refuse_unknown(call, action)
        return tree_unflatten([None if v is None else self._part(v, action) for v in call.gives], call.form)

    def _of_other_size(self, call: Called, action: OpAction, found: Any) -> str:
        """Views of a wrong size are seen only by what comes of them."""
        for v, x in zip(call.gives, tree_leaves(found), strict=True):
            if v is not None and tuple(x.shape) != (want := self._shape(v, action)):
                return f"it gives {tuple(x.shape)} on a part, not {want}"
        return ""

    def _part(self, v: int, action: OpAction) -> Tensor:
        return torch.empty(self._shape(v, action), dtype=self.graph.values[v].dtype, device="cpu")

    def _shape(self, v: int, action: OpAction | None = None) -> tuple[int, ...]:
        """The size of what a call gives; without one, that in which a value is used."""
        states = used(self.found, self.found.folded.classes[v])
        if action is not None and v not in action.after and v in self.operators.maker:
            i, k = self.operators.maker[v]
            states = made(self.found, self.operators.steps[i], k)
        return local_shape(self.found, self.graph.values[v].shape, states, self.rank)

    def around(
        self, run: int, key: CallKey, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], action: OpAction | None
    ) -> Any:
        """Call a function, compare, and run its operators in its stead where it does otherwise."""
        self.last = run
        number = self.calls.get((run, key))
        if number is None:  # no operators ran in it
            return self._unknown(run, key, func, args, kwargs)
        self.met.add(number)
        call = self.graph.calls[number]
        action = action or OpAction(number)
        if not action.why:
            action.why = self._another(call)
        before = self.record.ran = []
        if not action.why:
            try:
                found = done(self._now, action, func, args, kwargs)
            except (RuntimeError, ValueError, TypeError) as error:
                found, action.why = None, f"it fails on a part: {(str(error).splitlines() or [''])[0]}"
            else:
                action.why = self._unlike(call, before) or self._of_other_size(call, action, found)
            if not action.why:
                return found
        self.program.actions.setdefault(run, {})[key] = action
        self._see_other_parts(call, action, tree_leaves((args, kwargs)))
        return self.instead(action, ())

    def _see_other_parts(self, call: Called, action: OpAction, leaves: Sequence[Any]) -> None:
        """Keep where an operator would be run on a tensor of another size than was derived for it."""
        here = {v: x.shape for v, x in zip(call.takes, leaves, strict=True) if v is not None}
        for i in self.operators.live(call):
            node, step = self.graph.nodes[i], self.operators.steps[i]
            for place, v in enumerate(places_of(node, step) if step.call.name not in OF_NO_SIZE else ()):
                if v is None or v not in here:
                    continue
                at = self.found.mesh.coords(self.rank)
                got = tuple(sizes_after(here[v], action.before.get((i, place), ()), self.sizes, at))
                want = local_shape(self.found, self.graph.values[v].shape, needed(self.found, step, place), self.rank)
                if got != want:
                    said = f"{call.line}: {call.function} is given {got} on a part, not {want}"
                    self.unfit = self.unfit or _OtherWayError(said, call.run)

    def _unknown(self, run: int, key: CallKey, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that runs no operators, if so."""
        count = len(self.record.ran)
        found = func(*args, **kwargs)
        if any(call.name not in PASSING for call, _ in self.record.ran[count:]):
            raise _OtherWayError(f"{key[0]}: {key[1]} is called on a part only", run)
        return found

    def refuse_left_out(self) -> None:
        """Raise _OtherWayError for a call that the code makes on the whole only."""
        does = {action.call for own in self.program.actions.values() for action in own.values()}
        for number, call in enumerate(self.graph.calls):
            ran = (i for i in range(call.first, call.stop) if not self._passes(i))
            if number not in self.met and (number in does or any(self._counts(i, call) for i in ran)):
                raise _OtherWayError(f"{call.line}: {call.function} is not called on a part", call.run)

    def refuse_other_results(self, results: Any) -> None:
        """Raise _OtherWayError for a result of the model of which a rank has another part than was derived."""
        at, root = next((at, run) for at, run in enumerate(self.graph.runs) if run.parent is None)
        for v, x in zip(root.gives, tree_leaves(results), strict=True):
            if v is not None and tuple(x.shape) != (want := self._shape(v)):
                raise _OtherWayError(f"the model gives {tuple(x.shape)} on a part, not {want}", at)

    def _passes(self, i: int) -> bool:
        """Whether what follows a node is the same without it: it gives what it takes, or repeats it for nobody's part.

        Code may repeat rows only where there are several of them, and on a part there is one.
        """
        name, v = self.operators.steps[i].call.name, self.graph.nodes[i].results[0]
        if name != "expand" or v is None:
            return name in PASSING
        there = used(self.found, self.found.folded.classes[v])
        takers = (
            (j, place)
            for j in self.graph.takers.get(v, ())
            if j in self.operators.steps
            for place, own in enumerate(places_of(self.graph.nodes[j], self.operators.steps[j]))
            if own == v
        )
        ways = [made(self.found, self.operators.steps[i], 0)]
        ways += [
            needed(self.found, self.operators.steps[j], place)
            for j, place in takers
            if not self.graph.nodes[j].backward
        ]
        return all(own.get(axis, state) == state for own in ways for axis, state in there.items())

    def _another(self, call: Called) -> str:
        """Whether some operator is another one on a part, or draws: what it draws is by the place in the whole."""
        for i in range(call.first, call.stop):
            step = self.operators.steps[i]
            if draws(step) or draws_full_tensor(step):
                return f"{step.call.name} draws random numbers"
            if not self.operators.as_it_is(i):
                return f"{step.call.name} is another operator on a part"
        return ""

    def _unlike(self, call: Called, ran: Sequence[tuple[OpCall, list[Any]]]) -> str:
        """How what a function ran differs from what was derived; "" where it does not."""
        there = [one for one in ran if one[0].name not in PASSING]
        for i in range(call.first, call.stop):
            name = self.operators.steps[i].call.name
            if self.graph.nodes[i].implied or name in PASSING:
                continue
            if not there or there[0][0].name != name:
                if self._counts(i, call):
                    return "it runs other operators on a part"
            elif reason := self._differs(i, *there.pop(0)):
                return reason
        return "it runs other operators on a part" if there else ""

    def _counts(self, i: int, call: Called) -> bool:
        """Whether anything comes of what a node gives: autograd makes views anew that nobody takes."""
        return any(
            v in call.gives
            or any(j not in range(call.first, call.stop) or self._counts(j, call) for j in self.graph.takers.get(v, ()))
            for v in self.graph.nodes[i].results
            if v is not None
        )

    def _differs(self, i: int, ran: OpCall, results: Sequence[Any]) -> str:
        node, step = self.graph.nodes[i], self.operators.steps[i]
        given = [v for v in node.results if v is not None]
        shapes = [tuple(x.shape) for x in results if isinstance(x, Tensor)]
        for k, (v, shape) in enumerate(zip(given, shapes, strict=True)):
            want = local_shape(self.found, self.graph.values[v].shape, made(self.found, step, k), self.rank)
            if shape != want:
                return f"{step.call.name} gives {shape} on a part, not {want}"
        own = arguments_of(step.call, step.bound, self.operators.part(step))
        told = called(self.found, step).arguments
        for name, value in node.arguments.items():
            if name in SIZES or _has_tensors(value):
                continue
            want = own.get(name, told[name])
            if _plain(ran.arguments[name]) != _plain(want):
                return f"{step.call.name} is told {name}={ran.arguments[name]} on a part, not {want}"
        return ""


def _refuse_transforms() -> None:
    """Raise UserError within a transform of torch.func: its tensors stand for others, which no collective takes."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        raise UserError(
            f"{line_of(caller(sys._getframe(1)))}: a tensor would move between ranks within a transform of "  # pyright: ignore[reportPrivateUsage]
            "torch.func (vmap, grad, jacrev, ...), which no collective can: call the layers that lie in parts outside "
            "of it"
        )


def _has_tensors(value: Any) -> bool:
    leaves: list[Any] = tree_leaves(value, is_leaf=lambda x: isinstance(x, Ref))
    return any(isinstance(x, Ref) for x in leaves)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
