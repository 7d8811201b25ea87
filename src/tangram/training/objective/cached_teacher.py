"""What a teacher says of rows of a job, in a folder: of each token that counts its likeliest classes and the rest.

    index.json             what it was made of, and of how many rows; written last
    RANK-NUMBER.safetensors
        keys     (R, 16) uint8     of each row a hash of its tokens, labels and places up to the last that counts
        ends     (R,) int64        after which of the tokens here it ends
        sums     (R,) int64        checksums of what follows of it, which is read with every row
        classes  (N, K) int32      of each of its tokens that count
        logp     (N, K + 1) float32     logarithms of the shares of these and of the rest, at a temperature

So 8 K + 4 bytes a token that counts. A row is found by what it is, whatever its place in the order, the mesh and the
length that rows are filled up to; one that is not there, or is damaged, is not made up.
"""

# ruff: noqa: N803, N806, N815  a tensor carries its dims in its name

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  typed in part
from torch import Tensor

from tangram.checkpoint.store.manifest import checksum
from tangram.errors import UserError
from tangram.kernels.divergence import FAR, TopRows
from tangram.schema.job import Job
from tangram.training.data import IGNORE, Batch

INDEX = "index.json"
FILE_BYTES = 1 << 28
"""Of a file, about."""
AT_ONCE = 1 << 26
"""Bytes of logits that are sorted at a time."""


class TopLogits(NamedTuple):
    """What a teacher says of a batch: `TopRows` of each token, of which only those that count are asked for."""

    classes_BSK: Tensor
    logp_BSC: Tensor
    shared: int
    """Of how many classes, from the first."""


def row_keys(batch: Batch) -> Iterator[tuple[bytes, Tensor] | None]:
    """Of each row its key, and which of its tokens count; None of a row of which none does."""
    inputs_BS, labels_BS = batch.inputs_BS.cpu(), batch.labels_BS.cpu()
    for row, counted_S in enumerate(labels_BS != IGNORE):
        at_N = counted_S.nonzero()[:, 0]
        if not len(at_N):
            yield None
            continue
        end = int(at_N[-1]) + 1
        places_S = torch.arange(end) if batch.positions_BS is None else batch.positions_BS[row, :end].cpu()
        told = torch.stack([inputs_BS[row, :end], labels_BS[row, :end], places_S]).int().numpy().tobytes()
        yield hashlib.blake2b(told, digest_size=16).digest(), at_N


