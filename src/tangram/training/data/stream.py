"""The stream of samples: what each rank trains on, and what the held-out loss is measured on.

Sample k of a job is a pure function of (seed, k): the mix says which source it comes from, and each source is shuffled
anew in every epoch. Ranks only deal the samples out, so the position of the stream is the number of samples consumed,
whatever the number of ranks; and every rank knows, without a collective, how many labels the whole global batch counts.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from tangram.errors import UserError
from tangram.schema.job import DataPlan, Job
from tangram.training.data.corpus import Corpus, is_single
from tangram.training.data.mix import make_mix, permuted
from tangram.training.data.samples import IGNORE, Batch, Split, collate, labelled
from tangram.training.data.tokens import Tokens

Ints = npt.NDArray[np.int64]

LENGTHS = 8
"""Of rows of single documents, as many in each octave, and what all are multiples of: a derived model has a program
for each, and an eighth is filled up at most."""
ORDERED = 1024
"""Samples whose place in the text is found at once."""
LOOKED = 32
"""Steps of a job, as far from each other as may be, that say how long rows are in the mean."""
_HELD_OUT_SEED = 0  # the held-out samples are the same for every seed of a job


@dataclass(frozen=True)
class RankBatches:
    """One rank's part of a global batch, in micro-batches, with the labels counted in the whole of it."""

    micro: tuple[Batch, ...]
    counted: int
    firsts: tuple[int, ...]
    """The number of each micro-batch's first row in the order of the whole job."""
    begin: int = 0
    """That of the step's first row, on whatever rank it is."""
    total: int = 0
    """The rows of the global batch."""
    samples: int = 0
    """Those of the global batch, of one row or several."""
    first_tokens: int = 0
    """Of the first rows of its samples, how many tokens have one before them: more than are counted."""

    @property
    def length(self) -> int:
        return self.micro[0].inputs_BS.shape[1]

    def cut(self, length: int) -> "RankBatches":
        """With rows of this length, which is that of `step_length`."""
        if length == self.length:
            return self
        return replace(self, micro=tuple(one.cut(length) for one in self.micro))


