"""Whether tensors are those of the configuration that is to lie beside them, and what of them is told or left out.

    names     those of the configuration's model, as transformers loads them; else it is refused: N of M are not,
              or some are missing, which would be drawn anew
    tied      two names of one tensor, both stored: equal ones become one, unlike ones are refused; one of which the
              head's alone is stored gets the name of the embeddings
    derived   what old versions of transformers stored and new ones compute (`rotary_emb.inv_freq`) goes
    facts     numbers in the configuration that the shapes contradict

Nothing is looked at in a model that transformers has no class for, nor where weights are quantised.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from tangram.checkpoint.conversion.beside_text import not_there, put_back
from tangram.checkpoint.conversion.config_facts import facts
from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.formats.common.config_json import EMBEDDINGS, HEADS
from tangram.checkpoint.formats.common.model_part import leads, most_likely, only
from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.common.optimiser_names import named_without, renamed, split
from tangram.checkpoint.formats.common.outgoing import boxes
from tangram.checkpoint.formats.huggingface import has_weights
from tangram.checkpoint.store.manifest import DTYPES
from tangram.errors import UserError
from tangram.layout import Region
from tangram.layout.intervals import span
from tangram.relayout import TensorSpec, bind

if TYPE_CHECKING:  # it loads transformers
    from tangram.models.building.conversions import Conversion

SAID = 3
"""Names that a sentence has."""
COMPARED = 1 << 22
"""Elements of two tensors that are compared at once."""
DERIVED = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq|attn\.masked_bias"
    r"|(?:attn|attention)\.masked_bias|embeddings\.position_ids|freqs_cis)"
)
AVERAGE = re.compile(r"(^|_)(ema|swa|shadow|averaged?)(_|$)")
"""What programs call the module that has moving averages."""
LORA = re.compile(r"\.lora_(embedding_)?A(\.|$)")
MERGE = "give --adapter DIR with the adapter_config.json that peft wrote for it"
MASK = re.compile(r"(?:.*\.)?(?:attn|attention)\.bias")
"""A causal mask of four dims where an attention has one; a bias has one dim."""


@dataclass(frozen=True)
class Fitted:
    """A checkpoint without what its configuration does not want, and sentences about that."""

    source: OpenCheckpoint
    notes: tuple[str, ...]


def fitted(
    source: OpenCheckpoint,
    config: Mapping[str, Any] | None,
    check: bool,
    own: bool = False,
    folder: Path | None = None,
) -> Fitted:
    """A checkpoint as its configuration has it. `check`: hold the names to it, where it is to say what they are.

    `own`: the configuration lies in the checkpoint, so what it contradicts was there before, and is told. `folder`:
    where it lies else, with what was not trained perhaps. Raises UserError where the names are another model's, or
    tied tensors differ.
    """
    notes: list[str] = []
    source = _without_derived(source, config, notes)
    notes += _beside(source.specs)
    if config is None or "quantization_config" in config:
        return Fitted(source, tuple(notes))
    model = _declared(config) if check else None
    if model is not None:
        try:
            source = _put_back(source, model, config, folder, notes)
            notes += [] if own else _together(source, model)
            if folder is None and source.format == "tangram":
                notes += not_there(model, source.specs)
        except UserError as error:
            if not own:
                raise
            notes.append(f"as it was in the source: {error}")
    source = _tied_once(source, config, model, notes)
    notes += facts(source.specs, config)
    return Fitted(source, tuple(notes))


# ---------------------------------------------------------------- names


def _declared(config: Mapping[str, Any]) -> Any:
    from tangram.models.building.build import declared_on_meta  # loads transformers

    return declared_on_meta(config)


def _put_back(
    source: OpenCheckpoint, model: Any, config: Mapping[str, Any], folder: Path | None, notes: list[str]
) -> OpenCheckpoint:
    """The part of a checkpoint that is a configuration's model, or the text of it beside a directory with the rest."""
    beside = folder if folder is not None and source.format != "hf" and has_weights(folder) else None
    try:
        part, text = _named_by(source, model), model
    except UserError:
        text = _declared({**config, "architectures": None})
        if text is None or type(text) is type(model):
            raise
        try:
            part = _named_by(source, text)
        except UserError:
            part = None
        if part is None:
            raise
        if beside is None:
            raise UserError(
                f"the weights are of {type(text).__name__}, which is not all of the configuration's "
                f"{type(model).__name__}: give as --config DIR the one that training began from, with its weights"
            ) from None
    return part if beside is None else put_back(part, text, beside, notes)


