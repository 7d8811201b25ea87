"""The stream is a function of the seed; ranks only deal it out, and its position is one number."""

# ruff: noqa: N806  a tensor carries its dims in its name

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.schema.job import DataPlan, SourcePlan
from tangram.training import data
from tangram.training.data import IGNORE, Batch, Corpus, RankBatches, Stream
from tangram.training.data.corpus import is_single
from tangram.training.data.samples import collate
from tangram.training.data.stream import ORDERED
from tests.training.data.texts import corpus_of, data_plan, texts_of, write_files

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["packed", "single"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DataPlan:
    folder = tmp_path_factory.mktemp("stream")
    first, second = write_files(folder / "first"), write_files(folder / "second", 11)
    sources = SourcePlan(path=str(first), weight=2.0), SourcePlan(path=str(second), weight=1.0)
    return data_plan(folder / "cache", *sources, global_batch=10, micro_batch=2, packing=request.param)


@pytest.fixture(scope="module")
def corpus(plan: DataPlan) -> Corpus:
    return corpus_of(plan)


def dealt(corpus: Corpus, plan: DataPlan, first: int, size: int) -> list[RankBatches]:
    steps = -(-plan.global_batch // (plan.micro_batch * size))
    return [
        data.step_batches(
            corpus, plan, seed=5, first_sample=first, index=index, size=size, micro_steps=steps, device=CPU
        )
        for index in range(size)
    ]


def rows(ranks: list[RankBatches]) -> list[tuple[list[int], list[int], list[int]]]:
    """Every row that counts something, rank after rank; of single documents it has no positions."""
    found: list[tuple[list[int], list[int], list[int]]] = []
    for rank in ranks:
        for batch in rank.micro:
            positions_BS = batch.positions_BS
            if positions_BS is None:
                positions_BS = torch.zeros(len(batch.inputs_BS), 0)
            for inputs_S, labels_S, positions_S in zip(batch.inputs_BS, batch.labels_BS, positions_BS, strict=True):
                if int((labels_S != IGNORE).sum()):
                    found.append((inputs_S.tolist(), labels_S.tolist(), positions_S.tolist()))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 10])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(size: int, plan: DataPlan, corpus: Corpus) -> None:
    for step in range(12):  # beyond one epoch
        alone, together = dealt(corpus, plan, 10 * step, 1), dealt(corpus, plan, 10 * step, size)
        assert rows(alone) == rows(together)
        assert len({len(rank.micro) for rank in together}) == 1
        assert {rank.counted for rank in together} == {alone[0].counted}
        labels = [batch.labels_BS for rank in together for batch in rank.micro]
        assert alone[0].counted == sum(int((labels_BS >= 0).sum()) for labels_BS in labels)


