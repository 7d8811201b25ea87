"""Peaks of memory by moment and stage: what products leave beside kept gradients, and published ranks one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench._planner.rows import cases, read
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.models.outlines.outline import Dims, Group, Outline, decoder
from tangram.models.outlines.outlined import outlined
from tangram.planner.cost.calibration import published
from tangram.planner.cost.kept_activations import block_activations, block_backward, weights_of_shapes
from tangram.planner.cost.memory import memory
from tangram.planner.search.explain import StrategyRequest, laid_out
from tangram.planner.search.strategy import Ask, described, limit_of, setting_of
from tangram.planner.space.framework_profiles import LOSSES, Framework, framework, loss_of
from tangram.planner.space.grid import grid
from tangram.planner.space.setting import Beside, Precision, Setting

ROOT = Path(__file__).parents[2]
LLAMA = decoder(Dims(32, 4096, 32, 128256, ffn=14336, kv_heads=8), "llama-3-8b")
CORE = framework("megatron-core")
MIB = 2.0**20


def test_spare_gradients_are_one_of_each_shape() -> None:
    block, _ = LLAMA.runs[0]
    g = grid(batch=8, sequence=4096, tensor=[1, 4])
    each = 4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096
    assert weights_of_shapes(block, g).tolist() == [each, each / 4]
    shared = Dims(2, 1024, 8, 32000, ffn=4096, experts=16, expert_ffn=512, shared_ffn=512, per_token=2)
    mixed, _ = decoder(shared).runs[0]
    over = weights_of_shapes(mixed, grid(batch=8, sequence=512, tensor=2, expert=8))
    # qkv and out, up and down of what is shared in halves, the router whole, and one expert of the sixteen, whole
    assert over[0] == (3072 + 1024) * 1024 / 2 + 3 * 512 * 1024 / 2 + 16 * 1024 + 3 * 512 * 1024


def test_a_backward_holds_the_widest_gradient_and_the_streams() -> None:
    block, _ = LLAMA.runs[0]
    g = grid(batch=8, sequence=4096, tensor=[1, 2, 2], sequence_parallel=[0, 0, 1])
    setting = Setting(None, CORE)
    tokens, up, hidden = 4096 * 2, 28672, 4096
    expected = [tokens * (up + hidden), tokens * (up / 2 + hidden), tokens * (up / 2 + hidden / 2)]
    assert block_backward(block, LLAMA.hidden, g, setting).tolist() == expected


@pytest.mark.parametrize(("dropout", "each"), [(False, 2.0), (True, 5.0)])
def test_scores_are_kept_once_without_dropout(dropout: bool, each: float) -> None:
    block, _ = LLAMA.runs[0]
    g = grid(batch=8, sequence=4096, tensor=[1, 4])
    fused = replace(CORE, fused_attention=True, dropout=dropout)
    without, _ = block_activations(block, LLAMA.hidden, g, Setting(None, fused))
    plain, _ = block_activations(block, LLAMA.hidden, g, Setting(None, replace(fused, fused_attention=False)))
    numbers = 32 * 4096 * 4096
    assert (plain - without).tolist() == pytest.approx([each * numbers, each * numbers / 4])


def test_the_heads_gradient_is_there_with_the_logits() -> None:
    g = grid(batch=8, sequence=4096)
    plain = memory(LLAMA, g, Setting(None, replace(CORE, scratch_bytes=0.0))).last
    beside = memory(LLAMA, g, Setting(None, CORE)).last
    block, _ = LLAMA.runs[0]
    more = 2 * (128256 * 4096 + weights_of_shapes(block, g)[0])
    assert beside.passing[0] - plain.passing[0] == pytest.approx(more)


def kept(framework: Framework, precision: Precision = "bf16", outline: Outline = LLAMA, **numbers: int) -> float:
    """Bytes of a block for each token of a sequence."""
    g = grid(batch=8, sequence=4096, **numbers)
    found, _ = block_activations(outline.runs[-1][0], outline.hidden, g, Setting(None, framework, precision))
    return float(found[0]) / 4096


def test_single_kernels_keep_what_torch_keeps() -> None:
    """Counted by autograd's own hook on a block of a transformers model, eager, with fused attention, in bfloat16."""
    config = AutoConfig.for_model(
        "llama", hidden_size=256, intermediate_size=704, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    layer = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model.layers[0]
    weights = {one.untyped_storage().data_ptr() for one in layer.parameters()}
    seen: dict[int, int] = {}

    def pack(one: torch.Tensor) -> torch.Tensor:
        if one.untyped_storage().data_ptr() not in weights and one.numel() >= 64 * 64:
            seen[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    tokens = torch.randn(1, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    rotary = (torch.ones(1, 64, 64, dtype=torch.bfloat16), torch.ones(1, 64, 64, dtype=torch.bfloat16))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        layer(tokens * 1, position_embeddings=rotary)
    outline = decoder(Dims(1, 256, 4, 64, ffn=704))
    g = grid(batch=1, sequence=64)
    block = outline.runs[0][0]
    eager, _ = block_activations(block, 256, g, Setting(None, framework("transformers")))
    fused, _ = block_activations(block, 256, g, Setting(None, CORE))
    assert sum(seen.values()) == pytest.approx(float(eager[0]), rel=0.1)
    assert sum(seen.values()) > 1.3 * float(fused[0])


def test_inputs_of_products_in_few_bits_are_kept_in_them() -> None:
    inputs, attention = 4096 + 4096 + 14336, 4096
    assert kept(CORE) - kept(CORE, "fp8") == inputs - attention  # what attention gives is kept twice
    assert kept(CORE) - kept(CORE, "fp4") == pytest.approx(inputs * (2 - 0.5625) - 0.5625 * attention)
    assert kept(framework("torchtitan")) == kept(framework("torchtitan"), "fp8")


def test_experts_outputs_are_kept_by_their_era() -> None:
    mixed = decoder(Dims(2, 1024, 8, 32000, experts=16, expert_ffn=512, per_token=4))
    old, new = framework("megatron-lm", "2024-06"), framework("megatron-core")
    assert (old.name, new.name) == ("megatron", "megatron-core")
    assert kept(old, outline=mixed) - kept(new, outline=mixed) == 4 * 1024 * 2


def test_outputs_that_are_weighted_in_float32_are_kept_in_it() -> None:
    """As torchtitan does it (models/moe/moe.py), outside of what it compiles; of pull request 1993, DeepSeek-V3 16B on
    8 B200 without recompute, four samples of 6,144 take 88 % of 178.35 GiB. 144 GiB were said."""
    output, weights = torch.randn(6, 32, dtype=torch.bfloat16, requires_grad=True), torch.rand(6, 1)
    seen: dict[torch.dtype, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: seen.update({one.dtype: max(one.nbytes, seen.get(one.dtype, 0))}) or one, lambda one: one
    ):
        (output.to(torch.float32) * weights.requires_grad_()).to(torch.bfloat16)
    assert seen == {torch.float32: 6 * 32 * 4}

    mixed, titan = decoder(Dims(2, 1024, 8, 32000, experts=16, expert_ffn=512, per_token=4)), framework("torchtitan")
    more = kept(titan, outline=mixed) - kept(replace(titan, expert_output_bytes=0.0), outline=mixed)
    assert more == 4 * 1024 * 2
    g = grid(batch=32, sequence=6144, data=8, zero=3, micro=4)
    of = memory(outlined("deepseek-ai/DeepSeek-V2-Lite"), g, Setting(None, titan.compiled))
    assert of.reserved[0] / 2**30 == pytest.approx(0.88 * 178.35, rel=0.03)


def test_ranks_that_keep_what_they_gathered_keep_whole_inputs() -> None:
    titan = replace(framework("torchtitan"), kernels="fused")
    more = kept(titan, tensor=8, sequence_parallel=1) - kept(CORE, tensor=8, sequence_parallel=1)
    assert more == pytest.approx(2 * 4096 * 2 * 7 / 8)


@pytest.mark.parametrize(("loss", "each"), [*LOSSES.items()])
def test_a_loss_takes_what_its_way_says(loss: str, each: float) -> None:
    g = grid(batch=8, sequence=4096)
    usual, asked = (memory(LLAMA, g, Setting(None, CORE, loss=one)).last.passing[0] for one in ("", loss))
    assert asked - usual == pytest.approx(4096 * 128256 * (each - LOSSES["parallel"]))


def test_a_chunked_loss_is_of_as_many_tokens_as_its_framework_takes_and_of_preferences_none_is() -> None:
    """TRL's of 256 (its pull request 5846); what it makes of pairs is in one piece."""
    g, trl = grid(batch=8, sequence=4096), framework("trl")
    few, eighth = (memory(LLAMA, g, Setting(None, trl, loss=one)).last.passing[0] for one in ("", "compiled"))
    assert eighth - few == pytest.approx(128256 * (4096 * LOSSES["compiled"] - 256 * LOSSES["eager"]))
    assert Setting(None, trl).logit_bytes(np.array([64.0, 1024.0]), over_ranks=False).tolist() == [14.0, 3.5]
    assert Setting(None, trl, rows=2).logit_bytes(g.tokens, over_ranks=False) == LOSSES["eager"]
    assert Setting(None, trl, beside=Beside(1.0, 1.0)).logit_bytes(g.tokens, over_ranks=False) == LOSSES["eager"]
    assert Setting(None, framework("torchtune")).logit_bytes(g.tokens, over_ranks=False) == LOSSES["chunked"]


def test_keys_that_ranks_gather_are_those_of_all_tokens() -> None:
    """huggingface/accelerate pull request 4175: Qwen3-0.6B, a sample of 2^20 tokens over 8 H100, 27.9 GB, and 20.8 with
    activations on the host; trl's 6846: Qwen3-8B, 56.2 GB. 18.2, 11.2 and 47.0 GB were said."""

    trl = framework("trl")

    def peak(name: str, offload: int, by: Framework = trl) -> float:
        g = grid(batch=1, sequence=2**20, context=8, zero=3, recompute=int(Group.BLOCK), offload=offload, optimiser=9)
        return float(memory(outlined(name), g, Setting(None, by)).allocated[0]) / 1e9

    assert peak("Qwen/Qwen3-0.6B", 0) == pytest.approx(27.9, rel=0.05)
    assert peak("Qwen/Qwen3-0.6B", 4) == pytest.approx(20.8, rel=0.05)
    assert peak("Qwen/Qwen3-8B", 4) == pytest.approx(56.2, rel=0.02)
    around = peak("Qwen/Qwen3-8B", 4, replace(trl, gathers_keys=False))
    keys = 2 * 2 * 2**20 * 8 * (128 + 128) / 1e9  # with gradients, bytes, tokens, heads, keys and values
    assert peak("Qwen/Qwen3-8B", 4) - around == pytest.approx(keys)


def test_a_loss_is_known_by_what_trainers_call_it() -> None:
    assert {loss_of(one) for one in ("liger", "cce", "chunked_nll", "chunked")} == {"chunked"}
    assert [loss_of(one) for one in ("nll", "fused")] == ["eager", "fused"]
    with pytest.raises(UserError, match='there is no loss "chunkd"'):
        loss_of("chunkd")


def test_the_optimisers_part_that_is_offloaded_is_a_share() -> None:
    g = grid(batch=8, sequence=4096, offload=1)
    whole, half = (memory(LLAMA, g, Setting(None, CORE, away_share=one)).first for one in (1.0, 0.5))
    assert whole.optimiser[0] == 0
    assert half.optimiser[0] == half.host[0] == whole.host[0] / 2 == pytest.approx(6 * LLAMA.numbers, rel=1e-3)


def test_one_micro_batchs_gradients_take_the_place_of_what_was_kept() -> None:
    titan = framework("torchtitan")
    for micros, saved in ((1, 1), (2, 0)):
        g = grid(batch=8 * micros, sequence=8192, data=8, zero=3)
        anew, beside = (
            memory(LLAMA, g, Setting(None, replace(titan, fresh_gradients=one))).allocated[0] for one in (True, False)
        )
        assert beside - anew == pytest.approx(saved * LLAMA.numbers * 4 / 8)


def test_the_optimisers_work_is_a_peak_of_its_own() -> None:
    one = framework("internevo")
    g = grid(batch=64, sequence=64, data=8, zero=1)
    of = memory(LLAMA, g, Setting(None, one)).first
    states = of.parameters[0] + of.gradients[0] + of.optimiser[0]
    assert of.allocated[0] == pytest.approx(states + 12 * LLAMA.numbers / 8)


def test_a_run_whose_eager_loss_does_not_fit_is_out_of_memory_and_one_without_recompute_is_not() -> None:
    """Llama-3-8B on 8 H100 of 80 GB, samples of 8,192: the eager loss of two takes 29 GB."""
    cluster = builtin("h100-8x1")

    def fits(who: str, loss: str, micro: int, again: str) -> float:
        ask = Ask(2**17 * micro, 8192, framework=who, devices=8, loss=loss)
        g = laid_out(cluster, ask, StrategyRequest("dp=8", micro, 1, "1F1B", 3, again))
        return described(LLAMA, g, setting_of(cluster, ask), ask, limit_of(cluster, ask), published())[0].fits

    assert fits("torchtitan", "", 1, "every second matmul") > 0.9
    assert fits("torchtitan", "eager", 4, "full") < 0.1 < 0.9 < fits("torchtitan", "chunked", 4, "full")
    assert fits("tangram", "", 1, "none") > 0.9


def test_every_published_stage_is_near() -> None:
    """Of eight ranks the first and the last, which lie on different stages where there are stages."""
    off: list[float] = []
    for case in cases(read(ROOT / "data" / "published" / "runs.csv")):
        ranks = re.findall(r"r\d+:alloc=(\d+)MB", case.row["mem_rank"])
        if case.source != "simumax_b200" or not ranks:
            continue
        of = memory(case.outline, case.grid, Setting(None, case.framework, case.precision, case.node))
        for rank, measured in ((of.first, ranks[0]), (of.last, ranks[-1])):
            off.append(abs(float(rank.allocated[0]) / MIB / float(measured) - 1))
    assert len(off) == 44
    assert np.median(off) <= 0.006
    assert max(off) <= 0.021


def test_a_fast_link_has_the_device_itself() -> None:
    with pytest.raises(ValueError, match="0 devices at a fast link"):
        Setting(None, CORE, node=0)
