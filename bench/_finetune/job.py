"""The job that all of it measures: a chat model of random weights, and conversations of many lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.training.data import prepare, tokens_of
from tangram.training.state.build_model import source_of
from tests.training.chat import write_chat
from tests.training.data.test_chat import CHATML, tokenizer_of

ALONE = Strategy("one process", "dp=1", ("dp",), shard="dp")
LARGE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
"""114 million parameters; the vocabulary is that of bytes."""
SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Whose weights are mostly those that a base in 4 bits quantises, in whole blocks on two ranks."""


def write_job(folder: Path, *, large: bool, count: int, most: int = 450) -> Path:
    """The folder with all of it; questions and answers have at most `most` characters each, half of them below 80."""
    model = write_chat(folder / "chat-model", fields=LARGE if large else SMALL)
    tokenizer_of(model)
    (model / "chat_template.jinja").write_text(CHATML)
    (folder / "rows").mkdir()
    sizes = np.minimum(np.random.default_rng(0).lognormal(4.3, 0.9, (count, 2)).astype(int) + 5, most)
    rows = [
        {"messages": [
            {"role": "user", "content": f"{n}: " + "why? " * (asked // 5)},
            {"role": "assistant", "content": f"{n}, " + "so. " * (answered // 4)},
        ]}
        for n, (asked, answered) in enumerate(sizes.tolist())
    ]  # fmt: skip
    (folder / "rows" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "sft.toml").write_text(
        'version = 3\ntask = "sft"\nmodel.path = "chat-model"\ndata.sources = [{ path = "rows" }]\n'
        f'lora.rank = 8\nlora.alpha = 16.0\nrun.steps = 20\ndata.cache = "{folder / "cache"}"\n'
        'data.global_batch = 4\noptimiser.schedule = "constant"\noptimiser.lr = 1e-3\n'
    )
    return folder


def planned(folder: Path, way: Strategy = ALONE, micro_batch: int = 4, **more: str) -> Plan:
    """The job with a strategy."""
    job = load(folder / "sft.toml", more)
    prepare(job.data, tokens_of(job), lambda event: None)
    return plan_of(way, job, Counted(job, source_of(job, tokens_of(job)).config), micro_batch)
