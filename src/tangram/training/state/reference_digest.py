"""Whether a run that goes on compares with the reference that it began with.

No checkpoint has the reference: it is read from the model's weights again. Its digest stands in the checkpoint, and is
the same on any mesh.
"""

import hashlib
import json
from pathlib import Path

import torch

from tangram.checkpoint.saving.file_layout import Outgoing, add_piece
from tangram.checkpoint.saving.rank_shares import mine
from tangram.checkpoint.store import digest
from tangram.checkpoint.store.digest import Sums
from tangram.errors import UserError
from tangram.training.parallel.model import ParallelModel
from tangram.training.state.restore import describe
from tangram.training.state.state import JobState, TensorPlaces, entries

REFERENCE = "reference"
"""Its key in what a checkpoint says of its run."""


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


def refuse_other_reference(checkpoint: Path, now: str) -> None:
    """Raise UserError where a run began with other values; one that was saved before they were told is believed."""
    if describe(checkpoint).about.get(REFERENCE, now) != now:
        raise UserError(
            f'the reference that "{checkpoint}" was trained against had other values than model.path (or lora.start) '
            "has now: put back the weights that the run began with"
        )
