"""Rules of tensor parallelism are taken where they fit the shapes that flow, and refused with a reason elsewhere."""

from typing import Any

import pytest
from transformers import AutoConfig

from tangram.layout import Layout
from tangram.models.build import build_on_meta
from tangram.models.tensor_rules import TensorRules, rules_for
from tests.models.tiny import FIELDS, tiny


def rules(kind: str, ranks: int = 2, shard: str | None = "dp", **changes: Any) -> TensorRules | str:
    config = tiny(kind, **changes) if kind in {"llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt2"} else None
    config = config or AutoConfig.for_model(kind, **{**FIELDS, **changes})
    return rules_for(config, build_on_meta(config), ("tp", ranks), shard)


def test_llama() -> None:
    found = rules("llama")
    assert isinstance(found, TensorRules)
    assert found.parameters["*.q_proj.weight"] == "(heads/tp head_dim)/dp h"
    assert found.parameters["*.o_proj.weight"] == "h/dp (heads/tp head_dim)"
    assert found.activations["*.down_proj"] == "b s f/tp -> b s h"
    assert set(found.activations) == {f"*.{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert found.sizes == {"head_dim": 8}
    assert not any("embed" in name or "lm_head" in name for name in found.parameters)  # 65 does not divide by 2
    assert not found.vocabulary


def test_without_a_sharding_axis() -> None:
    found = rules("llama", shard=None)
    assert isinstance(found, TensorRules)
    assert found.parameters["*.q_proj.weight"] == "(heads/tp head_dim) h"
    assert not any("dp" in Layout.parse(text).axes for text in found.parameters.values())


def test_the_vocabulary_is_cut_where_it_divides_and_the_embedding_is_a_plain_one() -> None:
    found = rules("llama", vocab_size=64)
    assert isinstance(found, TensorRules)
    assert found.vocabulary
    assert found.parameters["lm_head.weight"] == "v/tp/dp h"
    assert found.activations["*.embed_tokens"] == "b s -> b s h"
    scaled = rules("gemma3_text", vocab_size=64)  # its embedding scales what it looks up
    assert isinstance(scaled, TensorRules)
    assert not scaled.vocabulary


def test_norms_of_heads_have_rules_that_fit_the_order_of_their_dims() -> None:
    for kind, flow in (("qwen3", "b s heads/tp head_dim"), ("gemma3_text", "b heads/tp s head_dim")):
        found = rules(kind)
        assert isinstance(found, TensorRules)
        assert found.activations["*.q_norm"] == f"{flow} -> {flow}"
        assert found.activations["*.k_norm"] == f"{flow} -> {flow}".replace("heads", "kv_heads")


def test_biases_are_cut_with_their_weights() -> None:
    found = rules("qwen2")
    assert isinstance(found, TensorRules)
    assert found.parameters["*.q_proj.bias"] == "(heads/tp head_dim)/dp"


@pytest.mark.parametrize(
    ("kind", "ranks", "changes", "reason"),
    [
        ("llama", 4, {}, "the 2 key-value heads do not divide by tp=4"),
        ("llama", 3, {}, "the 4 attention heads do not divide by tp=3"),
        (
            "llama",
            2,
            {"intermediate_size": 49},
            "what goes through model.layers.0.mlp.gate_proj does not have the shape",
        ),
        ("qwen3_moe", 2, {}, "no rule of tensor parallelism names model.layers.0.mlp.experts.gate_up_proj and 5 more"),
        ("gpt2", 2, {}, "no rule of tensor parallelism names transformer.h.0.attn.c_attn.weight and"),
        ("phi3", 2, {}, "no rule of tensor parallelism names model.layers.0.self_attn.qkv_proj.weight and 3 more"),
        ("olmo2", 2, {}, "what goes through model.layers.0.self_attn.q_norm does not have the shape"),
    ],
)
def test_refusals(kind: str, ranks: int, changes: dict[str, Any], reason: str) -> None:
    found = rules(kind, ranks, **changes)
    assert isinstance(found, str)
    assert reason in found


def test_a_parameter_that_is_cut_needs_a_rule_for_what_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.models import tensor_rules

    table = tensor_rules._table()
    flows = {name: flow for name, flow in table["activations"].items() if name != "*.up_proj"}
    monkeypatch.setattr(tensor_rules, "_table", lambda: {**table, "activations": flows})
    found = rules("llama")
    assert found == "model.layers.0.mlp.up_proj.weight is cut over tp, but no rule says how activations flow through it"
