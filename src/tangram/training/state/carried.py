"""What a directory has beside the language model that is trained: a vision tower, layers that predict further tokens.

A class of transformers says which tensors it does not read (`_keys_to_ignore_on_load_unexpected`): Qwen3.5 its tower
and MTP, DeepSeek-V3 and GLM-4.5 a layer behind the last. Text trains none of them, and an export without them would be
another model than its configuration says. So they go along as they were, in a file of their own.

The trade-off: layers that predict further tokens were trained beside other weights than those that they now stand
beside. Quantised ones stay behind: the configuration of an export in plain numbers would not say how to read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  typed in part
from torch import nn

from tangram.checkpoint.conversion.beside_text import plain_and_quantised, stems
from tangram.checkpoint.formats.common.config_json import CONFIG
from tangram.checkpoint.formats.huggingface import INDEX, has_weights, mapped_reader, read_index
from tangram.models.building.conversions import read_conversion
from tangram.training.observe.text_tables import count

_NONE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Carried:
    """Tensors of a directory by the names that they have there."""

    folder: Path
    names: tuple[str, ...] = _NONE
    behind: tuple[str, ...] = _NONE
    """Those that stay behind."""

    def words(self) -> str:
        """Where they are; empty for none."""
        parts = [
            f"{count(len(some), 'tensor')} of {', '.join(stems(some))} {what}"
            for some, what in (
                (self.names, "not trained here, which go along"),
                (self.behind, "quantised, which stay behind"),
            )
            if some
        ]
        return "; ".join(parts)


def carried_by(model: nn.Module, folder: Path | None) -> Carried | None:
    """What the directory `folder` has for no part of a model, as its class says; None where there is nothing."""
    patterns = [*cast("Iterable[str]", getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if folder is None or not patterns or not has_weights(folder):
        return None
    specs = read_index(folder).specs
    # Of these alone: how the others are made is asked where they are loaded, and codes are undone there.
    stored = {name: spec.shape for name, spec in specs.items() if any(re.search(one, name) for one in patterns)}
    names = read_conversion(model, stored).beside
    if not names:
        return None
    plain, behind = plain_and_quantised(names, specs)
    return Carried(folder, tuple(plain), tuple(behind))


def carry(carried: Carried, folder: Path) -> None:
    """Add the tensors to an export in `folder`, as one more of its files, and what the configuration says of them."""
    read, own = mapped_reader(carried.folder), read_index(folder)
    homes = {piece.tensor: piece.place for piece in read_index(carried.folder).pieces}
    files = sorted({str(piece.place) for piece in own.pieces})
    number = len(files) + 1
    numbered = {file: f"model-{at:05d}-of-{number:05d}.safetensors" for at, file in enumerate(files, 1)}
    last = f"model-{number:05d}-of-{number:05d}.safetensors"
    for file, name in numbered.items():
        (folder / file).rename(folder / name)
    save_file({name: read(homes[name], name) for name in carried.names}, folder / last, metadata={"format": "pt"})
    table = {piece.tensor: numbered[str(piece.place)] for piece in own.pieces} | dict.fromkeys(carried.names, last)
    nbytes = sum((folder / file).stat().st_size for file in (*numbered.values(), last))
    text = json.dumps({"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(table.items()))}, indent=2)
    (folder / INDEX).write_text(text, encoding="utf-8")


def with_towers(written: bytes, folder: Path) -> bytes:
    """The configuration of an export, within that of all of the model where it was read out of one (`text_config`)."""
    file = folder / CONFIG
    before: Any = json.loads(file.read_bytes()) if file.is_file() else {}
    text = cast("dict[str, Any]", json.loads(written))
    if not isinstance(before, dict) or "text_config" not in before or "text_config" in text:
        return written
    own = {key: value for key, value in text.items() if key not in ("architectures", "transformers_version")}
    return json.dumps({**cast("dict[str, Any]", before), "text_config": own}, indent=2).encode()
