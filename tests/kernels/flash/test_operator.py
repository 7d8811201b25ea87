"""The operator: its gradient, its shapes without values, compiled and exported, and what it refuses."""

import pytest
import torch
from torch.library import opcheck

from tangram.kernels.flash import operator
from tangram.kernels.flash.modes import MODES
from tangram.kernels.flash.operator import backend, flash, unable
from tangram.kernels.flash.spans import in_order

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _by_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "backend", lambda device: "emulated")


def arguments(mode: str, kind: torch.dtype = torch.float32, sinks: bool = False) -> tuple:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 12, 16, generator=generator).to(kind).requires_grad_() for h in (4, 2, 2))
    of_heads = torch.randn(4, generator=generator).requires_grad_() if sinks else None
    return (q, k, v, *in_order(12, 12, batch=2), of_heads, 0.25, mode)


@pytest.mark.parametrize("mode", MODES)
def test_as_torch_wants_an_operator(mode: str) -> None:
    opcheck(flash, arguments(mode, sinks=mode == "fp8"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_attention(mode: str, kind: torch.dtype) -> None:
    q, k, v, *others = arguments(mode, kind)
    out, sums = flash(q, k, v, *others)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(kind)
    assert out.dtype == kind
    assert not sums.requires_grad
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, scale=0.25, enable_gqa=True)
    right = (expected, *torch.autograd.grad((expected * weights.double()).sum(), exact))
    limit = {"bf16": 0.01, "nvfp4-emulated": 0.35, "nvfp4-dropin-emulated": 0.35}.get(mode, 0.12)
    for name, mine, one in zip(("O", "dQ", "dK", "dV"), (out, *found), right, strict=True):
        assert float((mine.detach().double() - one.detach()).norm() / one.detach().norm()) < limit, name


def test_compiled() -> None:
    given = arguments("fp8-fwd")
    eager, _ = flash(*given)
    found, _ = torch.compile(lambda *x: flash(*x), fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(found, eager)


def test_exported() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flash(q, k, v, *others)[0]

    q, k, v, *others = arguments("bf16")
    program = torch.export.export(Attention(), (q, k, v))
    assert any("tangram.flash" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(q, k, v), flash(q, k, v, *others)[0])


def test_refusals() -> None:
    assert unable("fp8", CPU, torch.bfloat16, 512) == ""  # no kernel computes it here
    assert "there is no attention" in unable("fp4", CPU, torch.bfloat16, 64)
    assert "float16" in unable("bf16", CPU, torch.float16, 64)
    with pytest.raises(ValueError, match="computes in bfloat16"):
        flash(*arguments("bf16", torch.float16))


def test_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend(CPU) == "emulated"
    assert backend(torch.device("meta")) == "emulated"
    assert backend(torch.device("cuda")) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend(CPU) == "triton"
    assert "do not fit" in unable("bf16", CPU, torch.bfloat16, 512)


def test_an_old_device_has_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "backend", lambda device: "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "of FP8" in unable("fp8", torch.device("cuda"), torch.bfloat16, 128)
    assert unable("nvfp4-emulated", torch.device("cuda"), torch.bfloat16, 128) == ""


@pytest.mark.parametrize(("mode", "why"), [
    ("nvfp4-dropin-emulated", "a backward takes the scores of its forward"),
    ("fp8-e5m2-emulated", "casts its tensors as the forward does"),
])  # fmt: skip
def test_what_is_studied_only_is_refused_on_a_device(monkeypatch: pytest.MonkeyPatch, mode: str, why: str) -> None:
    assert unable(mode, CPU, torch.bfloat16, 64) == ""
    monkeypatch.setattr(operator, "backend", lambda device: "triton")
    found = unable(mode, CPU, torch.bfloat16, 64)
    assert "is for studies on the CPU" in found
    assert why in found


def test_both_back_ends_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    given = arguments("fp8", torch.bfloat16, sinks=True)

    def found() -> list[torch.Tensor]:
        out, sums = flash(*given)
        wanted = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        return [out.detach(), sums, *torch.autograd.grad(out.sum(), wanted)]

    emulated = found()
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert operator.backend(CPU) == "triton"
    for mine, other in zip(found(), emulated, strict=True):
        assert float((mine.double() - other.double()).norm()) <= 0.03 * float(other.double().norm())
