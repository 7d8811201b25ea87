"""Codecs in their order and back, and the inverse of a mapping as text."""

from typing import Any

import numpy as np
import pytest
import torch

from tangram.layout import Region
from tangram.relayout import (
    CODECS,
    Codec,
    NotInvertibleError,
    Piece,
    RelayoutError,
    TensorSpec,
    bind,
    execute,
    inverse,
    plan,
)
from tests.relayout.moving import numbered, run, whole

X = numbered(6, 4)


def test_add_and_mul_round_once() -> None:
    x = torch.linspace(-3, 3, 24).view(6, 4).to(torch.bfloat16)
    out = run(whole("x: n h -> y: h n; add=1 mul=3", (6, 4), "bfloat16"), x, torch.zeros(4, 6, dtype=torch.bfloat16))
    expected = (((x.float() + 1).to(torch.bfloat16)).float() * 3).to(torch.bfloat16).T
    assert torch.equal(out, expected)
    assert torch.equal(x, torch.linspace(-3, 3, 24).view(6, 4).to(torch.bfloat16))  # the source is as it was


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ("add=-1", lambda x: x - 1),
        ("mul=2", lambda x: x * 2),
        ("add=3 mul=2", lambda x: (x + 3) * 2),
        ("mul=2 add=3", lambda x: x * 2 + 3),
        ("cast=float32:float64 add=0.1", lambda x: x.astype(np.float64) + 0.1),
    ],
)
def test_codecs_in_the_order_they_are_written_and_back(options: str, function: Any) -> None:
    text = f"x: n h -> y: h n; {options}"
    dtype = "float64" if "cast" in options else "float32"
    y = run(whole(text, (6, 4)), X, np.zeros((4, 6), dtype))
    np.testing.assert_array_equal(y, function(X).T)
    back = bind(inverse(text, lossy=True), {"y": TensorSpec((4, 6), dtype)})
    x = np.zeros((6, 4), np.float32)
    copies = plan(back, [Piece(0, "y", Region.full((4, 6)))], [Piece(0, "x", Region.full((6, 4)))])
    execute(copies, {(0, "y"): y}, {(0, "x"): x})
    np.testing.assert_array_equal(x, X)


def test_cast_and_nibbles() -> None:
    up = run(
        whole("x -> y; cast=bfloat16:float32", (3,), "bfloat16"),
        torch.tensor([1.5, -0.0, 3e38]).bfloat16(),
        torch.zeros(3),
    )
    assert torch.equal(up, torch.tensor([1.5, -0.0, 3e38]).bfloat16().float())
    down = run(whole("x -> y; cast=float32:float8_e4m3fn", (6, 4)), X, torch.zeros(6, 4, dtype=torch.float8_e4m3fn))
    assert torch.equal(down.float(), torch.from_numpy(X).to(torch.float8_e4m3fn).float())
    packed = np.array([0x12, 0xF0, 0x0F], np.uint8)
    np.testing.assert_array_equal(
        run(whole("x -> y; swap_nibbles", (3,), "uint8"), packed, packed.copy()), [0x21, 0x0F, 0xF0]
    )


def test_a_codec_of_ones_own() -> None:
    flip = Codec(lambda x, _: -x, lambda dtype, _: dtype, lambda value: value, lambda _: True)
    codecs = {**CODECS, "flip": flip}
    bound = bind("x -> y; flip", {"x": TensorSpec((6, 4))}, codecs=codecs)
    copies = plan(bound, [Piece(0, "x", Region.full((6, 4)))], [Piece(0, "y", Region.full((6, 4)))])
    np.testing.assert_array_equal(run(copies, X, np.zeros((6, 4), np.float32)), -X)
    assert str(inverse("x -> y; flip", codecs=codecs)) == "y -> x; flip"
    with pytest.raises(RelayoutError, match="no codec 'flip'"):
        inverse("x -> y; flip")


# ---------------------------------------------------------------- the way back


@pytest.mark.parametrize(
    ("text", "back"),
    [
        ("a: n h, b: n h -> c: (a + b) n h", "c: (a + b) n h -> a: n h, b: n h"),
        ("a -> b; add=-1", "b -> a; add=1"),
        ("a -> b; mul=4", "b -> a; mul=0.25"),
        ("a -> b; add=1 mul=2", "b -> a; mul=0.5 add=-1"),
        ("a -> b; cast=bfloat16:float32", None),
        ("a -> b; swap_nibbles", "b -> a; swap_nibbles"),
        ("a: n h = b: h n -> c: n h", "c: n h -> a: n h = b: h n"),
        ("a: n h -> b: (n + _=2) h; fill=7", "b: (n + _=2) h -> a: n h; fill=7"),
        ("b: (n + _=2) h -> a: n h; fill=7", "a: n h -> b: (n + _=2) h; fill=7"),
        ("a: n h -> b: (n + _=2) h", "b: (n + _=2) h -> a: n h; fill=0"),
        ("_ -> a: n=3; fill=2", "a: n=3 -> _; fill=2"),
        ("a -> _; fill=2", "_ -> a; fill=2"),
        ("a.{l+3}.w: o i -> b: l o i", "b: l o i -> a.{l+3}.w: o i"),
    ],
)
def test_inverse(text: str, back: str | None) -> None:
    found = str(inverse(text))
    assert found == (back or "b -> a; cast=float32:bfloat16")
    if "cast" not in text and "; fill=0" not in found:
        assert str(inverse(found)) == text


@pytest.mark.parametrize(
    ("text", "lossy"),
    [
        ("a -> b; cast=float32:bfloat16", "b -> a; cast=bfloat16:float32"),
        ("a -> b; cast=bfloat16:float16", "b -> a; cast=float16:bfloat16"),
        ("a -> b; cast=float16:bfloat16", "b -> a; cast=bfloat16:float16"),
        ("a -> _", "_ -> a"),
        ("b: (n + _=2) h -> a: n h", "a: n h -> b: (n + _=2) h"),
    ],
)
def test_what_has_no_way_back_without_loss(text: str, lossy: str) -> None:
    with pytest.raises(NotInvertibleError, match="allow lossy") as error:
        inverse(f"x -> y\n{text}")
    assert str(error.value).startswith(text)
    assert str(inverse(text, lossy=True)) == lossy


def test_what_has_no_way_back_at_all() -> None:
    with pytest.raises(NotInvertibleError, match="mul=0 loses every value"):
        inverse("a -> b; mul=0", lossy=True)
