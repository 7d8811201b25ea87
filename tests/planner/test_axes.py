"""Context and expert axes of plans: their marks, what follows from them, and what is refused before anything starts."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.build import build_on_meta
from tangram.planner.legality.check_plan import legal, refused_heads
from tangram.planner.local.derived_layouts import ModelAxis, TensorLayouts, axes_layouts, sample_graph
from tangram.planner.local.rank import predict
from tangram.schema.plan import Plan
from tests.planner.machine import rates
from tests.training.oracle.axes import MIXTURES
from tests.training.small import SMALL_MODEL
from tests.training.strategies import EXPERTS, GATHERED, HEADS, with_experts

FIELDS = {**SMALL_MODEL, "vocab_size": 256, "tie_word_embeddings": False}


def config_of(kind: str = "qwen3", **more: int) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**FIELDS, **MIXTURES.get(kind, {}), **more})


def laid_out(kind: str, mesh: str, *axes: ModelAxis, samples: int = 1, **more: int) -> TensorLayouts | str | None:
    config = config_of(kind, **more)
    model = build_on_meta(config)
    graph = sample_graph(model, 32, torch.float32, samples)
    return axes_layouts(config, model, graph, Mesh.parse(mesh), axes, "dp")


def plan_of(mesh: str, axes: Mapping[str, list[str]], parameters: Mapping[str, str], marks: Mapping[str, str]) -> Plan:
    tables: dict[str, Any] = {
        "version": 3,
        "mesh": mesh,
        "axes": {role: list(names) for role, names in axes.items()},
        "model": {"preset": "qwen3-1m"},
        "data": {"sources": [{"path": "stdlib"}], "sequence": 32, "global_batch": 8, "micro_batch": 2},
        "optimiser": {"lr": 1e-3},
        "run": {"steps": 1},
        "layouts": {"parameters": dict(parameters), "marks": dict(marks), "sizes": {"head_dim": 8}},
    }
    return Plan.model_validate(tables)


def test_context_cuts_the_sequence_and_no_parameter() -> None:
    found = laid_out("qwen3", "cp=2", ModelAxis("cp", "context", "gathered"))
    assert isinstance(found, TensorLayouts)
    assert (found.parameters, found.marks) == ({}, GATHERED)
    keys = 32 * 16 * 4 / 2
    assert sorted(m.nbytes for m in found.communication if m.times == 2)[-1] == keys


def test_by_heads_what_attention_gives_is_exchanged() -> None:
    found = laid_out("qwen3", "cp=4", ModelAxis("cp", "context", "heads"), num_key_value_heads=4, head_dim=4)
    assert isinstance(found, TensorLayouts)
    assert found.parameters == {}
    exchanged = 32 * 16 * 4 / 4 * 3 / 4  # of its quarter of a tensor a rank gets three quarters from the others
    assert [m.nbytes for m in found.communication if m.times == 2].count(exchanged) == 2  # forward and backward


def test_experts_are_whole_on_a_rank() -> None:
    for kind in MIXTURES:
        found = laid_out(kind, "ep=2", ModelAxis("ep", "expert", "sequence"))
        assert isinstance(found, TensorLayouts)
        assert {text for name, text in found.parameters.items() if "experts" in name} == {"_/ep/dp _ _"}
        assert all("shared" not in name and "experts" in name for name in found.parameters)
    assert laid_out("qwen3", "ep=2", ModelAxis("ep", "expert", "sequence")) is None


def test_experts_of_which_nothing_is_published() -> None:
    """llama4_text multiplies all experts at once, each with its own rows, and has no `ep_plan`."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    found = laid_out("llama4_text", "ep=2", ModelAxis("ep", "expert", "sequence"), **sizes)
    assert isinstance(found, TensorLayouts)
    assert found.parameters == {
        f"model.layers.*.feed_forward.experts.{name}": "_/ep/dp _ _" for name in ("gate_up_proj", "down_proj")
    }


def test_scans_have_no_heads_to_divide() -> None:
    config = AutoConfig.for_model("mamba2", hidden_size=32, num_heads=8, head_dim=8)
    assert refused_heads(config, tensor=[("tp", 2)]) == ()
    (why,) = refused_heads(config, ulysses=[("cp", 2)])
    assert "a mamba2 model has no attention heads (num_attention_heads) that ranks could exchange" in str(why)


@pytest.mark.parametrize("way", ["gathered", "ring", "heads"])
def test_marks_that_name_nothing_of_a_model_are_not_said_to_cut_it_unevenly(way: Any) -> None:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4, "vocab_size": 64, "n_positions": 64}
    config = AutoConfig.for_model("codegen", **sizes)
    model = build_on_meta(config)
    graph = sample_graph(model, 32, torch.float32, 1)
    axis = ModelAxis("cp", "context", way)
    assert axes_layouts(config, model, graph, Mesh.parse("cp=2"), [axis], None) is None


