"""Rotary positions against transformers' formula in float64, by kernels under the interpreter and torch's operators."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tangram.errors import UserError
from tangram.kernels.fused.rotary import rotary
from tests.kernels.fused.common import close, drawn, leaves, plain


def angles(batch: int, tokens: int, turned: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines; the halves differ, so that it is seen which belongs where."""
    x = drawn(batch, tokens, turned, seed=9, scale=4.0)
    return x.cos(), x.sin()


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' `apply_rotary_pos_emb` has it, for the first of the elements."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    x1, x2 = turned.chunk(2, -1)
    return torch.cat([turned * cos[:, None] + torch.cat([-x2, x1], -1) * sin[:, None], rest], -1)


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "queries", "keys", "tokens", "width", "turned", "batch"),
    [(2, 4, 2, 5, 16, 16, 1), (2, 3, 1, 33, 20, 6, 2), (1, 1, 1, 1, 2, 2, 1), (2, 2, 2, 0, 8, 8, 1),
     (1, 2, 0, 3, 8, 8, 1), (2, 2, 1, 3, 7, 0, 1), (1, 5, 2, 4, 80, 80, 1)],
)  # fmt: skip
def test_against_float64(kind: torch.dtype, rows: int, queries: int, keys: int, tokens: int, width: int, turned: int,
                         batch: int) -> None:  # fmt: skip
    q, k = (drawn(rows, tokens, heads, width, kind=kind).transpose(1, 2) for heads in (queries, keys))
    grads = [drawn(*x.shape, seed=5, kind=kind) for x in (q, k)]
    cos, sin = angles(batch, tokens, turned)
    own = leaves(q, k)
    out = rotary(*own, cos, sin)
    found = torch.autograd.grad(out, own, grads)
    for x, mine, owed, grad in zip((q, k), out, found, grads, strict=True):
        (double,) = leaves(x.double())
        true = reference(double, cos.double(), sin.double())
        assert mine.dtype == kind
        close(mine.detach(), true.detach())
        close(owed, torch.autograd.grad(true, double, grad.double())[0])


@pytest.mark.usefixtures("back_end")
def test_a_turn_back_is_the_inverse() -> None:
    half = drawn(1, 6, 4, scale=9.0).repeat(1, 1, 2)
    q, k = leaves(drawn(2, 3, 6, 8), drawn(2, 1, 6, 8, seed=1))
    turned = rotary(q, k, half.cos(), half.sin())
    back = torch.autograd.grad(turned, (q, k), [x.detach() for x in turned])
    for mine, true in zip(back, (q, k), strict=True):
        close(mine, true.detach().double())


@pytest.mark.usefixtures("back_end")
def test_elements_that_lie_apart() -> None:
    q, k = drawn(2, 3, 8, 5).mT, drawn(2, 8, 1, 5, seed=1).permute(0, 2, 3, 1)
    cos, sin = (x.mT.contiguous().mT for x in angles(1, 5, 6))
    for mine, x in zip(rotary(q, k, cos, sin), (q, k), strict=True):
        close(mine, reference(x.double(), cos.double(), sin.double()))


def test_as_torch_wants_an_operator() -> None:
    with plain():
        q, k = leaves(drawn(2, 5, 3, 8).transpose(1, 2), drawn(2, 1, 5, 8))
        opcheck(rotary, (q, k, *angles(1, 5, 6)))
        for batch in (1, 2):  # of angles, too
            double = leaves(*(x.double() for x in (drawn(2, 2, 3, 6), drawn(2, 1, 3, 6), *angles(batch, 3, 4))))
            assert torch.autograd.gradcheck(rotary, double)


def test_compiled_and_exported() -> None:
    class Turn(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            return rotary(q, k, cos, sin)

    given = (*leaves(drawn(2, 3, 5, 8), drawn(2, 1, 5, 8)), *angles(1, 5, 8))
    with plain():
        expected = Turn()(*given)
        assert all(map(torch.equal, torch.compile(Turn(), fullgraph=True, backend="aot_eager")(*given), expected))
        program = torch.export.export(Turn(), given)
        assert any("tangram.rotary" in str(node.target) for node in program.graph.nodes)


def test_refusals() -> None:
    q, k, (cos, sin) = drawn(2, 3, 5, 8), drawn(2, 1, 5, 8), angles(1, 5, 8)
    for given, sentence in (
        ((q, k[:1], cos, sin), r"not \(2, 3, 5, 8\), \(1, 1, 5, 8\)"),
        ((q, k, cos[:, :3], sin[:, :3]), "2 rows of 5 tokens want as many cosines"),
        ((q, k, cos[..., :5], sin[..., :5]), "an even number is turned, not 5"),
        ((q, k, *angles(1, 5, 10)), "an even number is turned, not 10"),
        ((q.half(), k.half(), cos, sin), "not with float16"),
    ):
        with pytest.raises(UserError, match=sentence):
            rotary(*given)