@pytest.mark.parametrize("global_batch", [12, 10, 7])
def test_a_resume_on_other_numbers_of_ranks_repeats_and_skips_nothing(
    global_batch: int, plan: DataPlan, corpus: Corpus
) -> None:
    """4 ranks, then 2, then 3, of batches that they do not divide: the rows are those of one rank that never stops."""
    own = plan.model_copy(update={"global_batch": global_batch})
    position, seen = 0, list[tuple[list[int], list[int], list[int]]]()
    ids: list[tuple[int, int]] = []
    for size, steps in ((4, 19), (2, 11), (3, 20)):
        streams = [
            Stream(corpus, own, seed=5, index=index, size=size, device=CPU, position=position) for index in range(size)
        ]
        for _ in range(steps):
            ids += data.sample_ids(corpus, own, 5, streams[0].position, global_batch)
            ranks = [next(stream) for stream in streams]
            seen += rows(ranks)
        (position,) = {stream.position for stream in streams}
    assert position == 50 * global_batch
    assert ids == data.sample_ids(corpus, own, 5, 0, position)
    for source, split in enumerate(corpus.training):
        windows = split.windows(own.sequence, single=is_single(own))
        own_ids = [window for of, window in ids if of == source]
        assert len(own_ids) > windows  # beyond one epoch
        for epoch in range(len(own_ids) // windows):
            assert sorted(own_ids[epoch * windows : (epoch + 1) * windows]) == list(range(windows))
    one = Stream(corpus, own, seed=5, device=CPU)
    assert seen == [row for _ in range(50) for row in rows([next(one)])]


def test_a_stream_goes_on_where_its_position_is_set(plan: DataPlan, corpus: Corpus) -> None:
    stream = Stream(corpus, plan)
    first = [rows([next(stream)]) for _ in range(3)]
    stream.position = plan.global_batch
    assert rows([next(stream)]) == first[1]
    assert first[0] != first[1]
    with pytest.raises(ValueError, match="has no share"):
        Stream(corpus, plan, index=0, size=11)


@given(st.integers(0, 10**15), st.integers(1, 40), st.integers(0, 40))
def test_any_part_of_the_stream_is_found_alone(
    corpus: Corpus, plan: DataPlan, first: int, count: int, skip: int
) -> None:
    whole = data.sample_ids(corpus, plan, 3, first, skip + count)
    assert whole[skip:] == data.sample_ids(corpus, plan, 3, first + skip, count)


def test_samples_on_both_sides_of_what_is_found_at_once(plan: DataPlan, corpus: Corpus) -> None:
    first = 3 * ORDERED - 2
    one_by_one = [sample for i in range(5) for sample in data.sample_ids(corpus, plan, 3, first + i, 1)]
    assert data.sample_ids(corpus, plan, 3, first, 5) == one_by_one
    assert data.sample_ids(corpus, plan, 3, first, 0) == data.sample_ids(corpus, plan, 3, ORDERED, 0) == []


def test_every_epoch_and_seed_has_its_own_order(plan: DataPlan, corpus: Corpus) -> None:
    windows = corpus.training[0].windows(plan.sequence, single=is_single(plan))
    ids = [window for source, window in data.sample_ids(corpus, plan, 3, 0, 3 * windows) if source == 0]
    other = [window for source, window in data.sample_ids(corpus, plan, 4, 0, 3 * windows) if source == 0]
    assert ids[:windows] != ids[windows : 2 * windows]
    assert ids[:windows] != other[:windows]
    assert ids[:windows] != sorted(ids[:windows])


def test_rows_of_single_documents_end_with_the_longest_of_their_step(tmp_path: Path) -> None:
    """On all ranks alike, whoever has it; nothing that counts is lost, and what shares rows keeps their length."""
    (tmp_path / "text").mkdir()
    texts = ["x" * n for n in (200, *[30, 90] * 10)]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = SourcePlan(path=str(tmp_path / "text"))
    fields = {"sequence": 300, "global_batch": 4, "micro_batch": 1, "held_out": 0.0}
    single = data_plan(tmp_path / "cache", source, packing="single", **fields)
    corpus, lengths = corpus_of(single), set[int]()
    for first in range(0, 20, 4):
        for size in (1, 2):
            found, whole = (
                [
                    data.step_batches(
                        corpus, single, seed=0, first_sample=first, index=index, size=size, micro_steps=4 // size,
                        device=CPU,
                    ).cut(length)
                    for index in range(size)
                ]
                for length in (data.step_length(corpus, single, 0, first), 300)
            )  # fmt: skip
            micro = [batch for one in found for batch in one.micro]
            (length,) = {batch.inputs_BS.shape[1] for batch in micro}
            longest = 0
            for short, full in zip(micro, [batch for one in whole for batch in one.micro], strict=True):
                assert torch.equal(short.inputs_BS, full.inputs_BS[:, :length])
                assert torch.equal(short.labels_BS, full.labels_BS[:, :length])
                assert int((short.labels_BS != IGNORE).sum()) == int((full.labels_BS != IGNORE).sum())
                longest = max(longest, int((full.labels_BS != IGNORE).sum()))
            unit = max(8, (1 << (longest - 1).bit_length() >> 1) // 8)
            assert length == min(300, -(-longest // unit) * unit) == found[0].length
            lengths.add(length)
    assert lengths == {96, 208}
    assert data.step_length(corpus, single, 0, 4, ways=7) % 14 == 0, "as context ranks cut it, in two halves each"
    packed = data_plan(tmp_path / "cache", source, packing="packed", **fields)
    kept = data.step_batches(
        corpus_of(packed), packed, seed=0, first_sample=0, index=0, size=1, micro_steps=4, device=CPU
    ).cut(data.step_length(corpus_of(packed), packed, 0, 0))
    assert kept.length == 300


def test_too_few_micro_batches_are_a_fault(plan: DataPlan, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="5 samples do not fit into 2 micro-batches of 2"):
        data.step_batches(corpus, plan, seed=0, first_sample=0, index=0, size=2, micro_steps=2, device=CPU)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_held_out_samples_are_dealt_out_once_in_equally_many_batches(size: int, plan: DataPlan, corpus: Corpus) -> None:
    batches: list[list[Batch]] = [
        list(data.held_out_batches(corpus, plan, index=index, size=size, device=CPU)) for index in range(size)
    ]
    assert len({len(own) for own in batches}) == 1
    samples = data.held_out_samples(corpus, plan)
    assert len(set(samples)) == len(samples) == 13
    every = torch.cat([batch.labels_BS for own in batches for batch in own])
    expected = sum(
        int(corpus.held_out[source].labels([window], plan.sequence, single=is_single(plan))[0])
        for source, window in samples
    )
    assert int((every != IGNORE).sum()) == expected


def test_held_out_samples_end_where_there_are_no_more(plan: DataPlan, corpus: Corpus) -> None:
    samples = data.held_out_samples(corpus, plan.model_copy(update={"held_out_samples": 10**6}))
    every = sum(split.windows(plan.sequence, single=is_single(plan)) for split in corpus.held_out)
    assert len(set(samples)) == len(samples) == every


def test_padding_is_the_share_of_places_that_hold_no_token(plan: DataPlan, corpus: Corpus) -> None:
    """Counted in the samples of one epoch of each source, in the shares of their weights."""
    expected = 0.0
    for share, split in zip((2 / 3, 1 / 3), corpus.training, strict=True):
        windows = split.windows(plan.sequence, single=is_single(plan))
        rows = [(split, window) for window in range(windows)]
        batch = collate(rows, plan.sequence, 999, CPU, single=is_single(plan))
        expected += share * float((batch.inputs_BS == 999).double().mean())
    assert data.padding(corpus, plan) == pytest.approx(expected)
    assert (expected > 0.05) == (plan.packing == "single")


def test_left_to_the_model_a_stream_has_documents_share_samples(plan: DataPlan, corpus: Corpus) -> None:
    left, packed = (plan.model_copy(update={"packing": packing}) for packing in ("auto", "packed"))
    assert rows([next(Stream(corpus, left))]) == rows([next(Stream(corpus, packed))])
    if plan.packing == "single":
        assert rows([next(Stream(corpus, left))]) != rows([next(Stream(corpus, plan))])


@pytest.mark.parametrize("packing", ["packed", "single"])
def test_documents_that_are_all_empty_are_refused(packing: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for number in range(3):
        (tmp_path / "source" / f"{number}.txt").write_text("")
    plan = data_plan(tmp_path / "cache", tmp_path / "source", packing=packing)
    with pytest.raises(UserError, match="has no text to train on: its files are empty"):
        corpus_of(plan)


def test_the_unigram_entropy_is_that_of_the_labels_that_are_counted(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for number, text in enumerate(["aab", "aac", "aad", "aae"]):
        (tmp_path / "source" / f"{number}.txt").write_text(text)
    plan = data_plan(tmp_path / "cache", tmp_path / "source", held_out=0.4)
    corpus = corpus_of(plan)
    kept = texts_of(corpus, held_out=True)
    assert kept
    labels = [*b"".join(kept), *[data.END] * len(kept)]
    expected = -sum(
        labels.count(label) / len(labels) * math.log(labels.count(label) / len(labels)) for label in set(labels)
    )
    assert data.unigram_entropy(corpus, plan) == pytest.approx(expected)


def test_nothing_held_out_is_no_loss(tmp_path: Path) -> None:
    plan = data_plan(tmp_path / "cache", write_files(tmp_path / "source"), held_out=0.0)
    corpus = corpus_of(plan)
    assert len(texts_of(corpus)) == 30
    with pytest.raises(UserError, match=r"set data\.held_out above 0"):
        next(data.held_out_batches(corpus, plan, index=0, size=1, device=CPU))
