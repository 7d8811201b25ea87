"""The models of the matrix, in few numbers, and the job that each is trained by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangram.schema.job import Job
from tangram.training.data import BYTES
from tangram.training.objective.packing import settle
from tangram.training.state.build_model import shallow, source_of

SEQUENCE, BATCH = 32, 12
"""Tokens of a sample, samples of a step: eight ranks have two or one."""
SIZES: Mapping[str, Any] = {
    "vocab_size": 264,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": None,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
MIXTURE: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED: Mapping[str, Any] = {"num_attention_heads": 8, "head_dim": 4}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {"model_type": "llama", **GROUPED},
    "Qwen3": {"model_type": "qwen3", **GROUPED},
    "Qwen3-MoE": {"model_type": "qwen3_moe", "num_experts": 4, **MIXTURE},
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **MIXTURE,
    },
    "Gemma 3": {
        "model_type": "gemma3_text",
        **GROUPED,
        "sliding_window": 20,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 4,
    },
    "GPT-OSS": {
        "model_type": "gpt_oss",
        **GROUPED,
        "sliding_window": 20,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **MIXTURE,
    },
    "GPT-2": {"model_type": "gpt2"},
}
"""Grouped queries, latent attention with shared experts, windows and tied embeddings, sinks and biases; GPT-2 with the
dropout that it has by default."""
WINDOWED = ("Gemma 3", "GPT-OSS")


def write_config(folder: Path, name: str, layers: int) -> Path:
    """The configuration of a model of so many layers, as a file."""
    more: dict[str, Any] = {"num_hidden_layers": layers}
    if name in WINDOWED:
        kinds = ("sliding_attention", "full_attention")
        more["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    path = folder / f"{MODELS[name]['model_type']}-{layers}.json"
    path.write_text(json.dumps({**SIZES, **MODELS[name], **more}))
    return path


def job_of(folder: Path, text: Path, name: str, layers: int, steps: int) -> Job:
    """What is trained, without a strategy; how its text is packed is settled.

    A step's gradient is clipped, so a wrong norm shows in every parameter. Adam's epsilon is high, for it blows up the
    rounding of gradients that are nearly zero (`tests/training/oracle/cases.py` has the figures).
    """
    tables: dict[str, Any] = {
        "version": 3,
        "seed": 3,
        "model": {"path": str(write_config(folder, name, layers))},
        "data": {
            "sources": [{"path": str(text), "pattern": "**/*.py"}],
            "tokenizer": "bytes",
            "cache": str(folder / "tokens"),
            "held_out": 0.0,
            "sequence": SEQUENCE,
            "global_batch": BATCH,
        },
        "optimiser": {"lr": 3e-3, "warmup_steps": 2, "weight_decay": 0.5, "eps": 1e-3},
        "run": {"steps": steps, "device": "cpu"},
    }
    job = Job.model_validate(tables)
    model = shallow(job, source_of(job, BYTES))
    packing = settle(model, "auto", None, lambda mine: mine).packing
    return job.model_copy(update={"data": job.data.model_copy(update={"packing": packing})})
