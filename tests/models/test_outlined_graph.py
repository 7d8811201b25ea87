"""Outlines from captured graphs: they have their models' parameters and operations, and where there is a table of the
same model made by hand they have its rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded, kinds_of
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.costs import ModelCosts, block_names, costs
from tangram.models.outlines.outline import Block, Group, Outline, decoder
from tangram.models.outlines.outlined import captured, dims_of, outline_of
from tangram.models.outlines.outlined_graph import outline_of_graph
from tests.models.kinds import GRAPHS, config_of

TOKENS = 64
LONG = ("jamba", "recurrent_gemma", "granitemoehybrid", "zamba2", "bamba")
"""Hybrids whose capture takes long; others of their kind are looked at with every run of the tests."""
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in LONG else kind for kind in GRAPHS]


def loss(output: Any) -> Tensor:
    logits: Tensor = output.logits if hasattr(output, "logits") else output
    return logits.float().sum()


def graph_of(model: nn.Module, tokens: int = TOKENS) -> Graph:
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, tokens, dtype=torch.long, device="meta")}
    inputs |= {"use_cache": False} if hasattr(model, "config") else {}
    return folded(capture(model, inputs, loss=loss, dtype=torch.bfloat16), block_names(model))


@cache
def counted(kind: str) -> ModelCosts:
    """What a run of the tiny model costs."""
    return costs(build_on_meta(config_of(kind)), TOKENS, dtype=torch.bfloat16)


@cache
def planned(kind: str) -> Outline:
    """Of the tiny model."""
    return outline_of(config_of(kind), kind)


def products_of(outline: Outline, tokens: int, *, of_all: bool = False) -> float:
    """FLOPs of a sample's forward as torch counts them: scores in full; `of_all`: every expert of every token."""
    found = 2.0 * outline.vocab * outline.hidden
    for block, count in outline.runs:
        each = block.experts if of_all else block.per_token
        found += count * sum(2.0 * p.inputs * p.outputs * (each if p.experts else 1) for p in block.products)
        found += count * sum(2.0 * tokens * s.heads * (s.qk_dim + s.v_dim) for s in block.scores)
        found += count * sum(one.flops for one in block.batched if "solve" not in one.name)
    return found * tokens


def kept(block: Block) -> Counter[tuple[int, str]]:
    """Bytes a token that the backward needs, by the half of a block and who divides them, with fused kernels."""
    found: Counter[tuple[int, str]] = Counter()
    for one in (one for one in block.kept if one.role != "eager"):
        half = int(one.group & (Group.ATTENTION | Group.MLP))
        found[half, one.cut] += one.width * (one.nbytes or 2.0) * (block.per_token if one.routed else 1)
    return found


def streamed(outline: Outline) -> float:
    return sum(
        count * one.width * (one.forward + one.backward) * (block.per_token if one.routed else 1)
        for block, count in outline.runs
        for one in block.streams
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_without_a_table_is_planned_from_its_graph(kind: str) -> None:
    found, config = planned(kind), config_of(kind)
    model = build_on_meta(config, AutoModelForMaskedLM) if kind == "bert" else build_on_meta(config)
    assert found.graph
    assert found.description == f"{kind} (from its graph)"
    assert found.numbers == sum(one.numel() for one in model.parameters())
    assert found.layers == len(block_names(model))
    if kind != "bert":  # its head has a product before the last one
        # Convolutions along each channel, and of Jamba's scan products with vectors, are streams here.
        flops = products_of(found, TOKENS, of_all=kind == "llama4_text")
        assert flops == pytest.approx(counted(kind).forward_flops_per_sample, rel=0.025)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bert"])
def test_fused_kernels_move_and_keep_less_than_single_operators(kind: str) -> None:
    found, whole = planned(kind), counted(kind)
    experts = {block.experts if kind == "llama4_text" else block.per_token for block, _ in found.runs}
    one = Outline(
        "", found.hidden, 0, True, tuple((replace(block, per_token=max(experts)), n) for block, n in found.runs)
    )
    less = sum(sum(kept(block).values()) * count for block, count in one.runs) * TOKENS
    every = sum(part.kept_bytes for part in whole.blocks)
    assert 0.1 * every < less < every
    assert (
        0.02 * whole.forward.bytes_moved
        < streamed(one) * TOKENS
        < whole.forward.bytes_moved + whole.backward.bytes_moved
    )


def test_of_a_scan_in_chunks_what_it_is_given_is_kept_and_what_is_within_made_again() -> None:
    """Qwen3.5's gated delta rule: queries and keys as its kernels are given them, values, and what they are multiplied
    by, some of them twice, of 16 bits; its code without kernels kept each product within a chunk in 32."""
    config = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32, vocab_size=512,
    )  # fmt: skip
    scan = next(block for block, _ in captured(config, "scan").runs if block.batched)
    within = [one for one in scan.kept if "linear_attn" in one.name and one.group & Group.ATTENTION]
    heads = 8 * 32
    assert {one.nbytes for one in within if one.width >= heads} == {0.0}
    assert 4 * heads <= sum(one.width for one in within) <= 12 * heads


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
def test_the_graph_has_the_rows_of_the_table_made_by_hand(kind: str) -> None:
    config = config_of(kind)
    model = build_on_meta(config)
    by_hand = decoder(dims_of(config, {key: tuple(one.shape) for key, one in model.named_parameters()}), kind)
    found = captured(config, kind)
    assert found.numbers == by_hand.numbers
    assert found.flops(1024) == pytest.approx(by_hand.flops(1024), rel=1e-12)
    assert [count for _, count in found.runs] == [count for _, count in by_hand.runs]
    for (block, _), (other, _) in zip(found.runs, by_hand.runs, strict=True):
        assert block.numbers == other.numbers
        assert (block.experts, block.per_token, block.halves) == (other.experts, other.per_token, other.halves)
        assert sorted_products(block) == sorted_products(other)
        assert [replace(one, group=Group.SCORES) for one in block.scores] == list(other.scores)
        mine, theirs = kept(block), kept(other)
        for key in theirs:
            if key != (Group.MLP, "tokens"):  # DeepSeek's router takes its input in float32
                assert mine[key] == pytest.approx(theirs[key], rel=0.2), key
        assert sum(mine.values()) == pytest.approx(sum(theirs.values()), rel=0.1)
    assert streamed(found) == pytest.approx(streamed(by_hand), rel=0.15)


