"""Peaks of memory by moment and stage: what products leave beside kept gradients, and published ranks one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench._planner.rows import cases, read
from tangram.models.outline import Dims, decoder
from tangram.planner.cost.memory import block_activations, block_backward, memory, weights_of_shapes
from tangram.planner.space.framework_profiles import framework
from tangram.planner.space.grid import grid
from tangram.planner.space.setting import Setting

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
    assert max(off) <= 0.015


def test_a_fast_link_has_the_device_itself() -> None:
    with pytest.raises(ValueError, match="0 devices at a fast link"):
        Setting(None, CORE, node=0)
