"""What a test replaces in a module is there: a name that moved would fail when the test has its turn, weeks later."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"


def module_file(name: str) -> Path | None:
    path = SOURCE / name.replace(".", "/")
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def names_of(file: Path) -> set[str]:
    """What a module has at its top, and what it sets or imports within a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case _:
                pass
    return found | {one.stem for one in file.parent.iterdir() if file.name == "__init__.py"}


def replaced(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """By `setattr(module, "name", ...)` and `setattr("module.name", ...)`: modules of the package, and names."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tangram"):
            modules |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Name(id=name), ast.Constant(value=str(what)), *_]
            ):
                yield modules.get(name, ""), what
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(path)), *_]):
                yield path.rpartition(".")[0], path.rpartition(".")[2]
            case _:
                pass


def test_what_tests_replace_is_there() -> None:
    missing = [
        f"{file.relative_to(TESTS)} replaces {what} of {name}, which has none"
        for file in sorted(TESTS.rglob("*.py"))
        for name, what in replaced(ast.parse(file.read_text()))
        if (source := module_file(name)) is not None and what not in names_of(source)
    ]
    assert not missing
    assert ("a.b", "c") in [*replaced(ast.parse('monkeypatch.setattr("a.b.c", 1)'))]
