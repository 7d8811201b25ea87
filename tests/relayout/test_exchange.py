"""Moving tensors between real ranks, against the same copies in one process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing as mp
from hypothesis import Phase, given, settings

from tests.relayout import exchange_refusals, exchanging, generate
from tests.relayout.exchanging import RANKS, play
from tests.relayout.generate import Case, cases

DRAWN = 60
SCENES = (
    exchanging.every_case,
    exchanging.every_row,
    exchanging.without_memory_in_common,
    exchanging.every_job,
    exchanging.spread,
    exchange_refusals.one_is_wrong,
    exchange_refusals.all_want_what_does_not_fit,
    exchange_refusals.one_fails_in_the_midst,
    exchange_refusals.dtensors,
)
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


def test_every_pattern_by_every_way(played: Played) -> None:
    assert played(exchanging.every_row) == [[]] * RANKS


def test_codecs_fills_ties_and_odd_shapes(played: Played) -> None:
    assert played(exchanging.every_job) == [[]] * RANKS


def test_where_ranks_have_no_memory_in_common(played: Played) -> None:
    refused = "RelayoutError: the ranks of a node can have no memory in common here; leave the way to the pattern"
    expected = [[[], ["shared memory"]], "", [[], ["shared memory"]], "", [[], ["all-to-all"]], refused]
    assert played(exchanging.without_memory_in_common) == [[], *[expected] * 4]


def test_replicas_are_spread(played: Played) -> None:
    assert played(exchanging.spread) == [None, *[[True, 96, 0, 96]] * 2, *[[True, 0, 96, 0]] * 2]


def test_what_is_wrong_on_one_rank_is_said_on_all_and_nothing_is_written(played: Played) -> None:
    expected = {
        "no source buffer": "RelayoutError: rank 2: there is no buffer for c at 2",
        "no target buffer": "RelayoutError: rank 2: there is no buffer for c at 2",
        "source of another shape": "RelayoutError: rank 2: c at 2 has shape [3, 2], but its piece holds [3, 1]",
        "target of another dtype": "RelayoutError: rank 2: b at 2 has dtype torch.float32, but the mapping says "
        "float64; name the change with cast=",
        "target is the source": "RelayoutError: rank 2: c at 2 and c at 2 share memory: copy one of them first, "
        "or tie them with `=` when they are one tensor",
        "a hole": "CoverageError: rank 2: b at 2: no source holds [0:47] of b",
        "a source that is no rank": "RelayoutError: rank 2: b is held at 'file', which is no rank of the group",
        "wanted for another": "RelayoutError: rank 2: b is wanted at 1: a rank names what it wants itself",
        "another source": "RelayoutError: rank 1: rank 2 wants [0:47] of b, which is not here: "
        "give all ranks the same source",
        "another mapping": "RelayoutError: rank 2 was given another mapping, or other tensors, than rank 0: "
        "all ranks move by the same",
        "no memory": "RelayoutError: rank 2: memory=0: give at least one byte",
        "another memory": "RelayoutError: rank 2 was given other settings than rank 0: all ranks move by the same",
        "no such way": "RelayoutError: rank 2 was given other settings than rank 0: all ranks move by the same",
        "a buffer that fails": "RelayoutError: rank 2: OSError: the device is lost",
        "tied copies differ": "RelayoutError: rank 0: emb at 2 and head at 1 are tied, but differ in [4:6 1:2] of emb",
    }
    assert played(exchange_refusals.one_is_wrong)[0] == {}
    for said in played(exchange_refusals.one_is_wrong)[1:]:
        assert said == {name: [sentence, True] for name, sentence in expected.items()}


def test_what_does_not_fit_is_refused(played: Played) -> None:
    ways = "shared memory, nothing, broadcast, all-gather, all-to-all, pairs"
    expected = [
        "RelayoutError: the ranks do not want what all-gather moves; leave the way to the pattern",
        f"RelayoutError: there is no way 'pigeons' between ranks; there are {ways}",
        "RelayoutError: rank 0: the source is laid over 6 ranks, but the group has 4",
        "RelayoutError: rank 0: the target is laid over 6 ranks, but the group has 4",
    ]
    assert played(exchange_refusals.all_want_what_does_not_fit) == [[], *[expected] * 4]


def test_a_rank_that_fails_in_the_midst_is_heard_of(played: Played) -> None:
    sentence = "RelayoutError: rank 3: ArithmeticError: too much"
    assert played(exchange_refusals.one_fails_in_the_midst) == [[], *[[sentence] * len(exchanging.HOW)] * 4]


def test_dtensors_over_other_meshes(played: Played) -> None:
    expected = [
        [True, True],
        "RelayoutError: rank 0: rank 1 has no b: all ranks name the same tensors",
        "RelayoutError: rank 0: w waits for a reduction over dp: do that first",
        "RelayoutError: rank 0: w: rank 1 of its mesh is not in the group",
    ]
    assert played(exchange_refusals.dtensors) == [None, [*expected[:3], ""], *[expected] * 3]
