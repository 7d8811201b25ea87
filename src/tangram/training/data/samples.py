"""Packed samples: the documents of a split laid end to end and cut into windows of equal length.

A document is [begin?] tokens end. Window w takes `sequence` inputs from token w * sequence on, and the label of each is
the next token; windows overlap by that one token, so an epoch counts every label exactly once. The last window is short
and filled up: nothing of the text is dropped.

No label crosses documents: the last token of one has the label `IGNORE`, and position ids begin at 0 with each document
(and with each window), by which attention is kept within documents. The trade-off against one document in a window: all
of every window is trained on, and a document that a window's edge cuts loses its context there.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100  # a label that is not counted

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """The training or the held-out documents of a source, end to end."""

    size: int
    """How many tokens, begins and ends included."""
    end_D: npt.NDArray[np.uint64] | Ints
    """Where each document ends: the place after its last token."""
    read: Callable[[int, int], Ints]
    """The tokens from a place up to another."""

    def windows(self, sequence: int) -> int:
        """How many samples it makes."""
        return max(0, -(-(self.size - 1) // sequence))

    def labels(self, windows: npt.ArrayLike, sequence: int) -> Ints:
        """How many labels each of these windows counts; no token has to be read for that."""
        start = np.asarray(windows, np.int64) * sequence
        stop = np.minimum(start + sequence, self.size - 1)
        ends = np.searchsorted(self.end_D, stop.astype(self.end_D.dtype), "right") - np.searchsorted(
            self.end_D, start.astype(self.end_D.dtype), "right"
        )
        return stop - start - ends


@dataclass(frozen=True)
class Batch:
    """Inputs, the labels that follow them, and where in its document each input stands; all int64."""

    inputs_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor


def collate(rows: Sequence[tuple[Split, int] | None], sequence: int, fill: int, device: torch.device) -> Batch:
    """Stack windows of splits into a batch. None is an empty row; what is empty holds `fill` and counts nothing."""
    inputs_BS = np.full((len(rows), sequence), fill, np.int64)
    labels_BS = np.full((len(rows), sequence), IGNORE, np.int64)
    positions_BS = np.tile(np.arange(sequence), (len(rows), 1))
    for row, place in enumerate(rows):
        if place is not None:
            _lay(*place, sequence, inputs_BS[row], labels_BS[row], positions_BS[row])
    return Batch(*(torch.from_numpy(x_BS).to(device) for x_BS in (inputs_BS, labels_BS, positions_BS)))


def _lay(split: Split, window: int, sequence: int, inputs_S: Ints, labels_S: Ints, positions_S: Ints) -> None:
    start = window * sequence
    stop = min(start + sequence, split.size - 1)
    tokens_T = split.read(start, stop + 1)
    count = stop - start
    inputs_S[:count] = tokens_T[:-1]
    labels_S[:count] = tokens_T[1:]
    kind = split.end_D.dtype.type
    first, last = np.searchsorted(split.end_D, [kind(start), kind(stop)], "right")
    ends_E = split.end_D[first:last].astype(np.int64) - start
    labels_S[ends_E - 1] = IGNORE
    begin_S = np.zeros_like(positions_S)
    begin_S[ends_E[ends_E < len(begin_S)]] = ends_E[ends_E < len(begin_S)]
    if count < len(begin_S):
        begin_S[count] = count  # what is filled up stands apart, like a document
    positions_S -= np.maximum.accumulate(begin_S)
