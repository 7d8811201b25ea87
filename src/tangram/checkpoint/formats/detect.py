"""Which format a checkpoint is in, by what lies there: a table of the formats that are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tangram.checkpoint.formats import dcp, huggingface, own, rank_files, shards, torch_dist, torch_save
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common import unrecognised
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.deepspeed import zero
from tangram.checkpoint.formats.paddle import flex
from tangram.errors import UserError
from tangram.models.directory import hub_hint, refuse_pointers, unread_weights


@dataclass(frozen=True)
class ReadFormat:
    """How a format is known and opened."""

    said: str
    fits: Callable[[Path], bool]
    open: Callable[[Path, Maps], OpenCheckpoint]


FORMATS: Mapping[str, ReadFormat] = {
    "tangram": ReadFormat("a checkpoint of Tangram", own.is_own, own.open_folder),
    "torch_dist": ReadFormat(
        "Megatron-core's distributed checkpoint", torch_dist.is_torch_dist, torch_dist.open_folder
    ),
    "dcp": ReadFormat("torch's distributed checkpoint", lambda path: (path / dcp.INDEX).is_file(), dcp.open_folder),
    "deepspeed": ReadFormat("a checkpoint of DeepSpeed", zero.is_deepspeed, zero.open_folder),
    "paddle": ReadFormat("Paddle's flex checkpoint", flex.is_paddle, flex.open_folder),
    "hf": ReadFormat("a Hugging Face directory", huggingface.has_weights, huggingface.open_folder),
    "ranks": ReadFormat("files of ranks, as verl's", rank_files.is_rank_files, rank_files.open_folder),
    "shards": ReadFormat("safetensors without an index", shards.is_shards, shards.open_folder),
    "torch": ReadFormat("a file of torch.save", torch_save.is_torch, torch_save.open_path),
}
"""By name; the first that fits is it."""


def open_any(path: Path, maps: Maps | None = None) -> OpenCheckpoint:
    """A checkpoint of whichever format. Raises UserError where none fits, or what is there is not whole.

    `maps`: how its files are looked into, where they are not simply there.
    """
    if not path.exists():
        raise UserError(f'"{path}" is not there{hub_hint(path)}')
    refuse_pointers(path)
    for known in FORMATS.values():
        if known.fits(path):
            return known.open(path, maps or Maps(path))
    if path.is_dir() and (other := unread_weights(path)):
        raise UserError(f'"{path}" is in no format that is read: its weights {other}')
    what = unrecognised.seen(path, {one.said: one.fits for one in FORMATS.values()})
    raise UserError(f'"{path}" is no checkpoint in a format that is read: {what}')
