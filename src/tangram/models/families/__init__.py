"""How families of models are called and cut in other frameworks: one data file each, and a mapping for a configuration.

    architectures = [...]         whose config.json this is
    include = [...]               files in `shared`, whose tables and parts it has, too; its own tables win
    [sizes]                       factors of the notation, by names of the configuration or arithmetic on them
    [words]                       what `$name` stands for in statements, where families differ in a name only; of
                                  several prefixes that names may have, the longest that there is, else the first
    [[part]]                      statements from Hugging Face to Megatron-core; `when` says for which configurations,
                                  `each = { layer_types = "full_attention" }` repeats them for each such layer `$i`

A mapping is written once; the way back is its inverse. Where a statement depends on a number, `$name` stands for it.
Nothing here knows a model: what differs between families is in their files.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, cast

from tangram.errors import UserError

__all__ = [
    "Family",
    "Mapped",
    "Part",
    "architectures_of",
    "families",
    "family_named",
    "family_of",
    "fields_of",
    "mapping_of",
    "megatrons_embedding",
    "read_family",
]

_TABLES = ("sizes", "defaults", "words", "local")
_EMBEDDING = "embedding.word_embeddings.weight"
_CLASSIFIER = re.compile(r"For(?:Sequence|Token)Classification$")


@dataclass(frozen=True)
class Part:
    """Statements that hold for some configurations."""

    when: str
    mapping: str
    of: tuple[tuple[str, ...], ...] = ((),)
    """Names that `$hf` and `$mc` stand for, and when; the statements are there once for each."""
    each: tuple[str, str] | None = None
    """A list of the configuration, and the value in it: once for each place `$i` that has it."""


@dataclass(frozen=True)
class Family:
    """A data file."""

    name: str
    architectures: tuple[str, ...]
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    """What a configuration means that does not say it."""
    words: Mapping[str, tuple[str, ...]]
    """What `$name` stands for, beside sizes; several are prefixes that names may have."""
    parts: tuple[Part, ...]
    local: Mapping[str, str]
    """What Megatron-core's layers without Transformer Engine call a tensor, where that is another name."""


@dataclass(frozen=True)
class Mapped:
    """A family's mapping for one configuration."""

    family: str
    text: str
    sizes: Mapping[str, int]


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """All that are known."""
    folder = resources.files(__name__)
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".toml")), key=lambda one: one.name)
    return tuple(_family(one.name.removesuffix(".toml"), one.read_text(encoding="utf-8")) for one in files)


def read_family(path: Path) -> Family:
    """One of a user's own. Raises UserError for what is none."""
    try:
        return _family(path.stem, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f'"{path}" cannot be read: {error.strerror}') from None


def family_named(text: str) -> Family:
    """By its name, or a file of a user's own. Raises UserError where there is neither."""
    found = next((one for one in families() if one.name == text), None)
    if found is None and not Path(text).exists():
        names = ", ".join(one.name for one in families())
        raise UserError(f"--family {text}: there is no such file, and families are {names}")
    return found or read_family(Path(text))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a configuration. Raises UserError where there is none."""
    asked = architectures_of(config, [one for family in families() for one in family.architectures])
    bases = {_CLASSIFIER.sub("ForCausalLM", one) for one in asked}
    for names in (set(asked), bases):
        for family in families():
            if names & set(family.architectures):
                return family
    known = ", ".join(one.name for one in families())
    said = ", ".join(asked) or f"none (its model_type is {config.get('model_type')!r})"
    raise UserError(f"no family has the architecture {said}; there are {known}: give a --family FILE of your own")


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of its decoder: a table `text_config` counts where it says nothing else itself.

    `classifier` is whether the head gives classes, `layer_types` the list that an interval of layers stands for.
    """
    inner = cast("Mapping[str, Any]", config.get("text_config") or {})
    found = {key: value for key, value in {**inner, **config}.items() if value is not None}
    found["classifier"] = any(_CLASSIFIER.search(str(one)) for one in config.get("architectures") or ())
    interval, layers = found.get("full_attention_interval"), found.get("num_hidden_layers")
    if isinstance(interval, int) and isinstance(layers, int) and interval > 0:
        kinds = ["linear_attention", "full_attention"]
        found.setdefault("layer_types", [kinds[(i + 1) % interval == 0] for i in range(layers)])
    return found


