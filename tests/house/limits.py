"""docs/limits.md, made of the refusals themselves: `python -m tests.house.limits` writes the page anew.

A refusal is a `raise` of `UserError` or a subclass of it, found in the source; what an f-string fills in is shown as
`...`. A sentence that says what Tangram does not do, by the phrases of `KINDS`, is a limit and stands on the page; one
that says what is wrong with an input (a damaged file, a misspelt option) does not, and is only counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tangram"
PAGE = ROOT / "docs" / "limits.md"
_ENDS = "BadRow"
"""An error whose text is the end of a sentence about a row."""


@dataclass(frozen=True)
class Refusal:
    room: str
    """The package, and for a sub-package its name too, as `planner/exports`."""
    module: str
    sentence: str


@dataclass(frozen=True)
class Kind:
    title: str
    rooms: str
    """A pattern of rooms."""
    phrases: str
    """A pattern that a limit of this kind has in its sentence."""


_CANNOT = (
    r"this version|not yet|not supported|needs? a tensor|no others|knows no|there is no rule|leave it out$|"
    r"cannot (?:be (?:cut|run on|captured|written as|replaced|built|counted|merged|given|computed|trained))|"
    r"cannot (?:run|follow|train|give|write into)|write it as (?:an operator|one)|"
    r"does not (?:run|take|support|tie|cut|know)|(?:is|are) not (?:read|merged|priced|run|written)\b|"
    r"only .* (?:is|are|was) (?:merged|read|replaced)"
)
_ROW = "a row that "
_OF_ROWS = f"^{_ROW}.*(?:template|trained? on|takes rows|special token|cannot be told)"
KINDS: tuple[Kind, ...] = (
    Kind(
        "Models: building, capturing, counting",
        r"models.*",
        _CANNOT + r"|is none that|has not$|is not causal|by tokens",
    ),
    Kind(
        "Derivation and marks",
        r"sharding/(?:derive|choose|eager|runtime|marks).*|sharding",
        _CANNOT + r"|mark it|too many|draws",
    ),
    Kind("Operators, their rules and other libraries", r"sharding/.*", _CANNOT),
    Kind("Training", r"training.*", _CANNOT + r"|is of routers|one module hands|converted before|" + _OF_ROWS),
    Kind("Planning", r"schema|planner(?!/(?:exports|platforms)).*", _CANNOT + r"|is not priced|searches|has not$"),
    Kind("Exports of plans to other projects", r"planner/(?:exports|platforms)", r"^(?!--)"),
    Kind(
        "Checkpoints and conversion",
        r"checkpoint.*",
        _CANNOT + r"|dequantise|no name for|convert it with|holds tensors|cannot hold",
    ),
    Kind(
        "Layouts and relayout",
        r"layout|relayout.*",
        _CANNOT + r"|no sequence of collectives|has no (?:placement|layout)|refused",
    ),
    Kind("Recovery", r"resilience.*", _CANNOT + r"|divide among|has no plan for|starts the ranks of a node itself"),
    Kind("Kernels and hardware", r"kernels.*|hardware.*", _CANNOT + r"|wants|the catalogue knows no"),
)
_INTRODUCTION = """# Limits

What Tangram refuses, in its own words. Nothing here is silently done otherwise: each line is the sentence that a
command or a call ends with, and `...` is what it fills in. The page is made of the source
(`python -m tests.house.limits`), and a test holds it to that. Refusals of damaged or contradictory input are not
listed: there are {others} more of those.
"""


@cache
def refusals() -> tuple[Refusal, ...]:
    """Every refusal of the source, in the order of its modules."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    errors = _subclasses(trees)
    found: list[Refusal] = []
    for path, tree in trees.items():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] == "cli":  # mistakes in options
            continue
        found += [Refusal("/".join(parts[:-1]), "/".join(parts), sentence) for sentence in _sentences(tree, errors)]
    return tuple(found)


def _subclasses(trees: Mapping[Path, ast.Module]) -> set[str]:
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {"UserError", _ENDS}
    while more := {c.name for c in classes if c.name not in found and any(_name(base) in found for base in c.bases)}:
        found |= more
    return found


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _sentences(tree: ast.Module, errors: set[str]) -> Iterator[str]:
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    for call in sorted(raised, key=lambda call: call.lineno):
        if isinstance(call, ast.Call) and _name(call.func) in errors and call.args:
            sentence = _text(call.args[0])
            if re.search(r"[a-z]{3}", sentence):
                yield _ROW * (_name(call.func) == _ENDS) + sentence


def _text(node: ast.expr) -> str:
    """The text of an expression, with `...` for what is not known before it runs."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return re.sub(r"(?:\.\.\.)+", "...", "".join(_text(value) for value in values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case _:
            return "..."


def kind_of(refusal: Refusal) -> Kind | None:
    """The kind of limit that a refusal is, None for one of input."""
    for kind in KINDS:
        if re.fullmatch(kind.rooms, refusal.room):
            return kind if re.search(kind.phrases, refusal.sentence) else None
    return None


def page() -> str:
    """The page as it should be."""
    found = refusals()
    lines = [_INTRODUCTION.format(others=sum(kind_of(one) is None for one in found))]
    for kind in KINDS:
        own = [one for one in found if kind_of(one) is kind]
        lines.append(f"## {kind.title}\n")
        module = ""
        for one in dict.fromkeys(own):
            if one.module != module:
                module = one.module
                lines.append(f"`{module}`\n" if lines[-1].endswith("\n") else f"\n`{module}`\n")
            lines.append(f"- {_escaped(one.sentence)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _escaped(sentence: str) -> str:
    """As Markdown that shows the sentence: angle brackets, stars and square brackets are no markup."""
    return re.sub(r"([<>*\[\]]|\b__|__\b)", r"\\\1", " ".join(sentence.split()))


if __name__ == "__main__":
    PAGE.write_text(page())
