"""Tensors that change over two axes at once, on real ranks: gradients of one process, the bytes that are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.training.run.launch import run_ranks
from tests.training.at_once_tasks import WORKS, Ran, run_all
from tests.training.oracle.warm import once

BOUND = 1e-5
RIGHT = [name for name, work in WORKS.items() if not work.mistake]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ran]]:
    def run(_: Path) -> list[dict[str, Ran]]:
        return run_ranks(run_all, WORKS, world=4, on_event=lambda _: None, device="cpu")

    return once(tmp_path_factory, "at-once", run)


@pytest.mark.parametrize("name", RIGHT)
def test_every_gradient_is_that_of_one_process(ran: list[dict[str, Ran]], name: str) -> None:
    own = [one[name] for one in ran]
    assert [(r.where, r.worst) for r in own if max(r.worst, r.eager) > BOUND] == []
    assert min(r.joint for r in own) >= 2


@pytest.mark.parametrize("name", RIGHT)
def test_ranks_receive_what_is_printed_and_less_than_with_one_axis_after_the_other(
    ran: list[dict[str, Ran]], name: str
) -> None:
    own = [one[name] for one in ran]
    assert sum(r.received for r in own) / len(own) == pytest.approx(own[0].derived)
    assert own[0].derived < 0.95 * own[0].apart


def test_gradients_that_are_not_summed_over_two_axes_are_seen(ran: list[dict[str, Ran]]) -> None:
    assert max(one["gradients are not summed"].worst for one in ran) > 50 * BOUND
