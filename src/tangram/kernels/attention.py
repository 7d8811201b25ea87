"""Attention whose mask is said token by token, in blocks, of which those that are hidden are not computed.

Each token has two numbers: its document, and its place among all tokens of its row. A query sees the keys of its own
document that stand at its own place or before, at most `window` places of them. So a mask is two numbers a token and no
square of the sequence, tokens may lie in any order, and whoever has some of the keys can say which of them count: what
parts of the keys come to is put together by `Partial` (ring attention: `relayout.collectives.ring_attention`).

    sums     sums_BHS is the logarithm of the sum of exponentials by which a result was divided; -inf: nothing is seen
    sinks    one more logit for each head that takes its share and gives nothing (GPT-OSS)
    groups   keys may have fewer heads: each serves as many query heads in a row

On the CPU a block is torch's fused kernel, elsewhere plain products (right, and slow: no device was at hand to choose a
kernel by measurement). Blockwise softmax: Rabe and Staats, 2021; its backward from the sums: Dao et al., 2022.
Trade-off: which blocks are hidden is worked out on the host, which on a device waits for the tokens' numbers.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
"""Tokens of a block. Smaller ones skip more and call more kernels."""
_aten = cast(Any, torch.ops.aten)


class Heads(NamedTuple):
    """Queries (B, H, S, E), keys (B, G, T, E), values (B, G, T, F)."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Seen:
    """Who sees what: the N = 2 numbers of queries and of keys, int64; `window` of 0: no limit."""

    own: Tensor
    """(B, S, N)."""
    keys: Tensor
    """(B, T, N)."""
    window: int = 0

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """Which keys (T) queries (S) see: bool (B, 1, S, T)."""
        own, keys = self.own[:, rows, None], self.keys[:, None, columns]
        found = (own[..., 0] == keys[..., 0]) & (own[..., 1] >= keys[..., 1])
        if self.window:
            found &= own[..., 1] - keys[..., 1] < self.window
        return found[:, None]

    def runs(self) -> Iterator[tuple[slice, slice, bool]]:
        """Blocks of queries, each with runs of keys of which it sees any, and whether it sees them all."""
        (low, high), (first, last) = _ends(self.own), _ends(self.keys)
        documents, places = (low[..., 0], high[..., 0]), (low[..., 1], high[..., 1])
        some = (documents[1][:, :, None] >= first[:, None, :, 0]) & (documents[0][:, :, None] <= last[:, None, :, 0])
        some &= places[1][:, :, None] >= first[:, None, :, 1]
        whole = (documents[0] == documents[1])[:, :, None] & (first[..., 0] == last[..., 0])[:, None]
        whole = whole & (documents[0][:, :, None] == first[:, None, :, 0])
        whole &= places[0][:, :, None] >= last[:, None, :, 1]
        if self.window:
            some &= places[0][:, :, None] - last[:, None, :, 1] < self.window
            whole &= places[1][:, :, None] - first[:, None, :, 1] < self.window
        S, T = self.own.shape[1], self.keys.shape[1]
        any_seen, all_seen = (cast("list[list[bool]]", x.tolist()) for x in (some.any(0), whole.all(0)))
        for i, (any_of, all_of) in enumerate(zip(any_seen, all_seen, strict=True)):
            rows = slice(i * BLOCK, min((i + 1) * BLOCK, S))
            for seen, run in groupby(range(len(any_of)), key=any_of.__getitem__):
                if seen:
                    blocks = [*run]
                    columns = slice(blocks[0] * BLOCK, min((blocks[-1] + 1) * BLOCK, T))
                    yield rows, columns, all(all_of[j] for j in blocks)


