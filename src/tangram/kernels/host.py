"""What starts kernels: where they run, and sizes of grids and tiles."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICES = ("cuda", "xpu")
"""Kinds of devices that Triton compiles for."""


def has_kernels(device: torch.device) -> bool:
    """Whether kernels run there; on a CPU they do under Triton's interpreter, which has to be asked for."""
    return device.type in DEVICES or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def cdiv(a: int, b: int) -> int:
    """Over, rounded up."""
    return -(-a // b)


def padded(width: int) -> int:
    """The power of two that a tile's dim has, which matrix units want to be 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def kernel(compiled: Any) -> Any:
    """A kernel as it is started: of a grid, then with its arguments, which no type describes."""
    return compiled
