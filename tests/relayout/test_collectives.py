"""One collective and its dual between every two ways to lie, on four real ranks, against one process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing as mp

from tangram.relayout.collectives.one_collective import DUALS, WAYS, RankPlacement, dual, way
from tests.relayout import collecting, ringing, routing, stepping
from tests.relayout.collecting import PLACES, RANKS, play

SCENES = (*collecting.SCENES, *routing.SCENES, *ringing.SCENES, stepping.every_two_layouts, stepping.refused_steps)
REFUSED = (collecting.refused, stepping.refused_steps)
Played = Callable[[Callable[..., Any]], list[Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """What each rank found in a scene."""
    folder = tmp_path_factory.mktemp("collected")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: new imports would take longest
        mp.start_processes(play, (str(folder), SCENES), nprocs=RANKS, start_method="fork")
    return lambda scene: [json.loads((folder / f"{scene.__name__}-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("scene", [s for s in SCENES if s not in REFUSED], ids=lambda s: s.__name__)
def test_nothing_is_wrong(played: Played, scene: Callable[..., Any]) -> None:
    assert played(scene) == [[]] * RANKS


def test_refusals(played: Played) -> None:
    sentences = [
        "dim 0 of (7, 8) cannot be cut into 4 even parts; pad the dim to a multiple of 4",
        "4 blocks of dim 1 of (7, 8) cannot be cut into 4 even parts; pad the dim to a multiple of 16",
        "a tensor of shape (7, 8) has no dim -1 to cut",
        "a tensor of shape (7, 8) has no dim 5 to cut",
        "a tensor lies as same, several, sum or cut, and not as 'whole'",
        "a dim is cut in one block or in several, and not in 0",
    ]
    assert played(collecting.refused) == [sentences] * RANKS


def test_refusals_of_steps(played: Played) -> None:
    step = "all-gather over a -> 16 24 (192 B)"
    sentences = [
        "there is no group for all-gather over a; make one of `members`",
        "the group over a has 4 ranks, and not 2",
        f"{step} takes a tensor of shape (8, 24), and not (9, 24)",
    ]
    assert played(stepping.refused_steps) == [sentences] * RANKS


def test_every_pair_has_a_way_and_its_dual_too() -> None:
    for a in PLACES:
        for b in PLACES:
            assert way(a, b)[1] == way(dual(b), dual(a))[0]
    assert {(a, b) for a in DUALS for b in DUALS if a != b or a == "cut"} == set(WAYS)
    assert dual(dual(RankPlacement("sum"))) == RankPlacement("sum")
