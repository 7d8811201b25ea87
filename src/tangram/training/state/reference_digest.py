"""Whether a run that goes on compares with the reference, or learns from the teacher, that it began with.

No checkpoint has either: they are read from their weights again. Their digest stands in the checkpoint, and is the same
on any mesh.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tangram.checkpoint.saving.file_layout import Outgoing, add_piece
from tangram.checkpoint.state.entries import mine
from tangram.checkpoint.store import digest
from tangram.checkpoint.store.digest import Sums
from tangram.errors import UserError
from tangram.training.parallel.model import ParallelModel
from tangram.training.state.restore import describe
from tangram.training.state.state import JobState, TensorPlaces, entries

REFERENCE = "reference"
"""Its key in what a checkpoint says of its run."""
TEACHER = "teacher"


def reference_digest(model: ParallelModel) -> str:
    """Of what is trained, as it is now. Collective over the world."""
    peers = model.world.peers
    trained = {f"model.{name}" for name, p in model.module.named_parameters() if p.requires_grad}
    here = entries(JobState(model.module, None, plain=model.plain), TensorPlaces(model.plan, model.world))
    own: dict[str, Sums] = {}
    for entry in mine((entry for entry in here if entry.name in trained), peers.index):
        data = entry.local.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        add_piece(Outgoing(entry.name, entry.spec, entry.region), 0, data, own)
    total: dict[str, Sums] = {}
    for found in peers.all_words(own):
        for name, sums in found.items():
            total[name] = digest.add(total.get(name, digest.NOTHING), sums)
    return hashlib.sha256(json.dumps(total, sort_keys=True).encode()).hexdigest()[:32]


def begin_of_others(model: ParallelModel, checkpoint: Path | None, kept: str | None = None) -> dict[str, str]:
    """What a checkpoint says of the reference and of the teacher, as they are now. Collective over the world. `kept`:
    the digest of what was kept of a teacher, in its place.

    Raises UserError where a run goes on from a checkpoint that began with others; one that was saved before they were
    told is believed.
    """
    others = {
        REFERENCE: (None if model.reference is None else model, "model.path (or lora.start)"),
        TEACHER: (model.teacher, "distill.cache" if kept else "distill.teacher"),
    }
    found = {what: reference_digest(other) for what, (other, _) in others.items() if other is not None}
    found |= {TEACHER: kept} if kept else {}
    before: Mapping[str, Any] = {} if checkpoint is None else describe(checkpoint).about
    for what, now in found.items():
        if before.get(what, now) != now:
            raise UserError(
                f'the {what} that "{checkpoint}" was trained against had other values than {others[what][1]} '
                "has now: put back the weights that the run began with"
            )
    return found
