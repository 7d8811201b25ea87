"""One call of attention: queries, keys, values, the gradient of the result, who sees whom, and sinks.

Masks are dense: a laboratory's sequences are short, and a mask that is written out can be looked at and spoiled.
"""

# ruff: noqa: N803  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Who sees whom, in words. `window` of 0: no limit; of one document, or of those with these lengths (packed).

    Where there are more keys than queries, the last query stands at the last key.
    """

    causal: bool = True
    window: int = 0
    documents: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = ["causal" if self.causal else "all"]
        words += [f"window {self.window}"] if self.window else []
        words += ["packed " + "+".join(map(str, self.documents))] if self.documents else []
        return ", ".join(words)

    def visible(self, S: int, T: int) -> Tensor:
        """Which of T keys each of S queries sees, bool (S, T)."""
        return visible(S, T, self.causal, self.window, self.documents)


def visible(S: int, T: int, causal: bool, window: int = 0, documents: Sequence[int] = (), ahead: int = 0) -> Tensor:
    """The mask; `ahead`: so many keys after its own place a query sees."""
    own, keys = torch.arange(S)[:, None] + T - S, torch.arange(T)[None]
    found = torch.ones(S, T, dtype=torch.bool)
    if causal:
        found &= keys <= own + ahead
    if window:
        found &= own - keys < window
        if not causal:
            found &= keys - own < window
    if documents:
        if sum(documents) != T or S != T:
            raise ValueError(f"documents of {sum(documents)} tokens do not fill {S} queries and {T} keys")
        of = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
        found &= of[:, None] == of[None]
    return found


@dataclass(frozen=True)
class Case:
    """Queries (B, H, S, E), keys (B, G, T, E), values (B, G, T, F), the result's gradient (B, H, S, F), all float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    visible: Tensor
    """(S, T)."""
    scale: float
    sinks: Tensor | None = None
    """One more logit for each head (H,), which gives nothing."""
    mask: Mask = Mask()
    """What `visible` was made from."""

    @property
    def rows(self) -> int:
        """Query heads that share a head of the keys."""
        return self.q.shape[1] // self.k.shape[1]

    def with_mask(self, visible_ST: Tensor) -> Case:
        """The same, and others are seen."""
        return replace(self, visible=visible_ST)


class Results(NamedTuple):
    """What attention gives forward and backward: (B, H, S, F), (B, H, S, E), (B, G, T, E), (B, G, T, F)."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


TENSORS = ("O", "dQ", "dK", "dV")


def shared(x_BGT: Tensor, heads: int) -> Tensor:
    """Heads of keys as often as query heads share them: head h is served by h // (H / G)."""
    found: Tensor = x_BGT.repeat_interleave(heads // x_BGT.shape[1], 1)
    return found


def summed(x_BHT: Tensor, groups: int) -> Tensor:
    """What query heads give back to the head of the keys that they share."""
    return x_BHT.reshape(x_BHT.shape[0], groups, -1, *x_BHT.shape[2:]).sum(2)
