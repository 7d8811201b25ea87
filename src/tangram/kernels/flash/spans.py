"""Who sees whom: each key has a place, each query the first and the last place that it sees.

One pair of numbers a query says every mask that models of language and of pictures train with:

    causal             first 0, last its own place
    packed documents   first where its document begins
    sliding window     first so many places before its own
    everything, cross  first 0, last the last key's place
    prefix, block      last where the prefix, or the block that its token is in, ends

Nothing is as large as the square of the sequence, and tokens may lie in any order. Which tiles of queries and keys a
kernel visits, and in which of them it needs no mask, follows by comparing the tiles' smallest and largest numbers;
it is worked out on the device, so nobody waits.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LAST = 2**31 - 1
"""A place beyond all keys."""


class Spans(NamedTuple):
    """The numbers, int32. A query whose `reach` is below its `since` sees nothing."""

    since: Tensor
    """(B, S)."""
    reach: Tensor
    """(B, S)."""
    places: Tensor
    """Of the keys (B, T), at least 0."""

    def visible(self) -> Tensor:
        """The mask written out, bool (B, S, T)."""
        places_B1T = self.places[:, None]
        return (self.since[..., None] <= places_B1T) & (places_B1T <= self.reach[..., None])

    def to(self, device: torch.device) -> Spans:
        """On another device."""
        return Spans(*(x.to(device) for x in self))


def by_numbers(own_BSN: Tensor, keys_BTN: Tensor, window: int = 0, causal: bool = True) -> Spans:
    """From two numbers a token: the place where its document begins, and its own place (B, S or T, 2).

    `window`: of how many places a query sees, its own included; 0: of all. Not causal: its whole document, or those
    less than `window` places before and after it.
    """
    begin_BS, place_BS = own_BSN.unbind(-1)
    since_BS = torch.maximum(begin_BS, place_BS - window + 1) if window else begin_BS
    if causal:
        reach_BS = place_BS
    else:
        after_BST = torch.where(keys_BTN[:, None, :, 0] == begin_BS[..., None], keys_BTN[:, None, :, 1], -1)
        reach_BS = after_BST.amax(-1)
        reach_BS = torch.minimum(reach_BS, place_BS + window - 1) if window else reach_BS
    return Spans(*(x.to(torch.int32) for x in (since_BS, reach_BS, keys_BTN[..., 1])))


def in_order(S: int, T: int, causal: bool = True, window: int = 0, batch: int = 1) -> Spans:
    """Of tokens in their order, of which the last query stands at the last key; on the CPU."""
    places_S, places_T = torch.arange(S) + T - S, torch.arange(T)
    zeros_S = torch.zeros_like(places_S)
    since_S = torch.maximum(zeros_S, places_S - window + 1) if window else zeros_S
    ends_S = torch.full_like(places_S, T - 1)
    free_S = torch.minimum(ends_S, places_S + window - 1) if window else ends_S
    reach_S = places_S if causal else free_S
    return Spans(*(x.to(torch.int32).expand(batch, -1).contiguous() for x in (since_S, reach_S, places_T)))


def with_blocks(spans: Spans, blocks_BS: Tensor) -> Spans:
    """The same, and queries see all of their block: of the neighbours with the same number that is not negative.

    `blocks_BS` (B, S) numbers tokens that stand at the places of the keys (S = T, in order): pictures of a
    vision-language model, or a prefix. A number that comes again further on is another block.
    """
    places_S = torch.arange(blocks_BS.shape[1], dtype=torch.int32, device=blocks_BS.device)
    new_BS = F.pad(blocks_BS[:, 1:] != blocks_BS[:, :-1], (1, 0), value=True)
    last_BS = F.pad(blocks_BS[:, 1:] != blocks_BS[:, :-1], (0, 1), value=True)
    first_BS = torch.where(new_BS, places_S, 0).cummax(1)[0]
    end_BS = torch.where(last_BS, places_S, LAST).flip(1).cummin(1)[0].flip(1)
    inside_BS = blocks_BS >= 0
    since = torch.where(inside_BS, torch.minimum(spans.since, first_BS.int()), spans.since)
    reach = torch.where(inside_BS, torch.maximum(spans.reach, end_BS.int()), spans.reach)
    return Spans(since, reach, spans.places)


class Ranges(NamedTuple):
    """Tiles that are visited, int32 (B, tiles, 4): first, first and end of a run that needs no mask, end."""

    of_queries: Tensor
    """Of each tile of queries, tiles of keys."""
    of_keys: Tensor
    """Of each tile of keys, tiles of queries."""


def ranges(spans: Spans, rows: int, columns: int) -> Ranges:
    """For tiles of `rows` queries and `columns` keys. What lies between first and end may see nothing; no more does."""
    since = _tiled(spans.since, rows)
    reach = _tiled(spans.reach, rows)
    places = _tiled(spans.places, columns)
    low, high = (x.amin(-1)[..., None] for x in (since, reach))
    first, last = (x.amax(-1)[..., None] for x in (since, reach))
    nearest, furthest = places.amin(-1)[:, None], places.amax(-1)[:, None]
    some = (furthest >= low) & (nearest <= last)
    whole = (nearest >= first) & (furthest <= high)
    if spans.places.shape[1] % columns:  # keys that are not there are masked
        whole[:, :, -1] = False
    return Ranges(_runs(some, whole), _runs(some.mT, whole.mT))


def _tiled(x: Tensor, size: int) -> Tensor:
    """(B, tiles, size), filled up with the last one."""
    short = -x.shape[1] % size
    if short:
        x = torch.cat([x, x[:, -1:].expand(-1, short)], 1)
    return x.reshape(x.shape[0], -1, size)


def _runs(some: Tensor, whole: Tensor) -> Tensor:
    """Of each row the ends of what is seen in part, and of its first run of whole tiles."""
    count = some.shape[-1]
    numbers = torch.arange(count, device=some.device)
    first = torch.where(some, numbers, count).amin(-1)
    end = torch.where(some, numbers + 1, 0).amax(-1)
    first = torch.minimum(first, end)
    begin = torch.where(whole, numbers, count).amin(-1)
    stop = torch.where(whole | (numbers <= begin[..., None]), count, numbers).amin(-1)
    nothing = begin == count
    begin, stop = torch.where(nothing, end, begin), torch.where(nothing, end, stop)
    return torch.stack([first, begin, stop, end], -1).to(torch.int32)
