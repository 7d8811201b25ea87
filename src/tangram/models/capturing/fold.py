"""Folding: which layers of a graph are the same, so that what is worked out for one serves all.

Two blocks are of one kind when their nodes are: the same operators with the same arguments, tensors of the same shapes,
dtypes and kinds, taken from the same places. So 61 layers of which 3 are dense are two kinds, and a layer that looks at
another window is a kind of its own. Nothing is known of architectures: a block is what runs inside a member of an
outermost list of modules.

Trade-off: layers that a model calls twice, or whose nodes are not in one run, are no blocks and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

from tangram.models.capturing.graph import Block, Graph, Ref


def folded(graph: Graph, paths: Sequence[str]) -> Graph:
    """The graph with its blocks; `paths` are those of the modules that repeat (`costs.block_names`)."""
    forward = [i for i, node in enumerate(graph.nodes) if not node.backward]
    owners = _owners(graph, paths)
    runs = [(path, [*nodes]) for path, nodes in groupby(forward, owners.__getitem__)]
    times: dict[str, int] = {}
    for path, _ in runs:
        times[path] = times.get(path, 0) + 1
    last = _last_use(graph)
    kinds: dict[Any, int] = {}
    blocks: list[Block] = []
    for path, nodes in runs:
        if not path or times[path] > 1:
            continue
        first, stop = nodes[0], nodes[-1] + 1
        made = {v for i in nodes for v in graph.nodes[i].results if v is not None}
        takes = tuple(dict.fromkeys(v for i in nodes for v in graph.nodes[i].inputs if v not in made))
        gives = tuple(sorted(v for v in made if last.get(v, -1) >= stop))
        signature = _signature(graph, range(first, stop), takes, gives, path)
        blocks.append(Block(path, first, stop, kinds.setdefault(signature, len(kinds)), takes, gives))
    return replace(graph, blocks=tuple(blocks))


def _owners(graph: Graph, paths: Sequence[str]) -> Sequence[str]:
    """Of each node the path that it runs in, or "".

    A module that several layers call, as one activation for all of them, has the path of the first, so who called it
    counts, where that is known.
    """
    known: dict[str, str] = {}

    def owner(module: str) -> str:
        if module not in known:
            known[module] = next((p for p in paths if module == p or module.startswith(f"{p}.")), "")
        return known[module]

    found = [owner(node.module) for node in graph.nodes]
    outermost: list[str] = []
    for run in graph.runs:
        outermost.append((outermost[run.parent] if run.parent is not None else "") or owner(run.module))
        found[run.first : run.stop] = [outermost[-1] or one for one in found[run.first : run.stop]]
    return found


def _last_use(graph: Graph) -> dict[int, int]:
    """For each value the last node of the forward that takes it; results of the graph are taken after all."""
    found = {v: i for i, node in enumerate(graph.nodes) if not node.backward for v in node.inputs}
    return {**found, **{v: len(graph.nodes) for v in graph.outputs.values()}}


def _signature(graph: Graph, nodes: range, takes: Sequence[int], gives: Sequence[int], path: str) -> Any:
    """What two blocks have in common if they are the same; it can be compared and hashed."""
    local: dict[int, int] = {v: -1 - i for i, v in enumerate(takes)}
    for i in nodes:
        for value in graph.nodes[i].results:
            if value is not None:
                local.setdefault(value, len(local))

    def meta(v: int) -> Any:
        value = graph.values[v]
        standing = value.kind in ("parameter", "buffer")
        name = value.name.removeprefix(path) if standing else ""
        if value.name in graph.constants:  # each layer makes its own, of the same numbers
            name = repr(cast("Any", graph.constants[value.name]).tolist())
        # What the model is given lies as it is given: a block that takes it is unlike one that takes another's result.
        return value.shape, value.stride, value.dtype, standing, value.kind == "input", name, value.trained

    listed = [
        (
            node.operator.name(),
            _frozen(node.arguments, local),
            tuple(-1 if v is None else local[v] for v in node.results),
            node.module.removeprefix(path),
            node.source,
        )
        for node in graph.nodes[nodes.start : nodes.stop]
    ]
    made = [meta(v) for i in nodes for v in graph.nodes[i].results if v is not None]
    return tuple(listed), tuple(map(meta, takes)), tuple(made), tuple(local[v] for v in gives)


def _frozen(arguments: Any, local: Mapping[int, int]) -> Any:
    if isinstance(arguments, Ref):
        return ("%", local[arguments.value])
    if isinstance(arguments, Mapping):
        return tuple((name, _frozen(one, local)) for name, one in cast("Mapping[str, Any]", arguments).items())
    if isinstance(arguments, list | tuple):
        return tuple(_frozen(one, local) for one in cast("Sequence[Any]", arguments))
    if isinstance(arguments, bool | float):  # 1 == 1.0 == True
        return (type(arguments).__name__, repr(arguments))
    return arguments


def pairs(graph: Graph, one: Block, other: Block) -> Iterator[tuple[int, int]]:
    """The values of a block beside those of another one of its kind: what they take, then what they make."""
    yield from zip(one.takes, other.takes, strict=True)
    here, there = (graph.nodes[block.first : block.stop] for block in (one, other))
    for a, b in zip(here, there, strict=True):
        for v, w in zip(a.results, b.results, strict=True):
            if v is not None and w is not None:
                yield v, w
