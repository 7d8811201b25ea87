"""The script that teams write for one model and direction: load all of it, fuse or split in torch, save all of it.

Hugging Face's Qwen3 to Megatron-core's fused names in torch's distributed checkpoint, and back. It takes the memory of
the model, twice where tensors are fused; nothing is proved, nothing appears at once.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.distributed import checkpoint

QKV, GATED = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
PLAIN = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm", "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm", "mlp.down_proj": "mlp.linear_fc2",
    "self_attn.q_norm": "self_attention.q_layernorm", "self_attn.k_norm": "self_attention.k_layernorm",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens": "embedding.word_embeddings",
    "lm_head": "output_layer",
    "model.norm": "decoder.final_layernorm",
}


def there(source: Path, target: Path, groups: int, dim: int) -> None:
    """From a Hugging Face directory."""
    found: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        found |= load_file(file)
    made = {f"{OUTSIDE[name.removesuffix('.weight')]}.weight": found[name] for name in found if ".layers." not in name}
    for i in range(1 + max(int(match[1]) for name in found if (match := re.search(r"layers\.(\d+)\.", name)))):
        at, to = f"model.layers.{i}", f"decoder.layers.{i}"
        q, k, v = (found[f"{at}.self_attn.{x}_proj.weight"] for x in "qkv")
        parts = [x.view(groups, -1, dim, x.shape[1]) for x in (q, k, v)]
        made[f"{to}.{QKV}"] = torch.cat(parts, 1).reshape(-1, q.shape[1])
        made[f"{to}.{GATED}"] = torch.cat([found[f"{at}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
        made |= {f"{to}.{core}{_end(core)}": found[f"{at}.{name}.weight"] for name, core in PLAIN.items()}
    _quietly(checkpoint.save, made, target)


def back(source: Path, target: Path, groups: int, dim: int, shard: int) -> None:
    """To a Hugging Face directory."""
    metadata: Any = checkpoint.FileSystemReader(str(source)).read_metadata()
    found: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in metadata.state_dict_metadata.items()
    }
    _quietly(checkpoint.load, found, source)
    names = {core: name for name, core in OUTSIDE.items()}
    made = {f"{names[name.removesuffix('.weight')]}.weight": x for name, x in found.items() if ".layers." not in name}
    for name in [name for name in found if name.endswith(QKV)]:
        to, at = name.removesuffix(f".{QKV}"), name.removesuffix(f".{QKV}").replace("decoder", "model")
        fused = found[name].view(groups, -1, dim, found[name].shape[1])
        parts: Any = fused.split([fused.shape[1] - 2, 1, 1], 1)
        for x, part in zip("qkv", parts, strict=True):
            made[f"{at}.self_attn.{x}_proj.weight"] = part.reshape(-1, found[name].shape[1]).contiguous()
        halves: Any = found[f"{to}.{GATED}"].chunk(2)
        for x, part in zip(("gate", "up"), halves, strict=True):
            made[f"{at}.mlp.{x}_proj.weight"] = part.clone()
        made |= {f"{at}.{name}.weight": found[f"{to}.{core}{_end(core)}"] for name, core in PLAIN.items()}
    target.mkdir()
    some: dict[str, Tensor] = {}
    for i, name in enumerate(sorted(made)):
        some[name] = made[name]
        if sum(x.nbytes for x in some.values()) > shard or i == len(made) - 1:
            save_file(some, target / f"model-{i:05d}.safetensors")
            some = {}


def _end(core: str) -> str:
    return "_weight" if core.endswith("layer_norm") else ".weight"


def _quietly(act: Any, state: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():  # torch says that there is one process only
        warnings.simplefilter("ignore")
        act(state, checkpoint_id=folder, no_dist=True)
