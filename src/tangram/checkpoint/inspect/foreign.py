"""A checkpoint of another program's format looked into: its tensors for a tree, the values of one, and all of it read.

Such a format is not digested, so to verify it is to prove that every element of every tensor is there once and can be
read. What torch writes (files of `torch.save`, DCP, Megatron-core) has a CRC-32 for each storage, which is compared.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.conversion.quantised import quantisation_of
from tangram.checkpoint.formats.archives.archive import TensorPlace, compare_sums
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.archives.state_dicts import Number
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import Count
from tangram.checkpoint.formats.common.outgoing import boxes
from tangram.checkpoint.formats.dcp import ByteSpan
from tangram.checkpoint.formats.detect import FORMATS, open_any
from tangram.checkpoint.formats.own import is_own
from tangram.checkpoint.formats.torch_dist import StackedRow
from tangram.checkpoint.inspect import quantised_weights, tree
from tangram.checkpoint.inspect.verify import VerifyReport
from tangram.checkpoint.inspect.verify import verify as verify_own
from tangram.checkpoint.saving.rank_parts import MODEL
from tangram.checkpoint.store import commits
from tangram.checkpoint.store.manifest import DTYPES, Manifest, StoredPiece, StoredTensor
from tangram.errors import UserError
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.relayout import bind

CHUNK = 1 << 25
"""Bytes that are read together."""
KEEP = 128 << 20
"""Bytes that are read before what was read is let go."""


@dataclass(frozen=True)
class Reading:
    """What came of reading all of a checkpoint."""

    path: Path
    format: str
    tensors: int
    nbytes: int
    findings: tuple[str, ...]
    seconds: float
    quantised: int = 0
    """Of the tensors, weights that are codes and scales, each counted once."""
    summed: bool = False
    """Whether all of it has checksums, which were compared."""

    @property
    def sound(self) -> bool:
        """Whether all is there and can be read."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path), "sound": self.sound, "findings": list(self.findings)}


def format_of(path: Path) -> str | None:
    """The format of another program that lies at a path; None of Tangram's own, and of what is in none."""
    if is_own(path) or not path.exists():
        return None
    return next((name for name, known in FORMATS.items() if name != "tangram" and known.fits(path)), None)


def is_foreign(path: Path) -> bool:
    """Whether nothing of Tangram's own lies at a path: no checkpoint, no part of one, no folder of some."""
    if not path.exists() or is_own(path) or (path / commits.MANIFEST).exists():
        return False
    return not (path.is_dir() and any(is_own(one) for one in path.iterdir()))


def refuse_unknown(path: Path) -> None:
    """Say what was seen at a path that has no checkpoint of any format. Raises UserError there."""
    if is_foreign(path):
        open_any(path)


def tensors_of(opened: OpenCheckpoint) -> list[StoredTensor]:
    """Its tensors as those of Tangram's own checkpoints are, without digests."""
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in opened.specs}
    for piece in opened.pieces:
        pieces[piece.tensor].append(StoredPiece(piece.region, "", 0))
    return [StoredTensor(name, spec, "", tuple(pieces[name])) for name, spec in opened.specs.items()]


def values_of(opened: OpenCheckpoint, name: str) -> tree.Values:
    """Look at the values of one tensor, in parts. Raises UserError where it is not there."""
    opened = quantised_weights.with_weights(opened, name)
    if name not in opened.specs:
        raise UserError(f'"{opened.path}" has no tensor {name!r}: `tangram checkpoint inspect` lists them')
    return tree.values_from(opened.specs[name], name, _parts(_filler(opened), opened, name))


def values_of_own(path: Path, manifest: Manifest, name: str) -> tree.Values:
    """The same of a checkpoint of Tangram's own; of a quantised weight what its codes stand for."""
    if isinstance(manifest.tensors.get(name), tree.QuantisedTensor):
        return values_of(open_any(path), name.removeprefix(f"{MODEL}."))
    return tree.values_of(path, manifest, name)


def read_all(path: Path, on_bytes: Callable[[int], None]) -> Reading:
    """Read every tensor of a checkpoint. What keeps one from being read is a finding."""
    begin, kind = time.perf_counter(), format_of(path) or ""
    try:
        opened = open_any(path)
        every = opened.uncut or opened  # also what is not the model's
        filler = _filler(every)
    except UserError as error:
        return Reading(path, kind, 0, 0, (str(error),), time.perf_counter() - begin)
    nbytes, findings = 0, list[str]()
    for name in every.specs:
        try:
            for part in _parts(filler, every, name):
                nbytes += part.nbytes
                on_bytes(part.nbytes)
        except UserError as error:
            findings.append(str(error))
    summed = not findings and _compare_sums(every, findings)
    tensors, weights = len(every.specs), 0
    if not findings and (quantised := quantisation_of(opened)) is not None:
        findings += [quantised.problem] if quantised.torn else []
        if not quantised.problem:
            weights = len(quantised.groups)
            tensors -= len(quantised_weights.owners_of(quantised.groups)) - weights
    return Reading(path, opened.format, tensors, nbytes, tuple(findings), time.perf_counter() - begin, weights, summed)


def _compare_sums(opened: OpenCheckpoint, findings: list[str]) -> bool:
    """Compare the checksums of all archives that tensors lie in. Whether each has them and no tensor lies elsewhere."""
    maps = Maps(opened.path if opened.path.is_dir() else opened.path.parent)
    spans: dict[tuple[str, int, int | None], None] = {}
    summed = True
    for place in (piece.place for piece in opened.pieces):
        span = place.span if isinstance(place, StackedRow) else place
        if isinstance(span, ByteSpan):
            spans[span.file, span.offset, span.length] = None
        elif isinstance(span, TensorPlace) and (maps.folder / span.file).is_file():
            spans[span.file, 0, None] = None
        elif not isinstance(span, Number | Count):  # which a tree has that was compared, too
            summed = False
    for span in spans:
        try:
            summed &= compare_sums(maps, *span)
        except UserError as error:
            findings.append(str(error))
    return summed and bool(spans)


def _filler(opened: OpenCheckpoint) -> Filler:
    return Filler(opened, bind(IDENTITY, opened.specs), opened.specs, KEEP)


def _parts(filler: Filler, opened: OpenCheckpoint, name: str) -> Iterator[Tensor]:
    spec = opened.specs[name]
    for box in boxes(spec.shape, max(1, CHUNK // DTYPES[spec.dtype])):
        values = torch.empty([b - a for a, b in box], dtype=getattr(torch, spec.dtype))
        if values.numel():
            filler.fill(name, Region.of([tuple(span(a, b) for a, b in box)]), values)
            yield values.reshape(-1)


def verify(path: Path | str) -> VerifyReport | Reading:
    """Read every byte of the checkpoint `path` once; `.sound` says whether nothing is wrong, `.findings` what is.

    Of Tangram's own format that is proved by checksums and digests (`VerifyReport`). Other formats have none: there it
    is proved that every element is there once and can be read (`Reading`). Raises UserError where there is no
    checkpoint.
    """
    path = Path(path)
    if format_of(path) is not None:
        return read_all(path, _no_progress)
    refuse_unknown(path)
    return verify_own(path)


def _no_progress(_: int) -> None:
    """Nobody watches."""
