"""The loss of rows beside torch's in float64: whole and in parts, in every type, whatever is computed at a time."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tangram.kernels import cross_entropy as kernel
from tangram.kernels.cross_entropy import Classes, OverParts, cross_entropy

IGNORED = -100
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def rows(n: int, v: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits far from zero, labels of which some are ignored, and what their losses count."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 40 + 8 * torch.randn(n, v, generator=generator)
    labels_N = torch.randint(v, (n,), generator=generator)
    labels_N[::3] = IGNORED
    return logits_NV.to(dtype), labels_N, torch.randn(n, generator=generator).to(torch.float64)


def wanted(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
    x = logits_NV.double().requires_grad_()
    losses_N = F.cross_entropy(x, labels_N, ignore_index=IGNORED, reduction="none")
    losses_N.backward(weights_N)
    assert x.grad is not None
    return losses_N.detach(), x.grad


def found(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, classes: Classes | None) -> tuple[Tensor, Tensor]:
    x = logits_NV.clone().requires_grad_()
    losses_N = cross_entropy(x, labels_N, IGNORED, classes)
    losses_N.backward(weights_N.to(losses_N.dtype))
    assert x.grad is not None
    return losses_N.detach(), x.grad


def in_parts(logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As of k parts, each in a thread."""
    barrier, said = threading.Barrier(k, timeout=60), [torch.empty(0)] * k

    def over(reduce: Callable[[Tensor], Tensor], me: int) -> OverParts:
        def run(x: Tensor) -> Tensor:
            said[me] = x
            barrier.wait()
            whole = reduce(torch.stack(said))
            barrier.wait()
            return whole

        return run

    def one(me: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(logits_NV.shape[1]).chunk(k)[me]
        largest, summed = over(lambda x: x.amax(0), me), over(lambda x: x.sum(0), me)
        classes = Classes(numbers, logits_NV.shape[1], largest, summed)
        return found(logits_NV[:, numbers], labels_N, weights_N, classes)

    with ThreadPoolExecutor(k) as pool:
        losses, gradients = zip(*pool.map(one, range(k)), strict=True)
    assert all(torch.equal(losses[0].nan_to_num(-1), other.nan_to_num(-1)) for other in losses)
    return losses[0], torch.cat(gradients, 1)


def is_close(ours: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], bound: float) -> bool:
    """Relative to the largest, or to one: what comes of differences of logits is as exact as those are."""
    pairs = zip(ours, right, strict=True)
    return all(float((a.double() - b).abs().max()) <= bound * max(1.0, float(b.abs().max())) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_losses_and_gradients_are_torchs(dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel.SOME_BYTES, "cpu", 2000)  # a few rows at a time
    given = rows(20, 33, dtype)
    losses_N, gradient_NV = in_parts(*given, k) if k else found(*given, None)
    assert is_close((losses_N, gradient_NV), wanted(*given), DTYPES[dtype])
    assert gradient_NV.dtype == dtype
    assert losses_N.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not losses_N[::3].any()
    assert not gradient_NV[::3].any()


@given(n=st.integers(1, 9), v=st.integers(2, 9), k=st.integers(1, 3), seed=st.integers(0, 99))
def test_any_number_of_rows_classes_and_parts(n: int, v: int, k: int, seed: int) -> None:
    given = rows(n, k * v, torch.float64, seed)
    assert is_close(in_parts(*given, k), wanted(*given), 1e-12)


def test_classes_that_are_masked_out_everywhere_on_a_part() -> None:
    logits_NV, labels_N, weights_N = rows(6, 8, torch.float64)
    logits_NV[:, 4:] = -torch.inf
    labels_N = labels_N % 4
    assert is_close(in_parts(logits_NV, labels_N, weights_N, 2), wanted(logits_NV, labels_N, weights_N), 1e-12)


def test_a_label_that_is_no_class_is_no_number() -> None:
    logits_NV, labels_N, weights_N = rows(4, 6, torch.float32)
    labels_N[1], labels_N[2] = 6, -1
    for losses_N, _ in (found(logits_NV, labels_N, weights_N, None), in_parts(logits_NV, labels_N, weights_N, 2)):
        assert losses_N.isnan().tolist() == [False, True, True, False]


def test_no_copy_in_float32_is_kept() -> None:
    logits_NV, labels_N, _ = rows(64, 512, torch.bfloat16)
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        cross_entropy(logits_NV.requires_grad_(), labels_N, IGNORED)
    assert max(kept) == logits_NV.nbytes
    assert sum(kept) < 1.1 * logits_NV.nbytes
