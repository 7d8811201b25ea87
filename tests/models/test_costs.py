"""What a model costs, against counts by hand and against what a real run on the CPU does."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.outlines.costs import OUTSIDE, at_micro_batch, block_names, costs
from tests.models.tiny import KINDS, tiny

SEQUENCE, BATCH = 16, 2


def test_flops_of_llama_by_hand() -> None:
    config = tiny("llama", tie_word_embeddings=False)
    found = costs(build_on_meta(config), SEQUENCE, BATCH)
    hidden, ff, vocabulary, heads, kv, d = 32, 48, 65, 4, 2, 8
    tokens = SEQUENCE * BATCH
    block = 2 * tokens * (hidden * (heads + 2 * kv) * d + heads * d * hidden + 3 * hidden * ff)
    scores = 2 * 2 * BATCH * heads * SEQUENCE * SEQUENCE * d
    head = 2 * tokens * hidden * vocabulary
    assert [part.forward_flops for part in found.parts] == [block + scores, block + scores, head]
    assert [part.name for part in found.parts] == ["model.layers.0", "model.layers.1", OUTSIDE]
    assert found.forward.flops == 2 * (block + scores) + head
    # A product has two in its backward; attention computes the scores once more: five products instead of two.
    assert found.backward.flops == 2 * 2 * block + 2 * 2.5 * scores + 2 * head
    assert found.flops_per_sample == (found.forward.flops + found.backward.flops) / BATCH
    # The rule of thumb: 2 FLOPs a weight and token, all weights but the embedding's and those of the norms.
    matrices = sum(p.size for p in found.parameters if len(p.shape) == 2 and "embed" not in p.name)
    assert found.forward.flops == 2 * matrices * tokens + 2 * scores
    assert found.logits_bytes == 4 * tokens * vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_is_counted(kind: str) -> None:
    model = build_on_meta(tiny(kind))
    found = costs(model, SEQUENCE, BATCH)
    assert found.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert len(found.blocks) == 2
    assert sum(found.block_parameters(part.name) for part in found.parts) == found.parameter_count
    assert all(found.block_parameters(part.name) > 0 for part in found.parts)
    assert math.isclose(sum(part.forward_flops for part in found.parts), found.forward.flops)
    assert math.isclose(sum(part.backward_flops for part in found.parts), found.backward.flops)
    assert 1.9 < found.backward.flops / found.forward.flops < 2.6
    assert all(part.kept_bytes > part.input_bytes > 0 for part in found.blocks)
    assert next(model.parameters()).is_meta  # the model is as it was
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "gemma3_text"])
def test_twice_the_samples_cost_twice(kind: str) -> None:
    model = build_on_meta(tiny(kind))
    one, two = costs(model, SEQUENCE, 1), costs(model, SEQUENCE, 2)
    assert two.forward.flops == 2 * one.forward.flops
    assert two.backward.flops == 2 * one.backward.flops
    assert 1.8 < two.activation_bytes / one.activation_bytes <= 2.0
    assert abs(two.forward.calls - one.forward.calls) <= 4


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2"])
def test_more_samples_are_found_along_a_line(kind: str) -> None:
    model = build_on_meta(tiny(kind))
    one, two, five = (costs(model, SEQUENCE, batch) for batch in (1, 2, 5))
    found = at_micro_batch(one, two, 5)
    assert found.forward.flops == five.forward.flops
    assert found.backward.flops == five.backward.flops
    assert math.isclose(found.activation_bytes, five.activation_bytes, rel_tol=0.01)
    assert math.isclose(found.forward.bytes_moved, five.forward.bytes_moved, rel_tol=0.01)
    assert math.isclose(found.backward.bytes_moved, five.backward.bytes_moved, rel_tol=0.01)
    assert found.logits_bytes == five.logits_bytes
    assert at_micro_batch(one, two, 2) == two


def test_experts_count_only_where_tokens_go() -> None:
    dense = costs(build_on_meta(tiny("qwen3_moe", num_experts=2)), SEQUENCE, 1)
    wide = costs(build_on_meta(tiny("qwen3_moe", num_experts=8)), SEQUENCE, 1)
    router = 2 * SEQUENCE * 32 * 6 * 2  # six more columns in the router of two blocks
    assert wide.forward.flops == dense.forward.flops + router
    assert wide.parameter_count > 1.5 * dense.parameter_count


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_what_is_counted_is_what_a_real_run_keeps_and_computes(kind: str) -> None:
    config = tiny(kind)
    found = costs(build_on_meta(config), SEQUENCE, BATCH)
    torch.manual_seed(0)
    model = type(build_on_meta(config))(config).train()
    held = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    half = torch.arange(SEQUENCE // 2)  # two documents in a sample, as packed text has them: attention gets a mask
    positions = torch.cat([half, half]).expand(BATCH, SEQUENCE)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), FlopCounterMode(display=False) as flops:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="sum")
    size = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in held)
    assert math.isclose(found.activation_bytes, size, rel_tol=0.03)
    scores = 2 * 2 * BATCH * 4 * SEQUENCE * SEQUENCE * 8 * 2  # torch's counter passes over attention on the CPU
    assert found.forward.flops - scores == flops.get_total_flops()


def test_bfloat16_keeps_less() -> None:
    model = build_on_meta(tiny("llama"))
    full, low = costs(model, SEQUENCE, 1), costs(model, SEQUENCE, 1, torch.bfloat16)
    assert low.forward.flops == full.forward.flops
    assert 0.5 < low.activation_bytes / full.activation_bytes < 0.85


def test_tied_and_frozen_parameters() -> None:
    tied = build_on_meta(tiny("llama", tie_word_embeddings=True))
    assert "lm_head.weight" not in [parameter.name for parameter in costs(tied, SEQUENCE).parameters]
    tied.get_parameter("model.norm.weight").requires_grad_(False)
    trained = {parameter.name: parameter.trained for parameter in costs(tied, SEQUENCE).parameters}
    assert trained.pop("model.norm.weight") is False
    assert all(trained.values())


def test_block_names() -> None:
    assert block_names(build_on_meta(tiny("gpt2"))) == ["transformer.h.0", "transformer.h.1"]
    assert block_names(nn.Linear(2, 2)) == []


def test_a_module_that_takes_no_tokens() -> None:
    with pytest.raises(UserError, match="what a Linear costs cannot be counted"):
        costs(nn.Linear(2, 2), SEQUENCE)


def test_a_model_that_looks_up_what_is_not_there() -> None:
    class Lookup(nn.Linear):
        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return {}[len(input_ids)]

    with pytest.raises(UserError, match=r"what a Lookup costs cannot be counted: .*test_costs.py:\d+: KeyError: 1$"):
        costs(Lookup(2, 2), SEQUENCE)
