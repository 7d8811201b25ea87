"""Samples: the documents of a split laid end to end and cut into windows of equal length, in one of three ways.

A document is [begin?] tokens end. A window takes its inputs from some place on, and the label of each is the next
token; windows that follow one another overlap by that one token, so an epoch counts every label exactly once. A window
that the text does not fill is filled up at its right end with what counts nothing: nothing of the text is dropped.

Packed: window w begins at token w * `sequence`, whatever documents lie there. No label crosses documents: the last
token of one has the label `IGNORE`, and position ids begin at 0 with each document (and with each window), by which
attention is kept within documents. All of every window is trained on; a document that a window's edge cuts loses its
context there; and the model has to take notice of position ids.

Best fit: windows of single documents, as below, are put together into as few as a greedy search finds (the longest
first, each where least room is left), so that none is cut which fits a window. They are kept apart as packed ones are.

Single: every document is cut by itself, so a window holds tokens of one document only, and any causal model may have
it: what it is filled up with stands to the right of all that counts. The price is the places that are filled up.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100  # a label that is not counted

Ints = npt.NDArray[np.int64]

_STRIDE = 64  # documents between two of which it is kept how many windows come before them
_CHUNK = _STRIDE << 14  # documents that are looked at together


@dataclass(frozen=True)
class Split:
    """The training or the held-out documents of a source, end to end."""

    size: int
    """How many tokens, begins and ends included."""
    end_D: npt.NDArray[np.uint64] | Ints
    """Where each document ends: the place after its last token."""
    read: Callable[[int, int], Ints]
    """The tokens from a place up to another."""
    context: int | None = None
    """Numbers from here on are tokens that are so much less and no labels: what an answer answers. None: all are. Those
    from twice as much on are the same of an answer that was rejected."""

    rows: int = 1
    """How many documents a sample is: of pairs two, chosen and rejected, each in a single window."""

    best_fit: bool = False
    """Whether a window that is not single has as many single ones as fit, and else what lies there end to end."""

    _packs: dict[int, "Packs"] = field(default_factory=dict[int, "Packs"], compare=False, repr=False)
    """By `sequence`."""
    _before: dict[int, Ints] = field(default_factory=dict[int, Ints], compare=False, repr=False)
    """Single documents, by `sequence`: the windows before every `_STRIDE`th document, and those of all."""

    def windows(self, sequence: int, *, single: bool = False) -> int:
        if single:
            return int(self._windows_before(sequence)[-1]) // self.rows
        if self.best_fit:
            return len(self._packed(sequence).first_W) - 1
        return max(0, -(-(self.size - 1) // sequence))

    def spans(self, windows: npt.ArrayLike, sequence: int, *, single: bool = False) -> tuple[Ints, Ints]:
        """The place of the first input of each of these windows, and the place after the last."""
        window_M = np.asarray(windows, np.int64)
        if single:
            return self._single_spans(window_M.ravel(), sequence)
        start_M = window_M * sequence
        return start_M, np.minimum(start_M + sequence, self.size - 1)

    def span(self, window: int, sequence: int, *, single: bool = False) -> tuple[int, int]:
        """The same of one window."""
        if not single:
            return window * sequence, min((window + 1) * sequence, self.size - 1)
        start, stop = self._single_spans(np.array([window]), sequence)
        return int(start[0]), int(stop[0])

    def pieces(self, window: int, sequence: int, *, single: bool = False) -> list[tuple[int, int]]:
        """Of a window the place of the first input and the place after the last, of each document that lies in it by
        itself: one but of a best fit."""
        if single or not self.best_fit:
            return [self.span(window, sequence, single=single)]
        start, stop = self._single_spans(self._packed(sequence).of(window), sequence)
        return list(zip(start.tolist(), stop.tolist(), strict=True))

    def longest(self, sequence: int) -> int:
        """The inputs of the longest single window; one pass over the documents."""
        some = (np.arange(at, min(at + _CHUNK, len(self.end_D))) for at in range(0, len(self.end_D), _CHUNK))
        spans = (self._documents(number, sequence)[:2] for number in some)
        return min(sequence, max(int((end - begin).max()) for begin, end in spans) - 1)

    def rows_of(self, samples: npt.ArrayLike) -> Ints:
        """The windows of these samples, those of each one after the other."""
        return (np.asarray(samples, np.int64).ravel()[:, None] * self.rows + np.arange(self.rows)).ravel()

    def labels(self, windows: npt.ArrayLike, sequence: int, *, single: bool = False) -> Ints:
        """How many labels each of these windows counts; no token has to be read for that."""
        if self.best_fit and not single:
            each = [self._packed(sequence).of(window) for window in np.ravel(np.asarray(windows, np.int64)).tolist()]
            return np.array([int(self.labels(members, sequence, single=True).sum()) for members in each], np.int64)
        start, stop = self.spans(windows, sequence, single=single)
        if (context := self.context) is not None:
            spans = zip(start.tolist(), stop.tolist(), strict=True)
            return np.array([int((self.read(a + 1, b + 1) // context % 2 == 0).sum()) for a, b in spans], np.int64)
        ends = np.searchsorted(self.end_D, stop.astype(self.end_D.dtype), "right") - np.searchsorted(
            self.end_D, start.astype(self.end_D.dtype), "right"
        )
        return stop - start - ends

    def is_bad(self, window: int, sequence: int) -> bool:
        """Whether a single window is written as an answer that was rejected, or is labelled as a bad one."""
        start, _ = self.span(window, sequence, single=True)
        return self.context is not None and int(self.read(start, start + 1)[0]) >= 2 * self.context

    def _packed(self, sequence: int) -> "Packs":
        """One pass over the single windows, then kept."""
        if sequence not in self._packs:
            count = self.windows(sequence, single=True)
            some = (np.arange(at, min(at + _CHUNK // _STRIDE, count)) for at in range(0, count, _CHUNK // _STRIDE))
            sizes = [stop - start for start, stop in (self._single_spans(one, sequence) for one in some)]
            self._packs[sequence] = best_fit(np.concatenate([np.zeros(0, np.int64), *sizes]), sequence)
        return self._packs[sequence]

    def _windows_before(self, sequence: int) -> Ints:
        """One pass over the documents, then kept: an eighth of a byte for each."""
        if sequence not in self._before:
            found = [np.zeros(1, np.int64)]
            for at in range(0, len(self.end_D), _CHUNK):
                _, _, count_D = self._documents(np.arange(at, min(at + _CHUNK, len(self.end_D))), sequence)
                found.append(np.add.reduceat(count_D, np.arange(0, len(count_D), _STRIDE)))
            self._before[sequence] = np.cumsum(np.concatenate(found))
        return self._before[sequence]

    def _documents(self, number: Ints, sequence: int) -> tuple[Ints, Ints, Ints]:
        """Of documents: the place of the first token, the place after the last, and how many windows each makes."""
        end = self.end_D[number].astype(np.int64)
        begin = np.where(number > 0, self.end_D[number - 1].astype(np.int64), 0)
        return begin, end, np.maximum(0, -(-(end - begin - 1) // sequence))

    def _single_spans(self, window_M: Ints, sequence: int) -> tuple[Ints, Ints]:
        before = self._windows_before(sequence)
        block_M = np.searchsorted(before, window_M, "right") - 1
        number_MK = np.minimum(block_M[:, None] * _STRIDE + np.arange(_STRIDE), len(self.end_D) - 1)
        begin_MK, end_MK, count_MK = self._documents(number_MK, sequence)
        rest_M = window_M - before[block_M]
        until_MK = np.cumsum(count_MK, 1)
        at_M = (until_MK <= rest_M[:, None]).sum(1)
        row_M = np.arange(len(window_M))
        own_M = rest_M - until_MK[row_M, at_M] + count_MK[row_M, at_M]  # the how-manieth of its document
        start_M = begin_MK[row_M, at_M] + own_M * sequence
        return start_M, np.minimum(start_M + sequence, end_MK[row_M, at_M] - 1)


@dataclass(frozen=True)
class Packs:
    """Which single windows each window of a best fit has, one after the other."""

    members_M: Ints
    first_W: Ints
    """Where in these each begins, and where all end."""

    def of(self, window: int) -> Ints:
        """The single windows of one."""
        return self.members_M[self.first_W[window] : self.first_W[window + 1]]


def best_fit(size_M: Ints, room: int) -> Packs:
    """Put pieces of these sizes, none above `room`, into windows of that room: the longest first, of two as long the
    first, each into a window where least is left of those where it fits."""
    order = np.argsort(-size_M, kind="stable")
    bins: list[list[int]] = []
    open_ones: dict[int, list[int]] = {}  # by what is left
    lefts: list[int] = []  # in order
    for member, size in zip(order.tolist(), size_M[order].tolist(), strict=True):
        at = bisect_left(lefts, size)
        if at == len(lefts):
            own, left = len(bins), room
            bins.append([])
        else:
            left = lefts[at]
            own = open_ones[left].pop()
            if not open_ones[left]:
                del open_ones[left], lefts[at]
        bins[own].append(member)
        if (rest := left - size) not in open_ones:
            open_ones[rest] = []
            insort(lefts, rest)
        open_ones[rest].append(own)
    members = np.array([member for one in bins for member in one], np.int64)
    return Packs(members, np.cumsum([0, *map(len, bins)], dtype=np.int64))


@dataclass(frozen=True)
class Batch:
    """Inputs, the labels that follow them, and where in its document each input stands; all int64."""

    inputs_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor | None
    """None: a row holds one document from its left end on, and a model is told nothing of positions."""
    bad_B: Tensor | None = None
    """Of answers with labels: which rows are bad ones."""
    others: "Batch | None" = None
    """Of these: what each row answers, answered by another sample's answer."""

    def cut(self, length: int) -> "Batch":
        """With rows of this length, of single documents that all end before it."""
        inputs_BS, labels_BS = (x_BS[:, :length].contiguous() for x_BS in (self.inputs_BS, self.labels_BS))
        others = None if self.others is None else self.others.cut(length)
        return replace(self, inputs_BS=inputs_BS, labels_BS=labels_BS, others=others)


