"""A configuration read strictly: keys that its type does not know but for a letter, and numbers that contradict.

A key that no class knows is left unread by it, and what it meant to say is the class's default: of `hiden_size` a model
of another size. Such keys are refused where a key that the type knows, and the file does not have, is near; other keys
(of the model's own code, of tokenizers) are the authors' own.

Keys that a type of Hugging Face's configurations knows, from the source of its class, which is not imported.

Importing transformers and torch takes seconds; that a key is misspelt is seen without either. What a class knows is
what it and the classes that it is made of annotate, take and rename (`attribute_map`). Of nearly all types that is what
the classes themselves say, which a test compares; of one that is not found here nothing is known.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tangram.errors import UserError
from tangram.models.building.fields import by_layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BESIDE = frozenset({"_name_or_path", "output_attentions", "torch_dtype", "dtype"})
"""Keys of every type that no class annotates."""


def known_keys(kind: str) -> frozenset[str] | None:
    """Of a type of model; None where its class is not found, or transformers is not there."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "models" / kind.replace("-", "_")
    for path in sorted(folder.glob("configuration_*.py")) if kind.isidentifier() else ():
        for name, node in _module(path)[0].items():
            if kind in _texts(node, "model_type"):
                return frozenset(_names(path, name)) | BESIDE
    return None


@cache
def _module(path: Path) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[Path, str]]]:
    """Its classes, and where names that it imports from its own package come from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    brought: dict[str, tuple[Path, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            target = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            brought |= {one.asname or one.name: (target, one.name) for one in node.names}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}, brought


def _names(path: Path, name: str) -> Iterator[str]:
    """What the class of this name, of a file or imported by it, and those before it know."""
    classes, brought = _module(path)
    if name not in classes:
        target, own = brought.get(name, (path, ""))
        file = target.with_suffix(".py") if target.with_suffix(".py").exists() else target / "__init__.py"
        if own and file.exists():
            yield from _names(file, own)
        return
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (one.arg for one in (*taken[1:], *filter(None, [node.args.kwarg])))
    yield from _texts(classes[name], "attribute_map")
    for base in classes[name].bases:
        if isinstance(base, ast.Name):
            yield from _names(path, base.id)


def _texts(of: ast.ClassDef, name: str) -> list[str]:
    """The text, or keys of the table, that a class gives a name."""
    for node in of.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            given = node.value.keys if isinstance(node.value, ast.Dict) else [node.value]
            return [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []


NEAR = 0.85
"""How alike two keys are of which one is taken for the other misspelt: two letters of ten, at most."""
POSITIVE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "num_key_value_heads",
    "head_dim", "moe_intermediate_size",
)  # fmt: skip


def refuse_misspelt(name: str) -> None:
    """The same of what is seen before torch and transformers are loaded: keys, and what the file's own numbers say."""
    path = Path(name)
    try:
        read: Any = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # which is told by those who read it as what it is
        return
    fields = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
    kind = str(fields.get("model_type"))
    if found := [*_misspelt(fields, kind, known_keys(kind) or frozenset(fields))]:
        raise UserError(f"{name}: {'; '.join([*found, *_numbers(SimpleNamespace(**fields))])}")


def refuse_strange(name: str, config: PreTrainedConfig) -> None:
    """Raise UserError, with all that is wrong, for a configuration in a directory or file whose keys or numbers are."""
    path = Path(name)
    fields = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if found := [*mistakes(cast("dict[str, Any]", fields), config)]:
        raise UserError(f"{name}: {'; '.join(found)}")


def mistakes(fields: Mapping[str, Any], config: PreTrainedConfig) -> Iterator[str]:
    """What is wrong with the fields of a configuration, each in a sentence."""
    yield from _misspelt(fields, config.model_type, known(type(config)))
    text = config.get_text_config()
    for part, said in ((fields, config), (fields.get("text_config"), text)):
        if isinstance(part, Mapping) and (part is fields) == (said is text):
            yield from dict.fromkeys(one for layer in by_layer(said) for one in _numbers(layer))


def _misspelt(fields: Mapping[str, Any], kind: str, keys: Set[str]) -> Iterator[str]:
    absent = sorted(keys - set(fields))
    for key in fields:
        if key not in keys and (near := difflib.get_close_matches(key, absent, 1, NEAR)):
            yield f'the key "{key}" is none of {kind} (did you mean {near[0]!r}?)'


def known(kind: type[PreTrainedConfig]) -> set[str]:
    """Keys of a class and of those that it is made of."""
    from transformers import PreTrainedConfig

    kinds = kind.__mro__
    named = {name for kind in kinds for name in (*inspect.signature(kind).parameters, *inspect.get_annotations(kind))}
    return named | set(kind.attribute_map) | set(PreTrainedConfig().to_dict()) | BESIDE


def _numbers(config: PreTrainedConfig | SimpleNamespace) -> Iterator[str]:
    def number(key: str) -> int:
        value = getattr(config, key, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    for key in POSITIVE:
        value = getattr(config, key, None)
        if isinstance(value, int) and value < 1:
            yield f"{key} is {value}"
    hidden, heads, groups, layers = (
        number(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    if heads > 0 and groups > 0 and heads % groups:
        yield f"num_key_value_heads of {groups} do not divide num_attention_heads of {heads}"
    if heads > 0 and hidden % heads and not number("head_dim") and not number("kv_lora_rank"):
        yield f"num_attention_heads of {heads} do not divide hidden_size of {hidden}, and there is no head_dim"
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and layers and len(cast("list[Any]", kinds)) != layers:
        yield f"layer_types are of {len(cast('list[Any]', kinds))} layers, and num_hidden_layers is {layers}"
    counts = [number(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts = min((one for one in counts if one > 0), default=0)  # a type may have two names of which one is said
    if experts and number("num_experts_per_tok") > experts:
        yield f"num_experts_per_tok is {number('num_experts_per_tok')}, and there are {experts} experts"
    if number("first_k_dense_replace") > layers:
        yield f"first_k_dense_replace is {number('first_k_dense_replace')}, and num_hidden_layers is {layers}"
