"""What one TP rank computes, of every type of model: as its layouts say, whatever fields a configuration has."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from tangram.errors import UserError
from tangram.models.outlines.costs import ModelCosts
from tangram.planner.local.derived_layouts import TensorLayouts
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.rank import rank
from tangram.planner.local.stage_shares import scaled
from tests.models.tiny import tiny
from tests.planner.machine import rates
from tests.planner.test_rank import job
from tests.training import zoo

SIZES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "gpt_neox": {"intermediate_size": 48},
    "cwm": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
}
"""A width of another name; heads that have no size of their own; a class that takes no None for its tokens."""


def _counted(config: PreTrainedConfig) -> tuple[Counted, TensorLayouts]:
    counted = Counted(job(), config)
    lies = counted.tensor(("tp", 2), None)
    assert isinstance(lies, TensorLayouts), lies
    return counted, lies


def _products(costs: ModelCosts) -> float:
    return sum(part.forward_flops + part.backward_flops for part in costs.blocks)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_rank_computes_its_share_whatever_fields_say(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SIZES, **OTHERS[kind])
    counted, lies = _counted(config)
    whole, local = counted.costs(2), counted.local_costs(lies, ("tp", 2), 2)
    assert 2 * _products(local) == pytest.approx(_products(whole))
    found = rank(job(), 2, rates(2), config, counted)
    assert [one.why_not for one in found if one.name == "TP" and one.plan is None] == []


def test_both_ways_of_counting_agree_where_there_are_two() -> None:
    counted, lies = _counted(tiny("llama", vocab_size=64))
    narrow, share = counted.local_costs(lies, ("tp", 2), 2), scaled(counted.costs(2), lies.share, logits=0.5)
    assert narrow != share
    assert share.forward.flops == pytest.approx(narrow.forward.flops)
    assert share.backward.flops == pytest.approx(narrow.backward.flops)
    assert share.logits_bytes == narrow.logits_bytes
    assert share.activation_bytes == pytest.approx(narrow.activation_bytes, rel=0.35)  # norms are cut over tokens, too


def test_a_narrower_configuration_that_is_not_what_a_rank_has_is_not_believed() -> None:
    """Planted: heads of which the class makes as wide ones as there are fewer."""
    config = AutoConfig.for_model("gpt_neox", **SIZES, **OTHERS["gpt_neox"])
    counted, lies = _counted(config)
    narrow = counted._narrow(2, lies.vocabulary)  # pyright: ignore[reportPrivateUsage]
    assert narrow is not None
    wrong = narrow.costs[0]
    assert 2 * _products(wrong) > 1.2 * _products(counted.costs(1))
    assert counted.local_costs(lies, ("tp", 2), 1) != wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_type_of_model_is_ranked_or_refused(kind: str) -> None:
    config = zoo.tiny(kind, 0).config
    try:
        counted = Counted(job(), config)
        found = rank(job(), 2, rates(2), config, counted)
    except UserError:
        return
    assert all(one.plan is not None or one.why_not for one in found)
    lies = counted.tensor(("tp", 2), None)
    if isinstance(lies, TensorLayouts):
        whole, local = counted.costs(1), counted.local_costs(lies, ("tp", 2), 1)
        assert _products(whole) <= 2.1 * _products(local) <= 2.1 * _products(whole)
