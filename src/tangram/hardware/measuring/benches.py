"""Benches of a checkout: find them, run one, and say what came out with the machine and the versions beside it.

A bench is a script `bench/NAME.py`, see `tangram.hardware.measuring.measure`. The scripts are no part of the installed
package: what a figure means depends on the code it was measured with, so they run from a checkout only.
"""

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tangram
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of one bench, and where and with what they were measured."""

    bench: str
    machine: dict[str, object]
    versions: dict[str, str | None]
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, object]:
        """The report as `tangram bench --json` prints it."""
        rows = [row.as_json() for row in self.rows]
        return {"bench": self.bench, "machine": self.machine, "versions": self.versions, "rows": rows}


def find_checkout(start: Path) -> Path:
    """The checkout that holds `start`, else the one that this package is installed from in place."""
    package = Path(tangram.__file__).resolve().parent
    for folder in (start.resolve(), *start.resolve().parents, *package.parents):
        if (folder / "bench").is_dir() and (folder / "src" / "tangram" / "__init__.py").is_file():
            return folder
    raise UserError("benches run from a checkout of Tangram: there is none here, so change into one and try again")


def summaries(checkout: Path) -> dict[str, str]:
    """The benches of a checkout by name, each with the first line of its docstring (nothing is run)."""
    scripts = sorted(path for path in (checkout / "bench").glob("*.py") if not path.name.startswith("_"))
    found: dict[str, str] = {}
    for script in scripts:
        text = ast.get_docstring(ast.parse(script.read_text())) or ""
        found[script.stem] = text.partition("\n")[0]
    return found


def load(checkout: Path, name: str) -> Callable[..., Iterable[Row]]:
    """The function `rows` of the bench `name`."""
    known, name = summaries(checkout), name.replace("-", "_")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known benches: {', '.join(known) or 'none'}"
        raise UserError(f"there is no bench {name!r}; {hint}")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))  # as a package, so that a bench can start processes that import it again
    module = importlib.import_module(f"bench.{name}")
    return cast("Callable[..., Iterable[Row]]", module.rows)


def run(
    checkout: Path, name: str, quick: bool, done: Callable[[Row], None], options: Mapping[str, object] | None = None
) -> Report:
    """Run one bench; `quick` asks it for fewer repeats and smaller sizes; `done` is called between its figures.

    `options`: more arguments of its `rows`, by their names. Raises UserError for one that it has not.
    """
    rows: list[Row] = []
    function, given = load(checkout, name), dict(options or {})
    if unknown := sorted(given.keys() - inspect.signature(function).parameters.keys()):
        raise UserError(f"the bench {name!r} has no option --{unknown[0]}: leave it out")
    for row in function(quick, **given):
        rows.append(row)
        done(row)
    # Imported after the figures were taken: machine needs torch, which a bench may want to measure the import of.
    from tangram.hardware.host.machine import describe, versions

    return Report(name, describe(checkout).as_json(), versions(), tuple(rows))