def _named_by(source: OpenCheckpoint, model: Any) -> OpenCheckpoint:
    """The part of a checkpoint that has the names of a configuration's model."""
    owners = split(source.specs, source.states)
    params = [name for name in source.specs if not owners[name][1]]
    lead = _lead_of(model, {name: source.specs[name] for name in params})
    if lead:
        own = {name for name in source.specs if owners[name][0].startswith(lead)}
        source = named_without(only(source, own), lead)
        params = [name.removeprefix(lead) for name in params if name.startswith(lead)]
    found = _conversion(model, {name: source.specs[name] for name in params})
    if found.surplus:
        raise UserError(
            f"{len(found.surplus):,} of {len(params):,} names are not those of the configuration "
            f"({type(model).__name__}): {_some(found.surplus)}; "
            + (
                f"to merge the pairs of LoRA among them, {MERGE}"
                if any(map(LORA.search, found.surplus))
                else "give the --config DIR of this model, or a --mapping FILE"
            )
        )
    if unlike := [*found.unlike, *_of_other_shape(model, found)]:
        raise UserError(f"the weights are not those of the configuration ({type(model).__name__}): {unlike[0]}")
    if missing := _missing(model, found):
        raise UserError(
            f"{len(missing):,} of the configuration's tensors ({type(model).__name__}) are not there, and "
            f"transformers would draw them anew: {_some(missing)}; give the --config DIR of this model"
        )
    return source


def _lead_of(model: Any, params: Mapping[str, TensorSpec]) -> str:
    """What stands before the names of a configuration's model, be they those that its files have or those of the class.

    One under which they are all there and nothing else is; else that under which most of the class's own are.
    """
    wanted = model.state_dict().keys()
    ends: dict[str, list[str]] = {}
    for name in params:
        for lead in leads([name]):
            ends.setdefault(lead, []).append(name.removeprefix(lead))
    counts = {lead: sum(name in wanted for name in names) for lead, names in ends.items()}
    most = max(counts.values())
    if most and most == counts[""]:
        return ""
    many = [lead for lead, names in ends.items() if 3 * len(names) >= len(params)]  # beside an average and a teacher
    fit = [lead for lead in many if _fits(model, {name: params[lead + name] for name in ends[lead]})]
    best = [lead for lead in fit if counts[lead] == max(map(counts.__getitem__, fit))]
    best = [lead for lead in best if not any(lead != other and lead.startswith(other) for other in best)]
    near = most_likely(best or [lead for lead in counts if 2 * counts[lead] > most] or [""])
    lead, *others = sorted(near, key=lambda one: -counts[one])
    if others and counts[others[0]] == counts[lead]:
        raise UserError(
            f"the configuration's tensors are under {lead} and under {others[0]}: say which with --part {lead[:-1]}"
        )
    return lead


def _fits(model: Any, params: Mapping[str, TensorSpec]) -> bool:
    found = _conversion(model, params)
    return not (found.surplus or found.unlike or _missing(model, found))


def _conversion(model: Any, params: Mapping[str, TensorSpec]) -> "Conversion":
    from tangram.models.building.conversions import read_conversion

    return read_conversion(model, {name: spec.shape for name, spec in params.items()})


def _together(source: OpenCheckpoint, model: Any) -> list[str]:
    """A sentence where experts are put together, as a module has them and no file that transformers writes."""
    from tangram.models.building.conversions import put_together

    found = put_together(model, source.specs)
    ways = "other programs than transformers 5 look for them one by one, as --to torch_dist and back makes them"
    return [f"{len(found):,} tensors are experts put together, as {found[0]}: {ways}"] if found else []


