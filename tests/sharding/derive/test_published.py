"""Where transformers publishes a plan, the derivation cuts the same parameters the same way, at the published sizes."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
from transformers import AutoConfig

from tangram.layout import Mesh
from tangram.models.building.build import build_on_meta
from tangram.models.building.named import named
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.outlines.costs import block_names
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.layouts import value_layout
from tangram.sharding.derive.marking.marks import marks_of
from tangram.sharding.derive.marking.published import published as read_published

DIM = {"colwise": 0, "rowwise": 1, "grouped_gemm": 0, "replicated_with_grad_allreduce": None}
"""The dim of a weight that a style cuts; None: whole."""
LAYERS = {"deepseek_v3": 4}
"""Three are dense."""


def published(kind: str) -> dict[str, str]:
    """By pattern, the style: of the experts that of the expert-parallel plan, for these are the marks that we have."""
    config: Any = AutoConfig.for_model(kind)
    tensor, expert = (getattr(config, name, None) or {} for name in ("base_model_tp_plan", "base_model_ep_plan"))
    plan = {name: style for name, style in {**tensor, **expert}.items() if style in DIM}
    return {f"model.{name}": style for name, style in plan.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_parameters_are_cut_as_published(kind: str) -> None:
    fields = {"num_hidden_layers": str(LAYERS.get(kind, 2))}
    model, inputs = named(kind, fields).make(4, 1024)
    graph = folded(capture(model, inputs), block_names(model))
    found = derive(graph, marks_of(kind) or [], Mesh.parse("tp=2"))
    plan = published(kind)
    compared: set[str] = set()
    for v, value in graph.of_kind("parameter"):
        module = value.name.removesuffix(".weight")
        styles = [style for pattern, style in plan.items() if fnmatch.fnmatchcase(module, pattern)]
        if styles and not value.name.endswith("_bias"):  # of experts: without a mark, and small
            cut = [d for d, dim in enumerate(value_layout(found, v).dims) if dim.axes]
            dim = DIM[styles[-1]]
            assert cut == ([] if dim is None else [dim]), f"{value.name} is published as {styles[-1]}"
            compared.add(styles[-1])
    assert compared >= {"colwise", "rowwise"} or compared == {"grouped_gemm"}


def test_a_tied_head_has_no_mark_of_its_own() -> None:
    """Its weight is the embeddings', and a mark by the other name would name no tensor of the model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for tied in (False, True):
        config = AutoConfig.for_model("qwen2", **sizes, **heads, tie_word_embeddings=tied)
        marks = read_published(build_on_meta(config), "tp")
        assert any(mark.pattern == "lm_head.weight" for mark in marks) != tied
        assert any(mark.pattern.endswith("q_proj.weight") for mark in marks)
