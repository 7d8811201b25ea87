"""Modules of torch with their defaults on two ranks: results, gradients and buffers are those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tangram.training.run.launch import run_ranks
from tests.training.module_models import WORKS, Off, run_all
from tests.training.oracle.warm import once

BOUND = 2e-5


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Off]]:
    def run(_: Path) -> list[Mapping[str, Off]]:
        return [*run_ranks(run_all, None, world=2, on_event=lambda _: None, device="cpu")]

    return once(tmp_path_factory, "module-models", run)


@pytest.mark.parametrize("name", WORKS)
def test_training_and_evaluation_are_those_of_one_process(ran: list[Mapping[str, Off]], name: str) -> None:
    for one in ran:
        assert max(*one[name].values, *one[name].gradients, one[name].buffers) < BOUND, one[name]


def test_a_fused_path_past_the_borders_of_modules_is_seen(ran: list[Mapping[str, Off]]) -> None:
    *others, last = ran[0]["by the fast path"].values
    assert max(others) < BOUND
    assert last > 20 * BOUND, "in evaluation without gradients, where nothing tells that the result is another one"


def test_a_gradient_is_only_of_what_a_call_wants_one_of(ran: list[Mapping[str, Off]]) -> None:
    for one in ran:
        assert max(*one["labels"].values, *one["labels"].gradients) < BOUND, one["labels"]
