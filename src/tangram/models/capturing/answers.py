"""Numbers that code reads out of tensors without memory, where they follow from what is known.

`bool((mask == causal).all())` of a mask that the code has made of nothing but sizes has one answer, whoever runs it. It
is worked out on real tensors from the nodes that were written down so far; a run later looks whether it is the same.
Small inputs of integers that come with their values, as the sizes of images (`image_grid_thw`), are known, too: what is
captured is then right for values of which code reads the same (`still_right`). What follows from other inputs, from
parameters, buffers or random numbers has no answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.models.capturing.graph import Graph, Node, Read, Value, filled, flat

aten = torch.ops.aten
ASKING = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})
"""Operators that give a number, and no tensor."""
MOST = 1 << 28
"""Elements of a tensor that is worked out."""
_OF_SIZES = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")


class Known:
    """The values of a graph that is being written that follow from known ones."""

    def __init__(
        self, values: Sequence[Value], nodes: Sequence[Node], known: Mapping[int, Tensor], numbers: Sequence[int]
    ) -> None:
        """`known`: by their number, with values. `numbers`: those that are asked for."""
        self._values, self._nodes, self._given, self._numbers = values, nodes, known, tuple(numbers)
        self._maker = {v: i for i, node in enumerate(nodes) for v in node.results if v is not None}
        self._done: dict[int, Tensor] = {}
        self._needed: dict[int, None] = {}
        self._all = all(self._reached(number) for number in numbers)

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator gives of arguments with references; None where they are not known."""
        if not self._all:
            return None
        with _disable_current_modes(), torch.no_grad():
            for i in sorted({self._maker[v] for v in self._needed if v in self._maker}):
                node = self._nodes[i]
                if all(v in self._done for v in node.results if v is not None):
                    continue
                made = run(node, filled(node.arguments, self._real))
                self._done.update({v: r for v, r in zip(node.results, made, strict=True) if v is not None})
            return func(*filled([*args], self._real), **filled({**kwargs}, self._real))

    def read(self, line: str, func: Any, arguments: tuple[list[Any], dict[str, Any]], answer: Any) -> Read:
        """What was answered, in a line of the code."""
        known = (self._values[v] for v in self._needed if v in self._given)
        return Read(
            line, func, arguments, answer, self._numbers, tuple(one.name for one in known if one.kind == "input")
        )

    def _real(self, v: int) -> Tensor:
        if v in self._done:
            return self._done[v]
        value = self._values[v]
        if v in self._given:
            return self._given[v]
        return torch.empty(value.shape, dtype=value.dtype)  # only its size counts

    def _reached(self, number: int) -> bool:
        """Whether a value follows from numbers; what it takes is noted."""
        waiting = [number]
        while waiting:
            v = waiting.pop()
            if v in self._needed:
                continue
            self._needed[v] = None
            value = self._values[v]
            if v in self._given:
                continue
            if v not in self._maker or math.prod(value.shape) > MOST:
                return False
            node = self._nodes[self._maker[v]]
            if torch.Tag.nondeterministic_seeded in node.operator.tags:
                return False
            if not node.operator.name().partition("::")[2].startswith(_OF_SIZES):
                waiting += node.inputs
        return True


def still_right(graph: Graph, inputs: Mapping[str, Tensor]) -> bool:
    """Whether code would read of these inputs what it has read in the capture, and get tensors of the same sizes."""
    reads = [one for one in graph.reads if one.inputs]
    given = {v: graph.constants[value.name] for v, value in graph.of_kind("buffer") if value.name in graph.constants}
    read = {v: inputs[value.name] for v, value in graph.of_kind("input") if value.name in graph.read_inputs}
    given |= {v: x.detach().cpu() for v, x in read.items()}
    known = Known(graph.values, graph.nodes, given, [v for one in reads for v in one.values])
    try:
        return all(_comparable(known.answer(one.operator, *one.arguments)) == _comparable(one.answer) for one in reads)
    except (RuntimeError, IndexError, ValueError):  # sizes that stand in the nodes are not those of these values
        return False


def _comparable(answer: Any) -> Any:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in tree_leaves(answer)]


# ----------------------------------------------------------------
# A graph run on real tensors: the proof that what was captured is what the model does.


def replay(graph: Graph, given: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Every value, by number; `given` are the parameters, buffers and inputs by name. None of them is written.

    Raises KeyError for one that is missing, and what operators raise where sizes are not those of the capture.
    """
    given = {**graph.constants, **given}
    found = {i: given[value.name] for i, value in graph.of_kind("parameter", "buffer", "input")}
    for node in graph.nodes:
        results = run(node, filled(node.arguments, found.__getitem__))
        found.update({v: r for v, r in zip(node.results, results, strict=True) if v is not None})
    return found


def run(node: Node, arguments: Mapping[str, Any]) -> list[Any]:
    """What a node gives, lists of tensors flattened; what it would write is copied first."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in cast(Any, node.operator)._schema.arguments:
        value = arguments[argument.name]
        if argument.is_write:
            value = value.clone()
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return defined(node, flat(node.operator(*positional, **named)))


def defined(node: Node, results: list[Any]) -> list[Any]:
    """What a node gives, with zeros where it gives memory as it finds it: so that two runs can be compared."""
    name = node.operator.name().partition("::")[2]
    return [r.zero_() for r in results] if name.startswith(("empty", "new_empty")) else results
