"""Derivation: the published plans from three marks, and every derived plan run beside the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, ViTConfig, ViTForImageClassification

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.costs import block_names
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.layouts import moved, value_layout
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.proof.derived import check

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, **HEADS}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": {"head_dim": 8, **TINY},
    "gemma3_text": {"head_dim": 8, **TINY},
    "mamba2": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2,
        "vocab_size": 64, "chunk_size": 8,
    },
}  # fmt: skip
MEGATRON = (
    "*.{q,up}_proj.weight: out/tp in",
    "{model.embed_tokens,lm_head}.weight: v/tp h",
    "model.layers.*: b s/tp h",
)


@cache
def language(kind: str) -> tuple[nn.Module, Graph, dict[str, Tensor]]:
    """A tiny model with values, its graph, and all that the graph takes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    model: nn.Module = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    ids = torch.randint(64, (4, 16))
    graph = folded(capture(model, {"input_ids": ids, "use_cache": False}), block_names(model))
    return model, graph, {**dict(model.named_parameters()), **dict(model.named_buffers()), "input_ids": ids}


def derived(graph: Graph, mesh: str, marks: Sequence[str]) -> Derived:
    return derive(graph, [Mark.parse(text) for text in marks], Mesh.parse(mesh))


def layouts(found: Derived) -> dict[str, str]:
    """Of the parameters of the first layer and those outside: the layout, without sizes."""
    graph = found.folded.graph
    return {
        value.name.replace("model.", "").replace("layers.0.", ""): "/".join(
            f"{d}:{cut.axis}" for d, dim in enumerate(value_layout(found, v).dims) for cut in dim.cuts
        )
        for v, value in graph.of_kind("parameter")
        if found.folded.classes[v] == v
    }


def test_the_plan_of_megatron_from_three_marks() -> None:
    _, graph, _ = language("llama")
    found = derived(graph, "tp=2", MEGATRON)
    assert layouts(found) == {
        "embed_tokens.weight": "0:tp",
        "self_attn.q_proj.weight": "0:tp", "self_attn.k_proj.weight": "0:tp", "self_attn.v_proj.weight": "0:tp",
        "self_attn.o_proj.weight": "1:tp",
        "mlp.gate_proj.weight": "0:tp", "mlp.up_proj.weight": "0:tp", "mlp.down_proj.weight": "1:tp",
        "input_layernorm.weight": "", "post_attention_layernorm.weight": "", "norm.weight": "",
        "lm_head.weight": "0:tp",
    }  # fmt: skip
    activation = 4 * 16 * 32 * 4 / 2  # bytes that a rank receives of one, in one direction
    large = [one for one in moved(found) if one.nbytes > 1000]
    assert Counter({(one.forward, one.backward): 0 for one in large}) == {
        ("all-gather", "reduce-scatter"): 0,
        ("reduce-scatter", "all-gather"): 0,
    }
    assert sum(one.times for one in large if one.forward == "all-gather") == 2 * 2 + 1  # attention, mlp; the head
    assert sum(one.times for one in large if one.forward == "reduce-scatter") == 2 * 2 + 1  # and the embedding
    assert all(one.forward_bytes == one.backward_bytes == activation for one in large)
    small = [one for one in moved(found) if 0 < one.nbytes <= 1000 and one.backward]
    assert {(one.forward, one.backward, one.times) for one in small} == {("", "all-reduce", 2), ("", "all-reduce", 1)}


STRATEGIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tensor, sequence": ("llama", "tp=2", MEGATRON),
    "tensor without sequence": ("llama", "tp=2", (*MEGATRON[:2], "model.layers.*: b s h")),
    "data": ("qwen3", "dp=2", ("input_ids: b/dp s",)),
    "data, tensor, sequence": ("qwen3", "dp=2 tp=2", (*MEGATRON[:2], "model.layers.*: b/dp s/tp h")),
    "context": ("qwen3", "cp=4", ("model.layers.*: b s/cp h",)),
    "data, context, tensor": ("qwen3", "dp=2 cp=2 tp=2", (*MEGATRON[:2], "model.layers.*: b/dp s/cp/tp h")),
    "more norms": ("gemma3_text", "tp=2", MEGATRON),
    "a scan": ("mamba2", "tp=2", ("{backbone.embeddings,lm_head}.weight: v/tp h", "backbone.layers.*: b s/tp h")),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_derived_gives_what_the_model_gives(name: str) -> None:
    kind, mesh, marks = STRATEGIES[name]
    model, graph, given = language(kind)
    ran = check(derived(graph, mesh, marks), given)
    assert ran.wrong == ""
    assert ran.operators == len(graph.nodes)
    assert ran.gradients >= len(list(model.parameters()))


