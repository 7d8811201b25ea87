"""`tangram shard MODEL`: capture a model, derive its layouts from marks; print them, why one lies so, or a page."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.planner.read import changes_of

if TYPE_CHECKING:
    from tangram.models.graph import Graph
    from tangram.sharding.derive.derive import Derived
    from tangram.sharding.derive.marks import Mark


@dataclass(frozen=True)
class Asked:
    """What a user typed."""

    name: str
    mesh: str
    marks: Sequence[str] = ()
    file: Path | None = None
    batch: int = 8
    sequence: int = 4096
    changes: Sequence[str] = ()
    why: str | None = None
    diff: tuple[str, str] | None = None
    html: Path | None = None
    json: bool = False
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """What took how long, as it is done."""


def derive_model(asked: Asked) -> None:
    """Print what follows from the marks, or what was asked of it. Raises UserError."""
    ways = [name for name in ("why", "diff", "html") if getattr(asked, name) is not None]
    if len(ways) > 1:
        raise UserError(f"--{' and --'.join(ways)} are one at a time")
    mesh = Mesh.parse(asked.mesh)
    _given(asked)  # so that a mistake in a mark is told before the model is captured
    with progress("capturing"):
        graph, kind = _captured(asked)
    found = _derived(asked, graph, mesh, _given(asked) or _shipped(kind))
    if asked.why is not None:
        _print_why(asked, found, asked.why)
    elif asked.html is not None:
        _write_page(asked, found, asked.html)
    else:
        _print(asked, found)


def _given(asked: Asked) -> "list[Mark]":
    from tangram.sharding.derive.marks import Mark, read_marks

    return [*(read_marks(asked.file) if asked.file else []), *map(Mark.parse, asked.marks)]


def _shipped(kind: str) -> "list[Mark]":
    from tangram.sharding.derive.marks import marks_of

    found = marks_of(kind)
    if not found:
        raise UserError(
            f"no marks come with Tangram for a {kind} model: give some, as in "
            "--mark '*.q_proj.weight: out/tp in', or a file of them with --marks"
        )
    return found


def _captured(asked: Asked) -> "tuple[Graph, str]":
    """The graph of a model, and the model's type."""
    from tangram.models.capture import capture
    from tangram.models.costs import block_names
    from tangram.models.fold import folded
    from tangram.models.named import named_config, on_meta, token_inputs

    config = named_config(asked.name, changes_of(asked.changes))
    if not _given(asked):
        _shipped(str(config.model_type))  # a sentence now, and not after seconds
    model = on_meta(config)
    start = time.perf_counter()
    graph = folded(capture(model, token_inputs(asked.batch, asked.sequence)), block_names(model))
    asked.seconds["capture"] = time.perf_counter() - start
    return graph, str(config.model_type)


def _derived(asked: Asked, graph: "Graph", mesh: Mesh, marks: "Sequence[Mark]") -> "Derived":
    from tangram.sharding.derive.derive import derive

    with progress("deriving"):
        start = time.perf_counter()
        found = derive(graph, marks, mesh)
        asked.seconds["derive"] = time.perf_counter() - start
    return found


def _print(asked: Asked, found: "Derived") -> None:
    from tangram.sharding.derive.show import amount, as_json, tables, total

    if asked.json:
        print_json({**as_json(found), "seconds": asked.seconds})
        return
    for title, headers, rows in tables(found):
        print_table(title, headers, rows)
    graph = found.folded.graph
    print(
        f"a rank receives {amount(total(found))}; {len(graph.nodes)} operators captured in "
        f"{asked.seconds['capture']:.1f} s, layouts of {len(graph.values)} tensors derived in "
        f"{asked.seconds['derive']:.2f} s"
    )


def _print_why(asked: Asked, found: "Derived", node: str) -> None:
    from tangram.sharding.derive.why import lines, why

    with progress("asking what else it could be"):
        told = why(found, node)
    if asked.json:
        print_json(told.as_json())
        return
    for title, headers, rows in lines(told):
        print_table(title, headers, rows)


def _write_page(asked: Asked, found: "Derived", path: Path) -> None:
    from tangram.sharding.derive.html import write_page
    from tangram.sharding.derive.show import amount, total

    write_page(path, found, Path(asked.name).name)
    if asked.json:
        print_json({"page": str(path), "bytes": total(found), "seconds": asked.seconds})
    else:
        print(f'a rank receives {amount(total(found))}; all of it is in "{path}", for a browser')
