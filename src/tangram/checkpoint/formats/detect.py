"""The formats that are read and those that are written: two tables. A new one is a module, and a row in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tangram.checkpoint.formats import dcp, huggingface, own, rank_files, shards, torch_dist, torch_save
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.outgoing import WriteTask
from tangram.checkpoint.formats.deepspeed import zero
from tangram.checkpoint.formats.paddle import flex
from tangram.checkpoint.store.manifest import DTYPES
from tangram.checkpoint.store.safetensors_header import NAMES
from tangram.errors import UserError
from tangram.models.building.directory import hub_hint, refuse_pointers, unread_weights


@dataclass(frozen=True)
class ReadFormat:
    """How a format is known and opened."""

    title: str
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
    what = _seen(path, {one.title: one.fits for one in FORMATS.values()})
    raise UserError(f'"{path}" is no checkpoint in a format that is read: {what}')


NAMED = 3
"""Names in a sentence."""


def _seen(path: Path, kinds: Mapping[str, Callable[[Path], bool]]) -> str:
    """What was seen there. `kinds`: the formats by what they are called, and whether a place is in one."""
    if path.is_file():
        return f'it is a file that ends in "{path.suffix}"' if path.suffix else "it is a file without an ending"
    there = sorted(path.iterdir())
    if not there:
        return "it is empty"
    inside = [one for one in (*there, *path.glob("snapshots/*")) if one.is_dir()]  # of the hub's cache: links two below
    inside += [one for one in there if one.is_file() and one.name.startswith(("pytorch_model", "model"))]
    below = [(str(one.relative_to(path)), kind) for one in inside for kind, fits in kinds.items() if fits(one)]
    if below:
        named = dict(reversed(below))
        some = ", ".join(f"{name} is {kind}" for name, kind in sorted(named.items())[:NAMED])
        more = " and others are, too" if len(named) > NAMED else ""
        return f"{some}{more}: give {'that' if len(named) == 1 else 'one of them'}"
    names = [one.name for one in there]
    for fits, sentence in SPECIAL:
        if any(fits(name) for name in names):
            return sentence
    shown = ", ".join(names[:NAMED])
    return f"it has {shown}{f' and {len(names) - NAMED:,} more' if len(names) > NAMED else ''}"


SPECIAL: tuple[tuple[Callable[[str], bool], str], ...] = (
    (
        lambda name: name.startswith("consolidated") and name.endswith((".safetensors", ".pth")),
        "it has consolidated files, which have names of their publisher's own: give the directory of model.safetensors",
    ),
    (
        lambda name: name == "adapter_model.safetensors",
        "it is an adapter of peft's: give the model, and this as --adapter",
    ),
    (
        lambda name: name.startswith("mp_rank_"),
        "it is of Megatron-LM's format before torch_dist: save it by --ckpt-format torch_dist",
    ),
    (
        lambda name: name.endswith(".distcp"),
        "it has .distcp files without the .metadata that says what is in them: that save did not end",
    ),
)


@dataclass(frozen=True)
class WriteFormat:
    """How a format is written."""

    title: str
    write: Callable[[WriteTask], list[str]]
    """Writes everything into the task's folder; the names of the files."""
    states: bool
    """Whether it has a place for the states of an optimiser."""
    structure: str
    """Whose names and shapes its tensors have: transformers' (hf), Megatron-core's (core) or Paddle's; "" for any."""
    dtypes: frozenset[str] = frozenset(DTYPES)


TARGETS: Mapping[str, WriteFormat] = {
    "hf": WriteFormat("a Hugging Face directory", huggingface.write, False, "hf", frozenset(NAMES)),
    "torch_dist": WriteFormat("Megatron-core's distributed checkpoint", torch_dist.write, True, "core"),
    "dcp": WriteFormat("torch's distributed checkpoint", dcp.write, True, ""),
    "tangram": WriteFormat("a checkpoint of Tangram", own.write, True, "hf"),
    "paddle": WriteFormat("Paddle's flex checkpoint", flex.write, True, "paddle", frozenset(flex.WRITTEN)),
}
"""By name."""
