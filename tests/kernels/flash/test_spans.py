"""Spans against masks that are written out, and the tiles that are visited against both."""

# ruff: noqa: N806  a tensor carries its dims in its name

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench._numerics.cases import visible
from tangram.kernels.attention import Seen
from tangram.kernels.flash.spans import Spans, by_numbers, in_order, ranges, with_blocks


@given(st.integers(1, 20), st.integers(0, 8), st.booleans(), st.integers(0, 9))
def test_in_order(queries: int, more: int, causal: bool, window: int) -> None:
    found = in_order(queries, queries + more, causal, window, batch=2).visible()
    assert found.shape == (2, queries, queries + more)
    assert torch.equal(found[1], visible(queries, queries + more, causal, window))


@st.composite
def numbers(draw: st.DrawFn) -> torch.Tensor:
    """Of rows of packed documents (B, S, 2), in some order."""
    S = draw(st.integers(1, 24))
    rows: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 2))):
        begins = torch.tensor([True, *(draw(st.booleans()) for _ in range(S - 1))])
        rows.append(torch.stack([torch.where(begins, torch.arange(S), 0).cummax(0)[0], torch.arange(S)], -1))
    order = torch.tensor(draw(st.permutations(range(S))))
    return torch.stack(rows)[:, order]


@given(numbers(), st.integers(0, 9), st.data())
def test_by_numbers_as_attention_by_tokens(own: torch.Tensor, window: int, data: st.DataObject) -> None:
    keep = torch.tensor(data.draw(st.lists(st.integers(0, own.shape[1] - 1), min_size=1, unique=True)))
    found = by_numbers(own, own[:, keep], window).visible()
    assert torch.equal(found, Seen(own, own[:, keep], window).mask(slice(None), slice(None))[:, 0])


@given(numbers(), st.integers(0, 9))
def test_by_numbers_both_ways(own: torch.Tensor, window: int) -> None:
    found = by_numbers(own, own, window, causal=False).visible()
    begin, place = own.unbind(-1)
    expected = begin[:, :, None] == begin[:, None]
    if window:
        expected &= (place[:, :, None] - place[:, None]).abs() < window
    assert torch.equal(found, expected)


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=16), st.integers(0, 5))
def test_blocks_see_all_of_themselves(blocks: list[int], window: int) -> None:
    S = len(blocks)
    found = with_blocks(in_order(S, S, window=window), torch.tensor([blocks])).visible()[0]
    expected = visible(S, S, True, window)
    for i in range(S):
        for j in range(S):
            between = blocks[min(i, j) : max(i, j) + 1]
            if blocks[i] >= 0 and set(between) == {blocks[i]}:
                # one run of places, so what lies between a window and the block is seen as well
                expected[i, min(i, j) : max(i, j) + 1] = True
    for i in range(S):
        seen = expected[i].nonzero().flatten()
        expected[i, int(seen.min()) : int(seen.max()) + 1] = True
    assert torch.equal(found, expected)


@given(numbers(), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.data())
def test_visited_tiles(own: torch.Tensor, window: int, rows: int, columns: int, data: st.DataObject) -> None:
    keep = torch.tensor(data.draw(st.lists(st.integers(0, own.shape[1] - 1), min_size=1, unique=True)))
    spans = by_numbers(own, own[:, keep], window)
    mask, found = spans.visible(), ranges(spans, rows, columns)
    _check(mask, found.of_queries, rows, columns)
    _check(mask.mT, found.of_keys, columns, rows)


def _check(mask: torch.Tensor, found: torch.Tensor, rows: int, columns: int) -> None:
    tiles = -(-mask.shape[2] // columns)
    for b in range(len(mask)):
        for i in range(-(-mask.shape[1] // rows)):
            first, begin, stop, end = found[b, i].tolist()
            assert 0 <= first <= begin <= stop <= end <= tiles
            for j in range(tiles):
                tile = mask[b, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                if begin <= j < stop:
                    assert tile.all()
                if not first <= j < end:
                    assert not tile.any()


def test_a_causal_mask_is_masked_on_the_diagonal_alone() -> None:
    found = ranges(in_order(256, 256), 64, 32)
    assert found.of_queries[0].tolist() == [[0, 2, 2, 2], *([0, 0, 2 * i, 2 * i + 2] for i in range(1, 4))]
    assert found.of_keys[0].tolist() == [[j // 2, j // 2 + 1, 4, 4] for j in range(8)]


def test_of_a_window_no_more_is_visited_than_it_reaches() -> None:
    found = ranges(in_order(512, 512, window=64), 32, 32).of_queries[0]
    assert (found[:, 3] - found[:, 0]).max() == 3


@pytest.mark.parametrize("since", [5, 9])
def test_who_sees_nothing_is_not_visited(since: int) -> None:
    spans = Spans(torch.tensor([[since]]).int(), torch.tensor([[4]]).int(), torch.arange(8)[None].int())
    assert not spans.visible().any()
    first, begin, stop, end = ranges(spans, 4, 4).of_queries[0, 0].tolist()
    assert begin == stop
    assert end - first <= 1
