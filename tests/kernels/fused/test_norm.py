"""RMSNorm against float64, by kernels under the interpreter and by torch's operators."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tangram.errors import UserError
from tangram.kernels.fused import norm
from tangram.kernels.fused.norm import add_rms_norm, rms_norm
from tests.kernels.fused.common import close, drawn, exact, leaves, plain

EPS = 1e-6
KINDS = [torch.float32, torch.bfloat16]


def reference(x: Tensor, weight: Tensor | None = None, offset: float = 0.0) -> Tensor:
    found = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return found if weight is None else found * (weight + offset)


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 16), (40, 130), (1, 1), (7, 1), (0, 8), (3, 0)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_against_float64(kind: torch.dtype, shape: tuple[int, ...], offset: float) -> None:
    x, grad, weight = drawn(*shape, kind=kind), drawn(*shape, seed=1, kind=kind), drawn(shape[-1], seed=2, kind=kind)
    own = leaves(x, weight)
    out, _ = rms_norm(*own, EPS, offset)
    assert out.dtype == kind
    dx, dweight = torch.autograd.grad(out, own, grad)
    right = exact(lambda x, w: reference(x, w, offset), grad, x, weight)
    close(out.detach(), right[0])
    summed = (grad * (weight + offset) / x).double().abs()  # of rows of one element dx is nearly nothing
    close(dx, right[1], float(summed.max()) if shape[-1] == 1 and shape[0] else None)
    close(dweight, right[2])


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_weight_and_of_strided_rows(kind: torch.dtype) -> None:
    whole = drawn(6, 2, 20, kind=kind)
    x, grad = whole[:, 1], drawn(20, 6, seed=3, kind=kind).T
    (own,) = leaves(whole)
    out, rstd = rms_norm(own[:, 1], None, EPS)
    assert not rstd.requires_grad
    (dwhole,) = torch.autograd.grad(out, own, grad)
    right = exact(reference, grad, x)
    close(out.detach(), right[0])
    close(dwhole[:, 1], right[1])
    assert not dwhole[:, 0].any()


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_residual(kind: torch.dtype) -> None:
    x, residual, grad, beside = (drawn(9, 24, seed=i, kind=kind) for i in range(4))
    weight = drawn(24, seed=9)  # float32 beside bfloat16, as mixed precision has it
    own = leaves(x, residual, weight)
    out, summed, _ = add_rms_norm(*own, EPS, 0.0)
    assert torch.equal(summed, x + residual)
    found = torch.autograd.grad((out, summed), own, (grad, beside))
    right = exact(reference, grad, summed.detach(), weight)
    close(out.detach(), right[0])
    close(found[0], right[1] + beside.double())
    assert torch.equal(found[0], found[1])
    close(found[2], right[2])
    (alone,) = torch.autograd.grad(add_rms_norm(*own, EPS, 0.0)[0], own[:1], grad)  # nobody reads the sum
    close(alone, right[1])


def test_many_rows_are_summed_in_parts_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "PARTS", 3)
    x, grad, weight = drawn(300, 40), drawn(300, 40, seed=1), drawn(40, seed=2)
    own = leaves(x, weight)
    found = torch.autograd.grad(rms_norm(*own, EPS)[0], own, grad)
    for mine, true in zip(found, exact(reference, grad, x, weight)[1:], strict=True):
        close(mine, true)
    again = torch.autograd.grad(rms_norm(*own, EPS)[0], own, grad)
    assert all(map(torch.equal, found, again))


def test_as_torch_wants_operators() -> None:
    with plain():
        x, weight = leaves(drawn(3, 8), drawn(8))
        opcheck(rms_norm, (x, weight, EPS, 1.0))
        opcheck(rms_norm, (x, None, EPS))
        opcheck(add_rms_norm, (x, *leaves(drawn(3, 8, seed=4)), weight, EPS, 0.0))
        assert torch.autograd.gradcheck(
            lambda *a: rms_norm(*a, EPS)[0], leaves(drawn(3, 5).double(), drawn(5).double())
        )


def test_compiled_and_exported() -> None:
    x, weight = leaves(drawn(3, 8), drawn(8))

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return rms_norm(x, weight, EPS)[0]

    with plain():
        expected = Norm()(x, weight)
        assert torch.equal(torch.compile(Norm(), fullgraph=True, backend="aot_eager")(x, weight), expected)
        program = torch.export.export(Norm(), (x, weight))
        assert any("tangram.rms_norm" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((drawn(3, 4).half(), None), "not with float16: cast it"),
        ((drawn(3, 4), drawn(5)), "of 4 wants as many weights, not \\(5,\\)"),
        ((torch.tensor(1.0), None), "x is one number"),
        ((drawn(1, 2**16 + 1), None), "holds rows of 65536 elements in its kernels, not of 65537"),
    ],
)
def test_refusals(given: tuple[Tensor, Tensor | None], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        rms_norm(*given, EPS)
    with pytest.raises(UserError, match=r"one shape and dtype, they are \(3, 4\) in float32 and \(3, 4\) in bfloat16"):
        add_rms_norm(drawn(3, 4), drawn(3, 4).bfloat16(), None, EPS)
