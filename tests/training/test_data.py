"""The stream of samples is a function of the seed alone: the number of ranks only deals it out."""

# ruff: noqa: N806  a tensor carries its dims in its name

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tangram.errors import UserError
from tangram.training import data
from tangram.training.data import END, IGNORE, Batch, RankBatches, Split
from tangram.training.plan import DataPlan
from tests.training.small import small_plan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan(text: Path) -> DataPlan:
    return small_plan(text).data


@pytest.fixture(scope="module")
def splits(plan: DataPlan) -> tuple[Split, Split]:
    return data.read_corpus(plan)


def dealt(split: Split, plan: DataPlan, step: int, world: int) -> list[RankBatches]:
    return [
        data.step_batches(split, plan, seed=5, step=step, rank=rank, world=world, device=CPU) for rank in range(world)
    ]


def rows(batches: list[RankBatches]) -> torch.Tensor:
    micro = [batch for rank in batches for batch in rank.micro]
    return torch.cat([torch.stack([batch.inputs_BS, batch.labels_BS], 1) for batch in micro])


@pytest.mark.parametrize("world", [2, 4])
def test_the_stream_does_not_depend_on_the_number_of_ranks(
    world: int, plan: DataPlan, splits: tuple[Split, Split]
) -> None:
    for step in range(6):  # beyond one epoch
        alone, together = dealt(splits[0], plan, step, 1), dealt(splits[0], plan, step, world)
        assert torch.equal(rows(alone), rows(together))
        assert {rank.counted for rank in together} == {alone[0].counted}
        assert alone[0].counted == int((rows(together)[:, 1] != IGNORE).sum())


def test_an_epoch_takes_every_sample_once_and_the_next_in_another_order(splits: tuple[Split, Split]) -> None:
    split, n = splits[0], len(splits[0])
    first = data.sample_stream(split, 5, 0, n)
    assert sorted(first) == list(range(n))
    both = data.sample_stream(split, 5, 0, 2 * n)
    assert both[:n] == first
    assert sorted(both[n:]) == sorted(first)
    assert both[n:] != first
    assert data.sample_stream(split, 5, n - 3, 7) == both[n - 3 : n + 4]
    assert data.sample_stream(split, 6, 0, n) != first


def test_a_sample_predicts_the_bytes_of_one_file() -> None:
    text = {"a.py": b"abcdefghij", "b.py": b"xyz", "c.py": b""}
    split = data._split(text.values(), 4)
    batch = data.collate(split, range(len(split)), 4, CPU)
    counted = batch.labels_BS != IGNORE
    assert split.size_W.tolist() == counted.sum(1).tolist() == [4, 4, 3, 4, 1]
    a, end = list(b"abcdefghij"), [END]
    assert batch.inputs_BS[counted].tolist() == end + a + end + list(b"xyz") + end
    assert batch.labels_BS[counted].tolist() == a + end + list(b"xyz") + end + end


def test_held_out_files_are_never_trained_on_and_stay_held_out(plan: DataPlan, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"file{number}.py").write_text(f"unique{number:03d}")
    own = plan.model_copy(update={"root": str(tmp_path)})

    def names(split: Split) -> set[str]:
        joined = bytes(token if token != END else 10 for token in split.tokens_N.tolist()).decode()
        return set(joined.split())

    training, held_out = map(names, data.read_corpus(own))
    assert not training & held_out
    assert len(training | held_out) == 40
    (tmp_path / "another.py").write_text("unique999")
    assert held_out <= names(data.read_corpus(own)[1])


def test_a_copy_of_a_held_out_file_is_not_trained_on(plan: DataPlan, tmp_path: Path) -> None:
    for number in range(40):  # twenty texts, each under two names that fall to either split
        (tmp_path / f"file{number}.py").write_text(f"<{number % 20:02d}>" * 9)
    training, held_out = data.read_corpus(plan.model_copy(update={"root": str(tmp_path)}))
    trained, kept = (
        {bytes(split.tokens_N[s + 1 : s + 5].tolist()) for s in split.start_W[::2]} for split in (training, held_out)
    )
    assert trained
    assert kept
    assert not trained & kept


@pytest.mark.parametrize("pattern", ["", "/etc/*.py", "**.py"])
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, plan: DataPlan) -> None:
    with pytest.raises(UserError, match=r"data\.pattern = .* (cannot be used|match)|files? .* match"):
        data.read_corpus(plan.model_copy(update={"pattern": pattern}))


def test_a_file_that_cannot_be_read_is_named(plan: DataPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"file.*\.py.* cannot be read: Permission denied"):
        data.read_corpus(plan)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_samples_are_dealt_out_once_in_equally_many_batches(
    world: int, plan: DataPlan, splits: tuple[Split, Split]
) -> None:
    batches: list[list[Batch]] = [
        list(data.held_out_batches(splits[1], plan, rank=rank, world=world, device=CPU)) for rank in range(world)
    ]
    assert len({len(own) for own in batches}) == 1
    every = torch.cat([batch.labels_BS for own in batches for batch in own])
    samples = data.held_out_samples(splits[1], plan)
    assert len(set(samples)) == len(samples) == 13
    assert int((every != IGNORE).sum()) == splits[1].size_W[samples].sum()


def test_the_unigram_entropy_of_known_counts() -> None:
    tokens_N = np.array([END, 1, 1, 2, 3, 0], np.int16)
    split = Split(tokens_N, np.array([0]), np.array([4]))
    assert data.unigram_entropy(split, [0]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


def test_a_folder_without_files_is_refused(plan: DataPlan, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training file among the 0"):
        data.read_corpus(plan.model_copy(update={"root": str(tmp_path)}))
    with pytest.raises(UserError, match="does not exist"):
        data.read_corpus(plan.model_copy(update={"root": str(tmp_path / "nowhere")}))
