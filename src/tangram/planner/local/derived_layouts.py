"""The model axes of a plan by derivation: layouts of all parameters, and what moves, from a few marks.

Tensor axes: marks come with Tangram for some types of model, else from the model's own `tp_plan` and `ep_plan`
(transformers), of which only what they say of weights is taken; what they would do with activations follows. A model
with neither gets those of a type that calls its modules the same, else Llama's as far as they are called so. Context
and expert axes: the marks of a table, by the way in which they cut. Names that are not in the model at hand are left
out, and what flows where an axis would cut it unevenly. Over a single tensor axis parameters are cut all the same,
heads whole ones (`by_heads`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.syntax import Dim
from tangram.models.building.build import token_inputs
from tangram.models.capturing.graph import Graph
from tangram.planner.legality.check_plan import bound_layout, heads_of
from tangram.planner.local.stage_shares import TensorShare, tensor_share
from tangram.relayout.collectives.one_collective import ALL_REDUCE
from tangram.schema.plan import Plan, matches
from tangram.schema.tuning import base_of, layout_beside
from tangram.sharding.derive.derive import Derived, Over
from tangram.sharding.derive.layouts import layout_of, local_shape, moved, used
from tangram.sharding.derive.marking.marks import Mark, marks_for, marks_of, matched, names_any, states
from tangram.sharding.derive.marking.published import marks_known_for, published
from tangram.sharding.derive.of_model import (
    States,
    derive_model,
    fitting,
    graph_of,
    on_parameters,
    parameter_states,
)
from tangram.sharding.derive.problem.states import SAME, State, chunked, received
from tangram.text import alternatives

STREAM = "model.embed_tokens,model.layers.*,model.norm"
"""What decoders that call their modules as Llama does hand on of each token; of others, what a mark of their type's is
on that cuts it over tp."""
SEQUENCE = f"{{{STREAM}}}: b s/AXIS h"
WAYS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("context", "gathered"): (SEQUENCE,),
    ("context", "ring"): (SEQUENCE,),
    ("context", "heads"): (
        SEQUENCE,
        "{*.q_proj,*.k_proj,*.v_proj,*.q_b_proj}: b s out/AXIS",
        "*.kv_b_proj: b one s out/AXIS",
    ),
    ("expert", "sequence"): (SEQUENCE,),
    ("expert", "samples"): (f"{{{STREAM}}}: b/AXIS s h",),
    ("expert", "whole"): (),
    ("tensor", "weights"): (),
}
"""By role and way, what else is cut over such an axis (its experts are, over an expert axis).

