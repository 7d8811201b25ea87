"""Results and gradients of fused operators, and of those that compute the same, against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from bench._numerics.metrics import norm
from tangram.kernels.fused.gated import gated
from tangram.kernels.fused.norm import rms_norm
from tangram.kernels.fused.projected_loss import projected_loss
from tangram.kernels.fused.quantisers import dequantise_fp8, dequantise_nvfp4, quantise_fp8, quantise_nvfp4
from tangram.kernels.fused.rotary import rotary
from tangram.kernels.lab.quant import hadamard

NAMES = ("kernels", "plain", "torch", "transformers")
EPS = 1e-6
_INTERPRET = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Sizes:
    """Rows, elements of a row, classes."""

    rows: int
    width: int
    classes: int


SMALL, LARGE = Sizes(32, 128, 512), Sizes(256, 512, 4096)


@dataclass(frozen=True)
class Measured:
    """Errors of one tensor in percent."""

    operator: str
    tensor: str
    ours: float
    """Of kernels where they run here, else of torch's operators."""
    peers: Mapping[str, float]
    kernels: bool

    def all(self) -> dict[str, float]:
        """By the names of `NAMES`."""
        return {"kernels" if self.kernels else "plain": self.ours, **self.peers}


Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One operator: what it is called with, and who computes it."""

    operator: str
    tensors: Sequence[str]
    """The result, and the inputs that have gradients."""
    inputs: tuple[Tensor, Tensor]
    exact: Function
    """Of inputs in float64."""
    ours: Function
    peers: Mapping[str, Function]


def measured(sizes: Sizes) -> Iterator[Measured]:
    """Every operator; kernels where they are interpreted, and torch's operators."""
    interpreted = os.environ.get(_INTERPRET) == "1"
    for case in (*_rows(sizes), _turned(sizes), _loss(sizes)):
        true = _run(case.exact, (case.inputs[0].double(), case.inputs[1].double()))
        found = {"kernels": _run(case.ours, case.inputs)} if interpreted else {}
        with _plain():
            found["plain"] = _run(case.ours, case.inputs)
        found |= {name: _run(peer, case.inputs) for name, peer in case.peers.items()}
        for i, tensor in enumerate(case.tensors):
            errors = {name: _error(own[i], true[i]) for name, own in found.items()}
            first = next(iter(errors))
            yield Measured(case.operator, tensor, errors.pop(first), errors, interpreted)
    yield from _casts(sizes, interpreted)


@contextmanager
def _plain() -> Generator[None]:
    """Without kernels, for a while."""
    before = os.environ.pop(_INTERPRET, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_INTERPRET] = before


