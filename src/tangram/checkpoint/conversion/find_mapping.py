"""Which mapping leads from a checkpoint to a format: a user's own, the family's, its inverse, or none.

Hugging Face directories and Tangram's checkpoints have a model's tensors by transformers' names, Megatron-core's by its
own. A family (`tangram.models.families`) says what becomes of what, from the configuration that lies with the weights.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tangram.checkpoint.conversion.convert import IDENTITY, target_of
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import MASTER, split
from tangram.errors import UserError
from tangram.layout.notation import Mapping as MappingText
from tangram.layout.syntax import TensorPattern
from tangram.models.families import Family, family_of, fields_of, mapping_of, megatrons_embedding
from tangram.models.structures import FRAMEWORKS, family_in
from tangram.relayout import BoundMapping, RelayoutError, TensorSpec, bind, inverse
from tangram.relayout.mapping.names import NameTable, template_of
from tangram.relayout.mapping.states import with_states

FUSED = ("mlp.experts.gate_up_proj",)
"""What a module of transformers has in memory, and so a checkpoint of Tangram, where files have experts one by one."""
KEPT = "names kept"
SAID = 5
"""Tensors that a sentence names."""


@dataclass(frozen=True)
class ChosenMapping:
    """A mapping that fits, and where it comes from."""

    source: OpenCheckpoint
    """Without what is left."""
    bound: BoundMapping
    description: str
    """Of where it comes from, as a sentence has it."""
    left: tuple[str, ...]
    """Tensors that are not converted: the optimiser's states, where the format has no place for them."""


def model_of(source: OpenCheckpoint) -> tuple[OpenCheckpoint, tuple[str, ...]]:
    """A checkpoint without optimiser states, and the names of those."""
    owners = split(source.specs, source.states)
    left = tuple(name for name in source.specs if owners[name][1])
    specs = {name: spec for name, spec in source.specs.items() if not owners[name][1]}
    pieces = tuple(piece for piece in source.pieces if piece.tensor in specs)
    return replace(source, specs=specs, pieces=pieces, states={}), left


