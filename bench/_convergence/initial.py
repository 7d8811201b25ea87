"""First weights with channels of queries and keys far from zero, as a Hugging Face directory that a job begins from.

Qwen2's projections of queries and keys have biases. As its class makes them they are zero; here one channel in sixteen
of each head gets about the setting's number, of random sign, as the law `channels` of `bench._numerics.inputs` has
it. The channels are among those that rotary embeddings turn slowest (of heads of 64 by less than a fiftieth of a
degree a token): a bias that is turned far is no outlier of a channel any more.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from bench._convergence.settings import Size, fields_of
from tangram.models.building.build import config_of
from tangram.models.building.initial import initial_tensors
from tangram.training.data import BYTES

SLOWEST = 8
"""Of the pairs of channels that are turned together one in so many, the slowest, may get a bias."""


def write(folder: Path, size: Size, seed: int, biases: tuple[float, float]) -> None:
    """Make the directory, unless it is there. `biases`: of queries and of keys."""
    if folder.exists():
        return
    fields = {key: value for key, value in fields_of(size).items() if key != "head_dim"}
    config = config_of("qwen2", {
        **fields, "vocab_size": BYTES.vocabulary, "bos_token_id": BYTES.end, "eos_token_id": BYTES.end,
        "tie_word_embeddings": False,
    })  # fmt: skip
    tensors = {name: x.clone() for name, x in initial_tensors(config, seed, _is_parameter)}
    dice = torch.Generator().manual_seed(seed)
    for name, x in sorted(tensors.items()):
        for projection, by in zip(("q_proj", "k_proj"), biases, strict=True):
            if name.endswith(f"{projection}.bias"):
                tensors[name] = biased(x.numel(), size.hidden // size.heads, by, dice)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        whole = Path(made) / "model"
        config.save_pretrained(whole)
        save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
        whole.rename(folder)  # all of it or nothing


def _is_parameter(name: str) -> bool:
    return name.endswith((".weight", ".bias"))  # what rotary embeddings turn by is a buffer


def biased(channels: int, width: int, by: float, dice: Any) -> Tensor:
    """The bias of a projection to heads of `width` channels."""
    found, half = torch.zeros(channels), width // 2
    slow = torch.arange(half - max(1, half // SLOWEST), half)
    near = torch.cat([slow, slow + half])
    few = max(1, width // 16)
    for head in range(channels // width):
        where = near[torch.randperm(len(near), generator=dice)[:few]]
        size = by * (1 + 0.2 * torch.randn(len(where), generator=dice))
        sign = torch.randint(2, (len(where),), generator=dice) * 2 - 1
        found[head * width + where] = size * sign
    return found
