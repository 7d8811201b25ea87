"""The loss of a projection against float64 and `kernels.cross_entropy`: labels, blocks, parts, and what it holds."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tangram.errors import UserError
from tangram.kernels.cross_entropy import Classes, cross_entropy
from tangram.kernels.fused import projected_loss as module
from tangram.kernels.fused.projected_loss import FLOPS, projected, projected_loss
from tests.kernels.fused.common import close, drawn, exact, leaves, plain


def labelled(rows: int, classes: int) -> Tensor:
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))
    labels[1::4] = -100
    return labels


def weighed(rows: int) -> Tensor:
    return drawn(rows, seed=8).abs() + 0.1


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "classes", "width", "block", "high"),
    [(7, 33, 12, 2**24, 4096), (9, 40, 16, 4 * 4 * 11, 4), (5, 1, 3, 64, 2), (1, 5, 1, 8, 1), (6, 1100, 4, 2**24, 4)],
)
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, rows: int, classes: int, width: int, block: int, high: int
) -> None:
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", block)
    monkeypatch.setattr(module, "ROWS", high)
    hidden, weight = drawn(rows, width, kind=kind), drawn(classes, width, seed=1, kind=kind)
    labels, grad = labelled(rows, classes), weighed(rows)
    own = leaves(hidden, weight)
    losses = projected_loss(*own, labels)
    assert losses.dtype == torch.float32
    found = torch.autograd.grad(losses, own, grad)
    right = exact(lambda h, w: F.cross_entropy(h @ w.T, labels, reduction="none"), grad, hidden, weight)
    close(losses.detach(), right[0], 4.0)
    sizes = (float(weight.abs().max()), float(hidden.abs().max()))
    for mine, true, size in zip(found, right[1:], sizes, strict=True):
        assert mine.dtype == kind
        close(mine, true, size)
    again = torch.autograd.grad(projected_loss(*own, labels), own, grad)
    assert all(map(torch.equal, found, again))


@pytest.mark.usefixtures("back_end")
def test_of_nothing() -> None:
    own = leaves(drawn(0, 4), drawn(3, 4))
    losses = projected_loss(*own, torch.zeros(0, dtype=torch.int64))
    assert losses.shape == (0,)
    assert not torch.autograd.grad(losses.sum(), own)[1].any()


@pytest.mark.usefixtures("back_end")
@pytest.mark.filterwarnings("ignore:invalid value")
def test_labels_and_numbers_as_in_the_loss_of_logits() -> None:
    hidden, weight = leaves(drawn(6, 4), drawn(5, 4, seed=1))
    labels = torch.tensor([0, 5, -1, -100, 4, 7])
    losses = projected_loss(hidden, weight, labels)
    expected = cross_entropy(hidden @ weight.T, labels, -100)
    torch.testing.assert_close(losses, expected, equal_nan=True)
    assert losses.isnan().tolist() == [False, True, True, False, False, True]
    hidden = hidden.detach().index_fill(0, torch.tensor([2]), math.nan)
    labels[[1, 2, 5]] = torch.tensor([1, 1, 1])
    losses = projected_loss(hidden, weight, labels)
    assert losses.isnan().tolist() == [False, False, True, False, False, False]
    far = hidden[:1] * 1e4
    expected = F.cross_entropy(far @ weight.T, labels[:1], reduction="none")
    torch.testing.assert_close(projected_loss(far, weight, labels[:1]), expected)


def test_classes_over_parts() -> None:
    """Parts are threads here, which Triton's interpreter has no two of; by torch's operators, then."""
    hidden, weight = drawn(9, 6), drawn(10, 6, seed=1)
    labels, grad = torch.tensor([0, 3, 9, -100, 5, 12, -3, 7, 2]), weighed(9)
    own = leaves(hidden, weight)
    whole = projected_loss(*own, labels)
    finite = torch.where(whole.isnan(), 0.0, grad)
    right = torch.autograd.grad(whole, own, finite)
    numbers = [torch.tensor([0, 2, 3, 8]), torch.tensor([1, 4, 5, 6, 7, 9])]
    together, said = Barrier(2), [torch.empty(0)] * 2

    def part(i: int) -> tuple[Tensor, ...]:
        def over(combine: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            said[i] = x
            together.wait(20)
            found = combine(torch.stack(said))
            together.wait(20)
            return found

        classes = Classes(numbers[i], 10, partial(over, lambda x: x.amax(0)), partial(over, lambda x: x.sum(0)))
        mine = leaves(hidden, weight[numbers[i]])
        losses = projected_loss(*mine, labels, -100, classes)
        return losses.detach(), *torch.autograd.grad(losses, mine, finite)

    with plain(), ThreadPoolExecutor(2) as pool:
        parts = [*pool.map(part, range(2))]
    for losses, _, dweight in parts:
        torch.testing.assert_close(losses, whole.detach(), equal_nan=True)
        torch.testing.assert_close(dweight, right[1][numbers[len(dweight) == 6]])
    torch.testing.assert_close(parts[0][1] + parts[1][1], right[0])


class _Largest(TorchDispatchMode):
    """The largest tensor that an operator gives, in bytes; operators within operators are seen, too."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [x.numel() * x.itemsize for x in tree_leaves(found) if isinstance(x, Tensor) and x._base is None]
        self.most = max([self.most, *sizes])
        return found


