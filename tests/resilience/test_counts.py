"""What a run counts along the way is counted on by those who go on from a snapshot."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from tangram.training.observe.events import ExpertLoads
from tests.resilience.runs import Run, job_of, run, text_in

EVERY = 6
MOE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


class Counting(Run):
    """Keeps the counts of experts, too."""

    def __call__(self, event: object) -> None:
        if isinstance(event, ExpertLoads):
            self.loads = {**getattr(self, "loads", {}), event.step: event}
        super().__call__(event)


@pytest.mark.slow
def test_a_count_of_experts_has_the_steps_before_a_rank_was_lost_too(tmp_path: Path) -> None:
    """It had those since alone, and said so of fewer tokens."""
    Qwen3MoeConfig(**MOE).save_pretrained(tmp_path / "model")
    text = text_in(tmp_path)
    tables: dict[str, Any] = {"data": {"tokenizer": "bytes"}, "run": {"steps": 4 * EVERY, "count_experts": EVERY}}
    job = job_of(
        tmp_path / "run", text, model={"path": f"{tmp_path / 'model'}", "preset": None, "change": {}}, **tables
    )
    seen, alone = Counting(at={EVERY // 2: 1, 2 * EVERY + 2: 0}), Counting()
    run(job, seen)
    (tmp_path / "alone").mkdir()
    run(replace(job, folder=tmp_path / "alone"), alone)
    assert seen.starts == 3
    assert [*seen.loads] == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]
    assert seen.loads == alone.loads
    assert all(sum(own) == 2 * one.tokens for one in seen.loads.values() for own in one.layers.values())