def _ends(numbers_BSN: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest numbers of each block."""
    S = numbers_BSN.shape[1]
    short = -S % BLOCK
    if short:  # the last token again
        numbers_BSN = torch.cat([numbers_BSN, numbers_BSN[:, -1:].expand(-1, short, -1)], 1)
    blocks = numbers_BSN.reshape(numbers_BSN.shape[0], -1, BLOCK, 2)
    return blocks.amin(2), blocks.amax(2)


class Partial(NamedTuple):
    """What some of the keys come to: a result (B, H, S, F) and its sums (B, H, S). Of no keys: zeros and -inf."""

    out: Tensor
    sums: Tensor

    def plus(self, other: Partial) -> Partial:
        """What the keys of both come to, in the dtype of the sums."""
        sums = torch.logaddexp(self.sums, other.sums)
        return Partial(sum((_weighed(one, sums) for one in (self, other)), torch.zeros(())), sums)

    def with_sinks(self, sinks_H: Tensor) -> Partial:
        """Those and a sink for each head."""
        sums = torch.logaddexp(self.sums, sinks_H.to(self.sums.dtype)[:, None])
        return Partial(_weighed(self, sums), sums)


def _weighed(one: Partial, sums: Tensor) -> Tensor:
    share = torch.exp(one.sums - torch.where(sums == -torch.inf, 0.0, sums))
    return one.out * share[..., None]


def nothing(heads: Heads) -> Partial:
    """Of no keys."""
    kind = torch.promote_types(heads.q.dtype, torch.float32)
    out = heads.q.new_zeros(*heads.q.shape[:3], heads.v.shape[3], dtype=kind)
    return Partial(out, out.new_full(heads.q.shape[:3], -torch.inf))


def attended(heads: Heads, seen: Seen, scale: float) -> Partial:
    """What these keys come to. Not differentiable."""
    found = nothing(heads)
    for rows, columns, whole in seen.runs():
        part = Heads(heads.q[:, :, rows], heads.k[:, :, columns], heads.v[:, :, columns])
        mask = None if whole else seen.mask(rows, columns)
        before = Partial(found.out[:, :, rows], found.sums[:, :, rows])
        after = before.plus(_forward(part, mask, scale))
        before.out.copy_(after.out)
        before.sums.copy_(after.sums)
    return found


def gradients(grad_out: Tensor, heads: Heads, seen: Seen, whole: Partial, scale: float) -> Heads:
    """Of the queries and of these keys and values, given what all keys have come to."""
    kind = whole.sums.dtype
    found = Heads(*(torch.zeros_like(x, dtype=kind, memory_format=torch.contiguous_format) for x in heads))
    for rows, columns, all_seen in seen.runs():
        part = Heads(heads.q[:, :, rows], heads.k[:, :, columns], heads.v[:, :, columns])
        own = Partial(whole.out[:, :, rows], whole.sums[:, :, rows])
        mask = None if all_seen else seen.mask(rows, columns)
        for total, one, where in zip(
            found, _backward(grad_out[:, :, rows], part, mask, own, scale), (rows, columns, columns), strict=True
        ):
            total[:, :, where] += one
    return found


# ---------------------------------------------------------------- one block


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, -torch.inf)


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _forward(heads: Heads, mask: Tensor | None, scale: float) -> Partial:
    width = max(heads.q.shape[-1], heads.v.shape[-1])  # the kernel takes one width
    q, k, v = (_padded(x, width) for x in heads)
    own = _fused if q.device.type == "cpu" else _plain
    out, sums = own(q, k, v, _bias(mask, q.dtype), scale)
    if mask is not None:  # a kernel may give any number for what sees nothing
        sums = sums.masked_fill(~mask.any(-1), -torch.inf)
    return Partial(out[..., : heads.v.shape[-1]], sums)


def _backward(grad_out: Tensor, heads: Heads, mask: Tensor | None, whole: Partial, scale: float) -> Heads:
    width = max(heads.q.shape[-1], heads.v.shape[-1])
    q, k, v = (_padded(x, width) for x in heads)
    grad_out, out = _padded(grad_out, width).to(q.dtype), _padded(whole.out, width).to(q.dtype)
    sums = torch.where(whole.sums == -torch.inf, 0.0, whole.sums)
    own = _fused_backward if q.device.type == "cpu" else _plain_backward
    found = own(grad_out, q, k, v, out, sums, _bias(mask, q.dtype), scale)
    return Heads(*(x[..., : y.shape[-1]] for x, y in zip(found, heads, strict=True)))


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    back = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return back(grad, q, k, v, out, sums, 0.0, False, attn_mask=bias, scale=scale)


def _split(x_BHS: Tensor, groups: int) -> Tensor:
    """Heads by the head of the keys that serves them: (B, G, R, S, ...)."""
    return x_BHS.view(x_BHS.shape[0], groups, -1, *x_BHS.shape[2:])


def _grouped(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Queries (B, G, R, S, E), R heads to a head of the keys, and their logits (B, G, R, S, T)."""
    q_BGRSE = _split(q, k.shape[1]).float()
    logits = torch.einsum("bgrse,bgte->bgrst", q_BGRSE, k.float()) * scale
    return q_BGRSE, logits if bias is None else logits + bias[:, :, None]


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    _, logits = _grouped(q, k, bias, scale)
    sums = logits.logsumexp(-1)
    shares = torch.exp(logits - torch.where(sums == -torch.inf, 0.0, sums)[..., None])
    out = torch.einsum("bgrst,bgtf->bgrsf", shares, v.float())
    return out.flatten(1, 2), sums.flatten(1, 2)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    q_BGRSE, logits = _grouped(q, k, bias, scale)
    grad_BGRSF, out_BGRSF = _split(grad, groups).float(), _split(out, groups).float()
    shares = torch.exp(logits - _split(sums, groups)[..., None])
    owed = torch.einsum("bgrsf,bgtf->bgrst", grad_BGRSF, v.float()) - (grad_BGRSF * out_BGRSF).sum(-1, keepdim=True)
    logits_owed = shares * owed * scale
    return (
        torch.einsum("bgrst,bgte->bgrse", logits_owed, k.float()).flatten(1, 2),
        torch.einsum("bgrst,bgrse->bgte", logits_owed, q_BGRSE),
        torch.einsum("bgrst,bgrsf->bgtf", shares, grad_BGRSF),
    )


# ---------------------------------------------------------------- as an operator


@torch.library.custom_op("tangram::attend", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, seen: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Attention of all keys: the result (B, H, S, F) in the dtype of `q`, and the sums (B, H, S).

    `own` (B, S, 2) and `seen` (B, T, 2): documents and places of the queries and of the keys. `sinks`: (H,).
    """
    found = attended(Heads(q, k, v), Seen(own, seen, window), scale)
    out, sums = found if sinks is None else found.with_sinks(sinks)
    return out.to(q.dtype), sums


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, own: Tensor, seen: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=kind)


@torch.library.custom_op("tangram::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Tensor,
    seen: Tensor,
    out: Tensor,
    sums: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attend`'s queries, keys and values."""
    found = gradients(grad, Heads(q, k, v), Seen(own, seen, window), Partial(out, sums), scale)
    return found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype)


@attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def sinks_owed(grad: Tensor, whole: Partial, sinks_H: Tensor) -> Tensor:
    """The gradient of the sinks, given what all keys and they have come to."""
    shares_BHS = torch.exp(sinks_H.to(whole.sums.dtype)[:, None] - whole.sums)
    return -(shares_BHS * (grad * whole.out).sum(-1)).sum((0, 2)).to(sinks_H.dtype)


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, own, seen, sinks, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, own, seen, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _owed(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    q, k, v, own, seen, sinks, out, sums = ctx.saved_tensors
    found = attend_backward(grad, q, k, v, own, seen, out, sums, ctx.scale, ctx.window)
    of_sinks = None if sinks is None else sinks_owed(grad, Partial(out, sums), sinks)
    return (*found, None, None, of_sinks, None, None)


attend.register_autograd(_owed, setup_context=_saved)
ATTEND, ATTEND_BACKWARD = torch.ops.tangram.attend, torch.ops.tangram.attend_backward
"""As the dispatcher names them."""
