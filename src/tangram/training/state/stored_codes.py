"""Weights that a directory keeps as codes, as the frozen base beside adapters keeps them: taken as they are.

    fp8    e4m3 with a scale for each 128 x 128 numbers: DeepSeek-V3's `weight_scale_inv`, as Qwen3's and others have it
    nf4    bitsandbytes' 4 bits with nested scales, blocks of 64 and of 256
    int8   bitsandbytes' 8 bits (`SCB`); its outliers are of activations, and no part of what is stored

Codes and scales go where `lora.base` would put them if it had quantised the weight, so layouts, checkpoints, export and
memory are those of such a base. Nothing is decoded on the way, and nothing quantised again. Experts that lie one by
one in fp8 are put together as their numbers would be, codes and scales alike. What is kept in any other way is refused:
a weight that went through numbers and back would be another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tangram.checkpoint.conversion.quantised import quantisation_of
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.config_json import is_quantised
from tangram.checkpoint.formats.huggingface import HuggingFaceIndex, open_folder, read_index
from tangram.errors import UserError
from tangram.layout import Mapping as MappingText
from tangram.layout import Region, Statement
from tangram.models.building.conversions import Part
from tangram.models.building.quantised import kept_of
from tangram.models.lora import dynamic_codes, nf4
from tangram.models.lora.bases import BASES, SQUARE, Kept, Shape
from tangram.relayout import Piece, TensorSpec, bind, execute, plan
from tangram.relayout.quantised.grids import TensorGroup, numbers
from tangram.relayout.quantised.table import matched

Stored = Mapping[str, Tensor]
"""The tensors of a group by their roles."""


def _of_fp8(group: TensorGroup, stored: Stored) -> Kept | None:
    if group.form.block != (SQUARE, SQUARE) or stored["codes"].dtype != torch.float8_e4m3fn or "zero" in stored:
        return None
    return {"fp8": stored["codes"].view(torch.uint8), "squares": numbers(stored["scale"])}


def _of_nf4(group: TensorGroup, stored: Stored) -> Kept | None:
    (rows, columns), facts = group.form.shape, group.form.facts
    if (facts["size"], facts.get("nested")) != (nf4.BLOCK, nf4.GROUP) or columns % nf4.BLOCK:
        return None
    known = (("map", torch.tensor(nf4.NORMAL)), ("nested_map", dynamic_codes.table(torch.device("cpu"))))
    if not all(torch.equal(stored[role].flatten(), table) for role, table in known):
        return None
    return {
        "nf4": stored["codes"].contiguous().view(torch.uint8).view(rows, columns // 2),
        "absmax": stored["scale"].view(rows, columns // nf4.BLOCK),
        "groups": stored["nested"].flatten(),
        "mean": torch.tensor(facts["offset"]),
    }


def _of_int8(group: TensorGroup, stored: Stored) -> Kept | None:
    return {"int8": stored["codes"], "rows": stored["scale"].flatten().float()}


TAKEN: Mapping[str, tuple[str, Callable[[TensorGroup, Stored], Kept | None]]] = MappingProxyType(
    {
        "fp8_inv": ("fp8", _of_fp8),
        "fp8_plain": ("fp8", _of_fp8),
        "scaled": ("fp8", _of_fp8),
        "nf4": ("nf4", _of_nf4),
        "bnb_int8": ("int8", _of_int8),
    }
)
"""By the codec of a stored weight, the base that may have it as it is, and how; None where the form is another one."""


@dataclass(frozen=True)
class StoredCodes:
    """What of a directory is codes, by the name of the weight that they stand for."""

    folder: Path
    base: str
    groups: Mapping[str, TensorGroup]
    read: Callable[[str], Tensor]

    def kept(self, name: str) -> Kept:
        """What a base keeps of a stored weight, all of it. Raises UserError for one that is kept otherwise."""
        group = self.groups[name]
        base, take = TAKEN.get(group.codec, ("", None))
        stored = {role: self.read(one) for role, one in group.members.items()} if take and base == self.base else {}
        kept = take(group, stored) if take and stored else None
        if kept is None:
            raise UserError(
                f'{name} in "{self.folder}" is quantised in a way that lora.base = "{self.base}" does not have: '
                f"{DEQUANTISE}"
            )
        return kept

    def joined(self, parts: Sequence[Part], name: str, shape: Shape) -> Kept:
        """What a base keeps of a weight that is made of several stored ones, as of experts: codes and scales go where
        the numbers would. Raises UserError for what has not its own scales then."""
        sources = [one for part in parts for one in part.sources]
        each = {one: self.kept(one) for one in sources}
        if self.base != "fp8" or not all(_in_squares(tuple(kept["fp8"].shape), shape) for kept in each.values()):
            raise UserError(
                f'{sources[0]} in "{self.folder}" is quantised, and {name} is made of it and others, whose codes '
                f"cannot be put together: {DEQUANTISE}"
            )
        return {
            kind: _put_together(parts, {one: kept[kind] for one, kept in each.items()}, name, size)
            for kind, size in (("fp8", shape), *BASES["fp8"].buffers(shape).items())
        }


def _in_squares(part: Shape, whole: Shape) -> bool:
    """Whether squares of a part are squares of what it goes into: dims are as they were, or of whole squares."""
    own, its = part[-2:], whole[-2:]
    return own in (its, its[::-1]) or all(
        one == other or one % SQUARE == 0 for one, other in zip(own, its, strict=True)
    )


def _put_together(parts: Sequence[Part], stored: Stored, name: str, shape: Shape) -> Tensor:
    made = torch.empty(shape, dtype=next(iter(stored.values())).dtype)
    specs = {one: TensorSpec(tuple(value.shape), str(value.dtype)) for one, value in stored.items()}
    sides = [(tuple((one,) for one in part.source), tuple((one,) for one in part.target)) for part in parts]
    text = MappingText(tuple(Statement(*both) for both in sides))
    bound = bind(text, specs, {name: TensorSpec(shape, str(made.dtype))})
    pieces = [Piece("stored", one, Region.full(spec.shape)) for one, spec in specs.items()]
    copies = plan(bound, pieces, [Piece("here", name, Region.full(shape))])
    execute(copies, {("stored", one): value for one, value in stored.items()}, {("here", name): made})
    return made


DEQUANTISE = "`tangram checkpoint convert DIR NEW --to hf --dequantise` makes a directory of them that can be trained"


def only_configured(config: Any, folder: Path | None) -> str:
    """What to say of weights that are plain numbers where their configuration says that they are quantised."""
    how = kept_of(config)
    if how is None or folder is None or is_quantised(read_index(folder).specs):
        return ""
    return (
        f"config.json says that weights are quantised ({how.method}), and those of {folder.name} are plain numbers: "
        "they are trained as such, and the export says nothing of it"
    )


def without_codes(folder: Path, index: HuggingFaceIndex, base: str) -> tuple[HuggingFaceIndex, StoredCodes | None]:
    """A directory's tensors with one for each weight that is kept as codes, and these codes; itself where none is.

    `base`: of `lora.base`. Raises UserError for codes without a base that could have them.
    """
    first = next(matched(index.specs), None)
    if first is None:
        return index, None
    if base == "parameters":
        own = TAKEN.get(first.codec, ("", None))[0]
        also = f', or lora.base = "{own}" trains adapters beside them as they are' if own else ""
        raise UserError(
            f'the weights in "{folder}" are quantised ({first.members["codes"]} is codes): {DEQUANTISE}{also}'
        )
    source = open_folder(folder, Maps(folder))
    found = quantisation_of(source)
    if found is None or found.problem:
        why = found.problem if found else f"{first.members['codes']} is codes"
        raise UserError(f'the weights in "{folder}" are quantised and cannot be read: {why}')
    places = {piece.tensor: piece.place for piece in index.pieces}
    groups = {group.name: group for group in found.groups}
    parts = {name for group in found.groups for name in group.members.values()} | {*found.unused}
    specs = {name: spec for name, spec in index.specs.items() if name not in parts}
    specs |= {name: TensorSpec(group.form.shape, "bfloat16") for name, group in groups.items()}
    pieces = tuple(piece for piece in index.pieces if piece.tensor not in parts)
    return replace(index, specs=specs, pieces=pieces), StoredCodes(
        folder, base, groups, lambda name: source.read(places[name], name)
    )
