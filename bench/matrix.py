"""Every strategy under every model, beside one process: loss parity, throughput and memory, as one page.

Each cell trains a tiny model by a strategy on 2 to 8 processes; every parameter's gradient and value and every loss are
compared with one process. The page (docs/matrix.md, docs/matrix.html and, as data, docs/matrix.json; `--folder` for
another place) keeps the newest result of each cell. `--only` takes models and strategies by name; `--quick` a dozen
cells, others with every commit, which go to no page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench._matrix.cells import Name, every_name, rotated
from bench._matrix.measure import commit_of_this, measure
from bench._matrix.models import MODELS
from bench._matrix.page import write_pages
from bench._matrix.results import SLOWER, Kept, Result, read
from bench._matrix.strategies import STRATEGIES
from tangram.errors import UserError
from tangram.hardware.host.machine import describe, versions
from tangram.hardware.measuring.measure import Row

DOCS = Path(__file__).parents[1] / "docs"
QUICK = 12


def rows(quick: bool, only: tuple[str, ...] | None = None, folder: Path | None = None) -> Iterable[Row]:
    """Throughput of each cell beside the prediction and the run before; a cell that broke misses its target."""
    names = chosen(only or ())
    if quick:
        names = rotated(names, QUICK, commit_of_this())
    place = folder or (None if quick else DOCS)
    machine = machine_of_this()
    kept = (read(place / "matrix.json") if place else None) or Kept(machine, {}, {})
    for model in MODELS:
        own = [name for name in names if name[0] == model]
        if not own:
            continue
        results = measure(own, kept.results if kept.machine == machine else dict[Name, Result](), tell)
        kept = Kept(machine, versions(), kept.results).with_results(results)
        if place is not None:
            write_pages(place, kept)
        yield from (row(result) for result in results if result.state != "refused")


def chosen(only: Sequence[str]) -> list[Name]:
    """The cells of some models, strategies or both; all where none are named."""
    if unknown := [word for word in only if word not in MODELS and word not in STRATEGIES]:
        raise UserError(
            f"--only {unknown[0]}: there is no such model or strategy in the matrix; models are {', '.join(MODELS)}"
        )
    models = [word for word in only if word in MODELS] or list(MODELS)
    lines = [word for word in only if word in STRATEGIES] or list(STRATEGIES)
    return [name for name in every_name() if name[0] in models and name[1] in lines]


def row(result: Result) -> Row:
    """Of a cell: what broke has a throughput of nothing, which no target takes."""
    peers = {"predicted": result.predicted_tokens_per_s, "before": result.before_tokens_per_s}
    speed = 0.0 if result.state == "broken" else result.tokens_per_s
    return Row(
        f"{result.model}, {result.strategy}",
        "tokens/s",
        speed,
        {name: number for name, number in peers.items() if number},
        target=SLOWER * result.before_tokens_per_s or 1e-9,
        better="higher",
    )


def machine_of_this() -> str:
    """In words."""
    found = describe(DOCS).as_json()
    return f"{found.get('cpu', '')}, {found.get('cores', '')} cores"


def tell(text: str) -> None:
    """How far it is, on the terminal."""
    print(text, file=sys.stderr, flush=True)
