"""A file as a strategy, Tangram's own or another project's, by its names: what `tangram plan explain FILE` reads."""

from __future__ import annotations

from pathlib import Path

from tangram.errors import UserError
from tangram.models.outlines.outline import Outline
from tangram.planner.imports.megatron import megatron
from tangram.planner.imports.tangram import tangram
from tangram.planner.imports.torchtitan import is_torchtitan, torchtitan
from tangram.planner.imports.words import ReadStrategy, words_of


def strategy_of(path: Path, outline: Outline, devices: int, most: int) -> ReadStrategy:
    """The strategy in a file, for a model on `devices` (0: as many as the file says, else `most`). Raises UserError."""
    kind, words = words_of(path)
    if is_torchtitan(words):
        return torchtitan(words, outline, devices, most, toml=kind == "toml")
    if kind == "toml" and words.has("version"):
        return tangram(path, outline, devices)
    if kind == "toml":
        raise UserError(f"{path} is no plan of Tangram, and has none of torchtitan's tables [training], [parallelism]")
    if not words.values:
        raise UserError(f"{path} has no arguments of Megatron-LM or torchtitan in it")
    return megatron(words, outline, devices, most)
