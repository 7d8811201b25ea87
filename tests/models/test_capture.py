"""What a capture writes down is what the model does: every graph is run again on real tensors and compared."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, ViTConfig, ViTForImageClassification

from tangram.errors import UserError
from tangram.models.building.twin import without_memory
from tangram.models.capturing.answers import replay
from tangram.models.capturing.capture import CaptureError, capture
from tangram.models.capturing.fold import folded, pairs
from tangram.models.outlines.costs import block_names

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, **TINY},
    "qwen3": {"num_hidden_layers": 2, "head_dim": 8, **TINY},
    "qwen3_moe": {
        "num_hidden_layers": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, **TINY,
    },
    "gemma3_text": {"num_hidden_layers": 2, "head_dim": 8, **TINY},
    "gpt_oss": {"num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **TINY},
    "deepseek_v3": {
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, **TINY, "num_key_value_heads": 4,
    },
    "mamba2": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2,
        "vocab_size": 64, "chunk_size": 8,
    },
}  # fmt: skip


def given_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {**{name: t.detach() for name, t in named}, **inputs}


def token_loss(output: Any) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), torch.arange(32) % 64)


def language(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **LANGUAGE[kind])
    model: nn.Module = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    return model.train(), {"input_ids": torch.randint(64, (2, 16))}


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_language_model_and_its_backward(kind: str) -> None:
    model, inputs = language(kind)
    graph = capture(model, {**inputs, "use_cache": False}, loss=token_loss)
    values = replay(graph, given_of(model, inputs))
    output = model(**inputs, use_cache=False)
    loss = token_loss(output)
    loss.backward()
    assert torch.equal(values[graph.outputs["logits"]], output.logits)
    assert torch.equal(values[graph.outputs["loss"]], loss.detach())
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert graph.gradients.keys() == trained.keys()
    for name, gradient in trained.items():
        found, want = values[graph.gradients[name]].double(), gradient.double()
        assert torch.linalg.vector_norm(found - want) <= 1e-5 * torch.linalg.vector_norm(want), name
    backward = [node for node in graph.nodes if node.backward]
    assert sum(node.of is not None for node in backward) > 0.9 * len(backward)
    assert all(not node.source.startswith("torch/") for node in graph.nodes)
    layers = folded(graph, block_names(model))
    count = LANGUAGE[kind]["num_hidden_layers"]
    kinds = {"deepseek_v3": [0, 1, 1]}.get(kind, [0] * count)
    assert [block.kind for block in layers.blocks] == kinds


def test_a_vision_model() -> None:
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
    model, inputs = ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}
    graph = folded(capture(model, inputs), block_names(model))
    assert torch.equal(replay(graph, given_of(model, inputs))[graph.outputs["logits"]], model(**inputs).logits)
    assert [block.kind for block in graph.blocks] == [0, 0]
    beside = {a: b for a, b in pairs(graph, *graph.blocks) if graph.values[a].kind == "parameter"}
    assert {graph.values[b].name for b in beside.values()} == {
        graph.values[a].name.replace(".0.", ".1.") for a in beside
    }
    assert len(beside) == 16


class Own(nn.Module):
    """A module with what a test wants in its forward."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ self.weight)


def _through_slice(x: Tensor) -> Tensor:
    y = torch.zeros(3, 8)
    y[:, :4].copy_(x)
    y[..., 4:] = 2 * x
    return y


def _through_views(x: Tensor) -> Tensor:
    y = x * 2
    y.view(2, 6)[1].mul_(3)
    y.t().unsqueeze(0)[0, 2].add_(1)
    y.permute(1, 0)[0] = 0.5
    torch.squeeze(y[:, None, :, None], (1, 3)).mul_(2)
    y = torch.cat([y, y])[:6, :4]  # all there is, as GhostNet takes it of a concatenation: an alias
    y += x.repeat(2, 1)
    y[:] *= 2
    return y


def _in_place(x: Tensor) -> Tensor:
    y = x.clone().relu_()
    y.add_(1)
    y[torch.tensor([0, 2])] = 7.0
    return y.masked_fill_(y > 8, 0.0)


def _lists(x: Tensor) -> Tensor:
    a, b = torch.split(x, 2, dim=-1)
    return torch.stack([b.sin(), a, torch.tensor([1.0, 2.0]).expand(3, 2)]).flatten(1)


@pytest.mark.parametrize("act", [_through_slice, _through_views, _in_place, _lists, torch.relu])
def test_what_is_written_in_place(act: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Own(act), torch.randn(3, 6)
    graph = capture(model, {"x": x})
    given = given_of(model, {"x": x})
    assert torch.equal(replay(graph, given)[graph.outputs["output0"]], model(x))
    assert all("test_capture.py:" in node.source for node in graph.nodes)


def _stale(x: Tensor) -> Tensor:
    y = x * 2
    top = y[0]
    y.add_(1)
    return top + 1


def _looks(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x


def _breaks(x: Tensor) -> Tensor:
    return x @ torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (_stale, r"test_capture.py:\d+ writes into a tensor that is taken under another name after that"),
        (_looks, r"test_capture.py:\d+: what runs depends on the values of a tensor"),
        (_breaks, r"Own cannot be captured: .*test_capture.py:\d+: .*"),
    ],
)
def test_what_cannot_be_captured_says_which_line(act: Callable[[Tensor], Tensor], sentence: str) -> None:
    with pytest.raises(CaptureError, match=sentence):
        capture(Own(act), {"x": torch.randn(3, 6)})


