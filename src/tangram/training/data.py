"""The text a job trains on, as bytes: files -> documents -> samples -> batches.

A token is a byte, so nothing has to be trained or downloaded before the first step; `END` opens and closes every
document. A sample is a window of one document, never of two, so the last window of a file is short and ranks count
different numbers of tokens: the loss must divide by the number in the global batch (see `loop`).

Every choice is a function of (seed, number of the sample in the job), none of the rank: the stream of samples is the
same on any number of ranks, and a rank knows the token count of the whole global batch without a collective.

Trade-off: the corpus is held in memory whole, on every rank (the standard library is some 10 MB).
"""

# ruff: noqa: N806, N815  a tensor carries its dims in its name

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.errors import UserError
from tangram.training.plan import DataPlan

END = 256  # before and after every document; also fills short samples, where no label counts it
VOCABULARY = 257
IGNORE = -100  # a label that is not counted
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Samples over one long row of tokens: sample i is `tokens_N[start_W[i] : start_W[i] + size_W[i] + 1]`."""

    tokens_N: npt.NDArray[np.int16]
    start_W: Ints
    size_W: Ints  # the number of labels of each sample, which is the number of tokens it counts

    def __len__(self) -> int:
        return len(self.start_W)

    def digest(self) -> str:
        """A fixed text for the content, by which ranks know that they read the same."""
        return hashlib.blake2b(self.tokens_N.tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Batch:
    """Inputs and the labels that follow them; a row of `None` counts nothing."""

    inputs_BS: Tensor
    labels_BS: Tensor


@dataclass(frozen=True)
class RankBatches:
    """One rank's part of a global batch, in micro-batches, with the tokens counted in the whole of it."""

    micro: tuple[Batch, ...]
    counted: int


def read_corpus(data: DataPlan) -> tuple[Split, Split]:
    """The training and the held-out split.

    A file is held out by the hash of its path: adding files moves none from one split to the other. A training file
    with the content of a held-out one (a copy, a link) is left out, for it would be learnt by heart.
    """
    root = Path(sysconfig.get_path("stdlib")) if data.root == "stdlib" else Path(data.root)
    if not root.is_dir():
        raise UserError(f'the folder "{root}" in data.root does not exist: give a folder of text files or "stdlib"')
    training: dict[Path, bytes] = {}
    held_out: dict[Path, bytes] = {}
    for path in _matches(root, data.pattern):
        name = path.relative_to(root)
        if path.is_file() and not SKIPPED_FOLDERS.intersection(name.parts[:-1]):
            (held_out if _fraction(name.as_posix()) < data.held_out else training)[path] = _read(path)
    known = set(held_out.values())
    training = {path: text for path, text in training.items() if text not in known}
    for kind, paths in (("training", training), ("held-out", held_out)):
        if not paths:
            raise UserError(
                f'no {kind} file among the {len(training) + len(held_out)} that match "{data.pattern}" under "{root}": '
                f"change data.pattern, or data.held_out (now {data.held_out})"
            )
    return _split(training.values(), data.sequence), _split(held_out.values(), data.sequence)


def _matches(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f'data.pattern = "{pattern}" cannot be used: {error}. Give one relative to data.root, as in "**/*.py"'
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f'the file "{path}" matches data.pattern and cannot be read: {error.strerror}. Leave it out by data.pattern'
        ) from None


def _fraction(text: str) -> float:
    """A fixed number in [0, 1) for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _split(texts: Iterable[bytes], sequence: int) -> Split:
    documents = [np.frombuffer(text, dtype=np.uint8) for text in texts]
    pieces: list[npt.NDArray[np.int16]] = []
    starts: list[int] = []
    sizes: list[int] = []
    position = 0
    for document in documents:
        pieces += [np.array([END], np.int16), document.astype(np.int16), np.array([END], np.int16)]
        labels = len(document) + 1
        starts += range(position, position + labels, sequence)
        sizes += [min(sequence, labels - at) for at in range(0, labels, sequence)]
        position += len(document) + 2
    return Split(np.concatenate(pieces), np.array(starts, np.int64), np.array(sizes, np.int64))


def sample_stream(split: Split, seed: int, first: int, count: int) -> list[int]:
    """Samples number `first` to `first + count` of the job: every epoch is its own shuffle of the split."""
    chosen: list[int] = []
    epoch, offset = divmod(first, len(split))
    while len(chosen) < count:
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(split))
        chosen += order[offset : offset + count - len(chosen)].tolist()
        epoch, offset = epoch + 1, 0
    return chosen


def collate(split: Split, samples: Sequence[int | None], sequence: int, device: torch.device) -> Batch:
    """Stack samples into one batch, short ones filled with tokens that no label counts."""
    inputs_BS = np.full((len(samples), sequence), END, np.int64)
    labels_BS = np.full((len(samples), sequence), IGNORE, np.int64)
    for row, sample in enumerate(samples):
        if sample is None:
            continue
        start, size = int(split.start_W[sample]), int(split.size_W[sample])
        window = split.tokens_N[start : start + size + 1]
        inputs_BS[row, :size] = window[:-1]
        labels_BS[row, :size] = window[1:]
    return Batch(torch.from_numpy(inputs_BS).to(device), torch.from_numpy(labels_BS).to(device))


def step_batches(
    split: Split,
    data: DataPlan,
    *,
    seed: int,
    step: int,
    rank: int,
    world: int,
    device: torch.device,
) -> RankBatches:
    """What rank `rank` of `world` trains on at `step`: its contiguous share of the global batch's rows."""
    samples = sample_stream(split, seed, step * data.global_batch, data.global_batch)
    share = data.global_batch // world
    mine = samples[rank * share : (rank + 1) * share]
    micro = [mine[at : at + data.micro_batch] for at in range(0, share, data.micro_batch)]
    return RankBatches(
        micro=tuple(collate(split, rows, data.sequence, device) for rows in micro),
        counted=int(split.size_W[samples].sum()),
    )


def held_out_samples(split: Split, data: DataPlan) -> list[int]:
    """The samples that the held-out loss is measured on: the same for every seed, step and number of ranks."""
    return sample_stream(split, seed=0, first=0, count=min(data.held_out_samples, len(split)))


def held_out_batches(split: Split, data: DataPlan, *, rank: int, world: int, device: torch.device) -> Iterator[Batch]:
    """One rank's share of the held-out samples; empty rows where they run out, so that all get as many batches."""
    rows: list[int | None] = list(held_out_samples(split, data))
    width = data.micro_batch * world
    rows += [None] * (-len(rows) % width)
    for at in range(rank * data.micro_batch, len(rows), width):
        yield collate(split, rows[at : at + data.micro_batch], data.sequence, device)


def unigram_entropy(split: Split, samples: Sequence[int]) -> float:
    """Entropy in nats of the tokens to be predicted: no model that ignores the context gets a lower loss."""
    labels_M = np.concatenate([_labels(split, sample) for sample in samples])
    counts_V = np.bincount(labels_M, minlength=VOCABULARY).astype(np.float64)
    share_V = counts_V[counts_V > 0] / counts_V.sum()
    return -math.fsum((share_V * np.log(share_V)).tolist())


def _labels(split: Split, sample: int) -> npt.NDArray[Any]:
    start, size = int(split.start_W[sample]), int(split.size_W[sample])
    return split.tokens_N[start + 1 : start + size + 1]
