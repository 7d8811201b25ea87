"""What a model's code writes into a tensor, or into a view of one, is in it on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tangram.training.run.launch import run_ranks
from tests.sharding.runtime import written

QUICK = ("sequence, then samples", "hidden")


def _is_kept(kinds: Sequence[str]) -> None:
    for found in run_ranks(written.run_all, kinds, world=2, on_event=lambda _: None, device="cpu"):
        assert len(found) == len(kinds) * len(written.WRITES)
        assert {name: own for name, own in found.items() if isinstance(own, str) or own > 1e-5} == {}


def test_nothing_that_is_written_is_lost_or_refused() -> None:
    _is_kept(QUICK)


@pytest.mark.slow
def test_by_other_marks() -> None:
    _is_kept([kind for kind in written.MARKS if kind not in QUICK])
