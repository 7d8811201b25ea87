"""Block FP8 and NVFP4 against the laboratory, bit by bit, by kernels under the interpreter and torch's operators."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tangram.errors import UserError
from tangram.kernels.fused.quantisers import (
    dequantise_fp8,
    dequantise_nvfp4,
    quantise_fp8,
    quantise_nvfp4,
    unpack_e2m1,
)
from tangram.kernels.lab.formats import E2M1, E4M3
from tangram.kernels.lab.quant import Operand, Scaling, hadamard, quantise
from tests.kernels.fused.common import drawn, plain

ROWS = Operand(E4M3, Scaling("group", 128))
SQUARES = Operand(E4M3, Scaling("tile", 128))
NVFP4 = Operand(E2M1, Scaling("group", 16, "e4m3", "tensor"))


def inputs(name: str, *shape: int) -> Tensor:
    x = drawn(*shape)
    if name == "wide":  # some scales underflow, some groups are zero
        x = x * torch.exp(4 * drawn(*shape[:-1], 1, seed=3)) * (drawn(*shape[:-1], 1, seed=4) > -1)
    if name == "ties":  # powers of two and their halves over a largest one of 1
        x = torch.exp2((3 * x).round().clamp(max=0)) * x.sign() * torch.where(drawn(*shape, seed=5) > 0, 1.0, 1.5) / 1.5
    if name == "tiny":
        x = x * 1e-41
    return x


def padded(x: Tensor, size: int = 128) -> Tensor:
    """The laboratory takes a tile that is less than one for a smaller one; with zeros it is the same tile."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size, 0, -x.shape[-2] % size))


@pytest.mark.usefixtures("back_end")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("normal", (5, 300)), ("wide", (40, 40)), ("ties", (33, 256)), ("tiny", (3, 20)), ("normal", (1, 1))],
)
def test_as_in_the_laboratory(name: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
    x = inputs(name, *shape).to(kind)
    exact = x.double()
    for height, operand in ((1, ROWS), (128, SQUARES)):
        codes, scales = quantise_fp8(x, height)
        assert scales.shape == (-(-shape[0] // height), -(-shape[1] // 128))
        found = dequantise_fp8(codes, scales, height, torch.float64)
        assert torch.equal(found, quantise(padded(exact), operand, "channels").values[: shape[0], : shape[1]])
    packed, scales, second = quantise_nvfp4(x)
    assert packed.shape == (shape[0], (shape[1] + 1) // 2)
    found = dequantise_nvfp4(packed, scales, second, shape[1], torch.float64)
    assert torch.equal(found, quantise(padded(exact, 16), NVFP4, "channels").values[: shape[0], : shape[1]])


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("width", [16, 64])
def test_turned(width: int) -> None:
    """Of small whole numbers a turn is exact, so it is seen bit by bit."""
    x, turn = (drawn(10, 192) * 9).round(), hadamard(width)
    exact = (x.double().unflatten(-1, (-1, width)) @ turn).flatten(-2)
    for height, operand in ((1, ROWS), (128, SQUARES)):
        found = dequantise_fp8(*quantise_fp8(x, height, turn.float()), height, torch.float64)
        assert torch.equal(found, quantise(padded(exact), operand, "channels").values[:10, :192])
    found = dequantise_nvfp4(*quantise_nvfp4(x, turn.float()), 192, torch.float64)
    assert torch.equal(found, quantise(exact, NVFP4, "channels").values)
    back = (found.unflatten(-1, (-1, width)) @ turn.mT).flatten(-2)
    assert (back - x).norm() < 0.15 * x.norm()


@pytest.mark.usefixtures("back_end")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_no_number_stays_none() -> None:
    x = drawn(3, 256)
    x[1, 5] = math.nan
    found = dequantise_fp8(*quantise_fp8(x))
    assert found.isnan().nonzero().tolist() == [[1, i] for i in range(128)]
    assert dequantise_fp8(*quantise_fp8(x, 128), 128)[:, :128].isnan().all()
    assert dequantise_nvfp4(*quantise_nvfp4(x), 256).isnan().all()


@pytest.mark.usefixtures("back_end")
def test_matrices_rows_and_nothing() -> None:
    x = drawn(2, 3, 4, 130)
    codes, scales = quantise_fp8(x, 128)
    assert codes.shape == x.shape
    assert scales.shape == (2, 3, 1, 2)
    apart = quantise_fp8(x[1, 2], 128)
    assert torch.equal(scales[1, 2], apart[1])
    assert torch.equal(codes[1, 2].float(), apart[0].float())
    lying, standing = quantise_fp8(x.mT), quantise_fp8(x.mT.contiguous())
    assert torch.equal(lying[0].float(), standing[0].float())
    for nothing in (drawn(0, 16), drawn(3, 0)):
        assert quantise_fp8(nothing)[0].shape == nothing.shape
        assert quantise_nvfp4(nothing)[0].numel() == 0


def test_both_back_ends_give_the_same_bits() -> None:
    pytest.importorskip("triton")
    x = drawn(6, 130)
    with plain():
        expected = (*quantise_fp8(x), *quantise_nvfp4(x))
    for mine, other in zip((*quantise_fp8(x), *quantise_nvfp4(x)), expected, strict=True):
        assert torch.equal(mine.view(torch.uint8) if mine.itemsize == 1 else mine,
                           other.view(torch.uint8) if other.itemsize == 1 else other)  # fmt: skip


def test_two_a_byte() -> None:
    packed = torch.tensor([[0x10, 0xF7, 0x0A]], dtype=torch.uint8)
    assert unpack_e2m1(packed, 5).tolist() == [[0.0, 0.5, 6.0, -6.0, -1.0]]


def test_as_torch_wants_operators() -> None:
    with plain():
        turn = hadamard(16).float()
        opcheck(quantise_fp8, (drawn(3, 32), 128, turn))
        opcheck(quantise_nvfp4, (drawn(3, 32), turn))
        compiled = torch.compile(lambda x: quantise_nvfp4(x)[0], fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(drawn(3, 32)), quantise_nvfp4(drawn(3, 32))[0])


def test_refusals() -> None:
    x = drawn(3, 40)
    for call, sentence in (
        (lambda: quantise_fp8(x.double()), "float32 or bfloat16, not float64"),
        (lambda: quantise_fp8(x, 64), "not 64 x 128"),
        (lambda: quantise_fp8(x[0], 128), "of matrices"),
        (lambda: quantise_nvfp4(x, hadamard(24).float()), "width divides 128"),
        (lambda: quantise_nvfp4(x, hadamard(16).float()), "rows of 40 are no whole number of 16"),
        (lambda: quantise_nvfp4(torch.tensor(1.0)), "one number"),
    ):
        with pytest.raises(UserError, match=sentence):
            call()