def collate(
    rows: Sequence[tuple[Split, int] | None], sequence: int, fill: int, device: torch.device, *, single: bool = False
) -> Batch:
    """Stack windows of splits into a batch. None is an empty row; what is empty holds `fill` and counts nothing.

    A sample of several rows is given as its windows (`Split.rows_of`).
    """
    inputs_BS = np.full((len(rows), sequence), fill, np.int64)
    labels_BS = np.full((len(rows), sequence), IGNORE, np.int64)
    positions_BS = np.tile(np.arange(sequence), (len(rows), 1))
    for row, place in enumerate(rows):
        if place is not None:
            _lay(*place, sequence, single, inputs_BS[row], labels_BS[row], positions_BS[row])
    inputs, labels, positions = (torch.from_numpy(x_BS).to(device) for x_BS in (inputs_BS, labels_BS, positions_BS))
    return Batch(inputs, labels, None if single else positions)


def labelled(own: Batch, rows: Sequence[tuple[Split, int] | None], before: Batch, fill: int) -> Batch:
    """A batch of single windows with their labels, and with the answers of the rows of `before` in its own's place."""
    sequence = own.inputs_BS.shape[1]
    bad_B = torch.zeros(len(rows), dtype=torch.bool, device=own.inputs_BS.device)
    inputs_BS, labels_BS = torch.full_like(own.inputs_BS, fill), torch.full_like(own.labels_BS, IGNORE)
    for row, place in enumerate(rows):
        if place is None:
            continue
        bad_B[row] = place[0].is_bad(place[1], sequence)
        at = int((own.labels_BS[row] != IGNORE).nonzero()[0])  # where the last token of the prompt stands
        answer = before.labels_BS[row][before.labels_BS[row] != IGNORE][: sequence - 1 - at]
        inputs_BS[row, : at + 1] = own.inputs_BS[row, : at + 1]
        inputs_BS[row, at + 1 : at + len(answer)] = answer[:-1]
        labels_BS[row, at : at + len(answer)] = answer
    return replace(own, bad_B=bad_B, others=Batch(inputs_BS, labels_BS, None))