@torch.no_grad()
def top_rows(logits_NV: Tensor, top: int, shared: int, temperature: float) -> TopRows:
    """The likeliest of the first `shared` classes, computed in float32 of some rows at a time."""
    found: list[TopRows] = []
    size = max(1, AT_ONCE // (4 * shared))
    for first in range(0, len(logits_NV), size):
        logp_NV = (logits_NV[first : first + size, :shared].float() / temperature).log_softmax(1)
        logp_NK, classes_NK = logp_NV.topk(top)
        rest_N1 = logp_NV.scatter_(1, classes_NK, -torch.inf).logsumexp(1, keepdim=True).clamp_(min=FAR)
        found.append(TopRows(classes_NK, torch.cat([logp_NK, rest_N1], 1)))
    return TopRows(*(torch.cat([getattr(one, name) for one in found]) for name in TopRows._fields))


def _sum_of(rows: TopRows) -> int:
    """The checksum of what is kept of a row, as int64 has it."""
    data = b"".join(one.contiguous().numpy().tobytes() for one in (rows.classes_NK.int(), rows.logp_NC))
    return checksum(data) - (1 << 63)


class CacheWriter:
    """A rank's files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.files: list[str] = []
        self.known: set[bytes] = set()
        self._rows: list[tuple[bytes, TopRows]] = []
        self._bytes = 0

    def add(self, key: bytes, rows: TopRows) -> None:
        """Keep what is said of a row, once."""
        if key not in self.known:
            self.known.add(key)
            self._rows.append((key, TopRows(rows.classes_NK.int().cpu(), rows.logp_NC.cpu())))
            self._bytes += sum(x.nbytes for x in self._rows[-1][1])
            if self._bytes >= FILE_BYTES:
                self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        keys, rows = zip(*self._rows, strict=True)
        tensors = {
            "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, 16),
            "ends": torch.tensor([len(one.logp_NC) for one in rows]).cumsum(0),
            "sums": torch.tensor([_sum_of(one) for one in rows]),
            "classes": torch.cat([one.classes_NK for one in rows]),
            "logp": torch.cat([one.logp_NC for one in rows]),
        }
        name = f"{self._rank:05d}-{len(self.files):05d}.safetensors"
        save_file(tensors, self._folder / name)
        self.files.append(name)
        self._rows, self._bytes = [], 0


def made_of(plan: Job, text: str, teacher: str | None) -> dict[str, Any]:
    """What of a job a folder has to be made of. `text`: the digest of its text and tokenizer; `teacher`: the stamp of
    the directory of its teacher, None where that is not here."""
    assert plan.distill is not None  # the task says so
    return {
        "data.sequence": plan.data.sequence,
        "data.packing": plan.data.packing,
        "distill.temperature": plan.distill.temperature,
        "teacher": teacher,
        "text": text,  # the last, as others have a part in it
    }


@dataclass(frozen=True)
class CachedTeacher:
    """A folder that was opened."""

    folder: Path
    top: int
    shared: int
    """Of how many classes, from the first."""
    digest: str
    """Of the teacher's weights, and of what was kept of it."""
    _files: Sequence[Any]
    _places: dict[bytes, tuple[int, int, int, int]]
    """By key the number of the file, the first token and the one after the last, and the checksum."""

    def top_logits(self, batch: Batch) -> TopLogits:
        """Of a batch. Raises UserError for a row that is not there or is damaged."""
        shape, device = batch.labels_BS.shape, batch.labels_BS.device
        classes_BSK = torch.zeros(*shape, self.top, dtype=torch.int64)
        logp_BSC = torch.full((*shape, self.top + 1), FAR)
        for row, found in enumerate(row_keys(batch)):
            if found is None:
                continue
            key, at_N = found
            if key not in self._places:
                raise UserError(
                    f'distill.cache: "{self.folder}" has nothing of a row of this run: make it anew, for as many '
                    "steps, the same seed and the same data, by `tangram data teach`"
                )
            file, begin, end, wanted = self._places[key]
            rows = TopRows(*(self._files[file].get_slice(name)[begin:end] for name in ("classes", "logp")))
            if _sum_of(rows) != wanted:
                raise UserError(
                    f'distill.cache: "{self.folder}" has other bytes of a row than were written: make it anew by '
                    "`tangram data teach`"
                )
            classes_BSK[row, at_N], logp_BSC[row, at_N] = rows.classes_NK.long(), rows.logp_NC
        return TopLogits(classes_BSK.to(device), logp_BSC.to(device), self.shared)


@dataclass(frozen=True)
class CacheIndex:
    """What a folder says of itself."""

    made_of: Mapping[str, Any]
    teacher: str
    """The digest of its weights."""
    top: int
    classes: int
    """Of how many, that both models have, `top` are kept."""
    teacher_classes: int
    rows: int
    tokens: int
    files: Sequence[str]


_NONE = "has not what a teacher says: make it by `tangram data teach JOB --out FOLDER`"


def _index_of(plan: Job) -> tuple[Path, CacheIndex]:
    """The folder of a job and its index. Raises UserError for a folder that has none."""
    assert plan.distill is not None  # the task says so
    folder = Path(str(plan.distill.cache))
    try:
        return folder, CacheIndex(**json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f'distill.cache: "{folder}" {_NONE}') from None


def sizes_of_cache(plan: Job) -> tuple[int, int]:
    """How many classes are kept of a token, and of how many. Raises UserError as `_index_of`."""
    index = _index_of(plan)[1]
    return index.top, index.classes


def open_cache(plan: Job, text: str, classes: int, teacher: str | None) -> CachedTeacher | None:
    """The folder of a job; None where it has none. `text` and `teacher`: as of `made_of`; `classes`: the student's.

    Raises UserError for a folder that is none, or was made of another text, tokenizer, teacher or job.
    """
    if plan.distill is None or plan.distill.cache is None:
        return None
    folder, index = _index_of(plan)
    words = {"text": "another text or tokenizer", "teacher": f'another teacher than "{plan.distill.teacher}"'}
    for key, now in made_of(plan, text, teacher).items():
        if index.made_of.get(key) != now not in ("auto", None):
            of = (
                f"of {words.get(key) or f'{key} = {index.made_of[key]}'}"
                if key in index.made_of
                else "by an older version"
            )
            raise UserError(f'distill.cache: "{folder}" was made {of}: make it anew by `tangram data teach`')
    if min(classes, index.teacher_classes) != index.classes:
        raise UserError(f'distill.cache: "{folder}" was made for a student of other classes: make it anew for this one')
    try:
        files = [safe_open(folder / name, "pt") for name in index.files]
        places = {key: place for at, file in enumerate(files) for key, place in _places(at, file)}
    except (OSError, SafetensorError) as error:
        raise UserError(f'distill.cache: "{folder}" {_NONE} ({error})') from None
    return CachedTeacher(folder, index.top, index.classes, f"{index.teacher}-{index.top}", files, places)


def _places(at: int, file: Any) -> Iterator[tuple[bytes, tuple[int, int, int, int]]]:
    keys, ends, sums = (cast(Tensor, file.get_tensor(name)).numpy() for name in ("keys", "ends", "sums"))
    begins = np.concatenate([[0], ends[:-1]]).tolist()
    for key, *place in zip(keys, begins, ends.tolist(), sums.tolist(), strict=True):
        yield key.tobytes(), (at, *place)
