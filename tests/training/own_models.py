"""Modules that no library knows: a diffusion transformer of images, and one of a person's own making.

The diffusion transformer is that of Peebles and Xie (2023): patches of a noisy image, conditioned on a time step and a
class, in blocks whose norms are shifted, scaled and gated by what is conditioned on (adaLN); it predicts the noise.
There the modulation begins as zeros, which would leave most gradients zero: here it begins as what layers begin with.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Two(nn.Module):
    """A bias after a row-cut product; called by position."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = F.one_hot(ids_BS, 32).float()
        return self.head(x_BSH + self.down(torch.tanh(self.up(x_BSH))))


class Written(nn.Module):
    """Two products, both pending sums: one is written into the other, and the code goes on with what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down, self.more = (nn.Linear(64, 32, bias=False) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSF = torch.tanh(self.up(F.one_hot(ids_BS, 32).float()))
        x_BSH = self.down(x_BSF)
        x_BSH.add_(self.more(x_BSF * x_BSF))
        return self.head(x_BSH.softmax(-1))


class Convolved(nn.Module):
    """Tokens that read their neighbours by windows, and all before them by a scan: a norm of running means between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(32, 16), nn.Linear(16, 32)
        self.near, self.far = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=4)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = self.embed(F.one_hot(ids_BS, 32).float())
        x_BHS = torch.tanh(self.near(x_BSH.transpose(1, 2)))
        mean_BHS = torch.cumsum(x_BHS, 2) / torch.logcumsumexp(x_BHS * 0.1, 2).exp()
        return self.head(self.far(x_BHS + mean_BHS).transpose(1, 2))


class Fixed(nn.Module):
    """The number of samples is written in its code."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return torch.tanh(x_BSF.view(4, 16, 4, 16)).flatten(-2)


class Another(nn.Module):
    """Code that takes another way where it sees a part of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.fixed = Fixed()
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSF = self.up(F.one_hot(ids_BS, 32).float())
        if x_BSF.shape[-1] < 64:
            x_BSF = torch.tanh(x_BSF)
        return self.head(self.down(self.fixed(x_BSF)))


class Times(nn.Module):
    """Time steps as sines and cosines, through two layers."""

    def __init__(self, width: int, waves: int = 16) -> None:
        super().__init__()
        self.waves = waves
        self.mlp = nn.Sequential(nn.Linear(waves, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time_B: Tensor) -> Tensor:
        half = self.waves // 2
        rates = torch.exp(-math.log(10000) / half * torch.arange(half, device=time_B.device))
        angles = time_B[:, None].float() * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1))


class Attention(nn.Module):
    """One product gives queries, keys and values: `(3 heads d)`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BSH: Tensor) -> Tensor:
        b, s, _ = x_BSH.shape
        q, k, v = self.qkv(x_BSH).reshape(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1))


def modulated(x_BSH: Tensor, shift_BH: Tensor, scale_BH: Tensor) -> Tensor:
    return x_BSH * (1 + scale_BH.unsqueeze(1)) + shift_BH.unsqueeze(1)


class Block(nn.Module):
    """Attention and an MLP, each with its norm shifted, scaled and its result gated."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x_BSH: Tensor, given_BH: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(given_BH).chunk(6, dim=1)
        x_BSH = x_BSH + gate1.unsqueeze(1) * self.attn(modulated(self.norm1(x_BSH), shift1, scale1))
        return x_BSH + gate2.unsqueeze(1) * self.mlp(modulated(self.norm2(x_BSH), shift2, scale2))


class Last(nn.Module):
    """From the stream to patches of noise."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, out)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x_BSH: Tensor, given_BH: Tensor) -> Tensor:
        shift, scale = self.modulation(given_BH).chunk(2, dim=1)
        return self.linear(modulated(self.norm(x_BSH), shift, scale))


class Diffusion(nn.Module):
    """`noisy_BCXY`, `time_B` and `class_B` give the noise, of the image's shape."""

    def __init__(self, size: int = 8, patch: int = 2, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.embed = nn.Conv2d(4, width, patch, stride=patch)
        self.positions = nn.Parameter(0.1 * torch.randn(1, self.side**2, width))
        self.times = Times(width)
        self.classes = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = Last(width, patch * patch * 4)

    def forward(self, noisy_BCXY: Tensor, time_B: Tensor, class_B: Tensor) -> Tensor:
        x_BSH = self.embed(noisy_BCXY).flatten(2).transpose(1, 2) + self.positions
        given_BH = self.times(time_B) + self.classes(class_B)
        for block in self.blocks:
            x_BSH = block(x_BSH, given_BH)
        patches = (
            self.last(x_BSH, given_BH).unflatten(1, (self.side, self.side)).unflatten(3, (self.patch, self.patch, 4))
        )
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
