"""The walls of the house, read from the source text: who may import whom, and who owns what.

Every module is parsed and never run, so that an import inside a function counts like one at the top. `findings` returns
one sentence for each breach; `test_walls.py` expects none in Tangram and plants breaches of each kind.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# From the lowest to the highest; a room imports only rooms that stand before it.
ROOMS = (
    "layout hardware kernels models relayout checkpoint sharding schema planner tracing training resilience cli".split()  # noqa: SIM905
)
# What lies beside the rooms: everybody may import these, nobody __main__; the package itself, its front door, offers
# names of every room, and imports none of them before they are used (test_minimal_imports.py).
BELOW_ALL = {"errors", "lazy", "text"}

# Rooms that are useful by themselves, and the only third-party libraries that they may need.
MINIMAL = {
    "layout": {"torch", "numpy", "lark"},
    "relayout": {"torch", "numpy", "lark"},
    "checkpoint": {"torch", "numpy", "lark", "safetensors", "xxhash"},
}
OPTIONAL = {("tangram.checkpoint.store.objects", "obstore")}
"""What a module imports when it is asked for it and not before; without it it says so in a sentence."""

# One owner each: the modules (or rooms) that may use what the name on the left stands for.
OWNERS: Mapping[str, tuple[str, ...]] = {
    "a collective": (
        "tangram.relayout",
        "tangram.training",
        "tangram.hardware.measuring.checks",
        "tangram.hardware.measuring.rates",
        "tangram.hardware.measuring.sweep",
    ),
    # The sweep's helpers are processes of its own, which measure collectives and end.
    "a default process group": ("tangram.training", "tangram.hardware.measuring.sweep"),
    "a process": ("tangram.hardware.host.workers", "tangram.training"),
    "a parser": ("tangram.layout",),
    "an import by a computed name": (
        "tangram.cli",
        "tangram.lazy",
        "tangram.hardware.host.workers",
        "tangram.hardware.measuring.benches",
    ),
    "the name of one kind of accelerator": ("tangram.hardware", "tangram.kernels"),
}

_COLLECTIVES = re.compile(
    r"torch\.distributed\.(nn\.functional\.|_functional_collectives\.)?(all_?reduce|all_?gather|reduce_scatter|all_?to_?all"
    r"|broadcast|gather|scatter|reduce|send|recv|isend|irecv|batch_isend_irecv|P2POp|barrier|monitored_barrier)\w*"
)
_COLLECTIVE_METHODS = {"allreduce", "allgather", "reduce_scatter", "alltoall", "alltoall_base", "_allgather_base"}
_GROUPS = {"torch.distributed.init_process_group", "torch.distributed.device_mesh.init_device_mesh"}
# Its connections are sockets.
_PROCESSES = re.compile(
    r"(subprocess|multiprocessing(?!\.connection)|torch\.multiprocessing|concurrent\.futures\.ProcessPoolExecutor"
    r"|torch\.distributed\.(elastic|launcher|run)|os\.(fork|forkpty|system|popen|posix_spawn|spawn\w+|exec\w+))(\.|$)"
)
_PARSERS = {"lark", "pyparsing", "ply", "parsy", "parsimonious", "antlr4", "sly", "arpeggio"}
_FILES = re.compile(r"(pathlib|shutil|tempfile|mmap|fileinput|glob|io|os|importlib\.resources)(\.|$)")
_DEVICE = re.compile(r"\bcuda\b")


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module
    lines: int
    is_package: bool = False
    """Whether it is an `__init__`."""

    @property
    def package(self) -> str:
        """Its package, as `tangram.planner.cost`: of an `__init__` the module itself."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        """The room it stands in; the module's own name where it lies beside the rooms."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""


def modules(package: Path) -> list[Module]:
    """Every module of the package in the folder `package`."""
    found: list[Module] = []
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found.append(Module(name, ast.parse(text, str(path)), text.count("\n"), parts[-1] == "__init__"))
    return found


