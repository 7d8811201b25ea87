"""What frozen weights in few bits take of a device, and attention that writes its scores, beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from tangram.hardware.catalogue.devices import device
from tangram.models.lora.outline import adapted
from tangram.models.outlines.outline import Group
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.kept_activations import block_activations, block_backward
from tangram.planner.cost.memory import memory
from tangram.planner.cost.step_time import seconds
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid
from tangram.planner.space.optimisers_and_offload import base_of
from tangram.planner.space.setting import Setting

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
CODES = base_of("nf4")


@pytest.mark.parametrize(
    ("name", "trainer", "base", "ranks", "micro", "measured"),
    [
        ("mistralai/Mistral-7B-v0.1", "peft", "nf4", 1, 4, 20.669e9),
        ("mistralai/Mistral-7B-v0.1", "peft", "nf4", 1, 8, 37.003e9),
        ("mistralai/Mistral-7B-v0.1", "llama-factory", "nf4", 1, 4, 16.374e9),  # its own preparation
        ("mistralai/Mixtral-8x7B-v0.1", "transformers-4", "nf4", 1, 4, 42.794e9),
        ("meta-llama/Llama-2-70b-hf", "peft", "nf4", 2, 2, 46.685e9),
        ("mistralai/Mixtral-8x7B-v0.1", "transformers-4", "bf16", 2, 2, 57.555e9),
    ],
)
def test_adapters_beside_frozen_weights_take_what_was_measured(
    name: str, trainer: str, base: str, ranks: int, micro: int, measured: float
) -> None:
    """foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv: rank 16 on attention, samples of
    4,096 tokens, layers recomputed, by FSDP where there are two. What is frozen has no gradient to reduce and is
    gathered as it is kept; activations are in float32 where embedding and norms were brought to it."""
    g = grid(batch=ranks * micro, sequence=4096, data=ranks, zero=3 * (ranks > 1), micro=micro,
             recompute=int(Group.BLOCK), recomputed=1.0)  # fmt: skip
    of = memory(adapted(outlined(name), 16, ATTENTION), g, Setting(None, framework(trainer), base=base_of(base)))
    assert of.allocated[0] == pytest.approx(measured, rel=0.08)


def test_rows_in_float32_are_moved_as_such() -> None:
    """The same table: 5.64 s with embedding and norms in float32, 4.56 s with both in 16 bits."""
    g = grid(batch=4, sequence=4096, micro=4, recompute=int(Group.BLOCK), recomputed=1.0)
    outline = adapted(outlined("mistralai/Mistral-7B-v0.1"), 16, ATTENTION)
    setting = Setting(device("a100"), framework("peft"), base=CODES)
    without = replace(setting, framework=replace(framework("peft"), frozen_end_bytes=2.0))
    assert (setting.row_bytes, without.row_bytes, replace(setting, base=base_of("gptq")).row_bytes) == (4.0, 2.0, 2.0)
    wide, narrow = (float(seconds(outline, g, one).step[0]) for one in (setting, without))
    assert 1.1 < wide / narrow < 1.3


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers' models do it in single kernels."""
    shares = torch.nn.functional.softmax(q @ k.transpose(2, 3) * 0.5 + mask, dim=-1, dtype=torch.float32)
    return shares.to(q.dtype) @ v


def test_scores_and_their_gradients_take_what_torch_allocates() -> None:
    """Of transformers' eager attention, forward and backward, the most that is there at once, by the profiler."""
    heads, tokens, width = 2, 512, 8
    q, k, v = (torch.randn(1, heads, tokens, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attended(q, k, v, mask).sum().backward()
    counted: Any = profile.profiler
    changes = [int(one.nbytes()) for one in counted.kineto_results.events() if one.name() == "[memory]"]
    peak = max(accumulate(changes)) / (heads * tokens * tokens)

    outline = outlined("meta-llama/Llama-2-7b-hf")
    block, g = outline.runs[0][0], grid(batch=1, sequence=4096)
    numbers = 32 * 4096 * 4096
    single, fused = (Setting(None, framework(one)) for one in ("transformers-2023", "transformers"))
    kept = [float(block_activations(block, outline.hidden, g, one)[0][0]) / numbers for one in (single, fused)]
    back = [float(block_backward(block, outline.hidden, g, one)[0]) / numbers for one in (single, fused)]
    assert kept[0] - kept[1] == pytest.approx(6.0, rel=0.01)
    assert back[0] - back[1] == pytest.approx(6.0)
    assert peak - 1.0 < kept[0] - kept[1] + back[0] - back[1] <= peak + 0.5


def test_experts_one_by_one_have_one_gradient_at_a_time() -> None:
    outline, g = outlined("mistralai/Mixtral-8x7B-v0.1"), grid(batch=4, sequence=4096, expert=[1, 4], data=4)
    block, hidden = outline.runs[0][0], outline.hidden
    one_by_one, together = (
        block_backward(block, hidden, g, Setting(None, framework(name))) for name in ("transformers-4", "transformers")
    )
    assert (one_by_one < together).tolist() == [True, True]


def test_unsloth_is_of_its_version() -> None:
    """hiyouga/LlamaFactory issue 3638 of 2024-05: 65,536 tokens take nearly all of 80 GB, 102,400 more than that."""
    outline = adapted(outlined("meta-llama/Meta-Llama-3-8B"), 8, ("q_proj", "v_proj"))
    g = grid(batch=1, sequence=[65536, 102400], recompute=int(Group.BLOCK), recomputed=1.0)
    then, since = (
        memory(outline, g, Setting(None, framework("unsloth", date), "fp16", base=CODES)).device / 2**30
        for date in ("2024-05", "")
    )
    assert 65 < then[0] < 79.1 < then[1]
    assert since[1] < 60
    assert [framework(name).loss for name in ("unsloth", "unsloth-2024")] == ["chunked", "compiled"]
