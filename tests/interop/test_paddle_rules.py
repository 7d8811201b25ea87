"""Paddle's op rules beside ours, as `tangram shard check --against paddle` compares them.

Skipped where the extra `paddle` is not installed; `make interop` runs it.
"""

import pytest

pytest.importorskip("paddle", reason="the extra `paddle` is not installed")

from tangram.errors import UserError
from tangram.sharding.compare import paddle

Compared = tuple[list[paddle.PaddleReport], list[paddle.PaddleDifference]]


@pytest.fixture(scope="module")
def compared() -> Compared:
    names = ["matmul", "max", "cumsum", "where", "transpose", "embedding", "conv2d", "mean_all"]
    return paddle.compare(names)


def verdicts(compared: Compared, name: str) -> set[str]:
    return {one.verdict for one in compared[1] if one.paddle == name}


def test_ours_is_right_wherever_the_two_differ(
    compared: Compared,
) -> None:
    reports, differences = compared
    assert {one.paddle for one in reports} >= {"matmul", "max", "cumsum", "where", "transpose", "conv2d"}
    assert not [str(one) for one in differences if one.verdict in ("ours is wrong", "ours refuses")]


def test_rules_that_agree_have_no_difference(
    compared: Compared,
) -> None:
    reports, differences = compared
    assert all(one.cases == one.agree for one in reports if one.paddle in ("transpose", "embedding"))
    assert not [one for one in differences if one.paddle in ("transpose", "embedding")]


def test_a_maximum_that_paddle_leaves_as_a_sum_is_refuted_by_running_it(
    compared: Compared,
) -> None:
    one = next(one for one in compared[1] if one.paddle == "max")
    assert one.verdict == "Paddle is wrong"
    assert "sum:x" in one.theirs
    assert "max:x" in one.ours
    assert "differs by up to" in str(one)


def test_what_both_may_do_is_said_to_be_right_on_both_sides(
    compared: Compared,
) -> None:
    assert "both are right" in verdicts(compared, "where")
    assert verdicts(compared, "mean_all") <= {"both are right", "ours is right"}


def test_a_rule_that_ends_paddles_process_is_told_and_the_others_go_on(
    compared: Compared,
) -> None:
    assert any(one.verdict == "Paddle ends its process" and "-1" in one.inputs for one in compared[1])


def test_an_unknown_operator_is_one_sentence() -> None:
    with pytest.raises(UserError, match="there is no operator frobnicate here, but abs,"):
        paddle.compare(["frobnicate"])