def megatrons_embedding(names: Iterable[str]) -> str | None:
    """The tensor by which Megatron-core's names are known: each of its models has it on its first stage."""
    return next((name for name in names if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")), None)


def architectures_of(config: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """What a configuration says that it is; where it says none, the one of `known` that its type of model names."""
    said = [str(one) for one in config.get("architectures") or ()]
    kind = str(config.get("model_type") or "")
    if said or not kind:
        return said
    heads = ["ForConditionalGeneration"] if "vision_config" in config else ["ForCausalLM", "LMHeadModel"]
    wanted = {_folded(one + head) for one in (kind, kind.removesuffix("_text")) for head in heads}
    return [one for one in known if _folded(one) in wanted]


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def mapping_of(
    family: Family,
    config: Mapping[str, Any],
    *,
    vocabulary: int | None = None,
    names: Collection[str] = (),
    local: bool = False,
) -> Mapped:
    """The mapping from Hugging Face to Megatron-core.

    `vocabulary`: rows of Megatron's embeddings where they are padded. `names`: tensors that are there, for a part that
    asks for one with `has`. `local`: with the names of layers without Transformer Engine. Raises UserError where the
    configuration does not say a size.
    """
    known = {**family.defaults, **fields_of(config)}
    sizes: dict[str, int] = {}
    for name, size in family.sizes.items():
        sizes[name] = _number(family, name, size, {**known, **sizes})
    rows = sizes.get("v")
    padded = vocabulary is not None and rows is not None and vocabulary > rows
    if vocabulary is not None and rows is not None and vocabulary < rows:
        raise UserError(f"{vocabulary} rows are fewer than the {rows} of the vocabulary")
    vocab = f"(v + _={(vocabulary or 0) - (rows or 0)})" if padded else "v"
    chosen = {key: _prefix(some, names) for key, some in family.words.items()}
    words: dict[str, Any] = {**chosen, **sizes, "vocab": vocab}
    holds = partial(_holds, known=known, sizes=sizes, names=names)
    lines = [
        part.mapping.replace("$hf", hf).replace("$mc", mc).replace("$i", i)
        for part in family.parts
        if holds(part.when)
        for hf, mc, when in ((*of, "", "", "")[:3] for of in part.of)
        if holds(when)
        for i in _places(part, known)
    ]
    try:
        text = Template("\n".join(lines)).substitute({key: str(value) for key, value in words.items()})
    except (KeyError, ValueError) as error:
        raise UserError(f"the family {family.name} names ${error}, which is no size and no word of it") from None
    if local and family.local:
        text = re.sub("|".join(map(re.escape, family.local)), lambda match: family.local[match[0]], text)
    return Mapped(family.name, text, {name: n for name, n in sizes.items() if len(name) == 1})


def _family(name: str, text: str, shared: bool = False) -> Family:
    try:
        fields: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the family {name} is no TOML: {error}") from None
    surplus = fields.keys() - {"architectures", "include", "part", *_TABLES}
    if surplus or not (shared or (fields.get("architectures") and (fields.get("part") or fields.get("include")))):
        what = f"it has {', '.join(sorted(surplus))}" if surplus else "it needs architectures and a [[part]]"
        raise UserError(f"the family {name} is none: {what}")
    included = [_shared(name, str(one)) for one in fields.get("include", [])]
    tables = {table: _merged([getattr(one, table) for one in included], fields.get(table, {})) for table in _TABLES}
    parts = cast("list[dict[str, Any]]", fields.get("part", []))
    if any("mapping" not in one for one in parts):
        raise UserError(f"the family {name} has a [[part]] without a mapping")
    own = tuple(
        Part(str(one.get("when", "")), str(one["mapping"]), _pairs(one.get("of")), _each(one.get("each")))
        for one in parts
    )
    return Family(
        name,
        tuple(fields.get("architectures", ())),
        {key: str(value) for key, value in tables["sizes"].items()},
        tables["defaults"],
        {key: _several(value) for key, value in tables["words"].items()},
        (*(part for one in included for part in one.parts), *own),
        tables["local"],
    )


def _shared(name: str, asked: str) -> Family:
    """What families have in common: a file without architectures."""
    folder = resources.files(__name__) / "shared"
    there = sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))
    if asked not in there:
        raise UserError(f"the family {name} includes {asked}; there are {', '.join(there)}")
    return _family(asked, (folder / f"{asked}.toml").read_text(encoding="utf-8"), shared=True)


def _merged(included: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for table in (*included, own) for key, value in table.items()}


def _several(value: Any) -> tuple[str, ...]:
    some = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
    return tuple(map(str, some))


def _each(value: Mapping[str, str] | None) -> tuple[str, str] | None:
    return next(iter(value.items())) if value else None


def _prefix(some: tuple[str, ...], names: Collection[str]) -> str:
    """The longest of several prefixes that a name has, else the first: none is no prefix of Megatron-core's names."""
    if len(some) == 1 or megatrons_embedding(names) is not None:
        return some[0]
    return max((one for one in some if any(name.startswith(one) for name in names)), key=len, default=some[0])


def _places(part: Part, known: Mapping[str, Any]) -> list[str]:
    """The numbers that `$i` stands for: one of no meaning where there is no `each`."""
    if part.each is None:
        return [""]
    key, value = part.each
    return [str(i) for i, one in enumerate(known.get(key) or ()) if one == value]


def _pairs(of: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, one)) for one in of) if of else ((),)


def _add(a: int, b: int) -> int:
    return a + b


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: _add,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
}


def _number(family: Family, name: str, text: str, known: Mapping[str, Any]) -> int:
    """A size: names of the configuration, whole numbers, + - * //, and `a or b` where a may be absent."""

    def of(node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=key):
                value = known.get(key)
                return value if isinstance(value, int) else None
            case ast.BoolOp(op=ast.Or(), values=values):
                return next((n for n in map(of, values) if n is not None), None)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                a, b = of(left), of(right)
                return None if a is None or b is None else _OPERATORS[type(op)](a, b)
            case _:
                raise UserError(f"the family {family.name} has the size {name} = {text!r}, which is no sum of names")

    found = of(ast.parse(text, mode="eval").body)
    if found is None:
        raise UserError(f"the configuration does not say the size {name} of the family {family.name}: {text}")
    return found


def _holds(when: str, known: Mapping[str, Any], sizes: Mapping[str, int], names: Collection[str]) -> bool:
    """`key`, `not key`, `has PATTERN`, several of them with `and`, and several of those with `or`."""

    def there(key: str) -> bool:
        if key.startswith("has "):
            pattern = re.compile(re.escape(key.removeprefix("has ")).replace(r"\*", ".*"))
            return any(pattern.fullmatch(name) for name in names)
        return bool(sizes.get(key, known.get(key)))

    def holds(word: str) -> bool:
        return there(word.removeprefix("not ").strip()) != word.startswith("not ")

    return not when or any(all(map(holds, words.split(" and "))) for words in when.split(" or "))
