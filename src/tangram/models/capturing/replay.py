"""A graph run on real tensors: the proof that what was captured is what the model does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from tangram.models.capturing.graph import Graph, Node, filled, flat


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