def sorted_products(block: Block) -> list[tuple[Any, ...]]:
    return sorted(
        (one.inputs, one.outputs, one.cut, int(one.group & ~Group.LATENT), one.experts) for one in block.products
    )


def test_llamas_rows_that_are_kept_are_those_of_the_table() -> None:
    config = config_of("llama")
    by_hand, found = outline_of(config, "llama"), captured(config, "llama")
    rows: list[Counter[tuple[int, str, float]]] = []
    for outline in (by_hand, found):
        rows.append(Counter())
        for one in (one for one in outline.runs[0][0].kept if one.role != "eager"):
            rows[-1][int(one.group), one.cut, one.nbytes] += one.width
    assert rows[0] == rows[1]


def test_who_divides_what() -> None:
    jamba = {one.name: one.cut for block, _ in planned("jamba").runs for one in block.products}
    assert {name: jamba[f"mamba.{name}"] for name in ("in_proj", "x_proj", "out_proj")} == {
        "in_proj": "out", "x_proj": "in", "out_proj": "in",
    }  # fmt: skip
    assert jamba["mamba"] == "out"  # steps, from their low rank
    assert jamba["feed_forward.router"] == ""
    hybrid = next(block for block, _ in planned("zamba2").runs if block.scores)
    shared = {one.name.partition(",")[0].rpartition("shared_transformer.")[2]: one.cut for one in hybrid.products}
    assert shared == {
        "self_attn.q_proj": "out", "self_attn.o_proj": "in", "feed_forward.gate_up_proj": "out",
        "feed_forward.gate_up_proj_adapter_list.0.0": "", "feed_forward.gate_up_proj_adapter_list.0.1": "out",
        "feed_forward.down_proj": "in", "linear": "", "mamba_decoder.mamba.in_proj": "out",
        "mamba_decoder.mamba.out_proj": "in",
    }  # fmt: skip


def test_blocks_of_a_shared_transformer_have_its_weights_once() -> None:
    runs = planned("zamba2").runs
    hybrids = [block for block, _ in runs if block.scores]
    assert len(hybrids) == 2
    assert not any(one.shared for one in hybrids[0].products)
    assert any(one.shared for one in hybrids[1].products)
    assert hybrids[1].numbers.total < hybrids[0].numbers.total
    assert hybrids[1].flops(TOKENS) == pytest.approx(hybrids[0].flops(TOKENS), rel=0.1)


