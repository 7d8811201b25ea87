"""The comparison itself can fail: whatever is missing, of another shape or a little wrong, it says so."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.training.oracle.compare import findings, worst
from tests.training.oracle.trace import Tensors, Trace

NAMES = ("a", "b", "c")


def made(scale: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.linspace(scale, 2 * scale, 6 + at, dtype=np.float32) for at, name in enumerate(NAMES)}


RIGHT = Trace((3.0, 2.0), (1.0, 1.0), {1: made(), 2: made(2)}, {1: made(3), 2: made(4)})


def without(tensors: Tensors, name: str) -> dict[str, np.ndarray]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def cut(tensors: Tensors, name: str) -> dict[str, np.ndarray]:
    return {**tensors, name: tensors[name][1:]}


def nudged(tensors: Tensors, name: str, by: float) -> dict[str, np.ndarray]:
    """One element of a tensor moved by so much of the tensor's norm."""
    other = tensors[name].copy()
    other[0] += by * np.linalg.norm(other)
    return {**tensors, name: other}


def test_what_is_equal_is_equal() -> None:
    assert findings(RIGHT, RIGHT) == []
    assert worst(RIGHT, RIGHT) == 0


@pytest.mark.parametrize("what", ["gradients", "values"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without, "there is no {what} of {name}"),
        (lambda tensors, name: nudged(tensors, name, 3e-5), "the {what} of {name} at step {step} differs by"),
        (lambda tensors, name: nudged(tensors, name, np.nan), "the {what} of {name} at step {step} differs by nan"),
        (
            lambda tensors, name: {**tensors, name: tensors[name][:-1]},
            "the {what} of {name} at step {step} differs by inf",
        ),
        (lambda tensors, name: {**tensors, f"{name}2": tensors[name]}, "there is a {what} of {name}2"),
    ],
)
def test_any_parameter_at_any_step_is_looked_at(
    what: str, step: int, name: str, change: Callable[[Tensors, str], Tensors], words: str
) -> None:
    before = getattr(RIGHT, what)
    wrong = replace(RIGHT, **{what: {**before, step: change(before[step], name)}})
    (found,) = findings(wrong, RIGHT)
    assert found.startswith(words.format(what=what[:-1], name=name, step=step))
    assert findings(replace(RIGHT, **{what: {**before, step: nudged(before[step], name, 3e-6)}}), RIGHT) == []


@pytest.mark.parametrize("what", ["gradients", "values"])
def test_a_step_or_everything_missing_is_found(what: str) -> None:
    before = getattr(RIGHT, what)
    assert findings(replace(RIGHT, **{what: {1: before[1]}}), RIGHT) == [f"{what} of the steps [1], not [1, 2]"]
    nothing = replace(RIGHT, **{what: {}})
    assert findings(nothing, nothing) == [f"{what} of the steps [], not []"]
    hollow = replace(RIGHT, **{what: {1: {}, 2: {}}})
    assert findings(hollow, hollow) == [f"there is no {what[:-1]} to compare"] * 2


def test_where_the_oracle_is_zero_ours_has_to_be() -> None:
    zero = replace(RIGHT, values={**RIGHT.values, 1: {**RIGHT.values[1], "a": np.zeros(6, np.float32)}})
    assert findings(RIGHT, zero) == ["the value of a at step 1 differs by inf"]
    assert findings(zero, zero) == []


def test_losses_are_compared_one_by_one() -> None:
    assert findings(replace(RIGHT, losses=(3.0, 2.0001)), RIGHT) == ["the loss of step 2 is 2.0001, not 2.0"]
    assert findings(replace(RIGHT, losses=(3.0, float("nan"))), RIGHT) == ["the loss of step 2 is nan, not 2.0"]
    assert findings(replace(RIGHT, losses=(3.0,)), RIGHT) == ["1 losses, not 2"]


def test_later_losses_may_be_further_apart() -> None:
    right, other = (replace(RIGHT, losses=(2.0,) * 20 + (last,)) for last in (2.0, 2.0001))
    assert findings(other, right) == []
    assert findings(replace(other, losses=(2.0,) * 20 + (2.001,)), right) == ["the loss of step 21 is 2.001, not 2.0"]