def choose(
    source: OpenCheckpoint,
    to: str,
    config: Mapping[str, Any] | None,
    *,
    text: str | None = None,
    sizes: Mapping[str, int] | None = None,
    family: Family | None = None,
    local: bool = False,
    divisor: int = 1,
    states: bool = True,
    made: Collection[str] | None = None,
) -> ChosenMapping:
    """The mapping to a format, bound to the checkpoint's tensors.

    `text` and `sizes`: a mapping of the user's own. `family`: instead of the one that the configuration names.
    `local`: write the names of Megatron-core's layers without Transformer Engine; those that are read are told apart by
    themselves. `divisor`: pad the vocabulary to a multiple of it. `states`: with the optimiser's, where the format has
    a place for them. `made`: names of tensors that are to come out, for a family that has two ways to say the same;
    those of the format unless given. Raises UserError where no mapping fits.
    """
    target = target_of(to)
    model, left = (source, ()) if states and target.states else model_of(source)
    structure = structure_of(model)
    if text is not None:
        return ChosenMapping(model, _followed(model, text, sizes or {}), "the mapping that was given", left)
    if target.structure in ("", structure):
        return ChosenMapping(model, bind(IDENTITY, model.specs), KEPT, left)
    framework = next((one for one in (structure, target.structure) if one in FRAMEWORKS), None)
    if framework is not None:
        if {structure, target.structure} != {"hf", framework}:
            other = "Megatron-core" if "core" in (structure, target.structure) else "another framework"
            raise UserError(f"between {FRAMEWORKS[framework]} and {other}, convert by way of --to hf")
        return _by_framework(model, left, framework, config, family)
    if config is None:
        raise UserError("there is no config.json, which says what the model is: give --config DIR")
    known = family or family_of(config)
    if structure == "core":
        bound = _from_core(model, known, config, made if made is not None else FUSED if to == "tangram" else ())
        return ChosenMapping(model, bound, f"the family {known.name}, read backwards", left)
    rows = fields_of(config).get("vocab_size")
    padded = -(-rows // divisor) * divisor if isinstance(rows, int) else None
    mapped = mapping_of(known, config, vocabulary=padded, names=model.specs, local=local)
    return ChosenMapping(model, _bound(model, mapped.text, mapped.sizes, known), f"the family {known.name}", left)


def structure_of(model: OpenCheckpoint) -> str:
    """Whose names and shapes a checkpoint's tensors have: `core`, one of `FRAMEWORKS`, else transformers' (`hf`)."""
    if megatrons_embedding(model.specs) is not None:
        return "core"
    if model.format == "paddle":
        return "paddle"
    return "torchtitan" if "tok_embeddings.weight" in model.specs else "hf"


def _by_framework(
    model: OpenCheckpoint,
    left: tuple[str, ...],
    framework: str,
    config: Mapping[str, Any] | None,
    family: Family | None,
) -> ChosenMapping:
    """Between transformers' structure and another framework's: Paddle keeps weights of Linear layers as [in, out]."""
    if config is None:
        how = "give --config DIR, or --mapping FILE"
        way = "weights of Linear layers transposed" if framework == "paddle" else "weights by names of its own"
        raise UserError(f"{FRAMEWORKS[framework]} keeps {way}, and there is no config.json: {how}")
    known = family or family_in(framework, config)
    mapped = mapping_of(known, config, names=model.specs)
    back = structure_of(model) == framework
    bound = _bound(model, str(inverse(mapped.text)) if back else mapped.text, mapped.sizes, known)
    return ChosenMapping(model, bound, f"the family {known.name}{', read backwards' if back else ''}", left)


def _followed(model: OpenCheckpoint, text: str, sizes: Mapping[str, int], partial: bool = False) -> BoundMapping:
    """A mapping of a model, bound, with the optimiser's states behind it."""
    if not model.states:
        return bind(text, model.specs, partial=partial, sizes=sizes)
    copies = {n: spec for n, spec in model.specs.items() if model.specs.get(f"{n}.{MASTER}") == spec}
    gone = {f"{name}.{MASTER}" for name in copies}
    specs = {name: spec for name, spec in model.specs.items() if name not in gone}
    keys: dict[str, Any] = dict(sizes)
    mapping = with_states(text, specs, model.states, **keys)
    return bind(_tied(mapping, copies), model.specs, partial=partial, sizes=sizes)


def _tied(mapping: MappingText, copies: Mapping[str, TensorSpec]) -> MappingText:
    """A mapping in which parameters that have a copy of their own type are tied to it: it is compared, and goes."""
    table = NameTable.of(copies)

    def group(some: tuple[TensorPattern, ...]) -> tuple[TensorPattern, ...]:
        found = [t for t in some if t.name in copies or table.members(template_of(t)[0])]
        return (*some, *(replace(t, parts=(*t.parts, f".{MASTER}")) for t in found))

    return MappingText(tuple(replace(s, source=tuple(map(group, s.source))) for s in mapping.statements))


def _from_core(model: OpenCheckpoint, known: Family, config: Mapping[str, Any], names: Collection[str]) -> BoundMapping:
    """The way back, by whichever names the layers have. `names`: that are among those to be made."""
    rows = model.specs[megatrons_embedding(model.specs) or ""].shape[0]
    errors: list[UserError] = []
    for local in (False, True) if known.local else (False,):
        mapped = mapping_of(known, config, vocabulary=rows, names=[*model.specs, *names], local=local)
        try:
            return _bound(model, str(inverse(mapped.text)), mapped.sizes, known)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _bound(model: OpenCheckpoint, text: str, sizes: Mapping[str, int], known: Family) -> BoundMapping:
    try:
        bound = _followed(model, text, sizes, partial=True)
    except RelayoutError as error:
        raise UserError(f'"{model.path}" is not what the family {known.name} says: {error}') from None
    unknown = uncovered(bound, model)
    if unknown:
        more = f" and {len(unknown) - SAID:,} more" if len(unknown) > SAID else ""
        names = ", ".join(unknown[:SAID])
        raise UserError(f"the family {known.name} does not say where these tensors go: {names}{more}")
    return bound


def uncovered(bound: BoundMapping, model: OpenCheckpoint) -> list[str]:
    """The tensors of a checkpoint that a mapping does not name."""
    named = bound.source.specs
    return [name for name in model.specs if name not in named]


def statements(text: str) -> int:
    """How many statements a mapping has. Raises LayoutError where it is none."""
    return len(MappingText.parse(text).statements)