context, gathered: the sequence, and all keys and values are gathered. ring: the sequence in a balanced order, and keys
and values go round (attention by tokens). heads: the sequence, and inside of attention the
heads instead (all-to-all, as in DeepSpeed-Ulysses). expert, sequence or samples: what lies between the experts, so that
its ranks compute it in parts; whole: all of them compute it. tensor, weights: the marks that are on weights, without
those that cut the sequence between layers (Megatron-LM's tensor parallelism without its sequence parallelism).
"""


@dataclass(frozen=True)
class ModelAxis:
    """A model axis of a plan."""

    name: str
    role: Literal["tensor", "context", "expert"]
    way: str = ""
    """Of `WAYS`; "" of a tensor axis: all marks that are known."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind that a rank takes part in, in the forward and the backward of one sample."""

    nbytes: float
    """What a rank receives, each time."""
    times: int


@dataclass(frozen=True)
class TensorLayouts:
    """What a plan says of its model axes."""

    parameters: Mapping[str, str]
    """By name pattern; those that are whole are not named."""
    marks: Mapping[str, str]
    vocabulary: bool
    """Whether the vocabulary is cut, too."""
    communication: tuple[CollectiveTraffic, ...]
    share: TensorShare
    """What a rank of the tensor axes does."""


def tensor_layouts(
    config: PreTrainedConfig, model: nn.Module, graph: Graph, axis: tuple[str, int], shard: str | None
) -> TensorLayouts | str | None:
    """The layouts over a tensor axis (name and size) and, of all parameters, over the data axis `shard`.

    `graph`: of one sample. None: no marks are known for such a model. A sentence: they do not fit.
    """
    return axes_layouts(config, model, graph, Mesh(((axis,),)), [ModelAxis(axis[0], "tensor")], shard)


def axes_layouts(
    config: PreTrainedConfig, model: nn.Module, graph: Graph, mesh: Mesh, axes: Sequence[ModelAxis], shard: str | None
) -> TensorLayouts | str | None:
    """The layouts over model axes, which are those of `mesh`, and, of all parameters, over the data axis `shard`.

    `graph`: of as many samples as an axis cuts, or one. None: no marks are known for such a model and axis. A sentence:
    they do not fit. Where TP ranks cannot divide what lies between their matmuls as well as others do, they only
    divide the matmuls.
    """
    marks: list[Mark] = []
    for axis in axes:
        found = _marks_over(config, model, axis)
        parts = len(axes) == 1 and axis.role == "tensor"
        own = fitting(graph, by_heads(config, graph, found, mesh) if parts else found, mesh, parts=parts)
        if axis.way == "weights":
            own = [mark for mark in own if on_parameters(graph, mark)]
        between, *more = [[_of_text(text, axis, config)] for text in WAYS.get((axis.role, axis.way), ())] or [[]]
        if not found or not any(names_any(graph, mark) for mark in between or found):
            return None
        if axis.way == "heads" and not any(names_any(graph, mark) for (mark,) in more):
            return (
                f"a {config.model_type} model makes queries, keys and values by one weight, and ranks exchange heads "
                "where each has its own: gather keys and values instead"
            )
        if not own or not all(fitting(graph, [mark], mesh) for mark in between):
            return _nothing(config, mesh, axis.name)
        marks += own
    tensor = {axis.name for axis in axes if axis.role == "tensor"}
    if _unevenly_together(graph, marks, mesh):
        marks = [mark for mark in marks if not mark.layout.axes & tensor or on_parameters(graph, mark)]
    try:
        lies = _lying(graph, marks, mesh, [axis.name for axis in axes if axis.role == "tensor"])
        whole = derive_model(graph, [*marks, *_settled(graph, lies)], mesh, left=True)
    except UserError as error:
        return " ".join(str(error).split())
    for axis in axes:
        if axis.role != "context" and not any(own[axis.name].kind == "cut" for own in lies.values()):
            return _nothing(config, mesh, axis.name)
    shapes = {value.name: value.shape for _, value in graph.of_kind("parameter")}
    parameters = dict(by_pattern({name: _text(shapes[name], own, shard) for name, own in lies.items()}))
    vocabulary = any(over.axis in tensor for over in _over_logits(whole))
    return TensorLayouts(
        parameters, _together(marks, mesh), vocabulary, tuple(_communication(whole)), tensor_share(whole, tensor)
    )


def beside_transposed(model: nn.Module, parameters: Mapping[str, str], data: Collection[str]) -> dict[str, str]:
    """The layouts of adapters beside weights that have their inputs first, as GPT-2's, where model axes cut these.

    By pattern, of a model with adapters; all others follow from what a plan says of their weights.
    """
    found: dict[str, str | None] = {}
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(getattr(module, "base_layer", None), Conv1D):
            text = next((one for rule, one in parameters.items() if matches((rule,), f"{name}.weight")), None)
            if text is not None:
                turned = str(Layout(Layout.parse(text).dims[::-1]))
                found |= {
                    own: layout_beside(turned, base_of(own)[1], data)
                    for own, _ in model.named_parameters()
                    if own.startswith(f"{name}.lora_")
                }
    return dict(by_pattern(found))


def plan_communication(plan: Plan, graph: Graph) -> tuple[CollectiveTraffic, ...]:
    """What moves over a plan's model axes, by its marks so far as they fit the graph. Raises UserError."""
    sizes = dict(Mesh.parse(plan.mesh).views[0])
    mesh = Mesh((tuple((axis, sizes[axis]) for axis in plan.model_axes),))
    marks = [Mark.parse(f"{pattern}: {layout}") for pattern, layout in plan.layouts.marks.items()]
    parameters = [(value.name, tuple(value.shape)) for _, value in graph.of_kind("parameter")]
    lies = {name: _cut_as(bound_layout(plan, name, shape), mesh) for name, shape in parameters}
    marks = [*fitting(graph, marks, mesh), *_settled(graph, lies)]
    return tuple(_communication(derive_model(graph, marks, mesh, left=True)))


def _cut_as(layout: Layout, mesh: Mesh) -> States:
    own = replace(layout, dims=tuple(dim.over(mesh.axes) for dim in layout.dims), at=())
    return {**dict.fromkeys(mesh.axes, SAME), **states(own, layout.shape, mesh)}


def _unevenly_together(graph: Graph, marks: Sequence[Mark], mesh: Mesh) -> bool:
    """Whether marks that each axis has by itself would cut a dim unevenly, taken together."""
    cuts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for mark in marks:
        for v in matched(graph, mark).values():
            for d, dim in enumerate(mark.layout.dims):
                cuts[v, d] |= dim.axes
    return any(
        graph.values[v].shape[d] % prod(mesh.axes[axis][0] for axis in own)
        for (v, d), own in cuts.items()
        if len(own) > 1 or graph.values[v].kind != "parameter"
    )


def _nothing(config: PreTrainedConfig, mesh: Mesh, axis: str) -> str:
    size = mesh.axes[axis][0]
    return f"the marks of a {config.model_type} model cut nothing of this one into {size} even parts"


def _lying(graph: Graph, marks: Sequence[Mark], mesh: Mesh, tensor: Sequence[str]) -> Mapping[str, States]:
    """How parameters lie: over tensor axes as follows from marks, over others as marks say and otherwise whole."""
    lies: dict[str, dict[str, State]] = {v.name: dict.fromkeys(mesh.axes, SAME) for _, v in graph.of_kind("parameter")}
    if tensor:
        own = Mesh((tuple((axis, n) for axis, n in mesh.views[0] if axis in tensor),))
        some = [mark for mark in marks if mark.layout.axes <= set(tensor)]
        for name, found in parameter_states(derive_model(graph, some, own, left=True)).items():
            lies[name] |= found
    for mark in marks:
        for name, v in matched(graph, mark).items():
            if graph.values[v].kind == "parameter":
                lies[name] |= states(mark.layout, graph.values[v].shape, mesh)
    return lies


def _settled(graph: Graph, lies: Mapping[str, States]) -> list[Mark]:
    """Where parameters lie, as marks of each."""
    return [Mark(value.name, layout_of(value.shape, lies[value.name])) for _, value in graph.of_kind("parameter")]


def sample_graph(model: nn.Module, sequence: int, dtype: torch.dtype, samples: int = 1, rules: str = "") -> Graph:
    """A language model on one sample, or on some; `rules`: of operators of its own."""
    return graph_of(model, token_inputs(samples, sequence), dtype, rules=rules)


def _marks_over(config: PreTrainedConfig, model: nn.Module, axis: ModelAxis) -> list[Mark]:
    """The marks over one axis; none where no such are known."""
    if axis.role == "tensor":
        return [_over(mark, axis.name) for mark in known_marks(config, model)]
    experts = published(model, "none", axis.name) if axis.role == "expert" else []
    whole = [mark for mark in experts if axis.name in mark.layout.axes] or _by_expert(model, axis)
    others = [_of_text(text, axis, config) for text in WAYS[axis.role, axis.way]]
    return [] if axis.role == "expert" and not whole else [*whole, *others]


def _by_expert(model: nn.Module, axis: ModelAxis) -> list[Mark]:
    """Where transformers publishes no such plan (llama4_text): weights in which all experts lie, cut by expert."""
    own = [name for name, p in model.named_parameters() if p.ndim == 3 and re.search(r"\.experts\.\w+$", name)]
    return [Mark.parse(f"{name}: _/{axis.name} _ _") for name, _ in by_pattern(dict.fromkeys(own, ""))]


def _of_text(text: str, axis: ModelAxis, config: PreTrainedConfig) -> Mark:
    own = [mark for mark in marks_of(str(config.model_type)) or () if str(mark.layout) == "b s/tp h"]
    stream = dict.fromkeys((*STREAM.split(","), *(name for mark in own for name in alternatives(mark.pattern))))
    return Mark.parse(text.replace(STREAM, ",".join(stream)).replace("AXIS", axis.name))


def _together(marks: Sequence[Mark], mesh: Mesh) -> dict[str, str]:
    """Marks as a plan has them: those of one pattern are one, of which each dim is cut in the order of the mesh."""
    order = [*mesh.axes]
    found: dict[str, Layout] = {}
    for mark in marks:
        before = found.get(mark.pattern)
        if before is None:
            found[mark.pattern] = mark.layout
            continue
        dims = tuple(
            replace(a, cuts=tuple(sorted((*a.cuts, *b.cuts), key=lambda cut: order.index(cut.axis))))
            for a, b in zip(before.dims, mark.layout.dims, strict=True)
        )
        found[mark.pattern] = replace(before, dims=dims)
    return {pattern: str(layout) for pattern, layout in found.items()}


def known_marks(config: PreTrainedConfig, model: nn.Module) -> list[Mark]:
    """The marks that come for the type, else those that `marks_known_for` knows, else Llama's: many decoders call some
    modules as it does, and whatever a mark is on, the rest follows from it."""
    return marks_for(config) or marks_known_for(model) or marks_of("llama") or []


def _over(mark: Mark, axis: str) -> Mark:
    """A mark over `tp`, over another axis."""
    text = re.sub(r"/tp\b", f"/{axis}", str(mark.layout))
    return Mark.parse(f"{mark.pattern}: {text}")


QUERIES = ("q_proj.weight", "c_attn.weight", "query_key_value.weight", "Wqkv.weight")
"""What queries are made with; in the latter three keys and values are made, too."""


def by_heads(config: PreTrainedConfig, graph: Graph, marks: Sequence[Mark], mesh: Mesh) -> list[Mark]:
    """The marks, and where they cut queries in parts that are no whole heads, with what attends to the same keys and
    values together."""
    _, kv_heads = heads_of(config)
    found: list[Mark] = []
    for mark in marks:
        for name in alternatives(mark.pattern):
            one = replace(mark, pattern=name)
            size = prod(mesh.axes[axis][0] for axis in mark.layout.axes if axis in mesh.axes)
            own = matched(graph, one) if name.endswith(QUERIES) and names_any(graph, one) else {}
            if len(kv_heads) == 1 and kv_heads[0] % size and own:
                shape = graph.values[next(iter(own.values()))].shape
                dims = [_in_groups(dim, n, kv_heads[0]) for dim, n in zip(mark.layout.dims, shape, strict=True)]
                one = replace(one, layout=Layout.parse(" ".join(dims)))
            found.append(one)
    return found


def _in_groups(dim: Dim, n: int, kv_heads: int) -> str:
    """A dim of `n` elements in which queries lie, cut by groups of heads: `out/tp` as `(groups/tp 64)`, or
    `(3 out/tp)`, for blocks of queries, keys and values, as `(3 groups/tp 64)`."""
    *blocks, last = dim.terms[0] if dim.terms else (dim,)
    size, left = divmod(n, prod(block.n for block in blocks) * kv_heads)
    if left or not last.cuts:
        return str(dim)
    groups = "/".join(["groups", *map(str, last.cuts)])
    return f"({' '.join([*map(str, blocks), groups, str(size)])})"


def _text(shape: Sequence[int], states: States, shard: str | None) -> str | None:
    """A layout as a plan has it; None for a parameter that no model axis cuts."""
    dims = dims_of(shape, states)
    if dims == ["_"] * len(shape):
        return None
    dims[0] += f"/{shard}" if shard else ""
    return " ".join(dims)


def dims_of(shape: Sequence[int], states: States) -> list[str]:
    """The dims of a parameter as a layout has them, each with the axes that cut it, as in `_/tp`; those in other parts
    than chunks with their sizes, as in `(3/tp 64)` or `(2 512/tp)`."""
    dims: list[str] = []
    for d, n in enumerate(shape):
        own = {axis: state for axis, state in states.items() if state.kind == "cut" and state.dim == d}
        if any(s.outer > 1 or (s.parts and s != chunked(d, n, len(s.parts))) for s in own.values()):
            dims.append(str(layout_of(shape, own).dims[d]))
        else:
            dims.append("/".join(["_", *own]))
    return dims


def by_pattern(texts: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Layouts by pattern: one for all layers where they lie alike."""
    groups: dict[str, dict[str, str | None]] = {}
    for name, text in texts.items():
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), {})[name] = text
    for pattern, own in groups.items():
        found = {*own.values()}
        one = found.pop()
        if not found:
            yield from [(pattern, one)] if one is not None else []
        else:
            yield from ((name, text) for name, text in own.items() if text is not None)


def _communication(found: Derived) -> Iterator[CollectiveTraffic]:
    for one in moved(found):
        name = found.folded.value(one.value)
        if name.kind == "parameter":
            continue  # once a step
        for nbytes in (one.forward_bytes, one.backward_bytes):
            if nbytes:
                yield CollectiveTraffic(nbytes, one.times)
    yield from _communication_of_loss(found)


def _communication_of_loss(found: Derived) -> Iterator[CollectiveTraffic]:
    """Of logits that are cut over the vocabulary: a number a token, and then two (`kernels.cross_entropy`)."""
    for over in _over_logits(found):
        graph = found.folded.graph
        v = graph.outputs["logits"]
        rows = prod(local_shape(found, graph.values[v].shape, used(found, found.folded.classes[v]))[:-1])
        yield from (CollectiveTraffic(received(ALL_REDUCE, 4.0 * n * rows, over.k), 1) for n in (1, 2))


def _over_logits(found: Derived) -> Iterator[Over]:
    """The axes over which logits are cut over the vocabulary."""
    graph = found.folded.graph
    if (v := graph.outputs.get("logits")) is None:
        return
    states = used(found, found.folded.classes[v])
    last = len(graph.values[v].shape) - 1
    yield from (over for over in found.axes if (own := states[over.axis]).kind == "cut" and own.dim == last)
