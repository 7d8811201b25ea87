"""What the operators of one block of a captured graph are.

product   with a weight, which is made of parameters alone; `Matmul` says of which
batched   of two results, as in a chunked scan; triangular systems count as the products that solving them takes,
          and products with vectors as streams, which memory bounds
scores    fused attention, whatever it runs within; and what a block writes as product, softmax, product
stream    everything else that takes or makes numbers; copies that only reorder are seen through, as views are
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tangram.errors import UserError
from tangram.models.capturing.graph import Block, Called, Graph, Node, refs
from tangram.models.outlines.flow import Attended, Flow, Matmul, name_of

_OPERANDS: Mapping[str, tuple[str, str, str]] = {
    "mm": ("self", "mat2", ""),
    "addmm": ("mat1", "mat2", "self"),
    "bmm": ("self", "mat2", ""),
    "baddbmm": ("batch1", "batch2", "self"),
    "_grouped_mm": ("self", "mat2", "bias"),
}
"""Of each product the names of its factors and of what is added."""
ATTENTION = "scaled_dot_product_attention"
SOLVES = "linalg_solve_triangular"
_COPIES = frozenset({"_unsafe_view", "clone", "detach", "alias", "contiguous", "lift_fresh", "expand", "reshape"})


def flow_of(graph: Graph, block: Block) -> Flow:
    """Of one block. Raises UserError where it is not given hidden states, or none of its products gives such back."""
    main = _block_input(graph, block)
    flow = Flow(graph, block, main, graph.values[main].shape[-1])
    flow.alive.update(v for v in block.takes if v == main or graph.values[v].differentiable)
    flow.alive -= {v for v in block.takes if graph.values[v].kind != "made"}
    flow.alive.add(main)
    for v in block.takes:
        if graph.values[v].kind == "parameter":
            flow.made_of[v] = frozenset((v,))
    calls = {i: call for call in graph.calls if call.function == ATTENTION for i in range(call.first, call.stop)}
    for i in flow.nodes:
        _take(flow, i, calls.get(i))
    _write_together(flow)
    _find_residual(flow)
    return flow


def _block_input(graph: Graph, block: Block) -> int:
    """The first tensor that the block's module was called with, that gradients flow through."""
    run = next((run for run in graph.runs if run.module == block.path), None)
    for value in (*(run.takes if run else ()), *block.takes):
        if value is not None and value in block.takes:
            one = graph.values[value]
            if one.kind in ("made", "input") and one.dtype.is_floating_point and len(one.shape) > 1:
                return value
    raise UserError(f"{block.path} is given no hidden states: an outline needs blocks that hand them on")


def _take(flow: Flow, i: int, call: Called | None) -> None:
    """Say what a node is."""
    node = flow.graph.nodes[i]
    alive = [v for v in node.inputs if v in flow.alive]
    if not alive:
        of = [flow.made_of[v] for v in node.inputs if v in flow.made_of]
        if of:
            flow.made_of.update(dict.fromkeys(flow.makes(i), frozenset[int]().union(*of)))
        return
    flow.alive.update(flow.makes(i))
    name, made = name_of(node), list(flow.makes(i))
    if call is not None or "attention" in name or name.endswith("attend"):
        _attend(flow, i, call)
    elif _is_view(node, name):
        for v in made:
            flow.bases[v] = flow.base(alive[0])
            flow.origins[v] = flow.origin(alive[0])
    elif not _is_product(flow, i, name):
        flow.memory_bound.add(i)
        alone = len(alive) == 1 and not set(node.inputs) & flow.made_of.keys()
        if name == "_to_copy" or (name in ("mul", "div") and alone):
            flow.origins.update(dict.fromkeys(made, flow.origin(alive[0])))