def test_logits_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 2**14)
    rows, classes = 512, 2048
    hidden, weight, labels = drawn(rows, 8), drawn(classes, 8, seed=1), labelled(rows, classes)
    with plain(), _Largest() as held:
        sums = module._sums(hidden, weight, labels)
        module._owed(weighed(rows), hidden, weight, labels, sums, labels != -100)
    assert 0 < held.most <= max(2**14, classes * 8 * 4) < rows * classes * 4 / 60
    with _Largest() as held:
        F.cross_entropy(hidden @ weight.T, labels)
    assert held.most >= rows * classes * 4, "what is counted sees logits"


def test_products_are_counted() -> None:
    own = leaves(drawn(6, 4), drawn(5, 4, seed=1))
    with plain(), FlopCounterMode(display=False, custom_mapping=FLOPS) as counted:
        projected_loss(*own, labelled(6, 5)).sum().backward()
    assert counted.get_total_flops() == 4 * 2 * 6 * 4 * 5


def test_as_torch_wants_an_operator() -> None:
    with plain():
        own = leaves(drawn(6, 4), drawn(5, 4, seed=1))
        labels = labelled(6, 5)
        opcheck(projected, (*own, labels))
        assert torch.autograd.gradcheck(lambda *x: projected_loss(*x, labels), leaves(*(x.double() for x in own)))


def test_compiled_and_exported() -> None:
    class Loss(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return projected_loss(hidden, weight, labels).sum()

    given = (*leaves(drawn(6, 4), drawn(5, 4, seed=1)), labelled(6, 5))
    with plain():
        expected = Loss()(*given)
        assert torch.equal(torch.compile(Loss(), fullgraph=True, backend="aot_eager")(*given), expected)
        program = torch.export.export(Loss(), given)
        assert any("tangram.projected_loss" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("hidden", "weight", "sentence"),
    [
        (drawn(3, 4), drawn(5, 3), r"not \[\(3, 4\), \(5, 3\), \(3,\)\]"),
        (drawn(3, 4), drawn(0, 4), "a class at least"),
        (drawn(3, 4), drawn(5, 4).bfloat16(), "of one dtype"),
        (drawn(3, 4).half(), drawn(5, 4).half(), "not with float16"),
    ],
)
def test_refusals(hidden: Tensor, weight: Tensor, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        projected_loss(hidden, weight, torch.zeros(3, dtype=torch.int64))
