"""Keys that a type of Hugging Face's configurations knows, from the source of its class, which is not imported.

Importing transformers and torch takes seconds; that a key is misspelt is seen without either. What a class knows is
what it and the classes that it is made of annotate, take and rename (`attribute_map`). Of nearly all types that is what
the classes themselves say, which a test compares; of one that is not found here nothing is known.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
