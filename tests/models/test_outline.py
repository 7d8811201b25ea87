"""Outlines of decoders: their parameters and operations are those of the models, and what is unknown is refused."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.outlines.costs import costs
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.models.outlines.outlined import outline_of, outlined

KNOWN = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2_moe",
    "glm4_moe", "phi3", "gpt2", "olmo2", "olmoe", "gpt_neox", "starcoder2", "granite", "cohere", "phi", "deepseek_v2",
    "deepseek_v3", "ernie4_5_moe", "opt", "smollm3", "exaone4", "glm4",
)  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def small(kind: str) -> Any:
    """A configuration of a type with few numbers."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 128, "pad_token_id": 0,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **{**sizes, **SMALL[kind]})


def test_published_models_have_their_sizes() -> None:
    assert outlined("llama-3-8b").numbers == 8_030_261_248
    assert outlined("llama-3-70b").numbers == 70_553_706_496
    assert outlined("deepseek-v3").numbers == 671_026_404_352
    assert [(block.name, count) for block, count in outlined("deepseek-v3").runs] == [("dense", 3), ("mixture", 58)]


@pytest.mark.parametrize("kind", KNOWN)
def test_the_outline_of_a_type_has_its_models_parameters(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    found = outline_of(config, kind)
    numbers = sum(one.numel() for one in build_on_meta(config).parameters())
    assert abs(found.numbers / numbers - 1) <= 0.005


def whole_flops(outline: Outline, sequence: int) -> float:
    """Of a sample's forward as torch counts it: attention in full, hidden or not."""
    found = 2.0 * outline.vocab * outline.hidden * sequence
    for block, count in outline.runs:
        products = sum(2.0 * p.inputs * p.outputs * (block.per_token if p.experts else 1) for p in block.products)
        scores = sum(2.0 * sequence * s.heads * (s.qk_dim + s.v_dim) for s in block.scores)
        found += count * sequence * (products + scores)
    return found


WINDOWED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "mistral": ({"sliding_window": 16}, [16]),
    "mixtral": ({"sliding_window": 16}, [16]),
    "phi3": ({"sliding_window": 16}, [16]),
    "starcoder2": ({"sliding_window": 16}, [16]),
    "qwen2": ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, [0, 16]),
    "qwen3": ({"sliding_window": 16, "use_sliding_window": False}, [0]),
    "gemma2": ({"sliding_window": 16}, [0, 16]),
}
"""Of types whose configurations say windows, with kinds of layers and without: which windows there are."""


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_are_those_that_the_configuration_says(kind: str) -> None:
    fields, windows = WINDOWED[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **{**sizes, "num_key_value_heads": 2, "pad_token_id": 0, **fields})
    found = outline_of(config, kind)
    assert sorted({one.window for block, _ in found.runs for one in block.scores}) == windows


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_operations_are_those_of_the_captured_model(kind: str) -> None:
    config = small(kind)
    counted = costs(build_on_meta(config), 32, dtype=torch.bfloat16)
    assert whole_flops(outline_of(config, kind), 32) == pytest.approx(counted.forward_flops_per_sample, rel=0.002)


def test_a_planted_wrong_width_is_seen() -> None:
    config = small("qwen3_moe")
    counted = costs(build_on_meta(config), 32, dtype=torch.bfloat16)
    right = outline_of(config, "qwen3_moe")
    wrong = decoder(
        Dims(3, 64, 4, 128, kv_heads=2, head_dim=16, experts=8, per_token=3, expert_ffn=32), "one expert too many"
    )
    assert right.numbers == pytest.approx(wrong.numbers, rel=0.001)
    assert abs(whole_flops(wrong, 32) / counted.forward_flops_per_sample - 1) > 0.02


def test_causal_and_windowed_attention_have_fewer_operations() -> None:
    dims = Dims(2, 64, 4, 128, ffn=96)
    plain = decoder(dims)
    products = plain.flops(0 + 1) - 2 * 2.0 * 0.5 * 4 * 32
    assert plain.flops(1024) == pytest.approx(products + 2 * 2.0 * 512 * 4 * 32)
    windowed = decoder(Dims(2, 64, 4, 128, ffn=96, window=128, windowed=2))
    assert windowed.flops(1024) == pytest.approx(products + 2 * 2.0 * (128 - 8) * 4 * 32)


def test_what_is_kept_is_named_by_what_drops_it() -> None:
    block = outlined("deepseek-v3").runs[1][0]
    kept = {one.name: one.group for one in block.kept}
    assert kept["queries, keys, values"] & Group.ATTENTION
    assert not kept["input of attention's norm"]
    assert all(one.group & Group.BLOCK or one.group in (Group.NONE, Group.ALTERNATE) for one in block.kept)


def test_bad_dims() -> None:
    with pytest.raises(UserError, match="needs layers, hidden, heads and vocab of at least 1"):
        decoder(Dims(0, 64, 4, 128, ffn=1))
    with pytest.raises(UserError, match="5 dense layers of 3: there are not so many"):
        decoder(Dims(3, 64, 4, 128, ffn=1, experts=4, dense_layers=5))
    with pytest.raises(UserError, match='there is no model "nothing"'):
        outlined("nothing")
