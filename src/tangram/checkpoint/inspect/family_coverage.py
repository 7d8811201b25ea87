"""What of a checkpoint a family of models names, what it does not, and what it wants that is not there.

`choose` refuses at the first of these; here all are told, for whoever writes a family or was given something strange.
Whose names they are (Hugging Face's, Megatron-core's, those of its layers without Transformer Engine) is whichever fits
most tensors. Layers are counted by the configuration, experts by those that are there.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tangram.checkpoint.conversion.find_mapping import model_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.errors import UserError
from tangram.layout.notation import Mapping as MappingText
from tangram.layout.syntax import TensorPattern
from tangram.models.families import Family, Mapped, mapping_of, megatrons_embedding
from tangram.relayout import RelayoutError, bind, inverse
from tangram.relayout.mapping.names import NameTable, TensorSpec, known_size, template_of
from tangram.relayout.mapping.names import TensorFamily as Members

HF, CORE, LOCAL = "Hugging Face", "Megatron-core", "Megatron-core without Transformer Engine"


@dataclass(frozen=True)
class Cover:
    """How a family and a checkpoint fit."""

    family: str
    names: str
    """Whose they are."""
    covered: int
    uncovered: tuple[str, ...]
    """Tensors that no statement names."""
    missing: tuple[str, ...]
    """Tensors that a statement names and that are not there; a pattern where it is not known how many."""
    wrong: str
    """Why shapes do not fit, once all names do."""
    left: tuple[str, ...]
    """Optimiser states, of which no family says anything."""

    @property
    def complete(self) -> bool:
        """Whether the checkpoint is just what the family says."""
        return not (self.uncovered or self.missing or self.wrong)

    def as_json(self) -> dict[str, Any]:
        return {
            "family": self.family, "names": self.names, "whole": self.complete, "covered": self.covered,
            "uncovered": list(self.uncovered), "missing": list(self.missing), "wrong": self.wrong or None,
            "optimiser_states": len(self.left),
        }  # fmt: skip


def cover(source: OpenCheckpoint, family: Family, config: Mapping[str, Any]) -> Cover:
    """Whose names fit best, and what is said and not said of them. Raises UserError where sizes are not known."""
    model, left = model_of(source)
    words = megatrons_embedding(model.specs)
    rows = None if words is None else model.specs[words].shape[0]
    found: list[Cover] = []
    for names in (HF, CORE, LOCAL) if family.local else (HF, CORE):
        padded = rows if names != HF else None
        mapped = mapping_of(family, config, vocabulary=padded, names=model.specs, local=names == LOCAL)
        found.append(_fit(model, mapped, names, left))
    return max(found, key=lambda one: (one.covered, -len(one.missing)))


def _fit(model: OpenCheckpoint, mapped: Mapped, names: str, left: tuple[str, ...]) -> Cover:
    text = MappingText.parse(mapped.text) if names == HF else inverse(mapped.text)
    groups = [group for statement in text.statements for group in statement.source]
    table = NameTable.of(model.specs)
    sizes = {**_counted(itertools.chain.from_iterable(groups), table, mapped.sizes), **mapped.sizes}
    covered: set[str] = set()
    missing: list[str] = []
    for group in groups:
        wanted = [_members(pattern, sizes, table) for pattern in group]
        there = [name for some in wanted for name in some if name in model.specs]
        covered.update(there)
        if wanted[0] and (not there or len(group) == 1):  # of tied ones any will do
            missing += [name for name in wanted[0] if name not in model.specs]
    uncovered = tuple(name for name in model.specs if name not in covered)
    wrong = "" if uncovered or missing else _wrong(model, text, mapped)
    return Cover(mapped.family, names, len(covered), uncovered, tuple(missing), wrong, left)


def _wrong(model: OpenCheckpoint, text: MappingText, mapped: Mapped) -> str:
    try:
        bind(text, model.specs, sizes=mapped.sizes)
    except (RelayoutError, UserError) as error:
        return str(error)
    return ""


def _counted(patterns: Iterable[TensorPattern], table: NameTable, known: Mapping[str, int]) -> dict[str, int]:
    """Sizes of indices that the configuration does not say: up to the highest number there is."""
    found: dict[str, int] = {}
    for pattern in (one for one in patterns if not one.wilds):
        template, offsets = template_of(pattern)
        for at, index in enumerate(pattern.index):
            if index.dim.name and known_size(index.dim, known) is None:
                highest = max((numbers[at] for numbers, _ in table.members(template)), default=-1)
                found[index.dim.name] = max(found.get(index.dim.name, 0), highest + 1 - offsets[at])
    return {name: size for name, size in found.items() if size > 0}


def _members(pattern: TensorPattern, sizes: Mapping[str, int], table: NameTable) -> Sequence[str]:
    if pattern.wilds:
        return list(table.wild_values(pattern))
    template, offsets = template_of(pattern)
    known = [known_size(index.dim, sizes) for index in pattern.index]
    if any(size is None for size in known):
        return [pattern.name]
    shape = TensorSpec(tuple(size for size in known if size is not None))
    return list(Members(pattern.name, template, offsets, shape).members)
