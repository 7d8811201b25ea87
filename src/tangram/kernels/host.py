"""What starts kernels: sizes of grids and tiles."""

from __future__ import annotations

from typing import Any


def cdiv(a: int, b: int) -> int:
    """Over, rounded up."""
    return -(-a // b)


def padded(width: int) -> int:
    """The power of two that a tile's dim has, which matrix units want to be 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def kernel(compiled: Any) -> Any:
    """A kernel as it is started: of a grid, then with its arguments, which no type describes."""
    return compiled
