"""Gated units against float64, by kernels under the interpreter and by torch's operators."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from tangram.errors import UserError
from tangram.kernels.fused.gated import ACTS, gated
from tests.kernels.fused.common import close, drawn, exact, leaves, plain


def reference(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """torch's GELU loses what is small in 1 + tanh, even in float64; this is the same function."""
    if act == "silu":
        return F.silu(gate) * up
    return gate * torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)) * up


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 16), (3, 1030), (1,), (0, 8), (3, 0)])
def test_against_float64(kind: torch.dtype, act: str, shape: tuple[int, ...]) -> None:
    gate, up, grad = (drawn(*shape, seed=i, kind=kind, scale=3.0) for i in range(3))
    own = leaves(gate, up)
    out = gated(*own, act)
    found = [out.detach(), *torch.autograd.grad(out, own, grad)]
    for mine, true in zip(found, exact(lambda *x: reference(act, *x), grad, gate, up), strict=True):
        assert mine.dtype == kind
        close(mine, true)


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("act", ACTS)
def test_halves_of_one_tensor(act: str) -> None:
    whole, grad = drawn(4, 3, 40), drawn(3, 4, 20, seed=1).transpose(0, 1)
    (own,) = leaves(whole)
    out = gated(*own.chunk(2, -1), act)
    (found,) = torch.autograd.grad(out, own, grad)
    right = exact(lambda x: reference(act, *x.chunk(2, -1)), grad, whole)
    close(out.detach(), right[0])
    close(found, right[1])


@pytest.mark.usefixtures("back_end")
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("act", ACTS)
def test_far_from_zero_every_element_is_right_by_itself(act: str) -> None:
    far = torch.tensor([-1e30, -60.0, -20.0, -9.0, -5.0, -1e-30, 0.0, 1e-30, 5.0, 60.0, 1e8, 1e30])
    gate, up = leaves(far, torch.full_like(far, 0.5))
    out = gated(gate, up, act)
    found = [out.detach(), *torch.autograd.grad(out.sum(), (gate, up))]
    right = exact(lambda *x: reference(act, *x), torch.ones_like(far), far.clamp(-1e8, 1e8), up)
    right[0][[0, -1]], right[2][[0, -1]] = (x[[0, -1]] * torch.tensor([1.0, 1e22]) for x in (right[0], right[2]))
    tolerance = {"silu": 1e-5, "gelu_tanh": 2e-4}[act]  # an exponent of 60 is rounded, too
    for mine, true in zip(found, right, strict=True):
        assert torch.allclose(mine.double(), true, rtol=tolerance, atol=1e-37), (mine, true)


def test_the_reference_is_the_activation_of_torch() -> None:
    gate, up = drawn(40).double(), drawn(40, seed=1).double()
    assert torch.allclose(reference("gelu_tanh", gate, up), F.gelu(gate, approximate="tanh") * up, rtol=1e-12)


def test_as_torch_wants_an_operator() -> None:
    with plain():
        gate, up = leaves(drawn(3, 8), drawn(3, 8, seed=1))
        opcheck(gated, (gate, up))
        for act in ACTS:
            assert torch.autograd.gradcheck(lambda *x, act=act: gated(*x, act), leaves(gate.double(), up.double()))


def test_compiled_and_exported() -> None:
    class Unit(torch.nn.Module):
        def forward(self, gate: Tensor, up: Tensor) -> Tensor:
            return gated(gate, up, "gelu_tanh")

    given = leaves(drawn(3, 8), drawn(3, 8, seed=1))
    with plain():
        expected = Unit()(*given)
        assert torch.equal(torch.compile(Unit(), fullgraph=True, backend="aot_eager")(*given), expected)
        program = torch.export.export(Unit(), tuple(given))
        assert any("tangram.gated" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((drawn(3, 4), drawn(3, 4), "relu"), 'no activation "relu": there are silu and gelu_tanh'),
        ((drawn(3, 4), drawn(4)), r"one shape and dtype, they are \(3, 4\) in float32 and \(4,\) in float32"),
        ((drawn(3, 4).half(), drawn(3, 4)), "not with float16: cast it"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "is one number"),
    ],
)
def test_refusals(given: tuple, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        gated(*given)
