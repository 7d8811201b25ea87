"""A plan's own numbers as a configuration, so that the tables of legality are asked of it as of any other.

Axes have their own names in a plan, and what they cut is said by layouts and marks: TP ranks are those of axes that
cut what queries are made with, ranks that exchange heads those of context axes that do, EP ranks those that cut the
experts. A pipeline whose schedule the search does not know (one's own table, say) is left out: `schema.plan` has
checked its stages and micro-batches already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from tangram.layout import Layout, Mesh
from tangram.layout.intervals import IntSet, span
from tangram.layout.locate import indices_of_rank
from tangram.models.outlines.outline import Group
from tangram.planner.legality.constraints import EXCHANGED, HEADS, RULES
from tangram.planner.legality.engine import Facts, Refusal, refusals
from tangram.planner.legality.trainer_support import KV_HEADS, SAID
from tangram.planner.space.grid import Grid, grid
from tangram.planner.space.schedule_formulas import code
from tangram.schema.parallelism import marked
from tangram.schema.plan import Plan
from tangram.sharding.derive.marking.marks import alternatives, matching
from tangram.sharding.derive.problem.states import scaled

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
    if not heads:
        return (Refusal("heads", f"a {config.model_type} model has no num_attention_heads"),)
    if len(over.get("tensor", ())) == 1 and not over.get("ulysses"):
        ((_, size),) = over["tensor"]
        if kv_heads[0] > (size - 1) * -(-kv_heads[0] // size) and heads[0] % kv_heads[0] == 0:
            return ()  # the last has one, too
    names = {column: " x ".join(name for name, _ in axes) for column, axes in over.items()}
    ranks = {column: prod(size for _, size in axes) for column, axes in over.items()}
    one = grid(batch=1, sequence=1, **ranks)
    return refusals(Facts(heads=heads, kv_heads=kv_heads), one, (*HEADS, EXCHANGED, KV_HEADS), names)


def heads_of(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Heads of queries and of keys and values, as a configuration says; none of either where it does not."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return (), ()
    groups = "num_kv_heads" if getattr(text, "new_decoder_architecture", False) else "num_key_value_heads"  # Falcon's
    kv_heads = getattr(text, groups, None)
    return (heads,), (kv_heads if isinstance(kv_heads, int) else heads,)


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
    (heads,), (kv_heads,) = heads_of(getattr(model, "config", None))

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
