"""Stochastic rounding to bfloat16: up as often as a number lies near the neighbour above, so that sums of small updates
are right on average (Gupta et al. 2015).

What is drawn for a number is a function of a key (seed, step, parameter, state) and of its place in the whole tensor,
a hash and no generator: so any mesh, and a run that goes on, has the bits of one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tangram.training.updates.parameter_shards import ParameterShards

AT_ONCE = 1 << 18
"""Numbers that are drawn for at a time, in whole rows."""
COUNTER_BYTES = 32 * AT_ONCE
"""What the hashes of as many take."""


def round_into(low: Tensor, high: Tensor, key: str, shards: ParameterShards, reduced: Sequence[int] = ()) -> None:
    """Write float32 numbers to bfloat16 ones of the same shape, both local: a parameter's, cut as `shards` says, or of
    a state of it that has one number along its `reduced` dims."""
    if not low.numel():
        return
    first, *inner = _places(low, shards, reduced)
    low, high = (x[None] if x.ndim == 0 else x for x in (low, high))
    rest = sum(inner, torch.zeros(low.shape[1:], dtype=torch.int64, device=low.device))
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), signed=True)
    at_once = max(1, AT_ONCE // max(1, math.prod(low.shape[1:])))
    for begin in range(0, low.shape[0], at_once):
        some = slice(begin, begin + at_once)
        low[some] = _rounded(high[some], (first[some].view(-1, *[1] * rest.ndim) + rest).add_(number))


def _places(x: Tensor, shards: ParameterShards, reduced: Sequence[int]) -> list[Tensor]:
    """Of each dim what its indices add to the place in the whole; those of all but the first are shaped to be added."""
    found: list[Tensor] = []
    for dim, n in enumerate(x.shape):
        cut = shards.places[dim] if shards.places else torch.arange(0)
        own = torch.zeros(1, dtype=torch.int64) if dim in reduced else cut if cut.numel() else torch.arange(n)
        own = own.to(x.device) * math.prod(shards.shape[dim + 1 :])
        found.append(own.view(-1, *[1] * (x.ndim - 1 - dim)) if dim else own)
    return found or [torch.zeros(1, dtype=torch.int64, device=x.device)]


def _rounded(high: Tensor, counters: Tensor) -> Tensor:
    """By 16 bits of each counter's hash, added to those that are cut off; what is not finite as ever."""
    bits = high.contiguous().view(torch.int32) + (_hash(counters) & 0xFFFF).int()
    return torch.where(high.isfinite(), (bits & -0x10000).view(torch.float32), high).bfloat16()


def _hash(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, which torch's int64 wraps around as unsigned words do. In place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = x.bitwise_xor_(_shifted(x, shift)).mul_(factor - (1 << 64))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)