def test_windows_chunks_and_who_sees_what_comes_after() -> None:
    scores = [block.scores[0] for block, count in planned("llama4_text").runs for _ in range(count)]
    assert [one.chunk for one in scores] == [16, 16, 16, 0]
    assert {one.kv_heads for one in scores} == {2}
    assert scores[0].keys(64) == 8
    assert scores[3].keys(64) == 32
    assert scores[0].keys(8) == 4
    gemma = [block.scores[0] for block, count in captured(config_of("gemma3_text"), "").runs for _ in range(count)]
    assert [one.window for one in gemma] == [16] * 5 + [0, 16]
    bert = planned("bert").runs[0][0].scores[0]
    assert not bert.causal
    assert bert.keys(64) == 64


def test_a_model_with_one_block_of_each_kind_is_the_whole_model() -> None:
    """What is captured of each kind once is what the whole model's graph says."""
    for kind in ("zamba2", "llama4_text"):
        config = config_of(kind)
        once, whole = planned(kind), outline_of_graph(graph_of(build_on_meta(config)), kind)
        assert once.numbers == whole.numbers
        assert once.layers == whole.layers
        assert products_of(once, TOKENS) == pytest.approx(products_of(whole, TOKENS), rel=0.005)
        assert streamed(once) == pytest.approx(streamed(whole), rel=0.005)


def test_kinds_are_told_apart_by_what_the_configuration_lists() -> None:
    model = build_on_meta(config_of("gemma3_text"))
    assert kinds_of(model, block_names(model)) == [0, 0, 0, 0, 0, 5, 0]


@settings(max_examples=4, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([8, 16]), st.sampled_from([1, 2]), st.sampled_from([8, 16, 32]),
    st.sampled_from([32, 96]),
)  # fmt: skip
def test_sizes_of_a_hybrid(heads: int, state: int, groups: int, chunk: int, ffn: int) -> None:
    config = config_of(
        "bamba", hidden_size=32 * heads, num_attention_heads=heads, num_key_value_heads=1, intermediate_size=ffn,
        mamba_n_heads=4 * heads, mamba_d_head=16, mamba_d_state=state, mamba_n_groups=groups if heads != 3 else 1,
        mamba_chunk_size=chunk, num_hidden_layers=2,
    )  # fmt: skip
    found = outline_of(config, "bamba")
    assert found.numbers == sum(one.numel() for one in build_on_meta(config).parameters())
    whole = costs(build_on_meta(config), max(2 * chunk, 64), dtype=torch.bfloat16)
    assert products_of(found, max(2 * chunk, 64)) == pytest.approx(whole.forward_flops_per_sample, rel=0.06)
    assert all(one.cut == "tensor" for block, _ in found.runs for one in block.batched)


class Own(nn.Module):
    """A library user's model: two MLPs behind norms."""

    class Layer(nn.Module):
        """One of them."""

        def __init__(self, ffn: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, ffn), nn.Linear(ffn, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([self.Layer(48), self.Layer(64)])
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_model_of_ones_own() -> None:
    model = Own()
    found = outline_of_graph(graph_of(model), "mine")
    assert found.numbers == sum(one.numel() for one in model.parameters())
    assert (found.hidden, found.vocab, found.tied, found.further) == (32, 50, False, -32)
    first, second = (block for block, _ in found.runs)
    assert sorted_products(first) == [(32, 48, "out", 16, 0), (48, 32, "in", 16, 0)]
    assert sorted_products(second) == [(32, 64, "out", 16, 0), (64, 32, "in", 16, 0)]
    assert first.vectors == 64
    assert (first.name, first.halves, first.scores) == ("dense", 1, ())


def test_refusals_say_why() -> None:
    with pytest.raises(UserError, match="t5 is an encoder with a decoder that reads it"):
        outline_of(AutoConfig.for_model("t5"), "t5")
    model = Own()
    given_ids = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    with pytest.raises(UserError, match="mine was captured without a loss"):
        outline_of_graph(folded(capture(model, given_ids), block_names(model)), "mine")
    with pytest.raises(UserError, match="mine has no blocks that run once"):
        outline_of_graph(capture(model, given_ids, loss=loss), "mine")
    with pytest.raises(UserError, match=r"modeling_minimax.py:\d+: expected scalar type"):
        outline_of(AutoConfig.for_model("minimax", num_hidden_layers=2, num_local_experts=2), "minimax")


def test_predictors_are_what_the_configuration_says() -> None:
    with_one, without = (outline_of(config_of("deepseek_v3", num_nextn_predict_layers=count), "") for count in (1, 0))
    assert (with_one.predictors, without.predictors) == (1, 0)
    assert with_one.numbers == without.numbers
    (block, count), last = with_one.predicting.runs[-1], with_one.runs[-1][0]
    assert count == 1
    assert block.numbers.total == last.numbers.total + 2 * 64 * 64 + 3 * 64
    assert without.predicting is without
