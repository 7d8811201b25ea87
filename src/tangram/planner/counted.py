"""A job's model on meta, and what it costs: counted once for all plans that are made of it."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedConfig

from tangram.errors import UserError
from tangram.models.build import build_on_meta
from tangram.models.costs import ModelCosts, at_micro_batch, costs
from tangram.models.graph import Graph
from tangram.planner.derived import Moves, TensorLayouts, plan_moves, sample_graph, tensor_layouts
from tangram.planner.job import Job
from tangram.planner.laid import refused_heads
from tangram.planner.plan import Plan, matches
from tangram.planner.staged import Stages, cut_into_stages


def frozen(model: nn.Module, job: Job) -> nn.Module:
    """The model with the parameters frozen that the job freezes."""
    for name, parameter in model.named_parameters():
        if matches(job.model.freeze, name):
            parameter.requires_grad_(False)
    return model


class Counted:
    """A job's model on meta and what it costs, counted once for each number of tensor ranks."""

    def __init__(self, job: Job, config: PreTrainedConfig) -> None:
        self.job, self.config = job, config
        self.model = frozen(build_on_meta(config), job)
        self._pair = cache(self._count)
        dtype = getattr(torch, job.precision.compute)
        self._graph = cache(lambda: sample_graph(self.model, job.data.sequence, dtype))

    def moves(self, plan: Plan) -> tuple[Moves, ...]:
        """What moves over a plan's model axes for one sample. Raises UserError where nothing can be derived."""
        return plan_moves(plan, self._graph())

    def costs(self, tensor: int, vocabulary: bool, micro_batch: float) -> ModelCosts:
        """Of one of so many tensor ranks, for one micro-batch."""
        return at_micro_batch(*self._pair(tensor, vocabulary), micro_batch)

    def tensor(self, axis: tuple[str, int], shard: str | None) -> TensorLayouts | str | None:
        """How everything lies over a tensor axis, derived from the marks that are known; None where none are."""
        if found := refused_heads(self.config, tensor=[axis]):
            return found[0].said
        try:
            graph = self._graph()
        except UserError as error:
            return " ".join(str(error).split())
        return tensor_layouts(self.config, self.model, graph, axis, shard)

    def stages(self, count: int) -> Stages:
        """The modules of each of so many stages of a pipeline. Raises UserError where it cannot be cut so."""
        return cut_into_stages(self._graph(), self.costs(1, False, 1), count)

    @property
    def graph(self) -> Graph:
        """What the model runs for one sample. Raises UserError where it cannot be captured."""
        return self._graph()

    def _count(self, tensor: int, vocabulary: bool) -> tuple[ModelCosts, ModelCosts]:
        model = self.model if tensor == 1 else build_on_meta(_one_of(self.config, tensor, vocabulary))
        dtype = getattr(torch, self.job.precision.compute)
        one, two = (costs(model, self.job.data.sequence, batch, dtype) for batch in (1, 2))
        return one, two


def _one_of(config: PreTrainedConfig, tensor: int, vocabulary: bool) -> PreTrainedConfig:
    """The model that one of so many tensor ranks computes: fewer heads, a narrower inside."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    text.num_key_value_heads = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // tensor
    text.num_attention_heads //= tensor
    text.intermediate_size //= tensor
    if vocabulary:
        text.vocab_size //= tensor
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(text, token, None)
    return config
