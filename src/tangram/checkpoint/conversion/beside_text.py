"""Weights of a language model, put back into the directory that it was read out of.

    model.layers.0.w                        by the class that reads the text of a directory alone
    model.language_model.layers.0.w         by the directory, which has model.visual.* and mtp.* beside it

A run saves what it trains. What the directory has beside that was not changed by it, so it is read from there: a
conversion with `--config DIR` gives what the run's own export gives (`tangram.training.state.carried`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.config_json import is_quantised
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import renamed, split
from tangram.checkpoint.formats.huggingface import open_folder
from tangram.relayout import Piece, TensorSpec

if TYPE_CHECKING:  # it loads transformers
    from tangram.models.building.conversions import Conversion


@dataclass(frozen=True)
class BesidePlace:
    """The place of a piece in the directory, not in the checkpoint."""

    place: Hashable


def put_back(source: OpenCheckpoint, model: Any, folder: Path, notes: list[str]) -> OpenCheckpoint:
    """A checkpoint of all of `model`, by the names of the directory `folder`, with what that has beside it.

    As it is where the directory has nothing beside it.
    """
    from tangram.models.building.conversions import read_conversion

    whole = open_folder(folder, Maps(folder))
    found = read_conversion(model, {name: spec.shape for name, spec in whole.specs.items()})
    beside = [name for name in found.beside if name not in source.specs]
    if not beside:
        return source
    beside, behind = plain_and_quantised(beside, whole.specs)
    if behind:
        notes.append(f"quantised, and not taken from {folder.name}: {_several(behind)}")
    if not beside:
        return source
    notes.append(f"taken from {folder.name} as they are there: {_several(beside)}")
    return _joined(_named_as(source, found), whole, frozenset(beside))


def not_there(model: Any, names: Collection[str]) -> list[str]:
    """What to say of a run's checkpoint alone, where the model's class leaves a part of a directory unread.

    Layers behind the last are only where a configuration speaks of them; masks and frequencies are no part.
    """
    predicted = getattr(model.config, "num_nextn_predict_layers", 0)
    patterns = [
        one for one in sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        if (re.search("mtp|visual", one) or (predicted and "layers" in one))
        and not any(re.search(one, name) for name in names)
    ]  # fmt: skip
    if not patterns:
        return []
    parts = ", ".join(re.sub(r"\W*$", "", re.sub(r"\(.*?\)|[\^\\]", "", one)) for one in patterns)
    return [
        f"{type(model).__name__} does not read {parts}: where the directory that training began from has them, "
        "--config DIR takes them along"
    ]


def plain_and_quantised(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> tuple[list[str], list[str]]:
    """Of many names those of modules in plain numbers, and those of modules with a quantised tensor."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(stems([name])[0], []).append(name)
    plain, quantised = list[str](), list[str]()
    for own in modules.values():
        (quantised if is_quantised({name: specs[name] for name in own}) else plain).extend(own)
    return plain, quantised


def stems(names: Collection[str]) -> Sequence[str]:
    """The modules that many names are in: `model.visual.*`, `mtp.*`, and a layer with its number."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        length = 3 if parts[:2] == ["model", "layers"] else 2 if parts[0] == "model" else 1
        found[".".join([*parts[:length], "*"])] = None
    return [*found]


def _several(names: Collection[str]) -> str:
    return f"{len(names):,} tensors of {', '.join(stems(names))}"


def _named_as(source: OpenCheckpoint, found: Conversion) -> OpenCheckpoint:
    """By the directory's names, where one tensor of it is one of the model's; states go with their parameters."""
    names = {
        target: part.sources[0] for part in found.parts if len(part.sources) == len(part.shapes) == 1
        for target in part.shapes
    }  # fmt: skip
    owners = split(source.specs, source.states)
    return renamed(
        source,
        {
            name: names.get(owners[name][0], owners[name][0]) + name.removeprefix(owners[name][0])
            for name in source.specs
        },
    )


def _joined(source: OpenCheckpoint, whole: OpenCheckpoint, names: Collection[str]) -> OpenCheckpoint:
    def read(place: Hashable, name: str) -> Tensor:
        return whole.read(place.place, name) if isinstance(place, BesidePlace) else source.read(place, name)

    def release() -> None:
        whole.release()
        source.release()

    more = [Piece(BesidePlace(one.place), one.tensor, one.region) for one in whole.pieces if one.tensor in names]
    return replace(
        source,
        specs={**source.specs, **{name: whole.specs[name] for name in names}},
        pieces=(*source.pieces, *more),
        read=read,
        release=release,
    )
