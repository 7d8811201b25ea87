"""What a model's code writes into a tensor, or into a view of one, is in it on every rank."""

from __future__ import annotations

import pytest

from tangram.training.run.launch import run_ranks
from tests.sharding.runtime import written


@pytest.fixture(scope="module")
def found() -> dict[str, float | str]:
    one, other = run_ranks(written.run_all, None, world=2, on_event=lambda _: None, device="cpu")
    assert one.keys() == other.keys()
    return {name: own if isinstance(own, str) else max(own, float(other[name])) for name, own in one.items()}


def test_nothing_that_is_written_is_lost(found: dict[str, float | str]) -> None:
    off = {name: own for name, own in found.items() if not isinstance(own, str)}
    assert {name: own for name, own in off.items() if own > 1e-5} == {}


def test_what_ranks_can_do_is_not_refused(found: dict[str, float | str]) -> None:
    assert {name: own for name, own in found.items() if isinstance(own, str)} == {}