def test_sizes_by_name() -> None:
    model, _ = language("qwen3")
    ids = torch.zeros(3, 16, dtype=torch.long, device="meta")
    graph = capture(model, {"input_ids": ids, "use_cache": False}, dynamic={"input_ids": {0: "batch", 1: "tokens"}})
    logits = graph.values[graph.outputs["logits"]]
    assert logits.shape == (3, 16, 64)
    assert logits.sizes == ("batch", "tokens", "64")
    merged = {value.sizes for value in graph.values if value.shape == (48, 32) and value.kind == "made"}
    assert ("batch*tokens", "32") in merged


def test_layers_that_differ_are_of_different_kinds() -> None:
    class Layer(nn.Module):
        def __init__(self, times: float) -> None:
            super().__init__()
            self.linear, self.times = nn.Linear(4, 4), times

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x) * self.times

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(t) for t in (1.0, 1.0, 2.0, 1.0)])

        def forward(self, x: Tensor, first: bool = False) -> Tensor:
            x = x if first else x.exp()
            for layer in self.layers:
                x = layer(x)
            return x

    model = Stack()
    given = {"x": torch.randn(2, 4)}
    graph = folded(capture(model, given), block_names(model))
    assert [block.kind for block in graph.blocks] == [0, 0, 1, 0]
    assert [len(block.takes) for block in graph.blocks] == [3] * 4
    assert {*graph.blocks[1].takes} & {*graph.blocks[0].gives}
    # As a later stage of a pipeline: what a layer is given from outside may lie otherwise than what layers hand on.
    stage = folded(capture(model, {**given, "first": True}), block_names(model))
    assert [block.kind for block in stage.blocks] == [0, 1, 2, 1]


def test_layers_are_of_one_kind_that_share_an_activation_and_make_equal_constants() -> None:
    class Layer(nn.Module):
        def __init__(self, act: nn.Module, bound: float) -> None:
            super().__init__()
            self.linear, self.act, self.bound = nn.Linear(4, 4), act, bound

        def forward(self, x: Tensor) -> Tensor:
            return torch.maximum(self.act(self.linear(x)), torch.tensor([self.bound] * 4))

    act = nn.GELU()
    layers = [Layer(act, bound) for bound in (-0.1, -0.1, -0.1, -0.2, -0.1)]
    named = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})  # as torchtitan's layers

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(4, 4), named

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers.values():
                x = layer(x)
            return x

    sequence = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers))
    for model, path, name in ((sequence, "1.", "input"), (Stack(), "layers.", "x")):
        graph = folded(capture(model, {name: torch.randn(2, 4)}), block_names(model))
        assert [block.path for block in graph.blocks] == [f"{path}{i}" for i in range(5)]
        # The activation is the first layer's. The fourth has another bound.
        assert [block.kind for block in graph.blocks] == [0, 1, 1, 2, 1]
    assert block_names(nn.Sequential(*layers)) == [*"01234"]
    assert block_names(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []  # no layers, but what one is made of


def test_every_operator_belongs_to_a_call_of_a_run() -> None:
    graph = capture(*language("qwen3"))
    inside = [i for call in graph.calls for i in range(call.first, call.stop)]
    assert sorted(inside) == [i for i, node in enumerate(graph.nodes) if not node.backward]
    for call in graph.calls:
        run = graph.runs[call.run]
        assert run.first <= call.first < call.stop <= run.stop
        assert all(graph.nodes[i].module == run.module for i in range(call.first, call.stop))
    keys = [(call.run, call.line, call.function, call.turn) for call in graph.calls]
    assert len(keys) == len({*keys})


def test_runs_say_what_modules_take_and_give() -> None:
    graph = capture(*language("qwen3"))
    first = next(run for run in graph.runs if run.module == "model.layers.0.self_attn")
    assert graph.runs[first.parent or 0].module == "model.layers.0"
    assert first.gives[0] == graph.results["model.layers.0.self_attn"]
    assert graph.results["model.layers.0.input_layernorm"] in first.takes


def test_a_forward_that_was_replaced_is_in_a_copy_that_of_the_copy() -> None:
    """As a wrapper put on a module: what ran was the model itself, with its hooks, on tensors without values."""
    model = nn.Sequential(nn.Linear(2, 2))
    forward: Any = model[0].forward
    model[0].forward = lambda x: forward(x) * 2  # type: ignore[method-assign]
    assert without_memory(model)(torch.empty(3, 2, device="meta")).is_meta
    model[0].forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model[0])  # type: ignore[method-assign]
    assert without_memory(model)(torch.empty(3, 2, device="meta")).is_meta


@pytest.mark.parametrize(("layers", "refused"), [(250, True), (100, False)])
def test_a_loop_that_would_take_minutes_is_refused_before_it_does(layers: int, refused: bool) -> None:
    """RWKV on the CPU: a loop over 4,096 tokens in each of 32 layers, of which a capture takes every turn."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(700):
                x = x + 1
            return x

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    if refused:
        with pytest.raises(UserError, match=r"test_capture.py:\d+ is in a loop.*give a shorter sequence"):
            capture(Stack(), {"x": torch.zeros(2)})
    else:
        assert len(capture(Stack(), {"x": torch.zeros(2)}).nodes) == 700
