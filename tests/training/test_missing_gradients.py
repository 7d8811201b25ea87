"""A trained parameter without a gradient is an error that names it; experts without tokens have zeros."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, OPTConfig, OPTForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tangram.errors import UserError
from tangram.schema.plan import matches
from tangram.training.mesh.local_parts import NO_PARTS
from tangram.training.step.optimiser_step import local_gradients


class Half(nn.Module):
    """Its second layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


def test_it_is_named_and_what_to_do_is_said() -> None:
    model = Half()
    model.first(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UserError) as raised:
        local_gradients(model, NO_PARTS)
    assert str(raised.value) == (
        'the parameter "second.weight" got no gradient: name it and 1 other in model.freeze if the loss does not '
        'depend on them: "second.*"'
    )


def test_patterns_are_of_all_layers_and_of_nothing_that_is_trained() -> None:
    """As of a model that is given no images: its tower is one pattern, and what brings its results to the decoder."""
    layers = nn.ModuleList(Half() for _ in range(12))
    model = nn.ModuleDict({"layers": layers, "vision": nn.ModuleDict({"tower": Half()}), "first": nn.Linear(2, 2)})
    sum(layer.first(torch.ones(1, 2)).sum() for layer in layers).backward()  # pyright: ignore[reportAttributeAccessIssue]
    model["first"].bias.requires_grad_(False)
    with pytest.raises(UserError, match=r'it and 28 others .* on them: "layers.\*.second.\*", "vision.\*", "first.\*"'):
        local_gradients(model, NO_PARTS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not matches(("layers.*.second.*", "vision.*", "first.*"), name))
    assert len(local_gradients(model, NO_PARTS)) == 24


def test_layers_that_are_left_out_at_random_are_said_to_be() -> None:
    """Else who trains OPT with its `layerdrop` would be told to freeze a layer, another one at each try."""
    config = OPTConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=2, ffn_dim=8, num_attention_heads=2, word_embed_proj_dim=8,
        max_position_embeddings=8, layerdrop=0.999,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    with pytest.raises(UserError, match=r"left out at random.*set model.change.layerdrop = 0"):
        local_gradients(model, NO_PARTS)


def test_adapters_that_a_model_goes_past_are_said_to_be() -> None:
    """Mamba multiplies by the weight of a layer that it does not call; "all-linear" names it, too."""
    config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4, time_step_rank=2)
    model = inject_adapter_in_model(LoraConfig(target_modules=["dt_proj", "x_proj"]), MambaForCausalLM(config))
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    with pytest.raises(UserError, match=r'without calling it, past its adapters: lora.exclude = \["dt_proj"\]'):
        local_gradients(model, NO_PARTS)


def test_what_is_frozen_needs_none() -> None:
    model = Half()
    model.second.requires_grad_(False)
    model.first(torch.ones(1, 2)).sum().backward()
    assert len(local_gradients(model, NO_PARTS)) == 2


def test_experts_without_tokens_have_zeros() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=1))
    experts = model.model.layers[0].mlp.experts

    def first_expert(_: nn.Module, __: object, routed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = routed
        return logits, weights, torch.zeros_like(chosen)

    model.model.layers[0].mlp.gate.register_forward_hook(first_expert)
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    assert len(local_gradients(model, NO_PARTS)) == len([*model.parameters()])
    grad = experts.down_proj.grad
    assert grad[0].any()
    assert not grad[1:].any()