def sample_ids(corpus: Corpus, data: DataPlan, seed: int, first: int, count: int) -> list[tuple[int, int]]:
    """Samples `first` to `first + count` of the job, each as (source, window of the source's training text)."""
    windows, weights = _windows(corpus.training, data), tuple(source.weight for source in data.sources)
    some = range(first // ORDERED, -(-(first + max(count, 1)) // ORDERED))
    found = np.concatenate([_ordered(windows, weights, seed, block) for block in some], axis=1)
    at = first - some.start * ORDERED
    source_B, window_B = found[:, at : at + count].tolist()
    return list(zip(source_B, window_B, strict=True))


@lru_cache(maxsize=16)
def _ordered(windows: tuple[int, ...], weights: tuple[float, ...], seed: int, block: int) -> Ints:
    """Source and window (2, `ORDERED`) of some samples that follow one another.

    To find one of them takes almost as long as to find all, so they are kept while they are dealt out.
    """
    places = make_mix(weights).places(np.arange(block * ORDERED, (block + 1) * ORDERED))
    return np.stack(_choose(windows, seed, *places))


def step_length(corpus: Corpus, data: DataPlan, seed: int, first_sample: int, ways: int = 1) -> int:
    """How long the rows of a step have to be for its longest document, the same on all ranks; one of `LENGTHS`.

    `data.sequence` where documents share windows. `ways`: into how many parts of two halves a row may be cut.
    """
    if not is_single(data):
        return data.sequence
    samples = sample_ids(corpus, data, seed, first_sample, data.global_batch)
    pairs_B2, longest = np.array(samples, np.int64), _longest_other(corpus, data, samples) if corpus.labelled else 1
    for source in _distinct(pairs_B2[:, 0]):
        split = corpus.training[source]
        rows_M = split.rows_of(pairs_B2[pairs_B2[:, 0] == source, 1])
        start_M, stop_M = split.spans(rows_M, data.sequence, single=True)
        longest = max(longest, int((stop_M - start_M).max()))
    return _rounded(longest, data.sequence, ways)


def step_lengths(corpus: Corpus, data: DataPlan, seed: int, steps: int) -> tuple[int, int]:
    """`step_length` in the mean of `steps` steps, as `LOOKED` of them say it, and that of no step is above."""
    if not is_single(data):
        return data.sequence, data.sequence
    longest = max(split.longest(data.sequence) for split in corpus.training)
    if corpus.labelled:  # a prompt and another's answer
        longest = min(2 * longest, data.sequence)
    some = np.unique(np.linspace(0, steps - 1, LOOKED, dtype=np.int64)).tolist()
    mean = np.mean([step_length(corpus, data, seed, step * data.global_batch) for step in some])
    return round(float(mean)), _rounded(longest, data.sequence)


def _longest_other(corpus: Corpus, data: DataPlan, samples: Sequence[tuple[int, int]]) -> int:
    """Of the prompts of samples, each with the answer of the sample before."""
    rows, device = _rows(corpus.training, samples), torch.device("cpu")
    answers_BS = collate(rows, data.sequence, corpus.fill, device, single=True).labels_BS.numpy() != IGNORE
    return min(data.sequence, int((answers_BS.argmax(1) + np.roll(answers_BS.sum(1), 1)).max()))


def _rounded(longest: int, sequence: int, ways: int = 1) -> int:
    octave = 1 << (longest - 1).bit_length() >> 1
    unit = math.lcm(max(octave // LENGTHS, LENGTHS), 2 * ways)
    return min(sequence, -(-longest // unit) * unit)


def step_batches(
    corpus: Corpus,
    data: DataPlan,
    *,
    seed: int,
    first_sample: int,
    index: int,
    size: int,
    micro_steps: int,
    device: torch.device,
) -> RankBatches:
    """What DP rank `index` of `size` trains on in the step that begins at `first_sample`: its share of the rows.

    Shares are contiguous and differ by one row at most; every rank gets `micro_steps` micro-batches, filled up with
    empty rows, so all of them join in every collective.
    """
    samples, each = sample_ids(corpus, data, seed, first_sample, data.global_batch), corpus.rows
    start, stop = (at * len(samples) // size for at in (index, index + 1))
    if stop - start > micro_steps * data.micro_batch:
        raise ValueError(f"{stop - start} samples do not fit into {micro_steps} micro-batches of {data.micro_batch}")
    width, first = data.micro_batch * each, (first_sample + start) * each
    mine = _rows(corpus.training, samples[start:stop])
    mine += [None] * (micro_steps * width - len(mine))
    before = _rows(corpus.training, [samples[number - 1] for number in range(start, stop)])
    counted, first_tokens = _count(corpus.training, samples, data)
    return RankBatches(
        micro=tuple(
            _batch(corpus, data, mine[at : at + width], before[at : at + width], device)
            for at in range(0, len(mine), width)
        ),
        counted=counted,
        firsts=tuple(range(first, first + len(mine), width)),
        begin=first_sample * each,
        total=data.global_batch * each,
        samples=len(samples),
        first_tokens=first_tokens,
    )


def held_out_samples(corpus: Corpus, data: DataPlan) -> list[tuple[int, int]]:
    """What the held-out loss is measured on, as (source, window): the same for every seed, step and number of ranks.

    The sources have their weights' shares, until one has no more. Raises UserError when nothing is held out.
    """
    windows = _windows(corpus.held_out, data)
    windows_N = np.array(windows)
    wanted = min(data.held_out_samples, int(windows_N.sum()))
    if not wanted:
        raise UserError("no text is held out to measure the loss on: set data.held_out above 0 and train anew")
    mix, chosen, first = make_mix(tuple(source.weight for source in data.measured)), list[tuple[int, int]](), 0
    while len(chosen) < wanted:
        count = max(wanted, len(mix.source_W))
        source_B, number_B = mix.places(np.arange(first, first + count))
        there_B = number_B < windows_N[source_B]
        source_B, window_B = _choose(windows, _HELD_OUT_SEED, source_B[there_B], number_B[there_B])
        chosen += zip(source_B.tolist(), window_B.tolist(), strict=True)
        first += count
    return chosen[:wanted]


def held_out_batches(corpus: Corpus, data: DataPlan, *, index: int, size: int, device: torch.device) -> Iterator[Batch]:
    """One rank's share of the held-out samples; empty rows where they run out, so that all get as many batches."""
    rows = _rows(corpus.held_out, held_out_samples(corpus, data))
    yield from _dealt(corpus, data, rows, index, size, device)


def batches_once(
    corpus: Corpus, data: DataPlan, *, seed: int, steps: int, index: int, size: int, device: torch.device
) -> Iterator[Batch]:
    """One rank's share of the rows of so many steps, each row once; else as `held_out_batches`."""
    samples = sorted({*sample_ids(corpus, data, seed, 0, steps * data.global_batch)})
    yield from _dealt(corpus, data, _rows(corpus.training, samples), index, size, device)


def _dealt(
    corpus: Corpus,
    data: DataPlan,
    rows: list[tuple[Split, int] | None],
    index: int,
    size: int,
    device: torch.device,
) -> Iterator[Batch]:
    own, before = data.micro_batch * corpus.rows, [*rows[-1:], *rows[:-1]]
    rows = rows + [None] * (-len(rows) % (own * size))
    for at in range(index * own, len(rows), own * size):
        yield _batch(corpus, data, rows[at : at + own], before[at : at + own], device)


def _batch(
    corpus: Corpus,
    data: DataPlan,
    rows: Sequence[tuple[Split, int] | None],
    before: Sequence[tuple[Split, int] | None],
    device: torch.device,
) -> Batch:
    """`before`: the windows of the samples before those of `rows`, whose answers stand beside labelled ones."""
    found = collate(rows, data.sequence, corpus.fill, device, single=is_single(data))
    if not corpus.labelled:
        return found
    before = [*before, *[None] * (len(rows) - len(before))]
    return labelled(found, rows, collate(before, data.sequence, corpus.fill, device, single=True), corpus.fill)


def unigram_entropy(corpus: Corpus, data: DataPlan) -> float:
    """Entropy in nats of the labels that held-out evaluation counts: no model without context gets a lower loss."""
    counts_V = np.zeros(0, np.int64)
    for batch in held_out_batches(corpus, data, index=0, size=1, device=torch.device("cpu")):
        labels_M = batch.labels_BS.numpy()
        here_V = np.bincount(labels_M[labels_M != IGNORE], minlength=len(counts_V))
        here_V[: len(counts_V)] += counts_V
        counts_V = here_V
    share_V = counts_V[counts_V > 0] / counts_V.sum()
    return -math.fsum((share_V * np.log(share_V)).tolist())


def padding(corpus: Corpus, data: DataPlan) -> float:
    """The share of the places of training samples that hold no token of a document and count nothing.

    Nearly 0 where documents share windows; of single documents it says how much of the computation is for nothing.
    """
    single, filled, weights = is_single(data), 0.0, 0.0
    for source, split in zip(data.sources, corpus.training, strict=True):
        # Every token but the last of a window is an input; of single documents that is the last of the document.
        inputs = split.size - (len(split.end_D) if single or split.best_fit else 1)
        filled += source.weight * inputs / (split.windows(data.sequence, single=single) * split.rows * data.sequence)
        weights += source.weight
    return 1 - filled / weights


SIDES: Mapping[int, tuple[str, ...]] = MappingProxyType({1: ("",), 2: ("chosen", "rejected")})
"""What each row of a sample is, by their number."""


class ShownSample(NamedTuple):
    """A row of a sample of the stream."""

    number: int
    """Of the sample."""
    side: str
    """Of a pair, which answer it is; of an answer with a label, what that says."""
    source: str
    runs: list[tuple[bool, str]]
    """Its text in order, in pieces that are in the loss or are not."""
    tokens: int
    counted: int


def shown_samples(job: Job, tokens: Tokens, corpus: Corpus, first: int, count: int) -> Iterator[ShownSample]:
    """Samples of the stream from number `first` on, as batches are made of them: a label says what is in the loss."""
    for number, (source, sample) in enumerate(sample_ids(corpus, job.data, job.seed, first, count), first):
        split = corpus.training[source]
        for side, window in zip(SIDES[corpus.rows], split.rows_of(sample).tolist(), strict=True):
            if corpus.labelled:
                side = "bad" if split.is_bad(window, job.data.sequence) else "good"
            marked = _marked(split, window, job.data, corpus.fill)
            runs = [(counts, tokens.spelled([i for _, i in some])) for counts, some in groupby(marked, lambda m: m[0])]
            counted = sum(one for one, _ in marked)
            yield ShownSample(number, side, job.data.sources[source].path, runs, len(marked), counted)


def _marked(split: Split, window: int, data: DataPlan, fill: int) -> list[tuple[bool, int]]:
    """The tokens of a window, and whether each is in the loss."""
    single, marked, at = is_single(data), list[tuple[bool, int]](), 0
    batch = collate([(split, window)], data.sequence, fill, torch.device("cpu"), single=single)
    for start, stop in split.pieces(window, data.sequence, single=single):
        labels, inputs = (
            cast("list[int]", x_BS[0, at : at + stop - start].tolist()) for x_BS in (batch.labels_BS, batch.inputs_BS)
        )
        last, at = int(split.read(stop, stop + 1)[0]), at + stop - start
        ids = [*inputs, last % (split.context or last + 1)]
        marked += zip([False, *(label != IGNORE for label in labels)], ids, strict=True)
    return marked


class Stream:
    """An endless iterator of one rank's `RankBatches`, for a training loop of one's own.

    A stream knows no model: with `data.packing = "auto"` documents share windows, and the loop has to see to it that
    they are kept apart; with "single" they do not, and `Batch.positions_BS` is None.

    `position` is the number of samples that all ranks together have consumed; save it, and set it to go on, on any
    number of ranks.
    """

    def __init__(
        self,
        corpus: Corpus,
        data: DataPlan,
        *,
        seed: int = 0,
        index: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        position: int = 0,
    ) -> None:
        if not 0 <= index < size <= data.global_batch:
            raise ValueError(f"rank {index} of {size} has no share of a global batch of {data.global_batch}")
        self.position = position
        self._corpus, self._data, self._seed = corpus, data, seed
        self._index, self._size, self._device = index, size, device or torch.device("cpu")

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> RankBatches:
        batches = step_batches(
            self._corpus,
            self._data,
            seed=self._seed,
            first_sample=self.position,
            index=self._index,
            size=self._size,
            micro_steps=-(-self._data.global_batch // (self._data.micro_batch * self._size)),
            device=self._device,
        )
        self.position += self._data.global_batch
        return batches


def _windows(splits: Sequence[Split], data: DataPlan) -> tuple[int, ...]:
    return tuple(split.windows(data.sequence, single=is_single(data)) for split in splits)


def _choose(windows_N: Sequence[int], seed: int, source_B: Ints, number_B: Ints) -> tuple[Ints, Ints]:
    """Sample number n of a source is in epoch n // windows; each epoch of each source is an own shuffle."""
    window_B = np.zeros_like(number_B)
    for source in _distinct(source_B):
        at_M = np.flatnonzero(source_B == source)
        windows = windows_N[source]
        number_M = number_B[at_M]
        epoch_M, place_M = number_M // windows, number_M % windows
        for epoch in _distinct(epoch_M):
            here = epoch_M == epoch
            window_B[at_M[here]] = permuted(place_M[here], windows, f"{seed}:{source}:{epoch}")
    return source_B, window_B


def _rows(splits: Sequence[Split], samples: Sequence[tuple[int, int]]) -> list[tuple[Split, int] | None]:
    """The windows of samples, each with its split."""
    return [(splits[source], row) for source, sample in samples for row in splits[source].rows_of(sample).tolist()]


def _count(splits: Sequence[Split], samples: Sequence[tuple[int, int]], data: DataPlan) -> tuple[int, int]:
    """How many labels samples count; and of those of several rows how many tokens of the first have one before them."""
    pairs_B2, counted, first_tokens = np.array(samples, np.int64), 0, 0
    for source in _distinct(pairs_B2[:, 0]):
        split = splits[source]
        rows_M = split.rows_of(pairs_B2[pairs_B2[:, 0] == source, 1])
        counted += int(split.labels(rows_M, data.sequence, single=is_single(data)).sum())
        if split.rows > 1:
            start_M, stop_M = split.spans(rows_M[:: split.rows], data.sequence, single=True)
            first_tokens += int((stop_M - start_M).sum())
    return counted, first_tokens


def _distinct(numbers: Ints) -> list[int]:
    return [int(number) for number in np.unique(numbers)]
