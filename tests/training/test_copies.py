"""Gradients of copies: sums over the ranks, in one bucket or in many, whoever has used what."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tangram.training.run.launch import run_ranks
from tests.training.copying import Gradients, summed

SIZES = {"a bucket each": 4, "one bucket": 2**20}
Found = Mapping[int, Mapping[str, Gradients | str]]


@pytest.fixture(scope="module")
def both() -> list[Found]:
    return run_ranks(summed, tuple(SIZES.values()), world=2, on_event=lambda _: None, device="cpu")


@pytest.fixture(params=SIZES)
def found(both: list[Found], request: pytest.FixtureRequest) -> Mapping[str, Gradients | str]:
    first, second = (rank[SIZES[request.param]] for rank in both)
    assert {**first, "not yet": ""} == {**second, "not yet": ""}  # what a rank has by itself
    assert first["buckets"] == ("4" if request.param == "a bucket each" else "1")
    return first


def each(a: float, b: float | None, c: float | None) -> Gradients:
    """Those of three numbers alike; d is frozen."""
    return {"a": [a] * 3, "b": b and [b] * 3, "c": c and [c] * 3, "d": None}


@pytest.mark.parametrize(
    ("when", "right"),
    [
        ("both used", each(6, 6, None)),  # twice in each: by its two names
        ("added to what was summed", each(26, 26, None)),
        ("used by one rank", each(4, 2, None)),
        ("and by the other", each(7, 3, None)),
        ("not yet", each(1, 1, None)),
        ("once", each(5, 3, 2)),
        ("in parts", each(2, 1, 1)),
    ],
)
def test_gradients_are_sums_over_the_ranks(found: Mapping[str, Gradients | str], when: str, right: Gradients) -> None:
    assert found[when] == right


def test_sums_that_were_added_to_are_refused(found: Mapping[str, Gradients | str]) -> None:
    assert "zero them before a step" in found["not zeroed"]
