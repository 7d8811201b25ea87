"""The field's words: what Tangram prints, and its pages, say TP, ZeRO, recompute as others do (docs/glossary.md).

Looked at are all strings of the source but docstrings, and the pages of `docs`. A word of our own that had a standard
one stands in `BANNED` with it.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = {
    r"(?:tensor|data|context|expert|pipeline) ranks?\b": "TP, DP, CP, EP or PP ranks",
    r"(?:computed?|computes|computing) again\b": "recompute",
    r"\bwhole copies\b": "replicas, DDP",
    r"\bmatrix products?\b": "matmuls",
    r"\bwaits? on the host\b": "offloaded to the host",
    r"\b90 of 100\b": "90 % interval",
    r"\bdivided over (?:all )?(?:DP|data)\b": "sharded over, a ZeRO stage",
}
PLANNER = {
    r"\bmade again\b": "recompute",
    r"\bchunks? of (?:a|each) rank\b": "virtual stages",
    r"\bproducts\b(?! of)": "matmuls",
}
"""And of the planner, whose tables people read first."""

NAMELESS = frozenset("told said asked wanted found given taken held lies whole moves".split())  # noqa: SIM905
"""Words that name nothing: of a function, a class or a field they say neither what it is nor what it does."""
OUTSIDE = frozenset(
    {
        "Choice.held",
        "Entry.held",
        "PredictedPlan.held",
        "Change.said",
        "Seconds.moves",
        "Rates.moves",
        "RuleMutant.found",
    }
)
"""Fields that are keys in files and in what `--json` prints; held-out data is a term of the field."""


def strings(file: Path) -> list[tuple[int, str]]:
    """Line and text of every string of a module but its documentation."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said and " " in node.value
    ]


def breaches(name: str, lines: list[tuple[int, str]], words: dict[str, str]) -> list[str]:
    return [
        f"{name}:{line} says {match[0]!r}: the field says {better}"
        for line, text in lines
        for word, better in words.items()
        if (match := re.search(word, text, re.IGNORECASE))
    ]


def test_what_is_printed_is_in_the_fields_words() -> None:
    source = ROOT / "src" / "tangram"
    found = [
        one
        for file in sorted(source.rglob("*.py"))
        for one in breaches(
            str(file.relative_to(ROOT)),
            strings(file),
            BANNED | (PLANNER if file.relative_to(source).parts[0] in ("planner", "schema") else {}),
        )
    ]
    assert found == []


def nameless(tree: ast.Module) -> list[str]:
    """The functions, classes and fields of a module whose names have such a word."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [
        (f"{owner.name}.{node.target.id}", node.target.id)
        for owner in classes
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    defined = [
        (node.name, re.sub("(?<!^)(?=[A-Z])", "_", node.name).lower())
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return [
        name
        for name, words in [*defined, *fields]
        if name not in OUTSIDE and NAMELESS & set(words.replace("held_out", "").strip("_").split("_"))
    ]


def test_functions_classes_and_fields_are_named_by_what_they_are() -> None:
    source = ROOT / "src" / "tangram"
    trees = {str(file.relative_to(source)): ast.parse(file.read_text()) for file in sorted(source.rglob("*.py"))}
    assert {file: names for file, tree in trees.items() if (names := nameless(tree))} == {}
    planted = "def is_whole(): ...\nclass Given:\n  told: int\n  held_out: int\nclass Choice:\n  held: int\n"
    assert nameless(ast.parse(planted)) == ["is_whole", "Given", "Given.told"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_documentation_is_in_the_fields_words(page: Path) -> None:
    if page.stem == "glossary":
        return
    lines = [(i, line) for i, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)]
    assert breaches(page.name, lines, BANNED) == []


def test_a_planted_word_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Of data ranks."""\nTITLE = "sent over tensor ranks"\nMORE = "a block is computed again"\n')
    assert [one.partition(":")[2] for one in breaches("a.py", strings(file), BANNED)] == [
        "2 says 'tensor ranks': the field says TP, DP, CP, EP or PP ranks",
        "3 says 'computed again': the field says recompute",
    ]
