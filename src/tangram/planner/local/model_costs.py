"""A job's model on meta, and what it costs: counted once for all plans that are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, read_source
from tangram.models.building.fields import varies
from tangram.models.capturing.attention import by_tokens
from tangram.models.capturing.graph import Graph
from tangram.models.capturing.stages import tied_modules
from tangram.models.lora.adapters import Adapters, add_adapters
from tangram.models.lora.bases import BASES, base_weights
from tangram.models.outlines.costs import ModelCosts, at_micro_batch, costs
from tangram.models.outlines.outlined import FIELDS, int_field
from tangram.planner.legality.check_plan import refused_heads
from tangram.planner.local.derived_layouts import (
    CollectiveTraffic,
    TensorLayouts,
    plan_communication,
    sample_graph,
    tensor_layouts,
)
from tangram.planner.local.own_rules import rules_of
from tangram.planner.local.stage_shares import cut_into_stages, local_shapes, scaled
from tangram.schema.job import Job
from tangram.schema.parallelism import PipelinePlan
from tangram.schema.plan import Plan, matches


def frozen(model: nn.Module, job: Job) -> nn.Module:
    """The model with the job's adapters, and with the parameters frozen that the job freezes."""
    if job.lora is not None:
        add_adapters(model, Adapters(**job.lora.modules))
    for name, parameter in model.named_parameters():
        if matches(job.model.freeze, name):
            parameter.requires_grad_(False)
    return model


class Rows(NamedTuple):
    """How many tokens the rows of a job's steps have, where not all have `data.sequence`."""

    mean: int
    """Of which a step's time is."""
    longest: int
    """Of which memory is."""


class Counted:
    """A job's model on meta and what it costs, counted once for each number of TP ranks."""

    def __init__(self, job: Job, config: PreTrainedConfig, rows: Rows | None = None) -> None:
        self.job, self.config = job, config
        self.rows = rows or Rows(job.data.sequence, job.data.sequence)
        self.model = frozen(build_on_meta(config), job)
        self.plain = self.model if job.lora is None else build_on_meta(config)  # of whose names layouts speak
        self._pair = cache(lambda: self._count(self.model))
        self._narrow = cache(self._narrowed)
        dtype = getattr(torch, job.precision.compute)
        self._graph = cache(lambda: sample_graph(self.plain, job.data.sequence, dtype, rules=rules_of(job)))

    @cached_property
    def teacher(self) -> Counted | None:
        """The same of what it learns from. Raises UserError for a directory that is none."""
        if self.job.distill is None or not self.job.runs_teacher:
            return None
        config = read_source(None, self.job.distill.teacher, {}).config
        run = self.job.run
        return Counted(self.job.of_teacher(), by_tokens(config, run.attention) if run.by_tokens else config, self.rows)

    @cached_property
    def timed(self) -> Counted:
        """The same for rows of their mean length, of which the time of a step is."""
        mean = self.rows.mean
        return self if mean == self.rows.longest else Counted(self.job, self.config, Rows(mean, mean))

    def communication(self, plan: Plan) -> tuple[CollectiveTraffic, ...]:
        """What moves over a plan's model axes for one sample. Raises UserError where nothing can be derived."""
        return plan_communication(plan, self._graph())

    def costs(self, micro_batch: float) -> ModelCosts:
        """Of the whole model, for one micro-batch of so many samples."""
        return at_micro_batch(*self._pair(), micro_batch * self.job.rows_per_sample)

    def local_costs(self, lies: TensorLayouts | None, axis: tuple[str, int], micro_batch: float) -> ModelCosts:
        """Of one rank of a tensor axis (name and size), for one micro-batch.

        Those of the model that a configuration says that has the rank's parts of parameters; where none does, those of
        the whole model by the share that follows from the layouts.
        """
        if lies is None or axis[1] == 1:
            return self.costs(micro_batch)
        narrow = self._narrow(axis[1], lies.vocabulary)
        if narrow is not None and narrow.shapes == self._parts(lies, axis):
            return at_micro_batch(*narrow.costs, micro_batch * self.job.rows_per_sample)
        logits = 1 / axis[1] if lies.vocabulary else 1.0  # but for a row
        return scaled(self.costs(micro_batch), lies.share, logits=logits)

    def _parts(self, lies: TensorLayouts, axis: tuple[str, int]) -> Mapping[str, tuple[int, ...]]:
        shapes = _shapes(self.model)
        dims = {name: text for name in shapes if (text := _layout(name, lies.parameters)) is not None}
        return local_shapes(shapes, dims, axis)

    def tensor(self, axis: tuple[str, int], shard: str | None) -> TensorLayouts | str | None:
        """How everything lies over a tensor axis, derived from the marks that are known; None where none are."""
        if found := refused_heads(self.config, tensor=[axis]):
            return found[0].reason
        try:
            graph = self._graph()
        except UserError as error:
            return " ".join(str(error).split())
        return tensor_layouts(self.config, self.plain, graph, axis, shard)

    def pipeline(self, count: int, schedule: str) -> PipelinePlan | None:
        """The modules of each of so many stages of a pipeline; None for one.

        Raises UserError where it cannot be cut so, ValueError (pydantic's) for a schedule that does not exist.
        """
        if count == 1:
            return None
        names = (name for name, _ in self.model.named_parameters(remove_duplicate=False))
        stages = cut_into_stages(self._graph(), self.costs(1), names, count)
        return PipelinePlan(schedule=schedule, stages=stages, tied=tied_modules(self.model, stages))

    @property
    def graph(self) -> Graph:
        """What the model runs for one sample. Raises UserError where it cannot be captured."""
        return self._graph()

    def _count(self, model: nn.Module) -> tuple[ModelCosts, ModelCosts]:
        dtype = getattr(torch, self.job.precision.compute)
        one, two = (costs(model, self.rows.longest, batch, dtype) for batch in (1, 2))
        lora = self.job.lora
        if lora is None or lora.base == "parameters" or model is not self.model:
            return one, two
        packed = base_weights(model, lora.base_skip, BASES[lora.base].block)
        parameters = tuple(replace(p, quantised=p.name in packed) for p in one.parameters)
        return replace(one, parameters=parameters), replace(two, parameters=parameters)

    def _narrowed(self, tensor: int, vocabulary: bool) -> _Narrow | None:
        """The model of one of so many TP ranks; None where no configuration says it."""
        config = one_of(self.config, tensor, vocabulary)
        if config is None:
            return None
        try:
            model = build_on_meta(config)
            return _Narrow(_shapes(model), self._count(model))
        except UserError:
            return None


