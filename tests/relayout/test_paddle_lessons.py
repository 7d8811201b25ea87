"""What another system of this kind was seen to do wrong in silence. Here each is right, or refused with advice."""

from typing import Any

import numpy as np
import pytest
import torch

from tangram.layout import LayoutError, Region
from tangram.relayout import Piece, RelayoutError, TensorSpec, bind, execute, inverse, plan, shard
from tests.relayout.moving import Side, move, numbered, same_bits


def test_two_targets_of_one_weight_are_tied_or_refused() -> None:
    """`w -> a` and `w -> b` once left `a` at its old values."""
    w = TensorSpec((4, 2))
    with pytest.raises(RelayoutError, match="w stands twice, here and in `w -> a`: tie copies with `=`"):
        bind("w -> a\nw -> b", {"w": w})
    x = numbered(4, 2)
    sides = (
        Side({"w": x}, {"w": "o/tp i"}, "tp=2"),
        Side({"a": x, "b": x}, {"a": "o/x i", "b": "o i/x"}, "x=2"),
    )
    move("w -> a = b", *sides)


def test_the_way_back_of_tied_weights_sees_when_they_differ() -> None:
    x = numbered(4, 2)
    back = bind(inverse("w -> a = b"), {"a": TensorSpec((4, 2)), "b": TensorSpec((4, 2))})
    held = [Piece(0, name, Region.full((4, 2))) for name in "ab"]
    copies = plan(back, held, [Piece(0, "w", Region.full((4, 2)))])
    out = np.zeros((4, 2), np.float32)
    with pytest.raises(RelayoutError, match="a at 0 and b at 0 are tied, but 8 of the 8 elements compared differ"):
        execute(copies, {(0, "a"): x, (0, "b"): x + 1}, {(0, "w"): out})
    assert not out.any()


@pytest.mark.parametrize("sizes", [(3, 5), (1, 7), (4, 4), (2, 0)])
def test_a_split_into_unequal_parts(sizes: tuple[int, int]) -> None:
    """8 -> 3 + 5 once gave [0, 1, 2] and [4, 5, 6, 7, old]."""
    n, m = sizes
    x = numbered(n + m, 2)
    move(
        "x: (a n + b m) h -> a: n h, b: m h",
        Side({"x": x}, {"x": "o/tp h"}, "tp=3"),
        Side({"a": x[:n], "b": x[n:]}, {"a": "o/y h", "b": "o/y h"}, "y=2"),
        derive=False,
    )


@pytest.mark.parametrize("text", ["x -> y", "x: n h -> y: n h"])
@pytest.mark.parametrize("shape", [(6, 2), (4, 3), (2, 4), (8, 1), (3, 2)])
def test_a_target_of_another_shape_is_refused(text: str, shape: tuple[int, int]) -> None:
    """A larger target once kept its old tail; a forgotten transpose once filled half."""
    with pytest.raises(LayoutError, match=r"y|has size|makes"):
        bind(text, {"x": TensorSpec((4, 2))}, {"y": TensorSpec(shape)})


def test_a_larger_target_says_with_what_it_is_filled() -> None:
    x, y = numbered(4, 2), np.pad(numbered(4, 2), ((0, 2), (0, 0)), constant_values=9)
    sides = Side({"x": x}, {"x": "..."}, "a=1"), Side({"y": y}, {"y": "n/a h"}, "a=2")
    move("x: n h -> y: (n + _) h; fill=9", *sides, derive=False)


def test_named_dims_see_a_forgotten_transpose_of_a_square_weight() -> None:
    x = numbered(3, 3)
    with pytest.raises(RelayoutError, match="no counterpart"):
        bind("x: o i -> y: i p", {"x": TensorSpec((3, 3))}, {"y": TensorSpec((3, 3))})
    sides = Side({"x": x}, {"x": "o/t i"}, "t=2"), Side({"y": x.T.copy()}, {"y": "i/t o"}, "t=2")
    move("x: o i -> y: i o", *sides)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_view_that_is_not_contiguous(kind: str) -> None:
    """A shard of `w.T` once held the order of the storage."""
    w = numbered(4, 6)
    bound = bind("w -> v", {"w": TensorSpec((6, 4))})
    source = shard("tp=2", {"w": "o/tp i"}, bound.source)
    target = shard("tp=3", {"v": "o i/tp"}, bound.target)
    whole: Any = torch.from_numpy(w).T if kind == "torch" else w.T
    have = {(rank, "w"): whole[3 * rank : 3 * rank + 3] for rank in range(2)}
    for rank, columns in enumerate([slice(0, 2), slice(2, 4), slice(4, 4)]):
        out = np.zeros((6, 2), np.float32)
        wanted = target.pieces(rank)
        execute(plan(bound, source, wanted), have, {(rank, "v"): out})
        assert not wanted or same_bits(out, np.ascontiguousarray(w.T[:, columns]))


def test_a_dtype_does_not_change_on_the_way_back_unseen() -> None:
    """The reverse of a statement with a dtype was once refused; here it is the other cast, or refused for its loss."""
    assert str(inverse("w -> a; cast=bfloat16:float32")) == "a -> w; cast=float32:bfloat16"
    with pytest.raises(RelayoutError, match="allow lossy"):
        inverse("w -> a; cast=float32:bfloat16")