def test_a_vision_model() -> None:
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
    model, pixels = ViTForImageClassification(config).eval(), torch.randn(4, 3, 32, 32)
    graph = folded(capture(model, {"pixel_values": pixels}), block_names(model))
    names = dict(model.named_parameters())
    first = next(name for name in names if "layer" in name and "q" in name.split(".")[-2] and name.endswith("weight"))
    up = next(name for name in names if names[name].shape == (48, 32))
    layers = f"{graph.blocks[0].path[:-1]}*: b s h"
    marks = [f"{first.replace('.0.', '.*.')}: out/tp in", f"{up.replace('.0.', '.*.')}: out/tp in", layers]
    found = derived(graph, "tp=2", marks)
    assert check(found, {**names, **dict(model.named_buffers()), "pixel_values": pixels}).wrong == ""
    inside = [v for v, value in graph.of_kind("parameter") if ".0." in value.name]
    cut = [v for v in inside if "tp" in str(value_layout(found, v))]
    assert {tuple(graph.values[v].shape) for v in cut} == {(32, 32), (48, 32), (32, 48), (32,), (48,)}


def test_a_wrong_layout_is_found() -> None:
    """What the proof is worth: one state of one tensor changed, and it is wrong."""
    _, graph, given = language("llama")
    found = derived(graph, "tp=2", MEGATRON)
    over = found.axes[0]
    products = [
        s for s in found.folded.steps if s.node.operator.name() == "aten::mm" and over.communication[s.number].label
    ]
    silent = 0
    for step in products[:4]:
        move = over.communication[step.number]
        turned = move._replace(outputs=tuple(s._replace(dim=1 - s.dim) if s.kind == "cut" else s for s in move.outputs))
        if turned == move:
            turned = move._replace(outputs=tuple(s._replace(kind="same") for s in move.outputs))
        moves = {**over.communication, step.number: turned}
        planted = type(found)(
            found.folded, found.mesh, found.marks, (type(over)(over.axis, 2, over.lying, over.used, moves),)
        )
        try:
            silent += not check(planted, given).wrong
        except RuntimeError:
            continue
    assert len(products) > 4
    assert silent == 0


def test_the_marks_are_kept_and_no_more_is_moved_than_without_them() -> None:
    _, graph, _ = language("qwen3")
    found = derived(graph, "dp=2", ("input_ids: b/dp s",))
    assert set(layouts(found).values()) == {""}
    kinds = {(one.forward, one.backward) for one in moved(found) if one.nbytes}
    assert kinds == {("", "all-reduce")}  # of the gradients, and of nothing else
    weights = sum(v.nbytes for _, v in graph.of_kind("parameter"))
    assert sum(one.nbytes for one in moved(found)) == weights


@pytest.mark.parametrize(
    ("mesh", "marks", "sentence"),
    [
        ("tp=2", ["*.q_prj.weight: o/tp i"], r"names no tensor of the model; the nearest is model.*q_proj.weight"),
        (
            "tp=2",
            ["*.*_proj.weight: o/tp i", "model.embed_tokens.weight: v/tp h h"],
            r"has 3 dims, but the tensor has shape",
        ),
        ("tp=2", ["{model.norm,lm_head}.weight: o/tp i"], r"names unlike tensors, model.norm.weight of 1 dims and"),
        ("dp=2 tp=3", ["*.q_proj.weight: o/tp/dp i"], r"cuts over tp before dp, which stands first in the mesh"),
        ("dp=3 tp=2", ["*.q_proj.weight: o/dp/tp i"], r"cuts one dim over dp and tp in parts of unlike sizes"),
        ("dp=3 tp=2", ["model.layers.*: b/dp s h", "model.layers.*: b/tp s h"], r"one dim over dp and tp in parts of"),
        (
            "tp=2",
            ["*.q_proj.weight: o/tp i", "*.0.*.q_proj.weight: o i/tp"],
            r"contradict each other on model.layers.0",
        ),
        ("tp=2", ["*.q_proj.weight: o/dp i"], r"names the axis dp, which is none of the mesh `tp=2`"),
        ("tp=2", ["*.q_proj.weight: (o/tp + 8) i"], r"knows cuts of factors and of products, no others"),
        ("tp=2", ["*.q_proj.weight"], r"a mark is written as `name: layout`"),
    ],
)
def test_marks_that_cannot_be(mesh: str, marks: list[str], sentence: str) -> None:
    _, graph, _ = language("llama")
    with pytest.raises(UserError, match=sentence):
        derived(graph, mesh, marks)


def test_an_operator_without_a_rule_is_named_with_its_line() -> None:
    @torch.library.custom_op("derive_test::odd", mutates_args=())
    def odd(x: Tensor) -> Tensor:
        return x.flip(0)

    odd.register_fake(torch.empty_like)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.derive_test.odd(x @ self.weight)

    graph = capture(Own(), {"x": torch.randn(4, 4)})
    with pytest.raises(
        UserError, match=r"test_derive.py:\d+: there is no rule for derive_test.odd: `tangram shard disc"
    ):
        derived(graph, "tp=2", ["x: a/tp b"])
