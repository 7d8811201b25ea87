"""Parts of a dim that are not even chunks: their places in the whole, and tensors taken and joined by them.

Places are arrays and no tensors: a run without memory looks at what tensors hold no more than at their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tangram.layout.intervals import IntSet, elements

Places = NDArray[np.int64]


@lru_cache(1 << 8)
def indices(outer: int, n: int, k: int, parts: tuple[IntSet, ...]) -> tuple[Places, ...]:
    """Of each of `k` ranks, the places in a dim of `n` elements of what it has: `parts` of each of `outer` blocks.

    `parts` of (): even chunks of a block.
    """
    block = n // outer
    own = parts or tuple(((i * block // k, (i + 1) * block // k),) for i in range(k))
    first = np.arange(outer, dtype=np.int64)[:, None] * block
    return tuple((first + np.array(elements(part), dtype=np.int64)).reshape(-1) for part in own)


def places(have: Places, wanted: Places) -> Places:
    """Where in a part those of its elements stand that are `wanted`. Both ascending."""
    return np.isin(have, wanted, assume_unique=True).nonzero()[0]


def picked(x: Tensor, dim: int, at: Places) -> Tensor:
    """A part, with storage of its own."""
    if len(at) and int(at[-1]) - int(at[0]) + 1 == len(at):
        return x.narrow(dim, int(at[0]), len(at)).clone(memory_format=torch.contiguous_format)
    return x.index_select(dim, torch.tensor(at.tolist(), dtype=torch.int64, device=x.device))


def padded(x: Tensor, dim: int, n: int) -> Tensor:
    """With zeros behind, up to `n` elements of a dim."""
    if x.shape[dim] == n:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], n - x.shape[dim], *x.shape[dim + 1 :])], dim)


def joined(parts: Sequence[Tensor], dim: int, at: Sequence[Places]) -> Tensor:
    """Parts put at their places, which together are all of a dim; contiguous."""
    whole, order = torch.cat([*parts], dim), np.concatenate([*at])
    if bool((order[1:] > order[:-1]).all()):
        return whole.contiguous()
    return whole.index_select(dim, torch.tensor(order.argsort().tolist(), dtype=torch.int64, device=whole.device))
