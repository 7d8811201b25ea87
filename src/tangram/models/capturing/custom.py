"""What a model's own `torch.autograd.Function` does: which operators ran in it, and whether its backward is known.

Operators inside are written down as any, and how their gradients flow is not: the backward is code of its own. It sees
whole tensors then, but where forward and backward are element by element, as of an activation: so each of its elements
can be worked out wherever it lies. Whether it is so is seen by running the backward once, without memory.

Functions of torch's own are left out: what `torch.utils.checkpoint` calls is differentiated when it is called again,
and an operator of one's own (`torch.library`) has a rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.models.capturing.called import caller, line_of
from tangram.models.capturing.graph import Custom, Node, Value

_APPLY = torch.autograd.Function.apply.__code__
_BACKWARD = BackwardCFunction.apply.__code__
_CALL = torch.nn.Module._call_impl.__code__  # pyright: ignore[reportPrivateUsage]
_PASSING = frozenset({"aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::view", "aten::view_as"})
"""Operators that give every element as it is, where the size stays."""
_LIKE = frozenset({"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like"})


def outermost(frame: FrameType | None) -> FrameType | None:
    """The frame in which the outermost Function of a model's own is applied; None where none is."""
    found = None
    while frame is not None:
        if frame.f_code is _APPLY and not frame.f_locals["cls"].__module__.startswith("torch."):
            found = frame
        frame = frame.f_back
    return found


def _in_module(frame: FrameType | None) -> bool:
    """Whether a module's forward stands between a frame and the backward that is tried."""
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False


@dataclass
class _Applied:
    """A Function, while it is written down."""

    kind: type
    line: str
    first: int
    stop: int
    takes: Sequence[int]
    """The tensors among its arguments."""
    runs: list[int] = field(default_factory=list[int])


class _Ran(TorchDispatchMode):
    """Keeps the operators that run, each with the leaves that it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[OpOverload, list[Any], list[Any]]] = []
        self.draws = False
        """Whether code draws random numbers outside of any module's forward."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws |= not _in_module(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        self.seen.append((func, tree_leaves((args, kwargs)), tree_leaves(found)))
        return found


@dataclass
class Customs:
    """The Functions that a capture has come across.

    `number_of`: of a tensor, None where it is not known; `bearers`: of a number, the tensors.
    """

    number_of: Callable[[Tensor], int | None]
    bearers: Mapping[int, Sequence[Tensor]]
    applied: list[_Applied] = field(default_factory=list[_Applied])
    _frame: FrameType | None = None
    """The last: held, so that no other has its identity."""

    def see(self, frame: FrameType | None, node: int, run: int | None = None) -> None:
        """Below a frame comes node `node`, or the run of a module that begins with it."""
        within = outermost(frame)
        if within is not None and within is not self._frame:
            takes = [v for x in tree_leaves(within.f_locals["args"]) if isinstance(x, Tensor) for v in self._of(x)]
            self.applied.append(_Applied(within.f_locals["cls"], line_of(caller(within.f_back)), node, node, takes))
        self._frame = within
        if within is not None and run is None:
            self.applied[-1].stop = node + 1
        elif within is not None and run is not None:
            self.applied[-1].runs.append(run)

    def tried(self, nodes: Sequence[Node], values: Sequence[Value], fake: FakeTensorMode) -> tuple[Custom, ...]:
        """All of them, each with what its backward does when it is called once, in a mode without memory."""
        self._frame = None
        return tuple(self._tried(one, nodes[one.first : one.stop], values, fake) for one in self.applied)

    def _tried(self, one: _Applied, nodes: Sequence[Node], values: Sequence[Value], fake: FakeTensorMode) -> Custom:
        ran, given = _Ran(), None
        with suppress(Exception), fake, ran, torch.no_grad():  # whatever a model's code raises
            given = self._backward(one, nodes)
        own = dict.fromkeys([*one.takes, *(v for node in nodes for v in _all(node))])
        read = (v for _, takes, _ in ran.seen for x in takes if isinstance(x, Tensor) for v in self._of(x))
        late = tuple(dict.fromkeys(v for v in read if v not in own))
        each = given is not None and _connected(one.takes, nodes, values) and _by_element(given, ran.seen)
        where = one.kind.__name__, one.line, one.first, one.stop
        return Custom(*where, (*own, *late), late, tuple(one.runs), each, ran.draws)

    def _backward(self, one: _Applied, nodes: Sequence[Node]) -> Tensor | None:
        """Run the backward for its only result: the gradient that was given to it; None where it is not known."""
        results = {v: None for node in nodes for v in node.results if v is not None}
        made = [x for v in results for x in self.bearers.get(v, ()) if _is_of(x.grad_fn, one.kind)]
        functions = {id(x.grad_fn): cast(Any, x.grad_fn) for x in made}
        if len(functions) != 1:
            return None
        (function,) = functions.values()
        if len(function._input_metadata) != 1:  # one for each result
            return None
        given = torch.ones_like(made[0])
        function.apply(given)
        return given

    def _of(self, x: Tensor) -> Iterator[int]:
        number = self.number_of(x)
        if number is not None:
            yield number


def _all(node: Node) -> list[int]:
    return [v for v in (*node.inputs, *node.results) if v is not None]


def _is_of(function: Any, kind: type) -> bool:
    return isinstance(function, BackwardCFunction) and cast(Any, function)._forward_cls is kind


def _by_element(given: Tensor, ran: Sequence[tuple[OpOverload, list[Any], list[Any]]]) -> bool:
    """Whether operators give each element of a gradient's size from elements in the same place, and from numbers."""
    return all(
        _plain(func) and all(x.shape in (given.shape, ()) for x in (*takes, *gives) if isinstance(x, Tensor))
        for func, takes, gives in ran
    )


def _plain(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags or func.name().split(".")[0] in _PASSING | _LIKE


def _connected(takes: Sequence[int], nodes: Sequence[Node], values: Sequence[Value]) -> bool:
    """Whether all that a Function takes goes, element by element, into what one chain of its operators gives."""
    sizes = {values[v].shape for v in takes}
    groups: list[set[int]] = [{v} for v in takes]
    for node in nodes:
        own = {*_all(node)}
        sizes |= {values[v].shape for v in own if values[v].shape}
        met = [group for group in groups if group & own]
        groups = [*(group for group in groups if not group & own), own.union(*met)]
    return len(sizes) == 1 and len(groups) == 1 and all(_plain(node.operator) for node in nodes)
