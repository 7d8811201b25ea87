"""The pairs of strategies that Paddle converts in its own tests, on real ranks, bit for bit."""

import json
import warnings
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tangram.checkpoint.inspect import verify
from tangram.checkpoint.store import commits
from tests.checkpoint.strategy_ranks import NAMED, PAIRS, RANKS, play


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four ranks saved and loaded."""
    folder = tmp_path_factory.mktemp("pairs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: new imports would take longest
        mp.start_processes(play, (str(folder),), nprocs=RANKS, start_method="fork")
    return folder


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair(played: Path, pair: str) -> None:
    ranks = NAMED[pair.split("-")[1]].ranks
    assert [json.loads((played / f"{rank}.json").read_text())[pair] for rank in range(ranks)] == [[]] * ranks


def test_what_all_of_them_saved_is_sound_and_the_same(played: Path) -> None:
    assert len(PAIRS) == 20
    saved = sorted({pair.split("-")[0] for pair in PAIRS})
    assert all(verify.verify(played / name).sound for name in saved)
    first, *others = ({n: t.digest for n, t in commits.read_manifest(played / name).tensors.items()} for name in saved)
    assert all(other == first for other in others)
