"""Real 8-bit and 4-bit optimiser states, of bitsandbytes and of torchao, follow a fused parameter; NF4 to the bit.

What must come out is said by the libraries themselves: the values of the moved state, dequantised by its own library,
are the fused values of the parts' states. Both come with the extra `lowbit`; `make interop` runs this.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.layout import Region
from tangram.models.lora import nf4
from tangram.models.lora.bases import BASES
from tangram.relayout import Piece, TensorSpec, bind, execute, plan
from tangram.relayout.mapping.states import ADAM_4BIT, ADAM_8BIT, SAME, SHARED, States, StateSpec, with_states
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tests.training.test_quantised_base import kept, some_weight

pytestmark = pytest.mark.filterwarnings("ignore")  # both libraries warn of accelerators that are not here

SHAPES = {"q": (2 * 3 * 16, 512), "k": (2 * 16, 512), "v": (2 * 16, 512)}  # large enough to be quantised
QKV = "q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h"
TORCHAO_8BIT: States = {
    f"{moment}.{name}": spec
    for moment in ("exp_avg", "exp_avg_sq")
    for name, spec in (("codes", SAME), ("scale", StateSpec("blocks", block=256)), ("qmap", SHARED))
} | {"step": SHARED}


def trained(optimiser: type[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Mapping[str, Mapping[str, object]]]:
    """Parameters, and what the optimiser keeps for each after two steps."""
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    opt = optimiser(list(params.values()), lr=1e-3)
    for _ in range(2):
        for p in params.values():
            p.grad = torch.randn_like(p)
        opt.step()
    return {k: p.detach() for k, p in params.items()}, {k: opt.state[p] for k, p in params.items()}


def moved(source: dict[str, Tensor], states: States) -> dict[str, Tensor]:
    """The fused parameter with its states."""
    specs = {k: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in source.items()}
    bound = bind(with_states(QKV, specs, states, g=2), specs, g=2)
    out = {k: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for k, s in bound.target.specs.items()}
    pieces, wanted = ([Piece(0, k, Region.full(t.shape)) for k, t in side.items()] for side in (source, out))
    execute(plan(bound, pieces, wanted), {(0, k): t for k, t in source.items()}, {(0, k): t for k, t in out.items()})
    return out


def fused(parts: list[Tensor]) -> Tensor:
    """Grouped [q|k|v] by plain reshapes."""
    return torch.cat([x.reshape(2, -1, 512) for x in parts], 1).reshape(-1, 512)


def test_bitsandbytes_adamw_8bit() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    params, kept = trained(bnb.optim.AdamW8bit)
    source = dict(params)
    for name, state in kept.items():
        source |= {f"{name}.{k}": v if isinstance(v, Tensor) else torch.tensor(v) for k, v in state.items()}
    out = moved(source, ADAM_8BIT)

    def values(state: Mapping[str, Tensor], name: str, i: int) -> Tensor:
        codes, absmax, code = (state[f"{name}.{x}{i}"] for x in ("state", "absmax", "qmap"))
        return bnb.functional.dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=256)

    for i in (1, 2):
        assert torch.equal(values(out, "qkv", i), fused([values(source, name, i) for name in "qkv"]))


@pytest.mark.parametrize(("optimiser", "states"), [("AdamW8bit", TORCHAO_8BIT), ("AdamW4bit", ADAM_4BIT)])
def test_torchao_adamw(optimiser: str, states: States) -> None:
    pytest.importorskip("torchao")
    module = importlib.import_module("torchao.optim")
    params, kept = trained(getattr(module, optimiser))
    source = dict(params)
    for name, state in kept.items():
        source[f"{name}.step"] = state["step"]
        for moment in ("exp_avg", "exp_avg_sq"):
            source |= {f"{name}.{moment}.{part}": getattr(state[moment], part) for part in ("codes", "scale", "qmap")}
    out = moved(source, states)
    for moment in ("exp_avg", "exp_avg_sq"):
        like = kept["q"][moment]
        parts = [out[f"qkv.{moment}.{part}"] for part in ("codes", "scale", "qmap")]
        rest = (like.signed, (160, 512)) if optimiser == "AdamW4bit" else (like.signed,)
        whole = type(like)(*parts, *rest).dequantize()
        assert torch.equal(whole, fused([kept[name][moment].dequantize() for name in "qkv"]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_bits_are_those_of_bitsandbytes(dtype: str) -> None:
    """Scales are compared with its torch code, which types without a kernel of their own go through: its kernel for
    CPUs takes another place than the nearest for 1 or 2 scales in a thousand."""
    bnb: Any = pytest.importorskip("bitsandbytes.functional")
    for seed, shape in enumerate([(160, 320), (1000, 64), (7, 11008)]):
        weight = some_weight(*shape, seed).to(getattr(torch, dtype))
        weight[0] = 0
        codes, scales, values = kept(weight)
        bytes_, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        assert torch.equal(bytes_.view(-1), codes.view(-1))
        assert torch.equal(state.absmax, nf4.largest(weight).view(-1))
        rest = (state.absmax - state.absmax.mean()).double()
        places, high = torch.ops.bitsandbytes.quantize_blockwise.default(rest, bnb.create_dynamic_map(), 256)
        assert torch.equal(places, scales.codes.view(-1))
        assert torch.equal(high, scales.groups)
        state.absmax = values.view(-1)
        assert torch.equal(bnb.dequantize_4bit(bytes_, state), nf4.decode(codes, values, weight.dtype))


@pytest.mark.parametrize("shape", [(40, 512), (33, 130)])
def test_moments_of_8_bits_are_those_of_bitsandbytes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, codes and scales after each of some steps, to the bit, where it takes the nearest place as its torch
    code does: its kernel for CPUs takes another one for some numbers, so with it updates are alike, and no more."""
    bnb: Any = pytest.importorskip("bitsandbytes")
    kernels: Any = importlib.import_module("bitsandbytes.backends.cpu.ops")
    kernel = kernels._quant_blockwise_fp32_direct
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}

    def nearest(values: Tensor, code: Tensor, largest: Tensor, codes: Tensor, block: int) -> None:
        kernel(values.double(), code, largest, codes, block)

    def differences(quantise: Any) -> list[tuple[int, float]]:
        """After each step: of how many codes, and how far at most parameters are apart."""
        monkeypatch.setattr(kernels, "_quant_blockwise_fp32_direct", quantise)
        torch.manual_seed(0)
        ours, theirs = (torch.nn.Parameter(torch.randn(shape)) for _ in range(2))
        theirs.data.copy_(ours.data)
        own = RuledOptimiser([ours], torch.float32, rule="adamw-8bit", **settings)
        other = bnb.optim.AdamW8bit([theirs], **settings)
        found: list[tuple[int, float]] = []
        for step in range(6):
            ours.grad = torch.randn(shape) * 10.0 ** (step % 3 - 2)
            ours.grad[:2] = 0
            theirs.grad = ours.grad.clone()
            own.step()
            other.step()
            mine, its = own.state[ours], other.state[theirs]
            codes = sum(int((mine[f"state{i}"] != its[f"state{i}"]).sum()) for i in (1, 2))
            scales = sum(int((mine[f"absmax{i}"].view(-1) != its[f"absmax{i}"]).sum()) for i in (1, 2))
            found.append((codes + scales, float((ours - theirs).detach().abs().max())))
        return found

    assert differences(nearest) == [(0, 0.0)] * 6
    with_kernel = differences(kernel)
    assert 0 < with_kernel[0][0] < 0.05 * 2 * torch.Size(shape).numel()
    assert with_kernel[0][1] == 0
    assert with_kernel[-1][1] < 0.1 * settings["lr"] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_in_int8_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional: Any = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(160, 320)).to(dtype)
    codes, rows, _ = functional.int8_vectorwise_quant(weight)
    kept = BASES["int8"].keep(weight, lambda name, whole: whole)
    assert torch.equal(kept["int8"], codes)
    assert torch.equal(kept["rows"], rows)