@dataclass(frozen=True)
class _Narrow:
    """A model of fewer heads and a narrower inside."""

    shapes: Mapping[str, tuple[int, ...]]
    costs: tuple[ModelCosts, ModelCosts]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _layout(name: str, layouts: Mapping[str, str]) -> str | None:
    return next((layout for pattern, layout in layouts.items() if matches((pattern,), name)), None)


def one_of(config: PreTrainedConfig, tensor: int, vocabulary: bool) -> PreTrainedConfig | None:
    """The model that one of so many TP ranks computes: fewer heads, a narrower inside. None: no fields say it."""
    config = deepcopy(config)
    text = config.get_text_config()
    sizes = {
        name: int_field(text, FIELDS[name]) for name in ("heads", "hidden", "head_dim", "kv_heads", "ffn", "vocab")
    }
    if varies(text) or not (sizes["heads"] and sizes["hidden"] and sizes["ffn"]):
        return None
    (heads, n), (_, hidden), (ffn, width) = sizes["heads"], sizes["hidden"], sizes["ffn"]
    kv_heads = sizes["kv_heads"][1] if sizes["kv_heads"] else n
    own = -(-kv_heads // tensor)  # of the rank that has most
    changes = {heads: own * n // kv_heads, ffn: -(-width // tensor)}
    changes["head_dim"] = sizes["head_dim"][1] if sizes["head_dim"] else hidden // n
    changes["num_key_value_heads"] = own
    if vocabulary and sizes["vocab"]:
        changes[sizes["vocab"][0]] = -(-sizes["vocab"][1] // tensor)
        changes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        for name, value in changes.items():
            setattr(text, name, value)
    except Exception:  # noqa: BLE001  classes refuse with what they like: fields that follow from others, no None
        return None
    return config
