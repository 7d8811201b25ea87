"""Models that attend by tokens beside the same models with transformers' own masks; who cannot is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.building.initial import initial_tensors
from tangram.models.capturing.attention import by_tokens, mask_of, numbers_of, refuse_unable
from tangram.training.parallel.apply import materialise

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SLIDING: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": LATENT,
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 4},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "glm4": {},
    "olmo2": {},
}
DOCUMENTS = torch.tensor([[*range(7), *range(9)], [*range(16)]])
ONE_EACH = torch.arange(16).expand(2, 16)
LEAKING = ("gpt_oss",)
"""Their own masks take no notice of documents."""


def config_of(kind: str, **more: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**SMALL, **MODELS.get(kind, {}), **more})


def logits_and_gradients(
    config: PreTrainedConfig, values: PreTrainedConfig, positions: Tensor, order: Tensor, **told: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the model on the same tokens, given in some order; the logits as they were."""
    model = build_on_meta(config)
    materialise(model, torch.device("cpu"), initial_tensors(values, 0))
    ids = (torch.arange(32).view(2, 16) * 7 + 3) % 64
    weights = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids[:, order], position_ids=positions[:, order], use_cache=False, **told).logits
    (logits * weights[:, order]).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach()[:, order.argsort()], found


@pytest.mark.parametrize("kind", MODELS)
def test_as_with_its_own_masks(kind: str) -> None:
    own = config_of(kind)
    replaced = by_tokens(own)
    refuse_unable(build_on_meta(replaced))
    given, positions = torch.arange(16), ONE_EACH if kind in LEAKING else DOCUMENTS
    wanted = logits_and_gradients(own, own, positions, given)
    other = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    numbers = numbers_of(positions)
    found = {
        "told by position ids": logits_and_gradients(replaced, own, positions, given),
        "told by a mask": logits_and_gradients(replaced, own, positions, given, attention_mask=mask_of(numbers)),
        "in another order": logits_and_gradients(
            replaced, own, positions, other, attention_mask=mask_of(numbers[:, other])
        ),
    }
    for how, (logits, gradients) in found.items():
        torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=1e-5, msg=lambda text, how=how: f"{how}: {text}")
        assert gradients.keys() == wanted[1].keys()
        for name, one in gradients.items():
            size = wanted[1][name].abs().max()
            assert float((one - wanted[1][name]).abs().max()) <= 2e-5 * float(size) + 1e-6, (how, name)


def test_documents_begin_where_positions_do() -> None:
    numbers = numbers_of(torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]]))
    assert numbers[..., 0].tolist() == [[0, 0, 0, 3, 3, 5], [0] * 6]
    assert numbers[..., 1].tolist() == [[*range(6)]] * 2


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 48}, "chunked_attention"),
        ("gemma2", {}, "softcap"),
        ("llama", {"attention_dropout": 0.1}, "it drops 0.1"),
        ("mamba", {}, "linear_attention"),
        ("bloom", {}, "cannot attend by tokens"),
    ],
)
def test_refused(kind: str, more: dict[str, Any], said: str) -> None:
    model = build_on_meta(by_tokens(config_of(kind, **more)))
    with pytest.raises(UserError, match=said):
        refuse_unable(model)


def test_the_configuration_stays_as_it_is() -> None:
    own = config_of("llama")
    before = copy.deepcopy(own.to_dict())
    replaced = by_tokens(own)
    assert own.to_dict() == before
    assert "tangram" not in str(replaced.to_dict())
