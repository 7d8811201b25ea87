"""Which mapping leads from a checkpoint to a format: a user's own, the family's, its inverse, or none.

Hugging Face directories and Tangram's checkpoints have a model's tensors by transformers' names, Megatron-core's by its
own. A family (`tangram.models.families`) says what becomes of what, from the configuration that lies with the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tangram.checkpoint.formats.opened import Opened
from tangram.checkpoint.restructure import IDENTITY
from tangram.errors import UserError
from tangram.layout.syntax import Mapping as MappingText
from tangram.models.families import Family, family_of, mapping_of
from tangram.models.structures import paddle_family
from tangram.relayout import Bound, RelayoutError, bind, inverse
from tangram.relayout.states import with_states

WORDS = "embedding.word_embeddings.weight"
"""A tensor that every model of Megatron-core has on its first stage."""
STATES = ("optimizer.", "chained_")
"""How the names of optimiser states begin in a torch_dist."""
STATEFUL = ("dcp", "paddle")
"""The formats that optimiser states are written in."""
SAID = 5
"""Tensors that a sentence names."""


@dataclass(frozen=True)
class Chosen:
    """A mapping that fits, and where it comes from."""

    source: Opened
    """Without what is left."""
    bound: Bound
    said: str
    left: tuple[str, ...]
    """Tensors that are not converted: optimiser states."""


def model_of(source: Opened, states: bool = False) -> tuple[Opened, tuple[str, ...]]:
    """A checkpoint without optimiser states, and the names of those. `states`: with those that are known by name."""
    ends = () if states else tuple(f".{state}" for state in source.states)
    left = tuple(n for n in source.specs if n.startswith(STATES) or (n.endswith(ends) and _owner(n) in source.specs))
    if not left:
        return source, ()
    gone = set(left)
    specs = {name: spec for name, spec in source.specs.items() if name not in gone}
    pieces = tuple(piece for piece in source.pieces if piece.tensor not in gone)
    return replace(source, specs=specs, pieces=pieces, states=source.states if states else {}), left


def _owner(name: str) -> str:
    """The parameter that a state would be of."""
    return name.rpartition(".")[0]


def choose(
    source: Opened,
    to: str,
    config: Mapping[str, Any] | None,
    *,
    text: str | None = None,
    sizes: Mapping[str, int] | None = None,
    family: Family | None = None,
    local: bool = False,
    divisor: int = 1,
) -> Chosen:
    """The mapping to a format, bound to the checkpoint's tensors.

    `text` and `sizes`: a mapping of the user's own. `family`: instead of the one that the configuration names.
    `local`: write the names of Megatron-core's layers without Transformer Engine; those that are read are told apart by
    themselves. `divisor`: pad the vocabulary to a multiple of it. Raises UserError where no mapping fits.
    """
    model, left = model_of(source, states=to in STATEFUL)
    core = WORDS in model.specs
    if text is not None:
        return Chosen(model, _followed(model, text, sizes or {}), "the mapping that was given", left)
    if "paddle" in (source.format, to) and to != "dcp" and source.format != to:
        return _by_paddle(model, left, to, config, family)
    if core == (to == "torch_dist") or to == "dcp":
        return Chosen(model, bind(IDENTITY, model.specs), "no mapping: every tensor as it is", left)
    if config is None:
        raise UserError("there is no config.json, which says what the model is: give --config DIR")
    known = family or family_of(config)
    if core:
        bound = _from_core(model, known, config)
        return Chosen(model, bound, f"the family {known.name}, read backwards", left)
    rows = config.get("vocab_size")
    padded = -(-rows // divisor) * divisor if isinstance(rows, int) else None
    mapped = mapping_of(known, config, vocabulary=padded, names=model.specs, local=local)
    return Chosen(model, _bound(model, mapped.text, mapped.sizes, known), f"the family {known.name}", left)


def _by_paddle(
    model: Opened, left: tuple[str, ...], to: str, config: Mapping[str, Any] | None, family: Family | None
) -> Chosen:
    """Between transformers' structure and Paddle's, whose weights of Linear layers are [in, out]."""
    if to == "torch_dist" or WORDS in model.specs:
        raise UserError("between Paddle and Megatron-core, convert by way of --to hf")
    if config is None:
        how = "give --config DIR, or --mapping FILE"
        raise UserError(f"Paddle keeps weights of Linear layers transposed, and there is no config.json: {how}")
    known = family or paddle_family(config)
    mapped = mapping_of(known, config, names=model.specs)
    back = model.format == "paddle"
    bound = _bound(model, str(inverse(mapped.text)) if back else mapped.text, mapped.sizes, known)
    return Chosen(model, bound, f"the family {known.name}{', read backwards' if back else ''}", left)


def _followed(model: Opened, text: str, sizes: Mapping[str, int], partial: bool = False) -> Bound:
    """A mapping of a model, bound, with the optimiser's states behind it."""
    keys: dict[str, Any] = dict(sizes)
    mapping = with_states(text, model.specs, model.states, **keys) if model.states else text
    return bind(mapping, model.specs, partial=partial, sizes=sizes)


def _from_core(model: Opened, known: Family, config: Mapping[str, Any]) -> Bound:
    """The way back, by whichever names the layers have."""
    rows = model.specs[WORDS].shape[0]
    errors: list[UserError] = []
    for local in (False, True) if known.local else (False,):
        mapped = mapping_of(known, config, vocabulary=rows, names=model.specs, local=local)
        try:
            return _bound(model, str(inverse(mapped.text)), mapped.sizes, known)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _bound(model: Opened, text: str, sizes: Mapping[str, int], known: Family) -> Bound:
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


def uncovered(bound: Bound, model: Opened) -> list[str]:
    """The tensors of a checkpoint that a mapping does not name."""
    named = bound.source.specs
    return [name for name in model.specs if name not in named]


def statements(text: str) -> int:
    """How many statements a mapping has. Raises LayoutError where it is none."""
    return len(MappingText.parse(text).statements)
