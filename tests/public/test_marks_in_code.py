"""Public reports about layouts in a model's own code, rebuilt small: as each operator runs, and captured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tangram.training.run.launch import run_ranks
from tests.public.marks_tasks import WAYS, Ran, run_all
from tests.training.oracle.warm import once

BOUND = 1e-5
Ranks = list[Mapping[str, Mapping[str, Ran]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    def run(_: Path) -> Ranks:
        return [*run_ranks(run_all, None, world=2, on_event=lambda _: None, device="cpu")]

    return once(tmp_path_factory, "public-marks", run)


def _right(ranks: Ranks, name: str, *ways: str) -> list[Ran]:
    """What the ranks found of a model, which is that of one process."""
    found = [own[name][way] for own in ranks for way in ways or WAYS]
    assert [one for one in found if one.refused or max(one.value, one.gradient) > BOUND] == []
    return found


def test_the_bias_of_a_row_cut_layer_is_added_once(ranks: Ranks) -> None:
    """Wenyueh/MinivLLM#80: a bias beside a weight that is cut by columns was added by each rank before the sum."""
    for one in _right(ranks, "bias"):
        assert one.parts is not None
        assert one.parts["down.bias"] == (8,)


def test_the_bias_of_a_column_cut_layer_is_cut_with_it(ranks: Ranks) -> None:
    """ModelTC/LightX2V#1453: the weight was cut, its bias stayed whole, and the sizes did not fit."""
    for one in _right(ranks, "bias"):
        assert one.parts is not None
        assert (one.parts["up.weight"], one.parts["up.bias"]) == ((8, 8), (8,))


def test_a_head_that_is_the_embeddings_stays_them(ranks: Ranks) -> None:
    """pytorch/torchtitan#2252, NVIDIA-NeMo/RL#227: the two were one until they were made parallel."""
    assert all(one.one for one in _right(ranks, "tied"))


def test_a_norm_keeps_the_cut_of_what_it_is_given(ranks: Ranks) -> None:
    """pytorch/pytorch#139681: an RMS norm over a sequence that is cut gave a plain tensor, and a residual failed."""
    _right(ranks, "norm")
    assert {own["norm"]["as it runs"].said for own in ranks} == {"_=3 _=4/tp _=8"}


def test_a_number_of_a_cut_tensor_is_that_of_the_whole(ranks: Ranks) -> None:
    """pytorch/pytorch#166638: `item` of something cut gave a number of the rank's own part, as it runs.

    A capture has no values, and says so with the line.
    """
    _right(ranks, "value", "as it runs")
    for own in ranks:
        assert "marks_tasks.py" in own["value"]["captured"].refused
        assert "values" in own["value"]["captured"].refused


def test_dropout_of_what_is_cut_and_of_what_is_not(ranks: Ranks) -> None:
    """awslabs/slapo#21: what ranks have all of is to be dropped alike, what they have parts of is not."""
    _right(ranks, "dropout")


def test_two_forwards_before_a_backward_that_computes_again(ranks: Ranks) -> None:
    """pytorch/pytorch#153354: a second forward before the backward, and recomputing found plain and sharded tensors.

    As operators run one after the other nothing is computed again, and a sentence says so.
    """
    _right(ranks, "twice", "captured")
    for own in ranks:
        assert "checkpoint" in own["twice"]["as it runs"].refused
