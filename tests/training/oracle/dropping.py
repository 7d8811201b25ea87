"""Experts without room for all that choose them, written out: choices one by one, in one process."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def dropping(model: nn.Module, factor: float, by: str) -> Iterator[list[tuple[float, float]]]:
    """Within, routers give no weight to what is dropped; the list gets, for each that runs, the share of it and by how
    much the choice was made, as `closest` has it."""
    shares: list[tuple[float, float]] = []

    def drop(router: nn.Module, args: Any, result: Any) -> Any:
        logits_TE, weights_TK, experts_TK = result
        kept_TK = kept(weights_TK, experts_TK, logits_TE.shape[-1], factor, by)
        margin = closest(weights_TK, experts_TK, kept_TK) if by == "probs" else math.inf
        shares.append((1 - float(kept_TK.float().mean()), margin))
        return logits_TE, weights_TK * kept_TK, experts_TK

    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    assert routers
    handles = [router.register_forward_hook(drop) for router in routers]
    yield shares
    for handle in handles:
        handle.remove()


def closest(weights_TK: Tensor, experts_TK: Tensor, kept_TK: Tensor) -> float:
    """The smallest distance of any expert's least probable choice that is kept to the next that is not, relative."""
    margins = [math.inf]
    for expert in experts_TK.unique():
        chosen_TK = experts_TK == expert
        inside, outside = weights_TK[chosen_TK & kept_TK].detach(), weights_TK[chosen_TK & ~kept_TK].detach()
        if len(inside) and len(outside):
            margins.append(float((inside.min() - outside.max()) / inside.min()))
    return min(margins)


def kept(weights_TK: Tensor, experts_TK: Tensor, experts: int, factor: float, by: str) -> Tensor:
    """Which choices find room."""
    T, K = experts_TK.shape
    limit = math.ceil(T * K / experts * factor)
    choices = [(-weights_TK[t, k].item() if by == "probs" else 0, t, k) for t in range(T) for k in range(K)]
    room = [limit] * experts
    kept_TK = torch.zeros(T, K, dtype=torch.bool)
    for _, t, k in sorted(choices):
        expert = int(experts_TK[t, k])
        if room[expert]:
            room[expert] -= 1
            kept_TK[t, k] = True
    return kept_TK
