"""Attention over keys that no rank has all of: what each has is passed on from rank to rank, until all have seen it.

Each rank has some queries, keys and values. While it attends to the keys that it holds, it sends them to the next rank
and is sent those of the one before. What parts of the keys come to is put together by their sums, so the result is that
of all keys at once but for rounding. In the backward keys go round again, and with them what each rank owes to them,
which is home after the last step.

    sent        of k ranks, keys and values k - 1 times forward; backward as often, and their gradients k times
    held        two of the parts at a time, instead of all keys (as `move` to `same` would need, and would keep)

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023. The trade-off: each step waits for
the slowest rank, so causal sequences want a balanced order of tokens.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.kernels.attention import Heads, Partial, attend, attend_backward, nothing, sinks_owed


class Passing:
    """Tensors on their way to the next rank of a group, and others from the one before."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, first: int = 0) -> None:
        """`first`: a number that tells them from others that are under way."""
        k, me = dist.get_world_size(group), dist.get_rank(group)
        self._first = first
        self._sent = [x.contiguous() for x in tensors]
        self._work: list[Any] = []
        if k == 1:
            self._found = self._sent
            return
        self._found = [torch.empty_like(x) for x in self._sent]
        to, of = (dist.get_global_rank(group, (me + step) % k) for step in (1, -1))
        wanted = [
            *(dist.P2POp(dist.isend, x, to, group, tag) for tag, x in enumerate(self._sent, first)),
            *(dist.P2POp(dist.irecv, x, of, group, tag) for tag, x in enumerate(self._found, first)),
        ]
        self._work = cast(Any, dist).batch_isend_irecv(wanted)

    def arrived(self) -> list[Tensor]:
        """What came, when it is there and all was sent."""
        for one in self._work:
            one.wait()
        return self._found


def ring_attend(
    heads: Heads,
    own_BSN: Tensor,
    seen_BTN: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """What `kernels.attention.attend` gives of this rank's queries and all keys: result and sums.

    `heads`: what this rank has of each, as many keys as every other; `own_BSN`: numbers of its queries; `seen_BTN`: of
    all keys, rank by rank. Collective.
    """
    return cast("tuple[Tensor, Tensor]", _Ring.apply(*heads, own_BSN, seen_BTN, sinks, scale, window, group))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_BSN: Tensor,
        seen_BTN: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        found, here = nothing(Heads(q, k, v)), [k, v]
        for step in range(dist.get_world_size(group)):
            last = step + 1 == dist.get_world_size(group)
            passing = None if last else Passing(here, group)
            seen = _of_step(seen_BTN, step, group)
            found = found.plus(Partial(*attend(q, *here, own_BSN, seen, None, scale, window)))
            here = passing.arrived() if passing is not None else here
        found = found if sinks is None else found.with_sinks(sinks)
        out = found.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, own_BSN, seen_BTN, sinks, out, found.sums)
        ctx.scale, ctx.window, ctx.group = scale, window, group
        ctx.mark_non_differentiable(found.sums)
        return out, found.sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, own_BSN, seen_BTN, sinks, out, sums = ctx.saved_tensors
        (grad, _), group, kind = gradients, ctx.group, sums.dtype
        here, of_q = [k, v], torch.zeros_like(q, dtype=kind)
        owed = [torch.zeros_like(x, dtype=kind) for x in here]
        coming: Passing | None = None
        for step in range(dist.get_world_size(group)):
            last = step + 1 == dist.get_world_size(group)
            passing = None if last else Passing(here, group)
            seen = _of_step(seen_BTN, step, group)
            more = attend_backward(grad, q, *here, own_BSN, seen, out, sums, ctx.scale, ctx.window)
            of_q += more[0]
            owed = coming.arrived() if coming is not None else owed
            owed = [x + one for x, one in zip(owed, more[1:], strict=True)]
            # Owed gradients follow their keys one step behind: they go on while the next keys are attended to.
            coming = Passing(owed, group, len(here))
            here = passing.arrived() if passing is not None else here
        assert coming is not None  # a group has a rank
        of_k, of_v = coming.arrived()
        of_sinks = None if sinks is None else sinks_owed(grad, Partial(out, sums), sinks)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, of_sinks, None, None, None


def _of_step(seen_BTN: Tensor, step: int, group: dist.ProcessGroup) -> Tensor:
    """The numbers of the keys that this rank holds after so many steps: those of the rank as many before it."""
    k = dist.get_world_size(group)
    return seen_BTN.chunk(k, 1)[(dist.get_rank(group) - step) % k]