def _run(function: Function, given: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The result, and the gradients under one that is drawn."""
    a, b = (x.detach().clone().requires_grad_() for x in given)
    out = function(a, b)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, (a, b), grad.to(out.dtype))]


def _error(found: Tensor, true: Tensor) -> float:
    return 100 * float(norm(found.double() - true.double()) / norm(true.double()))


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---------------------------------------------------------------- operators


def _rows(sizes: Sizes) -> Iterator[Case]:
    from transformers import activations  # takes seconds
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x, weight = _drawn(sizes.rows, sizes.width, seed=2), _drawn(sizes.width, seed=3)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    def module(kind: Any) -> Function:
        own = kind(sizes.width, eps=EPS)
        return lambda x, weight: torch.func.functional_call(own, {"weight": weight}, (x,))

    yield Case(
        "RMSNorm", ("y", "dx", "dweight"), (x, weight), exact, lambda x, w: rms_norm(x, w, EPS)[0],
        {"torch": lambda x, w: F.rms_norm(x, (sizes.width,), w, EPS), "transformers": module(Qwen3RMSNorm)},
    )  # fmt: skip
    yield Case(
        "RMSNorm, 1 + weight", ("y", "dx", "dweight"), (x, weight), lambda x, w: exact(x, 1 + w),
        lambda x, w: rms_norm(x, w, EPS, 1.0)[0],
        {"torch": lambda x, w: F.rms_norm(x, (sizes.width,), 1 + w, EPS), "transformers": module(Gemma3RMSNorm)},
    )  # fmt: skip
    up = _drawn(sizes.rows, sizes.width, seed=4)
    acts: Mapping[str, Callable[[Tensor], Tensor]] = cast(Any, activations).ACT2FN
    silu, gelu = acts["silu"], acts["gelu_pytorch_tanh"]
    yield Case(
        "SwiGLU", ("y", "dgate", "dup"), (x, up), lambda g, u: F.silu(g) * u, lambda g, u: gated(g, u, "silu"),
        {"torch": lambda g, u: F.silu(g) * u, "transformers": lambda g, u: silu(g) * u},
    )  # fmt: skip
    yield Case(
        "gated GELU", ("y", "dgate", "dup"), (x, up),
        lambda g, u: g * torch.sigmoid(math.sqrt(8 / math.pi) * (g + 0.044715 * g**3)) * u,
        lambda g, u: gated(g, u, "gelu_tanh"),
        {"torch": lambda g, u: F.gelu(g, approximate="tanh") * u, "transformers": lambda g, u: gelu(g) * u},
    )  # fmt: skip


def _turned(sizes: Sizes) -> Case:
    from transformers.models.qwen3 import modeling_qwen3

    apply_rotary_pos_emb = cast(Any, modeling_qwen3).apply_rotary_pos_emb
    q, k = (_drawn(1, 2, sizes.rows, 64, seed=seed) for seed in (5, 6))
    angle = torch.arange(sizes.rows)[:, None].double() * 1e4 ** (-torch.arange(32).double() / 32)
    cos, sin = (x.repeat(1, 2)[None] for x in (angle.cos(), angle.sin()))

    def both(turn: Any, kind: torch.dtype) -> Function:
        return lambda q, k: torch.cat(turn(q, k, cos.to(kind), sin.to(kind)), 1)

    return Case("RoPE", ("q and k", "dq", "dk"), (q, k), both(apply_rotary_pos_emb, torch.float64),
                both(rotary, torch.float32), {"transformers": both(apply_rotary_pos_emb, torch.bfloat16)})  # fmt: skip


def _loss(sizes: Sizes) -> Case:
    hidden, weight = _drawn(sizes.rows, sizes.width, seed=7), _drawn(sizes.classes, sizes.width, seed=8) * 0.05
    labels = torch.randint(sizes.classes, (sizes.rows,), generator=torch.Generator().manual_seed(9))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    def logits(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.linear(hidden, weight)

    return Case(
        "projected loss", ("losses", "dhidden", "dweight"), (hidden, weight), lambda h, w: loss(h @ w.T),
        lambda h, w: projected_loss(h, w, labels),
        {"torch": lambda h, w: loss(logits(h, w)), "transformers": lambda h, w: loss(logits(h, w).float())},
    )  # fmt: skip


def _casts(sizes: Sizes, interpreted: bool) -> Iterator[Measured]:
    """What is read again of casts; some channels are far larger, as they are in activations."""
    x, turn = _drawn(sizes.rows, sizes.width, seed=10), hadamard(64).float()
    x[:, ::50] *= 30

    def fp8(height: int, own: Tensor | None) -> Tensor:
        codes, scales = quantise_fp8(x, height, own)
        return dequantise_fp8(codes, scales, height)

    def nvfp4(own: Tensor | None) -> Tensor:
        packed, scales, second = quantise_nvfp4(x, own)
        return dequantise_nvfp4(packed, scales, second, sizes.width)

    casts: dict[str, Callable[[Tensor | None], Tensor]] = {
        "FP8, 1 x 128": partial(fp8, 1),
        "FP8, 128 x 128": partial(fp8, 128),
        "NVFP4": nvfp4,
    }
    for name, function in casts.items():
        for tensor, own in (("values", None), ("values, turned by 64", turn)):

            def back(own: Tensor | None = own, function: Callable[[Tensor | None], Tensor] = function) -> float:
                found = function(own)
                if own is not None:
                    found = (found.reshape(sizes.rows, -1, len(own)) @ own.mT).flatten(1)
                return _error(found, x)

            kernels = {"kernels": back()} if interpreted else {}
            with _plain():
                errors = kernels | {"plain": back()}
            yield Measured(name, tensor, errors.pop(next(iter(errors))), errors, interpreted)
