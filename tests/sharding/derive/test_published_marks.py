"""transformers' plans as marks: what they cut is what their styles cut; what they do not fit is left out or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.marking.marks import Mark, marks_of, matched
from tangram.sharding.derive.marking.published import marks_known_for, published
from tangram.sharding.derive.of_model import derive_model, fitting, graph_of, parameter_states
from tests.sharding.derive.test_marks_files import tiny

EXPERTS = "model.layers.*.mlp.experts"
IDS = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "use_cache": False}


def layouts(model: nn.Module, tensor: str, experts: str | None = None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for mark in published(model, tensor, experts):
        found.setdefault(mark.pattern, []).append(str(mark.layout))
    return found


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_by_the_tensor_plan_by_expert_or_both(kind: str) -> None:
    model = tiny(kind)
    up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    tensor, both = layouts(model, "tp"), layouts(model, "tp", "ep")
    assert (tensor[up], tensor[down]) == (["_ (2 _/tp) _"], ["_ _ _/tp"])
    assert both[up] == ["_ (2 _/tp) _", "_/ep _ _"]
    one = layouts(model, "tp", "tp")
    assert (one[up], one[down]) == (["_/tp _ _"], ["_/tp _ _"])
    assert {k: v for k, v in one.items() if "experts." not in k} == {
        k: v for k, v in tensor.items() if "experts." not in k
    }


def test_biases_of_experts_are_cut_with_them() -> None:
    found = layouts(tiny("gpt_oss"), "tp", "ep")
    assert found[f"{EXPERTS}.down_proj_bias"] == ["_/ep _"]
    assert found["lm_head.weight"] == ["_/tp _"]


def test_another_module_has_no_plans() -> None:
    assert published(nn.Linear(2, 2), "tp", "tp") == []


def test_styles_that_cut_no_weight_are_no_marks() -> None:
    model = tiny("llama")
    plan = {
        "model.layers.*.mlp": "sequence_parallel",
        "model.norm": "colwise",
        "nothing.*": "rowwise",
        "lm_head": "new",
    }
    model._tp_plan = plan  # type: ignore[assignment]
    assert [str(mark) for mark in published(model, "tp")] == ["model.norm.weight: _/tp"]


def test_a_plan_is_not_trusted() -> None:
    """A plan that no layouts fit is refused; of one with names or cuts that the model has not, these are left out."""
    model = tiny("llama")
    graph = graph_of(model, IDS, torch.float32)
    model._tp_plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.0.mlp.up_proj": "rowwise"}  # type: ignore[assignment]
    with pytest.raises(UserError, match="contradict each other on"):
        derive(graph, fitting(graph, published(model, "tp"), Mesh.parse("tp=2")), Mesh.parse("tp=2"))
    model._tp_plan = {"model.layers.*.mlp.up_proj": "colwise", "lm_head": "colwise"}  # type: ignore[assignment]
    of_three = fitting(graph, published(model, "tp"), Mesh.parse("tp=3"))
    assert of_three == []
    assert fitting(graph, [Mark.parse("*.up_proj.weight: o/ep i")], Mesh.parse("tp=2")) == []


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize("head", [AutoModel, AutoModelForMaskedLM])
def test_a_type_without_marks_has_those_of_one_that_calls_its_modules_the_same(head: Any) -> None:
    """RoBERTa those of BERT, with a head and without; what they cut, they cut in all its layers."""
    model = head.from_config(AutoConfig.for_model("roberta", **SIZES))
    assert marks_of("roberta") is None
    assert published(model, "tp") == []
    marks = fitting(graph_of(model, IDS, torch.float32), marks_known_for(model), Mesh.parse("tp=2"))
    assert [str(mark.layout) for mark in marks] == [str(mark.layout) for mark in marks_of("bert") or ()]
    states = parameter_states(derive_model(graph_of(model, IDS, torch.float32), marks, Mesh.parse("tp=2")))
    cut = [name for name, own in states.items() if own["tp"].kind == "cut" and "encoder" in name]
    assert len([name for name in cut if name.endswith("dense.weight")]) == 2 * 3, cut


def test_marks_of_which_a_line_names_nothing_are_no_type_s() -> None:
    model = AutoModel.from_config(AutoConfig.for_model("convnext", depths=[1], hidden_sizes=[32], num_stages=1))
    assert marks_known_for(model) == []
    model = AutoModel.from_config(AutoConfig.for_model("roberta", **SIZES))
    assert marks_known_for(nn.Sequential(model.encoder, model.embeddings)) == []
    model.encoder.blocks = model.encoder.layer
    del model.encoder.layer
    assert marks_known_for(model) == [], "its queries are called as BERT's, and its layers are not"


def test_a_bare_model_has_the_marks_of_its_type() -> None:
    """Its modules are called as those of the model with a head, but for what stands before each name."""
    model = AutoModel.from_config(AutoConfig.for_model("llama", **SIZES))
    graph = graph_of(model, IDS, torch.float32)
    marks = fitting(graph, marks_known_for(model), Mesh.parse("tp=2"))
    assert {name for mark in marks for name in matched(graph, mark)} >= {"layers.1", "embed_tokens.weight"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for
@pytest.mark.parametrize("wrapped", ["peft", "own", "own, with its configuration"])
def test_what_holds_a_model_has_the_marks_of_it(wrapped: str) -> None:
    """peft's, whose layers with adapters and modules to save have other names, and one's own head on a backbone."""
    if wrapped == "peft":
        own = LoraConfig(target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model: Any = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)), own)
    else:
        model = Headed(AutoModel.from_config(AutoConfig.for_model("llama", **SIZES)))
        if wrapped != "own":
            model.config = model.body.config
    inputs = {"input_ids": IDS["input_ids"]}
    graph = graph_of(model, inputs if wrapped != "peft" else IDS, torch.float32)
    marks = fitting(graph, marks_known_for(model), Mesh.parse("tp=2"))
    states = parameter_states(derive_model(graph, marks, Mesh.parse("tp=2")))
    cut = {name for name, own in states.items() if own["tp"].kind == "cut"}
    if wrapped == "peft":
        layer = "base_model.model.model.layers.1"
        expected = {f"{layer}.self_attn.q_proj.base_layer.weight", f"{layer}.self_attn.q_proj.lora_B.default.weight"}
        expected |= {f"{layer}.mlp.down_proj.weight", "base_model.model.lm_head.modules_to_save.default.weight"}
    else:
        expected = {"body.layers.1.self_attn.q_proj.weight", "body.layers.1.mlp.down_proj.weight"}
    assert expected <= cut
    stream = {name for mark in marks if str(mark.layout) == "b s/tp h" for name in matched(graph, mark)}
    assert any(name.endswith("layers.1") for name in stream), "hidden states are cut between layers"


class Headed(nn.Module):
    """A head on what a model gives."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(input_ids=input_ids, use_cache=False).last_hidden_state)
