"""Keys that go round real ranks, beside attention to all of them in one process: results and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.kernels.attention import Heads, attend
from tangram.relayout.collectives.ring_attention import ring_attend
from tests.relayout.collecting import World

B, HEADS, GROUPS, LENGTH, WIDTH = 2, 4, 2, 12, 8


def numbers(seed: int) -> Tensor:
    """Documents and places of tokens, in some order: in order, or drawn."""
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * LENGTH])
    found = torch.stack([documents, torch.arange(LENGTH).expand(B, -1)], -1)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(LENGTH)
    return found[:, order]


def cases() -> Iterator[tuple[int, bool, int, torch.dtype]]:
    """The order of tokens, whether there are sinks, the window, and the dtype."""
    yield from itertools.product((0, 3), (False, True), (0, 4), (torch.float64,))
    yield 3, True, 4, torch.bfloat16


def _apart(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))


def _wrong(group: dist.ProcessGroup, seed: int, sinks: bool, window: int, dtype: torch.dtype) -> str:
    """What is wrong with one case on this rank."""
    k, me = dist.get_world_size(group), dist.get_rank(group)
    draw = torch.Generator().manual_seed(7)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    whole: dict[str, Any] = {
        "q": some(B, HEADS, LENGTH, WIDTH),
        "k": some(B, GROUPS, LENGTH, WIDTH),
        "v": some(B, GROUPS, LENGTH, WIDTH),
        "sinks": some(HEADS) if sinks else None,
    }
    weights, tokens = some(B, HEADS, LENGTH, WIDTH), numbers(seed)
    leaves = {name: x.requires_grad_() for name, x in whole.items() if x is not None}
    wanted = attend(*(whole[name] for name in "qkv"), tokens, tokens, whole["sinks"], 0.4, window)[0]
    right = dict(zip(leaves, torch.autograd.grad((wanted * weights).sum(), [*leaves.values()]), strict=True))

    mine = slice(me * LENGTH // k, (me + 1) * LENGTH // k)
    parts = {
        name: (x if name == "sinks" else x[:, :, mine]).detach().clone().requires_grad_() for name, x in leaves.items()
    }
    heads = Heads(*(parts[name] for name in "qkv"))
    found = ring_attend(heads, tokens[:, mine], tokens, parts.get("sinks"), 0.4, window, group)[0]
    owed = dict(zip(parts, torch.autograd.grad((found * weights[:, :, mine]).sum(), [*parts.values()]), strict=True))
    if sinks:  # each rank's share of what is owed to what all have
        dist.all_reduce(owed["sinks"], group=group)
    apart = {"result": _apart(found, wanted[:, :, mine])}
    for name, one in owed.items():
        apart[name] = _apart(one, right[name] if name == "sinks" else right[name][:, :, mine])
    bound = 1e-12 if dtype == torch.float64 else 3e-2
    return " ".join(f"{name} {size:.1e}" for name, size in apart.items() if size > bound)


def every_ring(world: World) -> list[str]:
    """On one, two and four ranks, forward and backward."""
    found = [(k, case, _wrong(group, *case)) for k, group in world.groups.items() for case in cases()]
    return [f"{k} ranks, {case}: {wrong}" for k, case, wrong in found if wrong]


SCENES = (every_ring,)
