"""Loading on four real ranks, at other layouts than saved; reading together, and failing together."""

import json
import re
from collections import Counter
from typing import Any

import pytest
from torch import nn

from tangram.checkpoint.saving.save import save
from tangram.layout import Region
from tests.checkpoint import loading
from tests.checkpoint.loading import LAYOUTS, NODES, RANKS, large, play
from tests.checkpoint.stored import store, with_small_blocks
from tests.ranks import start

Played = Any


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """What each rank found in a scene, by the scene's name."""
    folder = tmp_path_factory.mktemp("loaded")
    save({"model": nn.Linear(3, 4, bias=False)}, folder / "linear")
    (folder / "temporary").mkdir()
    rows = {"model.large": [Region.box((i, 0), (32, 1031)) for i in (0, 32, 64)]}
    with pytest.MonkeyPatch.context() as patch:
        with_small_blocks(patch)
        store(folder / "large", {"model.large": large()}, rows)
        made = store(folder / "rotten", {"model.large": large()}, rows)
    file = folder / "rotten" / made.tensors["model.large"].pieces[1].file
    data = bytearray(file.read_bytes())
    data[70_001] ^= 4
    file.write_bytes(data)
    start(play, str(folder), ranks=RANKS)
    return lambda scene: [json.loads((folder / f"{scene.__name__}-{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_layout_is_loaded_into_every_other(played: Played):
    assert played(loading.every_pair) == [{}] * RANKS


def test_an_optimiser_without_states_gets_them_and_its_settings(played: Played):
    expected = {"wrong": [], "same names": True, "lr": 0.01, "progress": {"step": 2, "name": "fsdp"}}
    assert played(loading.without_states) == [expected] * RANKS


def test_parts_that_were_cut_by_hand_become_whole_arrays(played: Played):
    assert played(loading.other_cuts) == [[]] * RANKS


def test_what_does_not_fit_on_one_rank_is_refused_on_all_before_a_byte_changes(played: Played):
    for words in played(loading.one_does_not_fit):
        assert words[0] == (
            "LoadError: the checkpoint does not fit the state: model.weight has shape [4, 3] there and [3, 4] here"
        )
        assert words[2].endswith("is of another state: it lacks model.more")
        assert words[1::2] == ["False", "False"]


def test_a_rank_that_does_not_see_the_folder_fails_all(played: Played):
    for words in played(loading.no_folder):
        assert re.fullmatch(r'there is no checkpoint ".*nowhere"', words)


def test_each_block_is_read_once_on_any_nodes(played: Played):
    results = played(loading.once)
    for case in results[0]:
        assert all(result[case][1] for result in results), case
        read = Counter((file, block) for result in results for file, block in result[case][0])
        assert set(read.values()) == {1}, case
        counts = [len(result[case][0]) for result in results]
        layout, _, nodes = case.split()
        each = [[n for n, at in zip(counts, nodes, strict=True) if at == node] for node in sorted(set(nodes))]
        if layout in ("columns", "copied"):  # all nodes want all
            each.append([sum(some) for some in each])
        for some in each:
            assert layout == "rows" or max(some) - min(some) <= (1 if nodes == "aaaa" else 3), (case, counts)


def test_ranks_that_want_different_things(played: Played):
    results = played(loading.different_wants)
    for case in range(len(NODES)):
        assert all(result[case][1] for result in results)
        read = Counter((file, block) for result in results for file, block in result[case][0])
        assert set(read.values()) == {1}


def test_files_serve_where_there_is_no_other_memory_and_nothing_is_left(played: Played):
    assert played(loading.by_files) == [[[True, True], []]] * RANKS


def test_damage_is_told_to_all_ranks(played: Played):
    results = played(loading.damaged)
    assert all(words == results[0] for words in results)
    assert len(results[0]) == len(LAYOUTS) * len(NODES[::2])
    for words in results[0]:
        assert re.fullmatch(
            r'DamagedError: the checkpoint ".*rotten" is damaged: its file "model-00002-of-00003.safetensors", '
            r"with model.large, has other bytes from 69632 to 73728 than were written",
            words,
        )


def test_a_rank_that_fails_in_the_midst_fails_all(played: Played):
    for words in played(loading.one_cannot_read):
        assert words == [
            "rank 1 could not read the checkpoint: OSError: [Errno 5] Input/output error",
            "rank 3 could not read the checkpoint: MemoryError: none left",
        ] * len(NODES)


def test_what_is_spoiled_between_nodes_is_not_used(played: Played):
    for words in played(loading.spoiled):
        assert re.fullmatch(
            r'DamagedError: the checkpoint ".*large" is damaged: its file "model-0000.-of-00003.safetensors", '
            r"with model.large, has other bytes from \d+ to \d+, as rank \d sent it, than were written",
            words,
        )


def test_a_rank_that_cannot_plan_fails_all(played: Played):
    assert played(loading.one_cannot_plan) == ["the checkpoint has no tensor model.other"] * RANKS
