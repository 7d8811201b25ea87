"""Public models by their names: sizes as data (`catalogue.toml`), so that a plan of one needs neither torch nor a file.

A name is that of a repository on the Hugging Face hub, or its address, or its part after the slash; case does not
matter, nor do words that say how it was tuned (`TUNED`), nor who gives it out once more (`AGAIN`): those have the sizes
of what they began from.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Any

from tangram.errors import UserError
from tangram.models.building.directory import hub_hint
from tangram.models.outlines.images import tower_of, with_tower
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.text import packaged

TOLD = ("billions", "active", "tower", "config")
"""Keys that are no sizes of the decoder."""
TUNED = {"instruct", "chat", "it", "base", "pt", "hf", "thinking", "2507", "meta", "deduped"}
AGAIN = {"unsloth", "nousresearch"}
"""Who gives out others' models as they are."""
KEPT = {"-unsloth-bnb-4bit": "nf4", "-bnb-4bit": "nf4", "-gptq-int4": "gptq", "-gptq-int8": "gptq-int8", "-awq": "awq"}
"""What weights are kept in that a name ends like this."""
HUB = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"


@cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """The file: sizes by name, of a name that is like another the other's."""
    rows: dict[str, dict[str, Any]] = tomllib.loads(packaged("tangram.models", "catalogue.toml"))
    return {name: rows[row["like"]] if "like" in row else row for name, row in rows.items()}


@cache
def presets_named() -> tuple[str, ...]:
    """Names of the presets (`presets.toml`)."""
    return tuple(tomllib.loads(packaged("tangram.models", "presets.toml")))


@cache
def _short() -> Mapping[str, str]:
    """Whole names by each way to write them, in lower case."""
    return {one.lower(): name for name in catalogue() for one in (name, _last(name))}


@cache
def _plain() -> Mapping[str, str]:
    """Whole names by what is left of them; "" where models of unlike sizes are called so."""
    found: dict[str, str] = {}
    for name, row in catalogue().items():
        before = found.setdefault(_untuned(name), name)
        found[_untuned(name)] = before if before and catalogue()[before] == row else ""
    return found


@cache
def _owners() -> frozenset[str]:
    return frozenset(name.rpartition("/")[0].lower() for name in catalogue())


def _untuned(name: str) -> str:
    """Without the words of `TUNED`, and what stands between words."""
    return "".join(word for word in re.split(r"[-_ ]", _last(name).lower()) if word not in TUNED)


def _last(name: str) -> str:
    """After the slash, if there is one."""
    return name.rpartition("/")[2]


def in_catalogue(name: str) -> Outline | None:
    """The outline of a public model by its sizes; None for a name that is not in the catalogue with any."""
    found = _known_name(name)
    if not found or "config" in (row := catalogue()[found]):
        return None
    text = decoder(Dims(**{key: value for key, value in row.items() if key not in TOLD}), _last(found))
    return with_tower(text, tower_of(row["tower"])) if "tower" in row else text


def configured(name: str) -> tuple[str, dict[str, Any]] | None:
    """The short name and the configuration of a public model that no sizes describe."""
    found = _known_name(name)
    return (_last(found), dict(catalogue()[found]["config"])) if found and "config" in catalogue()[found] else None


def _known_name(name: str) -> str | None:
    """The name of a model in the catalogue, by whatever of it people write."""
    said = re.sub(HUB, "", name.strip().lower()).rstrip("/")
    known = said.rpartition("/")[0] in _owners() | AGAIN
    return _short().get(said) or (_plain().get(_untuned(said)) if known else None)


def active_numbers(outline: Outline) -> int:
    """Parameters that a token meets: all but those of experts that it does not go to."""
    idle = sum(
        count * block.numbers.experts * (1 - block.per_token / block.experts)
        for block, count in outline.runs
        if block.experts
    )
    return outline.numbers - round(idle)


def _apart(hint: str) -> str:
    """A hint as a sentence of its own."""
    text = hint.removeprefix(": ")
    return f" {text[:1].upper()}{text[1:]}" if text else ""


def no_model(name: str) -> UserError:
    """What is wrong with a name that is no model: the nearest names, or how to get what is on the hub."""
    for end, base in KEPT.items():
        if name.lower().endswith(end) and in_catalogue(whole := name[: -len(end)]):
            return UserError(
                f'"{name}" is {whole} with weights kept in few bits: give {whole}, --base {base} and --lora'
            )
    known = [*presets_named(), *catalogue()]
    hint = hub_hint(name)
    near = difflib.get_close_matches(name.lower(), [*presets_named(), *_short()], 3, 0.75)
    if near:
        names = dict.fromkeys(_short().get(one, one) for one in near)
        return UserError(f'there is no model "{name}": did you mean {" or ".join(names)}?{_apart(hint)}')
    among = "" if hint else f" ({len(known)} names, as {', '.join(known[2:8])})"
    return UserError(
        f'there is no model "{name}": give a name of the catalogue{among}, a preset, or a Hugging Face directory or '
        f"config.json{hint}"
    )