FILES = 16
"""Modules of a folder at most, beside its `__init__`; a larger room has sub-packages."""


def findings(package: Path, dependencies: Mapping[str, set[str]]) -> list[str]:
    """A sentence for each breach. `dependencies`: the rooms that may import a third-party module, by its name."""
    house = modules(package)
    found: list[str] = [*_circles(house), *_crowded(house)]
    for module in house:
        names = list(imported(module))
        found += [f"{module.name}:{line} {what}" for line, what in _walls(module, names)]
        found += [f"{module.name}:{line} {what}" for line, what in _third_party(module, names, dependencies)]
        found += [f"{module.name}:{line} {what}" for line, what in _owners(module, names)]
        if module.lines > 400:
            found.append(f"{module.name}:400 has {module.lines} lines; a file has 400 at most")
    return found


def _circles(house: list[Module]) -> Iterator[str]:
    """Packages of a room, and modules, that import each other, straight or by way of others: imports go down.

    The package `tangram` itself is no part of a circle: everybody may read its version, and its front door offers names
    of every room without importing any.
    """
    packages = {module.name: module.package for module in house}
    rooms = {module.name: module.room for module in house}
    of_packages: dict[str, set[str]] = {package: set() for package in packages.values()}
    of_modules: dict[str, set[str]] = {name: set() for name in packages}
    for module in house:
        for _, name in imported(module):
            while name and name not in packages:
                name = name.rpartition(".")[0]
            if not rooms.get(name, "") or not module.room:
                continue
            if name != module.name:
                of_modules[module.name].add(name)
            if packages[name] != module.package and rooms[name] == module.room:
                of_packages[module.package].add(packages[name])
    yield from _within_reach(of_packages)
    yield from _within_reach({name: uses - _doors(house) for name, uses in of_modules.items()})


def _doors(house: list[Module]) -> set[str]:
    """Packages whose `__init__` offers names lazily: it imports nothing of them before they are used."""
    return {m.name for m in house if m.is_package and any(name == "tangram.lazy.lazily" for _, name in imported(m))}


def _within_reach(uses: Mapping[str, set[str]]) -> Iterator[str]:
    """A sentence for each that is reached from itself."""
    left = {one: set(others) for one, others in uses.items()}
    while ends := {one for one, others in left.items() if not others}:
        left = {one: others - ends for one, others in left.items() if one not in ends}
    for one, direct in sorted(left.items()):
        through = ", ".join(sorted(other for other in direct if _reaches(other, one, left)))
        if through:
            yield f"{one}:1 is imported by what it imports itself: {through}"


def _reaches(start: str, goal: str, uses: Mapping[str, set[str]]) -> bool:
    seen, left = set[str](), [start]
    while left:
        if (one := left.pop()) == goal:
            return True
        if one not in seen:
            seen.add(one)
            left += uses[one]
    return False


def _crowded(house: list[Module]) -> Iterator[str]:
    count = Counter(module.package for module in house if not module.is_package)
    for package, files in sorted(count.items()):
        if files > FILES:
            yield f"{package}:1 has {files} modules; a folder has {FILES} at most, and a larger room sub-packages"


@lru_cache(None)  # a walk over all trees takes seconds, and several checks read them
def imported(module: Module) -> list[tuple[int, str]]:
    """Line and full dotted name of everything that is imported anywhere in the module."""
    return list(_imports(module))


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    package = module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value
            else:
                yield node.lineno, "<computed>"


