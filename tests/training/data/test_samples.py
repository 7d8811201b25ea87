"""Packing loses nothing, counts every label once, and keeps documents apart."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangram.training.data.samples import IGNORE, Split, collate

CPU = torch.device("cpu")
FILL = 999


def split_of(lengths: list[int]) -> Split:
    """Documents of these lengths; token i of the whole is i."""
    tokens = np.arange(sum(lengths))
    return Split(len(tokens), np.cumsum(lengths), lambda start, stop: tokens[start:stop])


documents = st.lists(st.integers(1, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 1)


@given(documents, st.integers(2, 9))
def test_the_windows_of_an_epoch_give_back_the_tokens_and_count_each_label_once(
    lengths: list[int], sequence: int
) -> None:
    split = split_of(lengths)
    batch = collate([(split, window) for window in range(split.windows(sequence))], sequence, FILL, CPU)
    inputs, labels = batch.inputs_BS.flatten().tolist(), batch.labels_BS.flatten().tolist()
    total = sum(lengths)
    assert inputs == [*range(total - 1), *[FILL] * (len(inputs) - total + 1)]
    last_of_documents = set((np.cumsum(lengths) - 1).tolist())
    expected = [IGNORE if token in last_of_documents else token + 1 for token in range(total - 1)]
    assert labels == expected + [IGNORE] * (len(inputs) - total + 1)
    counted = (batch.labels_BS != IGNORE).sum(1).tolist()
    assert split.labels(np.arange(split.windows(sequence)), sequence).tolist() == counted
    assert sum(counted) == total - len(lengths)


@given(documents, st.integers(2, 9))
def test_positions_begin_anew_with_each_document_and_window(lengths: list[int], sequence: int) -> None:
    split = split_of(lengths)
    begins = {0, *np.cumsum(lengths).tolist()}
    for window in range(split.windows(sequence)):
        batch = collate([(split, window)], sequence, FILL, CPU)
        position = -1
        for at, (token, found) in enumerate(
            zip(batch.inputs_BS[0].tolist(), batch.positions_BS[0].tolist(), strict=True)
        ):
            filled = token == FILL and batch.inputs_BS[0, at - 1] != FILL
            position = 0 if at == 0 or token in begins or filled else position + 1
            assert found == position


def test_an_empty_row_counts_nothing() -> None:
    batch = collate([None, (split_of([5]), 0)], 4, FILL, CPU)
    assert batch.inputs_BS[0].tolist() == [FILL] * 4
    assert batch.labels_BS[0].tolist() == [IGNORE] * 4
    assert batch.positions_BS[0].tolist() == [0, 1, 2, 3]
    assert batch.labels_BS[1].tolist() == [1, 2, 3, 4]
    assert {x.dtype for x in (batch.inputs_BS, batch.labels_BS, batch.positions_BS)} == {torch.int64}


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_how_many_windows(tokens: int, windows: int) -> None:
    assert split_of([tokens] if tokens else []).windows(4) == windows


def single_windows(lengths: list[int], sequence: int) -> list[list[int]]:
    """The inputs of every sample of single documents, written out: token i of the whole is i."""
    found: list[list[int]] = []
    begin = 0
    for length in lengths:
        inputs = list(range(begin, begin + length))[:-1]
        found += [inputs[at : at + sequence] for at in range(0, len(inputs), sequence)]
        begin += length
    return found


@given(documents, st.integers(2, 9))
def test_a_sample_of_a_single_document_holds_it_alone(lengths: list[int], sequence: int) -> None:
    split, expected = split_of(lengths), single_windows(lengths, sequence)
    assert split.windows(sequence, single=True) == len(expected)
    if not expected:
        return
    batch = collate([(split, window) for window in range(len(expected))], sequence, FILL, CPU, single=True)
    assert batch.positions_BS is None
    filled = [[*inputs, *[FILL] * (sequence - len(inputs))] for inputs in expected]
    assert batch.inputs_BS.tolist() == filled
    labels = [[*[token + 1 for token in inputs], *[IGNORE] * (sequence - len(inputs))] for inputs in expected]
    assert batch.labels_BS.tolist() == labels
    counted = (batch.labels_BS != IGNORE).sum(1).tolist()
    assert split.labels(np.arange(len(expected)), sequence, single=True).tolist() == counted
    assert sum(counted) == sum(lengths) - len(lengths)  # each label of an epoch once, whatever is packed


def test_windows_of_single_documents_are_found_among_many() -> None:
    """More documents than are looked at together, many without a window; asked for in any order."""
    lengths = [1 + (7 * number * number) % 23 * (number % 5 > 0) for number in range(1000)]
    split, expected = split_of(lengths), single_windows(lengths, 6)
    order = np.random.default_rng(0).permutation(len(expected))
    starts, stops = split.spans(order, 6, single=True)
    assert [(int(a), int(b)) for a, b in zip(starts, stops, strict=True)] == [
        (expected[at][0], expected[at][-1] + 1) for at in order
    ]
    assert split.spans([], 6, single=True)[0].shape == (0,)


def test_document_ends_as_they_lie_on_disk_give_the_same_samples() -> None:
    ends = np.cumsum([5, 1, 9, 2])
    tokens = np.arange(17)
    on_disk = Split(17, ends.astype("<u8"), lambda start, stop: tokens[start:stop])
    for window in range(on_disk.windows(4, single=True)):
        one, other = (
            collate([(split, window)], 4, FILL, CPU, single=True) for split in (on_disk, split_of([5, 1, 9, 2]))
        )
        assert torch.equal(one.inputs_BS, other.inputs_BS)
        assert torch.equal(one.labels_BS, other.labels_BS)


@pytest.mark.parametrize(("lengths", "windows"), [([], 0), ([1, 1], 0), ([2], 1), ([5], 1), ([6], 2), ([2, 2, 9], 4)])
def test_how_many_windows_of_single_documents(lengths: list[int], windows: int) -> None:
    assert split_of(lengths).windows(4, single=True) == windows
