"""torchtitan's checkpoints become transformers' as torchtitan's own adapters have it: the same names, the same bits."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from tangram.cli import main
from tests.checkpoint.peers.models import save

pytest.importorskip("torchtitan")

ADAPTERS = {"llama": "llama3.Llama3", "qwen3": "qwen3.Qwen3", "deepseek_v3": "deepseek_v3.DeepSeekV3"}


def adapter(kind: str, config: Any) -> Any:
    """torchtitan's own, of a release that takes a table of arguments."""
    package, _, name = ADAPTERS[kind].partition(".")
    module = importlib.import_module(f"torchtitan.models.{package}.model.state_dict_adapter")
    experts = SimpleNamespace(
        num_experts=getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", 0)
    )
    arguments = SimpleNamespace(
        n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads, dim=config.hidden_size,
        head_dim=getattr(config, "head_dim", None), moe_args=experts, n_layers=config.num_hidden_layers,
        q_lora_rank=getattr(config, "q_lora_rank", 0), enable_weight_tying=config.tie_word_embeddings,
        moe_enabled=bool(experts.num_experts),
    )  # fmt: skip
    return getattr(module, f"{name}StateDictAdapter")(arguments, None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("row", ["llama", "llama-2", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_what_torchtitan_saved_is_what_its_adapter_says(row: str, tmp_path: Path) -> None:
    changes = {"head_dim": 8} if row == "llama" else {}  # torchtitan's has no size of its own
    model = save(row, tmp_path / "hf", **changes)
    before: dict[str, Tensor] = load_file(tmp_path / "hf/model.safetensors")
    kind = next(kind for kind in ADAPTERS if row.startswith(kind))
    theirs = adapter(kind, model.config).from_hf(dict(before))
    assert "tok_embeddings.weight" in theirs
    dcp.save(theirs, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert main(["checkpoint", "convert", str(tmp_path / "titan"), str(tmp_path / "back"), "--to", "hf",
                 "--config", str(tmp_path / "hf")]) == 0  # fmt: skip
    after = load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