def third_party(names: list[tuple[int, str]], own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and top-level name of each import that is neither Python's nor one of our `own`."""
    for line, name in names:
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in own and name != "<computed>":
            yield line, top


def _walls(module: Module, names: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    if module.room not in {*ROOMS, *BELOW_ALL, "", "__main__"}:
        yield 1, f"stands in {module.room}, which is no room"
        return
    for line, name in names:
        parts = name.split(".")
        if parts[0] != "tangram" or len(parts) == 1 or parts[1].startswith("__version"):
            continue
        room = parts[1]
        if room in BELOW_ALL or room == module.room or module.room in ("", "__main__"):
            continue
        if room not in ROOMS:
            yield line, f"imports {name}, which is in no room"
        elif module.room not in ROOMS:
            yield line, f"imports {name}, but lies below all rooms"
        elif ROOMS.index(room) > ROOMS.index(module.room):
            yield line, f"imports {name}, but {room} stands above {module.room}"


def _third_party(
    module: Module, names: list[tuple[int, str]], dependencies: Mapping[str, set[str]]
) -> Iterator[tuple[int, str]]:
    for line, top in third_party(names, {"tangram"}):
        if top not in dependencies:
            yield line, f"imports {top}, which has no row in docs/dependencies.md"
        elif module.room not in dependencies[top]:
            yield line, f"imports {top}, whose row in docs/dependencies.md does not name the room {module.room}"
        elif module.room in MINIMAL and top not in MINIMAL[module.room] and (module.name, top) not in OPTIONAL:
            yield line, f"imports {top}, but {module.room} must work without it"


def _owners(module: Module, names: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    uses = [*names, *_dotted(module)]
    for line, name in dict.fromkeys(uses):
        for what in _kinds(name):
            if not _within(module.name, OWNERS[what]):
                yield line, f"uses {what} ({name}); that belongs to {', '.join(OWNERS[what])}"
        if module.room == "layout":
            if name == "torch.distributed" or name.startswith("torch.distributed."):
                yield line, f"uses {name}, but layout knows no torch.distributed"
            if _FILES.match(name) or name == "open":
                yield line, f"uses {name}, but layout knows no files"
    for line, text in _texts(module):
        if _DEVICE.search(text) and not _within(module.name, OWNERS["the name of one kind of accelerator"]):
            yield line, f"names one kind of accelerator in {text!r}; that belongs to hardware and kernels"


def _kinds(name: str) -> Iterator[str]:
    """What of OWNERS the use of a dotted name is."""
    if _COLLECTIVES.fullmatch(name) or (name.startswith("?.") and name[2:] in _COLLECTIVE_METHODS):
        yield "a collective"
    if name in _GROUPS or name == "torch.distributed.init_device_mesh":
        yield "a default process group"
    if _PROCESSES.match(name):
        yield "a process"
    if name.partition(".")[0] in _PARSERS:
        yield "a parser"
    if name == "<computed>":
        yield "an import by a computed name"
    if name.startswith("torch.cuda"):
        yield "the name of one kind of accelerator"


def _within(name: str, owners: tuple[str, ...]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _dotted(module: Module) -> Iterator[tuple[int, str]]:
    """Every dotted use with the names of imports put in full; a method of we do not know what is `?.name`."""
    full: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
            full |= {top: top for alias in node.names if not alias.asname for top in [alias.name.partition(".")[0]]}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in full:
                yield node.lineno, ".".join([full[value.id], *reversed(parts)])
            else:
                yield node.lineno, f"?.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno, "open"


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    """Every string but docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def _is_import_call(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in {"import_module", "__import__"}
    return isinstance(function, ast.Attribute) and function.attr == "import_module"


def documented_dependencies(page: Path) -> dict[str, set[str]]:
    """From the tables of docs/dependencies.md: the rooms that may import a module, by the module's name.

    A row reads | `package` | `import`, `import` | rooms | why |.
    """
    rooms: dict[str, set[str]] = {}
    for cells in _rows(page):
        for name in re.findall(r"`(\w+)`", cells[1]):
            rooms[name] = set(re.findall(r"\w+", cells[2]))
    return rooms


def documented_packages(page: Path) -> set[str]:
    """The packages that docs/dependencies.md has a row for."""
    return {cells[0].strip("` ") for cells in _rows(page)}


def _rows(page: Path) -> Iterator[list[str]]:
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            yield cells
