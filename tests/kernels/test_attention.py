"""Attention by tokens' numbers against plain attention with the same mask, and its gradients."""

# ruff: noqa: N806  a tensor carries its dims in its name

import itertools
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tangram.kernels import attention
from tangram.kernels.attention import Heads, Partial, Seen, attend, attended


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """In as many words as the definition has; of a query that sees nothing: zeros."""
    rows = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rows, 1), v.repeat_interleave(rows, 1)
    logits = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits, v = torch.cat([logits, column], -1), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return torch.softmax(logits, -1).nan_to_num(0.0) @ v


def numbers(documents: list[list[int]], order: Tensor | None = None) -> Tensor:
    """Of rows of documents with these lengths; `order`: where each token stood before."""
    rows = [torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in documents]
    found = torch.stack([torch.stack([row, torch.arange(len(row))], -1) for row in rows])
    return found if order is None else found[:, order]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    S, B = draw(st.integers(1, 23)), draw(st.integers(1, 2))
    groups, rows = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    E, width = draw(st.sampled_from([(8, 8), (8, 4), (4, 8)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    cut = [sorted({0, S, *draw(st.lists(st.integers(0, S), max_size=3))}) for _ in range(B)]
    order = torch.randperm(S, generator=generator) if draw(st.booleans()) else None
    own = numbers([[b - a for a, b in itertools.pairwise(one)] for one in cut], order)
    keep = torch.randperm(S, generator=generator)[: draw(st.integers(1, S))].sort()[0]
    return {
        "q": torch.randn(B, groups * rows, S, E, generator=generator, dtype=torch.float64),
        "k": torch.randn(B, groups, len(keep), E, generator=generator, dtype=torch.float64),
        "v": torch.randn(B, groups, len(keep), width, generator=generator, dtype=torch.float64),
        "own": own,
        "seen": own[:, keep],
        "sinks": torch.randn(groups * rows, generator=generator, dtype=torch.float64) if draw(st.booleans()) else None,
        "scale": 0.3,
        "window": draw(st.integers(0, S)),
    }


@contextmanager
def blocks(size: int) -> Generator[None]:
    """Inside, blocks are as small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", size)
        yield


SIZES = pytest.mark.parametrize("size", [1, 4, 256])


@SIZES
@given(case=cases())
def test_as_plain_attention(size: int, case: dict[str, Any]) -> None:
    leaves = [case[name].requires_grad_() for name in ("q", "k", "v", "sinks") if case[name] is not None]
    mask = Seen(case["own"], case["seen"], case["window"]).mask(slice(None), slice(None))
    wanted = plain(case["q"], case["k"], case["v"], mask, case["sinks"], case["scale"])
    with blocks(size):
        found, sums = attend(**case)
    torch.testing.assert_close(found, wanted)
    if case["sinks"] is None:
        assert torch.equal(sums == -math.inf, ~mask.any(-1).expand_as(sums))
    weights = torch.randn_like(found)
    with blocks(size):
        gradients = torch.autograd.grad((found * weights).sum(), leaves)
    for one, other in zip(gradients, torch.autograd.grad((wanted * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)


@given(case=cases(), at=st.integers(0, 23))
def test_parts_of_keys_are_put_together(case: dict[str, Any], at: int) -> None:
    heads = Heads(case["q"], case["k"], case["v"])
    whole = attended(heads, Seen(case["own"], case["seen"], case["window"]), case["scale"])
    at = min(at, case["k"].shape[2])
    parts = [
        attended(
            Heads(heads.q, heads.k[:, :, own], heads.v[:, :, own]),
            Seen(case["own"], case["seen"][:, own], case["window"]),
            case["scale"],
        )
        if case["k"][:, :, own].shape[2]
        else attention.nothing(heads)
        for own in (slice(at), slice(at, None))
    ]
    for one, other in zip(parts[0].plus(parts[1]), whole, strict=True):
        torch.testing.assert_close(one, other)


@SIZES
@given(case=cases())
def test_plain_products_say_the_same(size: int, case: dict[str, Any]) -> None:
    """What runs where there is no fused kernel."""
    heads, seen = Heads(case["q"].float(), case["k"].float(), case["v"].float()), Seen(case["own"], case["seen"])
    found = {}
    for name in ("_fused", "_plain"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BLOCK", size)
            patch.setattr(attention, "_fused", getattr(attention, name))
            patch.setattr(attention, "_fused_backward", getattr(attention, f"{name}_backward"))
            whole = attended(heads, seen, case["scale"])
            grad = torch.ones_like(whole.out)
            found[name] = (*whole, *attention.gradients(grad, heads, seen, whole, case["scale"]))
    for one, other in zip(found["_fused"], found["_plain"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_hidden_blocks_are_not_computed() -> None:
    size = attention.BLOCK
    own = numbers([[4 * size]])
    covered = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in Seen(own, own).runs())
    assert covered == size**2 * 10  # of 16
    documents = numbers([[2 * size, 2 * size]])
    runs = [*Seen(documents, documents).runs()]
    assert sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in runs) == size**2 * 6
    assert len([*Seen(own, own, window=1).runs()]) == 4


def test_in_bfloat16_sums_stay_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.bfloat16) for _ in range(3))
    own = numbers([[9]])
    out, sums = attend(q, k, v, own, own, None, 0.25, 0)
    assert (out.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    wanted = plain(q.float(), k.float(), v.float(), Seen(own, own).mask(slice(None), slice(None)), None, 0.25)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)


def test_as_torch_checks_operators() -> None:
    own = numbers([[5, 4]])
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    torch.library.opcheck(attend, (q, k, v, own, own, torch.randn(2, requires_grad=True), 0.25, 3))


def test_nothing_plus_nothing() -> None:
    heads = Heads(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 4))
    none = attention.nothing(heads)
    both: Partial = none.plus(none)
    assert bool((both.out == 0).all())
    assert bool((both.sums == -math.inf).all())
