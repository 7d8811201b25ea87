"""What needs no Paddle of the comparison with its rules: sentences, and what is said where it is not installed."""

import importlib.util

import pytest
import torch

from tangram.errors import UserError
from tangram.sharding.compare import paddle
from tangram.sharding.compare.paddle_table import PAIRS
from tangram.sharding.ops.rule_table import bound, builtin


def difference(verdict: str, given: str = "4/x 6", why: str = "") -> paddle.PaddleDifference:
    return paddle.PaddleDifference("max", "amax", given, "[4/x 6 -> 6 sum:x]", "[4/x 6 -> 6 max:x]", verdict, why)


def test_a_difference_is_one_sentence() -> None:
    said = str(difference("Paddle is wrong", why="output 0 differs"))
    assert said == (
        "max (amax) of 4/x 6: Paddle [4/x 6 -> 6 sum:x], ours [4/x 6 -> 6 max:x]; Paddle is wrong (output 0 differs)."
    )


def test_one_of_each_verdict_is_shown_with_the_number_of_others() -> None:
    some = [difference("Paddle is wrong"), difference("both are right"), difference("Paddle is wrong", "4 6/x")]
    assert paddle.first_of_each(some) == [(some[0], 1), (some[1], 0)]


def test_every_row_is_a_call_that_has_a_rule() -> None:
    assert len({pair.paddle for pair in PAIRS}) > 40
    for pair in PAIRS:
        call = pair.call(pair.tensors())
        assert [r for r in call.run() if isinstance(r, torch.Tensor)], pair
        assert bound(builtin(), call).outputs, pair


def test_an_unknown_operator_is_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match="there is no operator frobnicate here"):
        paddle.compare(["frobnicate"])


@pytest.mark.skipif(importlib.util.find_spec("paddle") is not None, reason="Paddle is installed")
def test_without_paddle_it_is_said_how_to_get_it() -> None:
    with pytest.raises(UserError, match=r"Paddle is not installed: pip install"):
        paddle.compare([])
