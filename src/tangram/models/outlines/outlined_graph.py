"""An outline from a captured graph: a block's table from what its own code runs, without a formula of its kind.

    graph = folded(capture(model, {"input_ids": ids}, loss=lambda output: output.logits.float().sum()), paths)
    outline_of_graph(graph, "mine")

Rows are made of the graph's operators (`models.outlines.flow`), cut as `models.outlines.fused` says:

    products   with weights; those that meet the same rows and are cut alike are one, as queries, keys and values
    scores     fused attention, and attention that is written out; shared heads of keys are seen in what is repeated
    batched    products of two results, as many as the capture has for its tokens
    streams    of operators that hang together what they read from outside and write to outside, each once: a kernel
               that is fused has no more. The backward reads the gradients of what was written and what was kept, and
               writes gradients of what was read
    kept       what the captured backward takes of the forward. Of what is made within a fused kernel its inputs, of
               which it is made again, and so of a scan in chunks; storages count once

So the table is in the terms of `models.outlines.outline.decoder`. What depends on no token (masks, angles) is not
counted: all blocks share it. Scans are as the code has them where no kernel is installed: in chunks, with products
within and between them, or step by step, where the states are taken to stay inside one fused kernel as all that hangs
together is.

Sizes are linear in tokens: a capture of two chunks stands for longer ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tangram.errors import UserError
from tangram.models.capturing.graph import Block as Place
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.blocks import Batched, Block, Cut, Group, Product, Scores
from tangram.models.outlines.flow import Flow, name_of
from tangram.models.outlines.fused import Cuts, cuts_of, fused_of
from tangram.models.outlines.outline import Outline, runs_of
from tangram.models.outlines.recognised import flow_of


@dataclass(frozen=True)
class Masks:
    """What the scores of a block leave out, which a graph does not show where masks are tensors."""

    window: int = 0
    chunk: int = 0
    causal: bool = True


def outline_of_graph(
    graph: Graph, name: str, *, masks: Mapping[str, Masks] | None = None, order: Sequence[int] | None = None
) -> Outline:
    """The outline of a model from its graph, captured with a loss and folded (`models.capturing.fold`).

    `masks`: of blocks by path, what their masks leave out; else keys after a query where there is a mask or attention
    is told that it is causal. `order`: where not all blocks were captured, for each of the model's its number among
    `graph.blocks`.

    Raises UserError for a graph without blocks, embedding or backward.
    """
    if not graph.blocks:
        raise UserError(f"{name} has no blocks that run once and in one piece: an outline is a table for each of them")
    if not any(node.backward for node in graph.nodes):
        raise UserError(
            f"{name} was captured without a loss: what its backward needs is not known, so give capture one"
        )
    tables = [block_of(graph, one, (masks or {}).get(one.path)) for one in graph.blocks]
    blocks = [tables[at] for at in order] if order is not None else tables
    hidden = flow_of(graph, graph.blocks[0]).hidden
    embedded = _embedded(graph, name)
    vocab, width = graph.values[embedded].shape
    head = _head(graph, vocab, width)
    own = {one.path for one in graph.blocks}
    beside = sum(
        prod(value.shape)
        for _, value in graph.of_kind("parameter")
        if not any(_within(value.name, path) for path in own)
    )
    tied = head is None or head == embedded
    ends = vocab * hidden * (1 if tied else 2) + hidden
    return Outline(name, hidden, vocab, tied, runs_of(blocks), further=beside - ends, graph=True)


def block_of(graph: Graph, place: Place, masks: Masks | None = None) -> Block:
    """The table of one block. Raises UserError where it hands on no hidden states."""
    flow = flow_of(graph, place)
    cuts = cuts_of(flow)
    fused = fused_of(flow, cuts)
    products, numbers = _products(flow, cuts)
    own = sum(prod(value.shape) for _, value in graph.of_kind("parameter") if _within(value.name, place.path))
    experts = max((one.experts for one in products), default=0)
    to = _per_token(flow, fused.spread) if experts else 1
    return Block(
        _name(flow, experts),
        products,
        _scores(flow, masks),
        fused.streams(),
        fused.kept(),
        own - numbers,
        experts,
        to,
        all_rows=to < fused.spread,
        batched=_batched(flow, cuts),
    )


def _within(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


def _name(flow: Flow, experts: int) -> str:
    """By what mixes its tokens, and whether it has experts."""
    attends, scans = bool(flow.attended), bool(flow.mixing - flow.scores.keys())
    words = [word for word, there in (("attention", attends), ("scan", scans), ("mixture", experts > 0)) if there]
    return " + ".join(words) or "dense"


def _products(flow: Flow, cuts: Cuts) -> tuple[tuple[Product, ...], int]:
    """Rows, and how many of the block's own numbers they have."""
    rows: dict[tuple[int, str, Group, int, bool, bool], Product] = {}
    counted = set[int]()
    for i, one in flow.products.items():
        way, group = cuts.products[i], Group.ATTENTION if i in flow.attention else Group.MLP
        names = {flow.graph.values[v].name for v in one.parameters}
        shared = not all(_within(name, flow.block.path) for name in names) or bool(one.parameters & counted)
        counted |= one.parameters
        experts = one.stacked if one.stacked > 1 and cuts.choosing else 0
        # Matrices beside each other that no token chooses between are one that is mostly nothing.
        inputs = one.inputs * (1 if experts else one.stacked)
        key = (flow.base(one.input) if way == "out" else -i, way, group, experts, shared, one.bias)
        said = flow.graph.nodes[i].module.removeprefix(f"{flow.block.path}.")
        known = rows.get(key)
        if known is None:
            rows[key] = Product(said, inputs, one.outputs, way, group, experts, one.bias, shared=shared)
        else:
            rows[key] = replace(known, name=f"{known.name}, {said}", outputs=known.outputs + one.outputs)
    found = tuple(rows.values())
    return found, sum(one.numbers for one in found)