def _of_other_shape(model: Any, found: "Conversion") -> list[str]:
    """Sentences about tensors of a model that those stored make in another shape: it could not be loaded."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    odd: list[str] = []
    for part in found.parts:
        for name, shape in part.shapes.items():
            if name in wanted and tuple(shape) != wanted[name]:
                sizes, right = (" x ".join(map(str, dims)) for dims in (shape, wanted[name]))
                made = "" if part.sources == (name,) else f", of {_some(part.sources)}"
                odd.append(f"{name} is {sizes}{made}, not {right}")
    return odd


def _missing(model: Any, found: "Conversion") -> list[str]:
    """Tensors of a model that nothing stored makes; of tied ones a single name is enough."""
    tied = _tied_names(model)
    there = {name for part in found.parts for name in part.shapes}
    there |= {words for head, words in tied.items() if head in there}
    there |= {head for head, words in tied.items() if words in there}
    unneeded = cast("Collection[str]", getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    missing = [
        name
        for name, tensor in model.state_dict().items()
        if name not in there and not _is_derived(name, tensor.ndim) and not any(re.search(p, name) for p in unneeded)
    ]
    return [*found.missing, *missing]


def _tied_names(model: Any) -> Mapping[str, str]:
    """Which tensors of a model are another one, by the names of both."""
    return cast("Mapping[str, str]", getattr(model, "all_tied_weights_keys", None) or {})


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:SAID])}{f' and {len(names) - SAID:,} more' if len(names) > SAID else ''}"


# ---------------------------------------------------------------- what goes


def _without_derived(source: OpenCheckpoint, config: Mapping[str, Any] | None, notes: list[str]) -> OpenCheckpoint:
    derived = {name for name, spec in source.specs.items() if _is_derived(name, len(spec.shape))}
    if derived and config is not None and (model := _declared(config)) is not None:
        derived -= model.state_dict().keys()  # a class may keep some: without them a loader would miss them
    if not derived or len(derived) == len(source.specs):
        return source
    kinds = sorted({".".join(name.split(".")[-2:]) for name in derived})
    notes.append(f"left out, since models compute them: {len(derived):,} of {', '.join(kinds)}")
    return _quietly(source, source.specs.keys() - derived)


def _beside(specs: Collection[str]) -> list[str]:
    """Sentences about what goes along beside the weights: moving averages, by the names of these, and pairs of LoRA."""
    own = [name for name in specs if AVERAGE.search(name.partition(".")[0])]
    others = {end for name in set(specs).difference(own) for end in (name, name.partition(".")[2])}
    twins = Counter(name.partition(".")[0] for name in own if others & {".".join(name.split(".")[n:]) for n in (1, 2)})
    notes = [
        f"{many:,} tensors of {front} are named as others, as moving averages are: they go along as weights"
        for front, many in twins.items()
    ]
    if pairs := sum(LORA.search(name) is not None for name in specs):
        has = "has a pair of LoRA beside it" if pairs == 1 else "have a pair of LoRA beside them"
        notes.append(f"not merged: {pairs:,} of the weights {has}: {MERGE}")
    return notes


def _is_derived(name: str, dims: int) -> bool:
    return DERIVED.fullmatch(name) is not None or (dims == 4 and MASK.fullmatch(name) is not None)


def _tied_once(source: OpenCheckpoint, config: Mapping[str, Any], model: Any, notes: list[str]) -> OpenCheckpoint:
    """A checkpoint in which a head that is the embeddings has no name of its own. `model`: where it is built."""
    head = min((name for name in source.specs if name.endswith(HEADS)), key=len, default=None)
    if head is None:
        return source
    said = config.get("tie_word_embeddings")  # many published configurations leave it to their class
    if said is False or ((model := model or _declared(config)) is None and said is None):
        return source
    words = min((name for name in source.specs if name.endswith(EMBEDDINGS)), key=len, default=None)
    if words is None:
        return _named_as_words(source, head, model, notes)
    if model is not None and not _ties(model, head, words):
        return source
    if source.specs[head] != source.specs[words]:
        raise UserError(
            f"the configuration ties {head} to {words}, but they have unlike shapes or types: "
            "set its tie_word_embeddings to false where both are meant"
        )
    differing, elements = unlike_elements(source, head, words)
    if differing:
        raise UserError(
            f"the configuration ties {head} to {words}, but {differing:,} of {elements:,} elements differ: "
            "set its tie_word_embeddings to false where both are meant"
        )
    notes.append(f"{head} is {words}, bit for bit, as the configuration says: one tensor")
    owners = split(source.specs, source.states)
    return _quietly(source, {name for name in source.specs if owners[name][0] != head})


def _ties(model: Any, head: str, words: str) -> bool:
    """Whether a class ties these two, which may have names that it gives to files alone. Some tie others, or none."""
    tied = _tied_names(model)
    known = {head, words} <= model.state_dict().keys()
    return tied.get(head, head) == tied.get(words, words) if known else bool(tied)


def _named_as_words(source: OpenCheckpoint, head: str, model: Any, notes: list[str]) -> OpenCheckpoint:
    """A checkpoint that has of a tied pair the head alone, by the name that other programs look for."""
    words = _tied_names(model).get(head) if model is not None else None
    if words is None or not any(name.startswith(f"{words.partition('.')[0]}.") for name in source.specs):
        return source  # not tied, or by other names than the model's
    notes.append(f"{head} alone is there of two that are tied: it gets the name {words}")
    owners = split(source.specs, source.states)
    names = {name: words + name.removeprefix(head) if owners[name][0] == head else name for name in source.specs}
    return renamed(source, names)


def _quietly(source: OpenCheckpoint, names: Collection[str]) -> OpenCheckpoint:
    """Some tensors alone, where a sentence tells of the others."""
    return replace(only(source, names), beside=source.beside)


def unlike_elements(source: OpenCheckpoint, one: str, other: str) -> tuple[int, int]:
    """How many elements of two tensors of one type and shape differ in a bit, and how many there are."""
    specs = {name: source.specs[name] for name in (one, other)}
    pair = only(source, specs.keys())
    filler = Filler(pair, bind(IDENTITY, specs), specs, 64 << 20)
    spec, differing, elements = specs[one], 0, 0
    for box in boxes(spec.shape, COMPARED):
        region = Region.of([tuple(span(a, b) for a, b in box)])
        two = [torch.empty([b - a for a, b in box], dtype=getattr(torch, spec.dtype)) for _ in specs]
        if two[0].numel():
            for name, into in zip(specs, two, strict=True):
                filler.fill(name, region, into)
            bits = [into.reshape(-1).view(torch.uint8).view(-1, DTYPES[spec.dtype]) for into in two]
            differing += int((bits[0] != bits[1]).any(1).sum())
            elements += two[0].numel()
    return differing, elements
