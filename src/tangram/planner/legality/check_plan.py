"""Whether a plan can be what it says, judged on the model itself: the one check of every plan, whoever makes it.

The search and the trainer's own plans, a plan's file before its ranks start, a dry run, the sharding choice that is
written as a plan, a plan for other ranks: all are asked here. First the tables of legality, of the plan's own numbers
(`laid`); then what no number says: the ranks have to have all of each parameter, once, and
model axes to divide samples, tokens and experts. Time is that of the different layouts and of the ranks along the axes
that each names, not of the mesh: thousands of ranks are checked in a second.

A plan's own numbers are made a configuration (`laid`), so that the tables of legality are asked of it as of any
other. TP ranks are those of axes that cut what queries are made with, ranks that exchange heads those of context axes
that do, EP ranks those that cut the experts. A pipeline whose schedule the search does not know (one's own table, say)
is left out: `schema.plan` has checked its stages and micro-batches already.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.layout import Layout, LayoutError, Mesh, validate
from tangram.layout.blocks import in_blocks, refuse_cut_blocks
from tangram.layout.intervals import IntSet, span
from tangram.layout.locate import indices_of_rank, partitions
from tangram.models.building.build import token_inputs
from tangram.models.building.fields import values
from tangram.models.capturing.attention import refuse_unable
from tangram.models.capturing.capture import capture
from tangram.models.capturing.graph import Graph
from tangram.models.capturing.stages import refuse_unlike_chain, refuse_unlike_modules
from tangram.models.lora.bases import BASES, base_weights
from tangram.models.outlines.costs import block_names
from tangram.models.outlines.outline import Group
from tangram.planner.legality.engine import EXCHANGED, HEADS, RULES, Facts, Refusal, nearest, refusals, uneven
from tangram.planner.legality.trainer_support import KV_HEADS, SAID
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.schedule_formulas import code
from tangram.relayout.mapping.states import ADAM_8BIT
from tangram.schema.parallelism import marked
from tangram.schema.plan import Plan
from tangram.schema.tuning import COLUMNS, packed
from tangram.sharding.derive.marking.marks import Mark, matched, matching, result_names
from tangram.sharding.derive.problem.states import scaled
from tangram.text import alternatives

MOST_RANKS = 1_000_000
CHECKED = 8  # tokens of the sample on which stages are checked


def legal(plan: Plan, model: nn.Module, graph: Graph | None = None) -> None:
    """Raise UserError with the reason where the plan cannot be run on the model (on meta or not).

    `graph`: a capture of one sample, where there is one already.
    """
    if plan.run.by_tokens:
        refuse_unable(model)
    if plan.pipeline is not None:
        refuse_unlike_modules(model, plan.pipeline.stages, plan.pipeline.tied)
        graph = graph or capture(model, token_inputs(1, CHECKED))
        refuse_unlike_chain(graph, plan.pipeline.stages)
        _refuse_marks(plan, graph)
    if found := refused(plan, model):
        raise UserError(str(found[0]))
    mesh = Mesh.parse(plan.mesh)
    if mesh.size > MOST_RANKS:
        raise UserError(f"the mesh {plan.mesh} has {mesh.size:,} ranks; plans of up to {MOST_RANKS:,} are checked")
    data = set(plan.axes.data)
    cutting, codes = set[str](), dict[str, LayoutError]()
    for name, parameter in model.named_parameters():
        layout = bound_layout(plan, name, tuple(parameter.shape))
        if layout.pending or layout.flat:
            raise UserError(f'the layout "{layout}" of {name} leaves a sum or a rank out: give each rank its cut')
        cutting |= layout.axes & data
        _covers(layout, name, mesh)
        if parameter.requires_grad and plan.optimiser.has_codes(name, parameter.shape):
            codes |= _cut_codes(layout, name, tuple(parameter.shape), mesh)
    _refuse_cut_codes(plan, model, codes)
    if plan.lora is not None and plan.lora.base != "parameters":
        base = BASES[plan.lora.base]
        for name, shape in base_weights(model, plan.lora.base_skip, base.block).items():
            for kind in base.tensors:
                bound_layout(plan, f"{name}_{kind}", (*shape[:-1], shape[-1] // COLUMNS[kind]))
    if len(cutting) > 1:
        raise UserError(f"parameters are cut over the data axes {', '.join(sorted(cutting))}: one of them may")
    _refuse_uneven(plan, model, mesh)


@dataclass(frozen=True)
class Divided:
    """A number of which each rank of some axes gets an equal part."""

    what: str
    """In words, with the key that changes it."""
    count: int
    axes: tuple[str, ...]


def _flowing(plan: Plan, model: nn.Module) -> Iterator[Divided]:
    """Samples and tokens, where marks cut what layers give, of shape (batch, sequence, hidden)."""
    axes: dict[int, set[str]] = {0: set(), 1: set()}
    blocks = set(block_names(model))
    for names, layout in marks_on(plan, model):
        if len(layout.dims) == 3 and names & blocks:
            for dim, own in axes.items():
                own |= layout.dims[dim].axes
    yield Divided("samples of a micro-batch (data.micro_batch)", plan.data.micro_batch, _of(plan, axes[0]))
    yield Divided("tokens of a sample (data.sequence)", plan.data.sequence, _of(plan, axes[1]))


def _experts(plan: Plan, model: nn.Module) -> Iterator[Divided]:
    """Experts that are stacked, and dims that several axes cut: of which of them parts are unlike, no state says."""
    known: set[tuple[str, tuple[int, ...]]] = set()
    for name, parameter in model.named_parameters():
        shape, text = tuple(parameter.shape), plan.layout_of(name)
        if (text, shape) in known:
            continue
        known.add((text, shape))
        for i, dim in enumerate(bound_layout(plan, name, shape).dims):
            axes = _of(plan, dim.axes)
            if i == 0 and len(shape) > 1 and ".experts." in name and dim.axes & set(plan.axes.expert):
                yield Divided("experts", shape[i], axes)
            elif len(axes) > 1:
                yield Divided(f"places of dim {i} of {name}", shape[i], axes)


EVEN: tuple[Callable[[Plan, nn.Module], Iterator[Divided]], ...] = (_flowing, _experts)
"""What model axes have to divide, where they cut it. Of other dims of parameters ranks may have more and less."""


def _of(plan: Plan, axes: Iterable[str]) -> tuple[str, ...]:
    some = set(axes)
    return tuple(axis for axis in plan.model_axes if axis in some)


def _refuse_uneven(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    for one in (divided for find in EVEN for divided in find(plan, model)):
        size = math.prod(mesh.axes[axis][0] for axis in one.axes)
        named = " x ".join(one.axes)
        if one.count % size:
            mend = nearest(one.count, size, lambda n, named=named: f"{named}={n}")
            raise UserError(f"{uneven(one.count, one.what, f'{named}={size}')}: {mend}")


def _refuse_marks(plan: Plan, graph: Graph) -> None:
    """A stage passes over marks of what it lacks, so of the whole model each has to name something that a stage has."""
    for pattern, text in plan.layouts.marks.items():
        named = matched(graph, Mark.parse(f"{pattern}: {text}"))
        if result := next((name for name in named if name in result_names(graph)), None):
            raise UserError(
                f"layouts.marks names {result}, a result of the model: in a pipeline mark the module that gives it"
            )


def bound_layout(plan: Plan, name: str, shape: tuple[int, ...]) -> Layout:
    """The layout of a parameter with every size known. Raises UserError where it does not fit the shape."""
    text, columns = plan.layout_of(name), packed(name)[1] if plan.lora is not None else 1
    try:
        whole = (*shape[:-1], shape[-1] * columns) if columns > 1 else shape
        layout = _bound(text, whole, tuple(sorted(plan.layouts.sizes.items())))
        if columns > 1:
            layout = in_blocks(layout, columns, Mesh.parse(plan.mesh))
        if layout.at:  # of plans that did not go through their checks; who has it, the stages say
            raise UserError(f'the layout "{layout}" of {name} leaves a sum or a rank out: give each rank its cut')
        return replace(layout, at=plan.stages_of(name))
    except LayoutError as error:
        raise UserError(f'the layout "{text}" does not fit {name} of shape {shape}: {error}') from None


def _cut_codes(layout: Layout, name: str, shape: tuple[int, ...], mesh: Mesh) -> dict[str, LayoutError]:
    """Why moments in 8 bits do not lie as the parameter, by its name; empty where they do."""
    try:
        refuse_cut_blocks(layout, shape, ADAM_8BIT["absmax1"].block, mesh)
    except LayoutError as error:
        return {name: error}
    return {}


def _refuse_cut_codes(plan: Plan, model: nn.Module, codes: Mapping[str, LayoutError]) -> None:
    """One sentence about the first of some parameters, with what keeps all of them as they are."""
    if not codes:
        return
    name, error = next(iter(codes.items()))
    names = dict.fromkeys((*plan.optimiser.moments_skip, *(re.sub(r"\.\d+\.", ".*.", one) for one in codes)))
    more = f" (so it is of {len(codes) - 1} more)" if len(codes) > 1 else ""
    shape = list(model.get_parameter(name).shape)
    raise UserError(
        f'the layout "{plan.layout_of(name)}" of {name} {shape} does not fit its moments of 8 bits: {error}{more}; '
        f"set optimiser.moments_skip = {json.dumps([*names])}"
    )


@lru_cache(maxsize=4096)
def _bound(text: str, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout.parse(text).bind(shape, **dict(sizes))


def _covers(layout: Layout, name: str, mesh: Mesh) -> None:
    validate(layout, mesh)
    if not partitions(replace(layout, at=()), mesh):  # where stages are disjoint, one has all
        raise UserError(f'the layout "{layout}" of {name} does not give every element to exactly one place of {mesh}')


WHOLE = "cut whole heads, and those of queries beside the keys that they attend to, as `tangram plan` does"


@dataclass(frozen=True)
class Laid:
    """What rules ask of a plan and its model."""

    facts: Facts
    grid: Grid
    names: Mapping[str, str]
    """Of axes, by column."""


def refused(plan: Plan, model: nn.Module) -> tuple[Refusal, ...]:
    """Why the numbers of a plan cannot be trained with; empty where they can."""
    one = laid(plan, model)
    found = refusals(one.facts, one.grid, (*HEADS, KV_HEADS, *RULES, *SAID), one.names)
    return tuple(replace(why, mend=WHOLE) if why.rule == "key-value heads" else why for why in found)


def refused_heads(config: PreTrainedConfig, **over: Sequence[tuple[str, int]]) -> tuple[Refusal, ...]:
    """Why ranks cannot have whole heads of attention each, some perhaps more than others; empty where they can.

    `over`: the axes (names and sizes) of the columns `tensor` and `ulysses`.
    """
    heads, kv_heads = heads_of(config)
    if not heads:  # as of scans, whose marks say what ranks divide
        why = f"a {config.model_type} model has no attention heads (num_attention_heads) that ranks could exchange"
        return (Refusal("heads", why),) if over.get("ulysses") else ()
    if len(over.get("tensor", ())) == 1 and not over.get("ulysses") and len(kv_heads) == 1:
        ((_, size),) = over["tensor"]
        if kv_heads[0] > (size - 1) * -(-kv_heads[0] // size) and heads[0] % kv_heads[0] == 0:
            return ()  # the last has one, too
    names = {column: " x ".join(name for name, _ in axes) for column, axes in over.items()}
    ranks = {column: prod(size for _, size in axes) for column, axes in over.items()}
    one = grid(batch=1, sequence=1, **ranks)
    return refusals(Facts(heads=heads, kv_heads=kv_heads), one, (*HEADS, EXCHANGED, KV_HEADS), names)


def heads_of(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Heads of queries and of keys and values in any layer, as a configuration says; none where it does not."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = tuple(one for one in values(text, "num_attention_heads") if isinstance(one, int))
    if not heads:
        return (), ()
    groups = "num_kv_heads" if getattr(text, "new_decoder_architecture", False) else "num_key_value_heads"  # Falcon's
    return heads, tuple(one for one in values(text, groups) if isinstance(one, int)) or heads


def laid(plan: Plan, model: nn.Module) -> Laid:
    """The numbers of a plan, as far as rules ask for them."""
    sizes = dict(Mesh.parse(plan.mesh).views[0])
    over_heads, (experts, over_experts) = _over_heads(plan, model), _over_experts(plan, model)
    own = {
        "tensor": [axis for axis in over_heads if axis not in plan.axes.context],
        "ulysses": [axis for axis in over_heads if axis in plan.axes.context],
        "context": [*plan.axes.context],
        "expert": over_experts,
        "data": [*plan.axes.data],
    }
    heads, kv_heads = heads_of(getattr(model, "config", None)) if over_heads else ((), ())
    tensor = prod(sizes[axis] for axis in own["tensor"])
    if not own["ulysses"] and any(n % tensor and _has_uneven_heads(plan, model) for n in (*heads, *kv_heads)):
        heads, kv_heads = (), ()
    one = grid(
        batch=plan.data.global_batch, sequence=plan.data.sequence, micro=plan.data.micro_batch,
        recompute=int(Group.BLOCK if plan.run.recompute else Group.NONE), **_staged(plan),
        **{column: prod(sizes[axis] for axis in axes) for column, axes in own.items()},
    )  # fmt: skip
    names = {column: " x ".join(axis for axis in sizes if axis in axes) for column, axes in own.items()}
    return Laid(Facts(heads=heads, kv_heads=kv_heads, experts=experts), one, names)


def _staged(plan: Plan) -> dict[str, int]:
    """What a grid says of stages; nothing, where it has no words for them."""
    if plan.pipeline is None or (schedule := code(plan.pipeline.schedule)) < 0:
        return {}
    ranks = plan.stage_ranks
    return {"pipeline": ranks, "virtual": len(plan.pipeline.stages) // ranks, "schedule": schedule} if ranks > 1 else {}


def _over_heads(plan: Plan, model: nn.Module) -> list[str]:
    """The model axes that cut what queries are made with, or what that gives, in the order of the mesh."""
    weights = {name for name, _ in model.named_parameters() if name.endswith((".q_proj.weight", ".q_b_proj.weight"))}
    axes = {axis for name in weights for axis in Layout.parse(plan.layout_of(name)).axes}
    for names, layout in marks_on(plan, model):
        axes |= layout.axes if any(f"{name}.weight" in weights for name in names) else frozenset()
    return [axis for axis in plan.model_axes if axis in axes]


def _has_uneven_heads(plan: Plan, model: nn.Module) -> bool:
    """Whether ranks have whole heads by the plan's layouts, some more than others: those of queries beside the keys and
    values that they attend to, or all keys and values."""
    mesh, axes = Mesh.parse(plan.mesh), plan.axes.tensor
    counts = heads_of(getattr(model, "config", None))
    if any(len(one) != 1 for one in counts):  # layers that differ have parts that come out even, or none
        return False
    (heads,), (kv_heads,) = counts

    def units(name: str, size: int) -> tuple[IntSet | None, ...]:
        """By rank, which of so many equal parts of its rows it has; None: no whole ones."""
        rows = parameters[name].shape[0]
        dim = Layout.parse(plan.layout_of(name)).bind(tuple(parameters[name].shape), **plan.layouts.sizes).dims[0]
        every = product(*(range(mesh.axes[axis][0]) for axis in axes))
        sets = [indices_of_rank(dim.over(axes), mesh, dict(zip(axes, at, strict=True))) for at in every]
        cut = [scaled((own,), 1, rows // size) if rows % size == 0 else None for own in sets]
        return tuple(None if one is None else one[0] for one in cut)

    parameters = dict(model.named_parameters())
    paths = {name.removesuffix("q_proj.weight") for name in parameters if name.endswith(".q_proj.weight")}
    for path in paths:
        others = [name for name in (f"{path}k_proj.weight", f"{path}v_proj.weight") if name in parameters]
        keys = [units(name, kv_heads) for name in others]
        whole = all(set(own) == {span(0, kv_heads)} for own in keys)
        queries = units(f"{path}q_proj.weight", heads if whole else kv_heads)
        if None in queries or not others or heads % kv_heads or not (whole or all(o == queries for o in keys)):
            return False
    return bool(paths)


def _over_experts(plan: Plan, model: nn.Module) -> tuple[int, list[str]]:
    """How many experts are stacked at most, and the expert axes that cut them."""
    count, axes = 0, set[str]()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and ".experts." in name:
            dims = Layout.parse(plan.layout_of(name)).dims
            count = max(count, parameter.shape[0])
            axes |= dims[0].axes if len(dims) == parameter.ndim else frozenset[str]()
    return count, [axis for axis in plan.axes.expert if axis in axes]


def marks_on(plan: Plan, model: nn.Module) -> Iterator[tuple[set[str], Layout]]:
    """The modules that each mark names, if any, and its layout."""
    modules = [name for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())]
    for pattern, text in plan.layouts.marks.items():
        yield {n for own in alternatives(pattern) for n in matching(own, modules)}, marked(text)
