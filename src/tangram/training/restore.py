"""Load the state of a job from a checkpoint, into any layout on any number of ranks.

The index of the checkpoint gives pieces, the plan gives the regions that a rank holds, and `tangram.relayout` proves
coverage and copies. Everything that can be known beforehand is checked before the first byte of the model changes.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.checkpoint.folders import MARKER, Marker, digest, read_marker
from tangram.checkpoint.formats import dcp
from tangram.errors import UserError
from tangram.planner.plan import Plan
from tangram.relayout import Piece, TensorSpec, bind, execute
from tangram.relayout import plan as plan_copies
from tangram.training.state import Entry, JobState, Places, Progress, entries, frozen
from tangram.training.world import World

HERE = "here"  # the place of the tensors that a checkpoint is read into


def load(path: Path, state: JobState, plan: Plan, world: World | None) -> Progress:
    """Fill a job's state from a checkpoint of any layout and any number of ranks; how far it was.

    `plan` and `world` are of the job that goes on; without a world everything is whole in this process. A rank reads
    the pieces that have something of what it holds. Not collective. Raises UserError for a checkpoint that is not
    whole, is damaged, or is of another model.
    """
    marker = read_marker(path)
    progress = _progress(path, marker)
    targets = entries(state, Places(plan, world))
    index = _checked_index(path, marker)
    specs = {entry.name: entry.spec for entry in targets}
    found = {name: spec for name, spec in index.specs.items() if state.optimiser is not None or name in specs}
    if state.optimiser is not None:
        _refuse_other_frozen(path, marker, frozen(state))
    _refuse_other_model(path, found, specs)
    pieces: dict[str, list[Piece]] = {name: [] for name in specs}
    for piece in index.pieces:
        if piece.tensor in pieces:
            pieces[piece.tensor].append(piece)
    read = dcp.chunk_reader(path, {name: mark.sums for name, mark in marker.files.items()})
    for entry in targets:  # one by one, so that only one tensor's pieces are in memory beside the model
        if entry.region:
            same = {entry.name: entry.spec}
            copies = plan_copies(bind("{name*} -> {name*}", same, same), pieces[entry.name], [_want(entry)])
            execute(copies, read, {(HERE, entry.name): entry.local})
    state.progress = progress
    return progress


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself, without its tensors."""

    progress: Progress
    about: Mapping[str, Any]
    frozen: tuple[str, ...]


def describe(path: Path) -> Description:
    """What the checkpoint in the folder `path` is of. Raises UserError for one that is not whole."""
    marker = read_marker(path)
    return Description(_progress(path, marker), marker.about, marker.frozen)


def _progress(path: Path, marker: Marker) -> Progress:
    try:
        found = marker.progress
        return Progress(int(found["step"]), int(found["samples"]), int(found["tokens"]), float(found["seconds"]))
    except KeyError as error:
        raise UserError(f'the {MARKER} of the checkpoint "{path}" is damaged: its progress lacks {error}') from None


def _want(entry: Entry) -> Piece:
    return Piece(HERE, entry.name, entry.region)


def _checked_index(path: Path, marker: Marker) -> dcp.DcpIndex:
    """The index of a checkpoint; its bytes are checked before they are unpickled."""
    mark = marker.files.get(dcp.INDEX)
    if mark is None or zlib.crc32((path / dcp.INDEX).read_bytes()) != mark.sums.get(0):
        raise UserError(f'the "{dcp.INDEX}" of the checkpoint "{path}" is damaged: its bytes are not those written')
    index = dcp.read_index(path)
    if digest(index.specs) != marker.digest:
        raise UserError(f'the checkpoint "{path}" is damaged: its tensors are not those that {MARKER} names')
    return index


def _refuse_other_frozen(path: Path, marker: Marker, now: tuple[str, ...]) -> None:
    then = set(marker.frozen)
    newly, freed = sorted(set(now) - then), sorted(then - set(now))
    if newly or freed:
        what, name = ("trained", newly[0]) if newly else ("frozen", freed[0])
        raise UserError(
            f'the checkpoint "{path}" was written with {name} {what} ({len(newly) + len(freed)} parameter(s) differ): '
            "resume with the same model.freeze"
        )


def _refuse_other_model(path: Path, found: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> None:
    differences = [f"it lacks {name}" for name in wanted if name not in found]
    differences += [f"it has {name}" for name in found if name not in wanted]
    for name in (name for name in wanted if name in found):
        a, b = found[name], wanted[name]
        if a != b:
            differences.append(f"its {name} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}")
    if differences:
        more = f" ({len(differences)} differences in all)" if len(differences) > 1 else ""
        raise UserError(f'the checkpoint "{path}" is of another model than the plan\'s: {differences[0]}{more}')
