"""Moving tensors between real ranks, against the same copies in one process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing as mp
from hypothesis import Phase, given, settings

from tests.relayout import exchanging, generate
from tests.relayout.exchanging import RANKS, SCENES, play
from tests.relayout.generate import Case, cases

DRAWN = 60
Played = Callable[[Callable[..., Any]], list[Any]]


def drawn() -> list[Case]:
    """Random mappings between random layouts of as many ranks as there are, other ones each time."""
    out: list[Case] = []

    @settings(max_examples=DRAWN, phases=[Phase.generate], database=None)
    @given(cases())
    def draw(case: Case) -> None:
        out.append(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "MESHES", [(1,), (2,), (3,), (4,), (5,), (1, 2), (2, 2), (1, 3, 1), (1, 5), (2, 1, 2)])
        draw()
    return out


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """What each rank found in a scene."""
    folder = tmp_path_factory.mktemp("moved")
    some = drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: new imports would take longest
        mp.start_processes(play, (str(folder), some, SCENES), nprocs=RANKS, start_method="fork")
    return lambda scene: [json.loads((folder / f"{scene.__name__}-{rank}.json").read_text()) for rank in range(RANKS)]


def test_random_mappings_and_layouts(played: Played) -> None:
    assert played(exchanging.every_case) == [[]] * RANKS