def _batched(flow: Flow, cuts: Cuts) -> tuple[Batched, ...]:
    rows: dict[tuple[int, int, int, Cut, Group], Batched] = {}
    for i, (count, m, k, n) in flow.batched.items():
        cut = cuts.values[next(iter(flow.makes(i)))]
        group = Group.ATTENTION if i in flow.attention else Group.MLP
        times = count / flow.tokens
        known = rows.get(key := (m, k, n, cut, group))
        if known is not None:
            rows[key] = replace(known, times=known.times + times)
        else:
            rows[key] = Batched(name_of(flow.graph.nodes[i]), m, k, n, times, cut, group)
    return tuple(rows.values())


def _scores(flow: Flow, masks: Masks | None) -> tuple[Scores, ...]:
    found: list[Scores] = []
    for one in flow.attended:
        shown = masks or Masks(one.window, causal=one.causal)
        found.append(
            Scores(one.heads, one.kv_heads, one.qk_dim, one.v_dim, shown.window, chunk=shown.chunk, causal=shown.causal)
        )
    return tuple(found)


def _per_token(flow: Flow, spread: int) -> int:
    """To how many experts a token goes: as many as are chosen, where all are computed of all tokens."""
    chosen = [flow.graph.nodes[i].arguments.get("k") for i in flow.nodes if name_of(flow.graph.nodes[i]) == "topk"]
    stacked = max((one.stacked for one in flow.products.values()), default=1)
    return int(min(filter(None, chosen), default=spread)) if spread == stacked else spread


def _embedded(graph: Graph, name: str) -> int:
    """The table of parameters that the model's first input of whole numbers is looked up in."""
    given: dict[int, int] = {v: v for v, value in graph.of_kind("input") if not value.dtype.is_floating_point}
    for node in graph.nodes[: graph.blocks[0].first]:
        inputs = [given[v] for v in node.inputs if v in given]
        if name_of(node) == "embedding" and inputs:
            return next(v for v in node.inputs if graph.values[v].kind == "parameter")
        if inputs and not any(
            graph.values[v].dtype.is_floating_point for v in (*node.inputs, *node.results) if v is not None
        ):  # views, and places of images that are masked
            given.update((v, inputs[0]) for v in node.results if v is not None)
    raise UserError(f"{name} looks no tokens up in a table: an outline begins with an embedding")


def _head(graph: Graph, vocab: int, width: int) -> int | None:
    """The weight of the last product with as many outputs as there are tokens."""
    stop = graph.blocks[-1].stop
    made: dict[int, int] = {v: v for v, _ in graph.of_kind("parameter")}
    found = None
    for i, node in enumerate(graph.nodes):
        if node.backward:
            break
        weights = [made[v] for v in node.inputs if v in made]
        if i >= stop and name_of(node) in ("mm", "addmm", "bmm") and weights:
            shapes = {v: graph.values[v].shape for v in weights}
            found = next((v for v, shape in shapes.items() if set(shape) >= {vocab} and len(shape) == 2), found)
        elif len(weights) == 1 and len(node.inputs) == 1:
            made.update((v, weights[0]) for v in node.results if v is not None)
    return found