def _lay(
    split: Split, window: int, sequence: int, single: bool, inputs_S: Ints, labels_S: Ints, positions_S: Ints
) -> None:
    if split.best_fit and not single:
        _lay_pieces(split, split.pieces(window, sequence), inputs_S, labels_S, positions_S)
        return
    start, stop = split.span(window, sequence, single=single)
    count = _tokens_of(split, start, stop, inputs_S, labels_S)
    if single:
        return
    kind = split.end_D.dtype.type
    first, last = split.end_D.searchsorted(np.array([start, stop], kind), "right").tolist()
    if first == last and count == len(positions_S):
        return  # all of one document
    ends_E = split.end_D[first:last].astype(np.int64) - start
    labels_S[ends_E - 1] = IGNORE
    begin_S = np.zeros_like(positions_S)
    begin_S[ends_E[ends_E < len(begin_S)]] = ends_E[ends_E < len(begin_S)]
    if count < len(begin_S):
        begin_S[count] = count  # what is filled up stands apart, like a document
    positions_S -= np.maximum.accumulate(begin_S)


def _tokens_of(split: Split, start: int, stop: int, inputs_S: Ints, labels_S: Ints) -> int:
    """Lay the tokens of a span at the begin of a row; how many inputs that are."""
    tokens_T, count = split.read(start, stop + 1), stop - start
    inputs_S[:count] = tokens_T[:-1]
    labels_S[:count] = tokens_T[1:]
    if split.context is not None:
        labels_S[:count] = np.where(tokens_T[1:] // split.context % 2, IGNORE, tokens_T[1:] % split.context)
        inputs_S[:count] %= split.context
    return count


def _lay_pieces(
    split: Split, pieces: Sequence[tuple[int, int]], inputs_S: Ints, labels_S: Ints, positions_S: Ints
) -> None:
    at = 0
    for start, stop in pieces:
        count = _tokens_of(split, start, stop, inputs_S[at:], labels_S[at:])
        positions_S[at:] -= positions_S[at]
        at += count
    if at < len(positions_S):
        positions_S[at:] -= positions_S[at]  # what is filled up stands apart, like a document
