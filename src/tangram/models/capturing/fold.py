"""Folding: which layers of a graph are the same, so that what is worked out for one serves all.

Two blocks are of one kind when their nodes are: the same operators with the same arguments, tensors of the same shapes,
dtypes and kinds, taken from the same places. So 61 layers of which 3 are dense are two kinds, and a layer that looks at
another window is a kind of its own. Nothing is known of architectures: a block is what runs inside a member of an
outermost list of modules.

Trade-off: layers that a model calls twice, or whose nodes are not in one run, are no blocks and stay as they are.

Capturing a hundred layers costs as much as a few where each kind of block runs once (`run_once`). There two blocks are
of one kind when their modules are: classes, plain attributes, shapes of parameters and which of them are another
block's, and what lists of the configuration with an entry for each block say of them. In the place of a block that is
like one before it stands what gives what it takes (`stages.Through`). What a model's code makes of a block's number
alone is not seen; blocks that give more than hidden states cannot be left out: then the capture fails, and the caller
captures the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

from torch import nn

from tangram.models.capturing.graph import Block, Graph, Ref
from tangram.models.capturing.stages import Through


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


# ---------------------------------------------------------------- a model of which each kind of block runs once

_NUMBERED = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "idx", "block_idx"})
"""Attributes that say which block it is."""


def kinds_of(model: nn.Module, blocks: Sequence[str]) -> list[int]:
    """For each block the number of the first that is like it."""
    owner: dict[int, str] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        owner.setdefault(id(one), name)
    said = _listed(getattr(model, "config", None), len(blocks))
    seen: dict[Any, int] = {}
    return [seen.setdefault(_module_kind(model, path, owner, said[at]), at) for at, path in enumerate(blocks)]


def run_once(model: nn.Module, blocks: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Leave only the first block of each kind in the model, which is changed; the names of those that are left."""
    for at, (path, kind) in enumerate(zip(blocks, kinds, strict=True)):
        if kind != at:
            model.set_submodule(path, Through(model.get_submodule(path)))
    return [path for at, (path, kind) in enumerate(zip(blocks, kinds, strict=True)) if kind == at]


def _listed(config: Any, count: int) -> list[tuple[Any, ...]]:
    """What the configuration's lists of so many entries say of each block."""
    own = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields: dict[str, Any] = own.to_dict() if hasattr(own, "to_dict") else {}
    lists = [
        [*cast("Iterable[Any]", fields[name])] for name in sorted(fields) if isinstance(fields[name], list | tuple)
    ]
    by_block = [one for one in lists if len(one) == count]
    return [tuple(repr(one[at]) for one in by_block) for at in range(count)]


def _module_kind(model: nn.Module, path: str, owner: Mapping[int, str], said: tuple[Any, ...]) -> Any:
    block = model.get_submodule(path)
    modules = tuple(
        (name, type(module).__qualname__, _plain(module))
        for name, module in cast("Iterable[tuple[str, nn.Module]]", block.named_modules())
    )
    parameters = tuple(
        (name, tuple(one.shape), one.requires_grad, "" if owner[id(one)].startswith(f"{path}.") else owner[id(one)])
        for name, one in block.named_parameters(remove_duplicate=False)
    )
    return modules, parameters, said


def _plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Its attributes that are numbers and texts, but for its own number."""
    found = {name: value for name, value in vars(module).items() if name not in _NUMBERED}
    kinds = (bool, int, float, str, type(None))
    return tuple(sorted((name, repr(value)) for name, value in found.items() if isinstance(value, kinds)))