@pytest.mark.parametrize(
    ("kind", "heads", "weight", "layout"),
    [
        ("gpt2", 4, "transformer.h.*.attn.c_attn.weight", "_ (3 32/tp)"),
        ("gpt2", 3, "transformer.h.*.attn.c_attn.weight", "_ (3 3/tp 8)"),
        ("gpt_neox", 4, "gpt_neox.layers.*.attention.query_key_value.weight", "_/tp _"),
        ("gpt_neox", 3, "gpt_neox.layers.*.attention.query_key_value.weight", "(3/tp 24) _"),
        ("bloom", 3, "transformer.h.*.self_attention.query_key_value.weight", "(3/tp 24) _"),
        ("mpt", 3, "transformer.blocks.*.attn.Wqkv.weight", "(3 3/tp 8) _"),
    ],
)
def test_queries_keys_and_values_in_one_weight_are_cut_by_whole_heads(
    kind: str, heads: int, weight: str, layout: str
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8 * heads, "num_attention_heads": heads, "vocab_size": 65}
    config = AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0)
    model = build_on_meta(config)
    graph = sample_graph(model, 32, torch.float32, 1)
    found = axes_layouts(config, model, graph, Mesh.parse("tp=2"), [ModelAxis("tp", "tensor")], None)
    assert isinstance(found, TensorLayouts), found
    assert found.parameters[weight].replace("_=", "") == layout
    assert found.vocabulary


def test_samples_between_experts_need_samples() -> None:
    axis = ModelAxis("ep", "expert", "samples")
    assert isinstance(laid_out("qwen3_moe", "ep=2", axis, samples=2), TensorLayouts)
    assert laid_out("qwen3_moe", "ep=2", axis) == (
        "the marks of a qwen3_moe model cut nothing of this one into 2 even parts"
    )


def test_context_and_tensor_axes_together() -> None:
    axes = (ModelAxis("cp", "context", "gathered"), ModelAxis("tp", "tensor"))
    found = laid_out("qwen3", "cp=2 tp=2", *axes)
    assert isinstance(found, TensorLayouts)
    assert found.parameters["model.layers.*.self_attn.k_proj.weight"] == "_/tp/dp _"
    assert not any("cp" in text for text in found.parameters.values())
    plan = plan_of(
        "dp=2 cp=2 tp=2",
        {"data": ["dp"], "context": ["cp"], "tensor": ["tp"]},
        {**found.parameters, "*": "_/dp ..."},
        found.marks,
    )
    legal(plan, build_on_meta(config_of()))


CONTEXT = {"data": ["dp"], "context": ["cp"]}


@pytest.mark.parametrize(
    ("kind", "mesh", "axes", "parameters", "marks", "reason"),
    [
        (
            "qwen3", "dp=2 cp=3", CONTEXT, {"*": "_/dp ..."}, GATHERED,
            "the 32 tokens of a sample (data.sequence) do not divide by cp=3: the nearest sizes are cp=4, or 33 in",
        ),
        (
            "qwen3", "dp=2 cp=8", CONTEXT, {"*": "_/dp ..."}, HEADS,
            "the 4 attention heads (num_attention_heads) do not divide by cp=8: the nearest sizes are cp=4, or 8 in",
        ),
        (
            "qwen3", "dp=2 cp=4", CONTEXT, {"*": "_/dp ..."}, HEADS,
            "the 2 key-value heads (num_key_value_heads) do not divide by cp=4: the nearest sizes are cp=2, or 4 in",
        ),
        (
            "qwen3", "dp=2 tp=4", {"data": ["dp"], "tensor": ["tp"]},
            {"*.[qkv]_proj.weight": "(heads/tp head_dim)/dp h", "*": "_/dp ..."}, {"*.q_proj.weight": "o/tp i"},
            "the 2 key-value heads (num_key_value_heads) do not divide by tp=4",
        ),
        (
            "qwen3_moe", "dp=2 ep=8", {"data": ["dp"], "expert": ["ep"]}, with_experts("dp"), EXPERTS,
            "the 4 experts do not divide by ep=8: the nearest sizes are ep=4, or 8 in their place",
        ),
        (
            "qwen3_moe", "dp=2 ep=4", {"data": ["dp"], "expert": ["ep"]}, with_experts("dp"),
            {"*.experts.{gate_up_proj,down_proj}": "e/ep _ _", "model.layers.*": "b/ep s h"},
            "the 2 samples of a micro-batch (data.micro_batch) do not divide by ep=4: the nearest sizes are ep=2",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_what_would(
    kind: str, mesh: str, axes: Any, parameters: Any, marks: Any, reason: str
) -> None:
    model = build_on_meta(config_of(kind))
    with pytest.raises(UserError) as refused:
        legal(plan_of(mesh, axes, parameters, marks), model)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("mesh", "axes", "marks", "reason"),
    [
        ("dp=2 cp=2", CONTEXT, {}, 'no mark and no layout of a parameter names "cp"'),
        ("dp=2 cp=2 ep=2", {**CONTEXT, "expert": ["ep"]}, GATHERED, 'no mark and no layout of a parameter names "ep"'),
        ("a=2 b=2", {"tensor": ["a", "b"]}, {}, 'no mark and no layout of a parameter names "a"'),
        ("dp=2 cp=2", {"data": ["dp", "cp"], "context": ["cp"]}, {}, 'the axis "cp" of the mesh has 2 roles'),
    ],
)
def test_axes_without_a_purpose_are_refused(mesh: str, axes: Any, marks: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="validation error") as refused:
        plan_of(mesh, axes, {"*": "..."}, marks)
    assert reason in str(refused.value)


def test_a_rank_of_a_context_axis_is_predicted_to_keep_a_part() -> None:
    config = config_of()
    one = predict(plan_of("dp=2", {"data": ["dp"]}, {"*": "_/dp ..."}, {}), rates(2), config)
    both = predict(plan_of("dp=2 cp=2", CONTEXT, {"*": "_/dp ..."}, GATHERED), rates(4), config)
    assert both.memory.activations == pytest.approx(one.memory.activations / 2, rel=1e-3)
    assert both.memory.parameters == one.memory.parameters
