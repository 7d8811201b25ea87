"""Which files of the repository lean on which, read from their source text and never run.

A Python file leans on what it imports anywhere, on modules and files that it names in texts (`"tangram.cli.plan"`,
`root / "docs"`, `"job.toml"`), on the data beside it, and a test on the conftest.py of its folders. Names cannot show
everything (a path put together from pieces): what they miss has its turn in the rotation all the same.
"""

import ast
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

EVERYWHERE = ("pyproject.toml", "constraints.txt")
"""A change of these may change any test."""


@dataclass(frozen=True)
class Graph:
    """`leans`: the files that a file leans on. `functions`: the names of its usual tests' functions, by test file."""

    leans: Mapping[str, frozenset[str]]
    functions: Mapping[str, tuple[str, ...]]

    def distances(self, changed: Mapping[str, int]) -> dict[str, int]:
        """For each file that leans on a changed one, over how many others at least, plus what is said of that one."""
        back: dict[str, list[str]] = defaultdict(list)
        for file, below in self.leans.items():
            for other in below:
                back[other].append(file)
        steps: dict[str, int] = {}
        front = sorted((step, file) for file, step in changed.items())
        while front:
            step, file = heapq.heappop(front)
            if file not in steps:
                steps[file] = step
                for above in back[file]:
                    heapq.heappush(front, (step + 1, above))
        return steps


def is_test(file: str) -> bool:
    """Whether pytest collects the file."""
    return file.startswith("tests/") and PurePosixPath(file).name.startswith("test_") and file.endswith(".py")


def read_graph(root: Path, files: Iterable[str]) -> Graph:
    """The graph of these files, by their paths below `root`."""
    known = {file for file in files if (root / file).is_file()}
    modules = {_module(file): file for file in known if file.endswith(".py")}
    names = _Names.of(known, modules)
    leans: dict[str, frozenset[str]] = {}
    functions: dict[str, tuple[str, ...]] = {}
    for module, file in modules.items():
        tree = ast.parse((root / file).read_bytes(), file)
        nodes = list(ast.walk(tree))
        below = {*_imports(nodes, module, modules), *names.named(nodes), *names.beside(file)}
        if is_test(file):
            below |= names.above(file)
            functions[file] = tuple(node.name for node in nodes if _is_usual_test(node))
        if file == "tests/conftest.py":
            below |= known & {*EVERYWHERE}
        leans[file] = frozenset(below - {file})
    return Graph(leans, functions)


def _is_usual_test(node: ast.AST) -> bool:
    """Slow tests and cells of the matrix are chosen by parts of their own (`make slow`, `make matrix`)."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
        return False
    return not {"pytest.mark.slow", "pytest.mark.matrix"} & {ast.unparse(mark) for mark in node.decorator_list}


def _module(file: str) -> str:
    """The dotted name of a Python file; what is imported as a package is named like its __init__.py."""
    parts = PurePosixPath(file).with_suffix("").parts
    if file.startswith("src/"):
        parts = parts[1:]
    return ".".join(parts).removesuffix(".__init__")


def _imports(nodes: Iterable[ast.AST], module: str, modules: Mapping[str, str]) -> Iterator[str]:
    """The files of what is imported, the packages on the way to it included: they are run first."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (modules[above] for n in range(len(parts)) if (above := ".".join(parts[: n + 1])) in modules)


@dataclass(frozen=True)
class _Names:
    """The files by what texts call them."""

    modules: Mapping[str, str]
    packages: Mapping[str, frozenset[str]]
    files: Mapping[str, frozenset[str]]
    folders: Mapping[str, frozenset[str]]
    data: Mapping[str, frozenset[str]]
    conftests: frozenset[str]

    @staticmethod
    def of(known: Iterable[str], modules: Mapping[str, str]) -> "_Names":
        packages, files, folders, data = (defaultdict[str, set[str]](set) for _ in range(4))
        for module, file in modules.items():
            packages[module.rpartition(".")[0] + "."].add(file)
        homes = {str(PurePosixPath(file).parent) for file in modules.values()}
        for file in known:
            path = PurePosixPath(file)
            if not file.endswith(".py") or path.parts[0] not in ("src", "tests"):
                files[path.name].add(file)
            if len(path.parts) > 1:
                folders[path.parts[0]].add(file)
            home = next((str(above) for above in path.parents if str(above) in homes), None)
            if not file.endswith(".py") and home and file.startswith(("src/", "tests/")):
                data[home].add(file)
        conftests = frozenset(file for file in known if PurePosixPath(file).name == "conftest.py")
        return _Names(modules, _frozen(packages), _frozen(files), _frozen(folders), _frozen(data), conftests)

    def named(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        """What texts name: modules, families of modules (`f"bench.{name}"`), files, and folders behind a `/`."""
        for node in nodes:
            if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
                yield from self.packages.get(str(node.values[0].value), ())
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
                yield from self.folders.get(str(node.right.value), ())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
                text = node.value
                if text in self.modules and "." in text:
                    yield self.modules[text]
                if "." in text:
                    last = text.rpartition("/")[2]
                    yield from (file for file in self.files.get(last, ()) if f"/{file}".endswith(f"/{text}"))

    def beside(self, file: str) -> frozenset[str]:
        """Data in the folder of a Python file or below, for which no other folder of Python files is nearer."""
        return self.data.get(str(PurePosixPath(file).parent), frozenset())

    def above(self, file: str) -> frozenset[str]:
        """The conftest.py of the folders that a test stands in."""
        return self.conftests & {str(above / "conftest.py") for above in PurePosixPath(file).parents}


def _frozen(groups: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {key: frozenset(value) for key, value in groups.items()}