def _attend(flow: Flow, i: int, call: Called | None) -> None:
    """A node of attention: of a call of torch's, or fused by itself."""
    flow.mixing.add(i)
    if call is None:
        node = flow.graph.nodes[i]
        flow.attended.append(
            _attended(flow, frozenset((i,)), _query_key_value(node), next(flow.makes(i)), node.arguments)
        )
    elif all(one.made not in call.gives for one in flow.attended):
        flow.attended.append(_called(flow, call))


def _is_product(flow: Flow, i: int, name: str) -> bool:
    """Whether a node multiplies matrices; then it is put among those that do."""
    node, values = flow.graph.nodes[i], flow.graph.values
    if name in _OPERANDS:
        if (one := _matmul(flow, i, name)) is not None:
            flow.products[i] = one
            return True
        left, right, _ = _OPERANDS[name]
        a, b = (values[next(refs(node.arguments[side]))].shape for side in (left, right))
        sizes = math.prod(a[:-2]), a[-2], a[-1], b[-1]
    elif name == SOLVES:
        a, b = (values[next(refs(node.arguments[side]))].shape for side in ("self", "B"))
        sizes = math.prod(a[:-2]), a[-1], max(a[-1] // 2, 1), b[-1]
    elif name == "convolution":
        flow.mixing.add(i)
        if (one := _convolved(flow, i)) is not None:
            flow.products[i] = one
        return one is not None
    else:
        return False
    flow.mixing.add(i)
    if min(sizes[1:]) > 1:  # of vectors they are sums, which memory bounds
        flow.batched[i] = sizes
    return min(sizes[1:]) > 1


def _is_view(node: Node, name: str) -> bool:
    returned = node.operator._schema.returns  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return name in _COPIES or any(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def _matmul(flow: Flow, i: int, name: str) -> Matmul | None:
    """A product with a weight; None where both factors are results."""
    node = flow.graph.nodes[i]
    left, right, added = _OPERANDS[name]
    a, b = (next(refs(node.arguments[side])) for side in (left, right))
    extra = next(refs(node.arguments.get(added)), None)
    biased = extra is not None and extra in flow.made_of
    made = next(flow.makes(i))
    if b in flow.made_of:
        shape = flow.graph.values[b].shape
        return Matmul(i, a, made, flow.made_of[b], shape[-2], shape[-1], math.prod(shape[:-2]), biased)
    if a in flow.made_of:
        shape = flow.graph.values[a].shape
        return Matmul(i, b, made, flow.made_of[a], shape[-1], shape[-2], math.prod(shape[:-2]), biased)
    return None


def _convolved(flow: Flow, i: int) -> Matmul | None:
    """A convolution that mixes channels, as a product of all that a kernel sees; None of channel by channel."""
    node = flow.graph.nodes[i]
    weight = next(refs(node.arguments["weight"]))
    if node.arguments["groups"] != 1 or weight not in flow.made_of:
        return None
    outputs, *seen = flow.graph.values[weight].shape
    given, bias = next(refs(node.arguments["input"])), next(refs(node.arguments["bias"]), None)
    return Matmul(i, given, next(flow.makes(i)), flow.made_of[weight], math.prod(seen), outputs, 1, bias is not None)


def _called(flow: Flow, call: Called) -> Attended:
    """All operators of one call of torch's attention, which differ by shapes and types."""
    query, key, value = (v for v in call.takes[:3] if v is not None)
    (made,) = (v for v in call.gives if v is not None)
    nodes = frozenset(range(call.first, call.stop))
    hidden = len([v for v in call.takes if v is not None]) > 3
    told = any(bool(flow.graph.nodes[i].arguments.get("is_causal")) for i in nodes)
    return _attended(flow, nodes, (query, key, value), made, {"is_causal": hidden or told})


def _query_key_value(node: Node) -> tuple[int, int, int]:
    query, key, value = (next(refs(node.arguments[side])) for side in ("query", "key", "value"))
    return query, key, value


def _attended(
    flow: Flow, nodes: frozenset[int], takes: tuple[int, int, int], made: int, said: Mapping[str, Any]
) -> Attended:
    query, key, value = (flow.graph.values[v].shape for v in takes)
    hides = any(True for name in ("attn_mask", "attn_bias") for _ in refs(said.get(name)))
    kv = min(_heads(flow, takes[1]), _heads(flow, takes[2]))
    causal = bool(said.get("is_causal")) or hides or "is_causal" not in said
    return Attended(
        nodes, takes, made, query[1], min(kv, query[1]), key[-1], value[-1], causal, said.get("window") or 0
    )


def _heads(flow: Flow, value: int) -> int:
    """Of keys or values before they are repeated for each query of a group."""
    heads = flow.graph.values[value].shape[1]
    while (maker := flow.maker(value)) is not None:
        given = list(flow.takes(maker))
        if name_of(flow.graph.nodes[maker]) == "expand" and flow.numel(given[0]) < flow.numel(value):
            return max(heads * flow.numel(given[0]) // flow.numel(value), 1)
        if len(given) != 1 or flow.base(given[0]) != flow.base(value):
            break
        value = given[0]
    return heads


def _write_together(flow: Flow) -> None:
    """Attention that is written as a product, a softmax and a product becomes one operator."""
    for i in [i for i in flow.memory_bound if name_of(flow.graph.nodes[i]) in ("_softmax", "_safe_softmax")]:
        made, below = flow.down(flow.makes(i), lambda j: j not in flow.batched and j not in flow.products)
        first = max((j for j in flow.up([i]) if j in flow.batched), default=None)
        last = [j for j in below if j in flow.batched and next(refs(flow.graph.nodes[j].arguments)) in made]
        if first is None or len(last) != 1:
            continue
        one, other = flow.batched[first], flow.batched[last[0]]
        if one[:2] == other[:2] and one[3] == other[2]:
            flow.attended.append(_together(flow, first, last[0]))


def _together(flow: Flow, first: int, last: int) -> Attended:
    """Two products and what lies between them, which are no operators of their own any more."""
    count, rows, width, _ = flow.batched[first]
    (query, key), (_, value) = (list(refs(flow.graph.nodes[j].arguments))[:2] for j in (first, last))
    _, under = flow.down(flow.makes(first), lambda j: j != last)
    nodes = frozenset((under & flow.up([last])) | {first, last})
    heads, out = max(count * rows // flow.tokens, 1), flow.batched[last][3]
    flow.memory_bound -= nodes
    flow.mixing |= nodes
    del flow.batched[first], flow.batched[last]
    return Attended(nodes, (query, key, value), next(flow.makes(last)), heads, heads, width, out, True)


def _find_residual(flow: Flow) -> None:
    """What is added to something that a product made of it, in the order in which it is made."""
    flow.residual.add(flow.main)
    wide = flow.tokens * flow.hidden
    for i in flow.nodes:
        node = flow.graph.nodes[i]
        if name_of(node) not in ("add", "add_") or i not in flow.memory_bound:
            continue
        given = [v for v in node.inputs if v in flow.alive]
        if len(given) != 2 or any(flow.numel(v) != wide for v in given):
            continue
        for one, other in (given, reversed(given)):
            if _made_by_product(flow, flow.origin(one), other):
                flow.residual.update((one, flow.base(one), flow.origin(one), *flow.makes(i)))
                break


def _made_by_product(flow: Flow, source: int, value: int) -> bool:
    """Whether a product of a weight lies on the way from one value to another."""
    seen, todo = set[tuple[int, bool]](), [(value, False)]
    while todo:
        here, passed = todo.pop()
        if flow.origin(here) == source and passed:
            return True
        maker = flow.maker(here)
        if maker is None or (here, passed) in seen:
            continue
        seen.add((here, passed))
        passed = passed or maker in flow.products
        todo += [(v, passed) for v in flow.takes(maker)]
    return False
