"""A module that is no transformers model: linear layers with biases, a head of three rows, its own loss."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tangram.training.data import IGNORE, Batch


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return x_BSH + self.down(torch.tanh(self.up(self.norm(x_BSH))))


class Own(nn.Module):
    """Predicts the next byte from this one. Of `gain`'s three rows and one bias some ranks get nothing."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.gain = nn.Linear(width, 3)
        self.head = nn.Linear(width, 257)

    def forward(self, inputs_BS: Tensor) -> Tensor:
        x_BSH = self.embed(inputs_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(x_BSH) * (1 + self.gain(x_BSH).mean(-1, keepdim=True))


def own_model(seed: int) -> Own:
    """The module with values of its own for each seed; the process's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Own()


def own_loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Summed over the tokens that count."""
    logits_BSV: Tensor = model(batch.inputs_BS)
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=IGNORE, reduction="sum")
