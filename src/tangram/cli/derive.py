"""`tangram shard MODEL`: capture a model, derive its layouts from marks or choose them; print, explain, draw them."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.layout import Mesh, NotationError
from tangram.schema.files import changes_of

if TYPE_CHECKING:
    from tangram.cli.choose import Choosing
    from tangram.models.building.named import Inputs
    from tangram.models.capturing.graph import Graph
    from tangram.sharding.derive.derive import ConflictError, Derived
    from tangram.sharding.derive.marking.marks import Mark
    from tangram.sharding.derive.problem.rates import WorkRates
    from tangram.sharding.discover.own_rules import Samples


SHIPPED = "shipped"
"""In place of a file of marks: those that come with Tangram."""


@dataclass(frozen=True)
class OwnOperators:
    """What a user said of operators of their own."""

    rules: Path | None = None
    samples: "Callable[[], Samples | None]" = lambda: None
    """Imports what defines them, and gives the function that gives calls, if there is one."""

    def proved(self) -> str:
        """The text of the rules, proved. Raises UserError."""
        from tangram.sharding.discover.own_rules import own_rules

        samples = self.samples()
        return "" if self.rules is None else own_rules(self.rules, samples).text


@dataclass(frozen=True)
class DeriveOptions:
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
    cluster: str | None = None
    choosing: "Choosing | None" = None
    """Where a plan is to be chosen, and not derived."""
    own: OwnOperators = OwnOperators()
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """What took how long, as it is done."""


def derive_model(asked: DeriveOptions) -> None:
    """Print what follows from the marks, or what was asked of it. Raises UserError."""
    ways = [name for name in ("why", "diff", "html") if getattr(asked, name) is not None]
    if len(ways) > 1:
        raise UserError(f"--{' and --'.join(ways)} are one at a time")
    if asked.choosing is not None:
        _choose(asked, asked.choosing)
        return
    from tangram.models.building.named import named

    mesh = _mesh(asked.mesh)
    rates = _rates(asked, mesh)
    sides = _sides(asked)  # read first, and once: a mistake is told before the model is captured, and a pipe ends
    with progress("capturing"):
        model = named(asked.name, changes_of(asked.changes))
        made = model.make(asked.batch, asked.sequence)
        rules = asked.own.proved()
        marks = [_shipped(model.kind, made[0]) if side is None else side for side in sides]
        graph = _captured(asked, made, rules)
    found, *others = (_derived(asked, graph, mesh, some, rates) for some in marks)
    if asked.diff is not None:
        _print_difference(asked, found, others[0], asked.diff)
        return
    if asked.why is not None:
        _print_why(asked, found, asked.why, rates)
    elif asked.html is not None:
        _write_page(asked, found, asked.html)
    else:
        _print(asked, found)


def _choose(asked: DeriveOptions, choosing: "Choosing") -> None:
    from tangram.cli.choose import answer, bytes_of, cluster_of, job_of, show, write
    from tangram.models.building.named import named

    if asked.why is not None or asked.diff is not None:
        raise UserError("--why and --diff are of plans that follow from marks: leave out --choose")
    mesh = _mesh(asked.mesh)
    cluster = cluster_of(asked.cluster, mesh)
    if choosing.memory is not None:
        bytes_of(choosing.memory)  # mistakes are told before the model is captured
    job = job_of(choosing, asked.sequence)
    (given,) = _sides(asked)
    with progress("capturing"):
        model = named(asked.name, changes_of(asked.changes))
        made = model.make(asked.batch, asked.sequence)
        rules = asked.own.proved()
        graph = _captured(asked, made, rules)
    found = answer(graph, mesh, cluster, model.kind, given or [], choosing)
    wrote = None
    if choosing.write is not None:
        wrote = write(
            choosing,
            found,
            cluster,
            asked.batch,
            job,
            lambda samples: _captured(asked, model.make(samples, asked.sequence), rules),
        )
    if asked.html is not None:
        _write_page(asked, found.chosen.plan, asked.html)
    else:
        show(found, asked.json, {**asked.seconds}, wrote)


def _mesh(text: str) -> Mesh:
    try:
        mesh = Mesh.parse(text)
    except NotationError as error:
        at = f" at {error.text[error.position :]!r}" if error.text[error.position :] else ""
        raise UserError(
            f'"{text}" is no mesh{at}: write each axis with its number of ranks, as in "dp=2 tp=4"'
        ) from None
    if not mesh.axes:
        raise UserError('the mesh has no axis: write each with its number of ranks, as in "dp=2 tp=4"')
    return mesh


def _rates(asked: DeriveOptions, mesh: Mesh) -> "WorkRates":
    """Those of the cluster for each axis that the mesh has."""
    from tangram.hardware.catalogue.cluster import load
    from tangram.sharding.derive.problem.rates import WorkRates

    rates = WorkRates(cluster=load(asked.cluster) if asked.cluster else None)
    for axis in mesh.axes:
        rates.along(mesh, axis)  # a mesh that is too large is told before the model is captured
    return rates


def _sides(asked: DeriveOptions) -> "list[list[Mark] | None]":
    """The marks that were given, of the one derivation or of two; None for those that come with Tangram."""
    from tangram.sharding.derive.marking.marks import Mark

    given = [*(_of_file(str(asked.file)) if asked.file else []), *map(Mark.parse, asked.marks)]
    if asked.diff is None:
        return [given or None]
    if given:
        raise UserError("--diff compares two files of marks: leave out --mark and --marks")
    return [None if name == SHIPPED else _of_file(name) for name in asked.diff]


def _of_file(name: str) -> "list[Mark]":
    from tangram.sharding.derive.marking.marks import read_marks

    found = read_marks(Path(name))
    if not found:
        raise UserError(f'there is no mark in "{name}": write some, one a line, as in `*.q_proj.weight: out/tp in`')
    return found


def _shipped(kind: str, model: Any) -> "list[Mark]":
    """The marks that come with Tangram for a type of model, else those of transformers' plan of it."""
    from tangram.sharding.derive.marking.published import marks_known_for

    found = marks_known_for(model)
    if not found:
        what = f"a {kind} model, nor has transformers a tensor-parallel plan of it" if kind else "a model of one's own"
        raise UserError(
            f"no marks come with Tangram for {what}: give some, as in --mark '*.q_proj.weight: out/tp in', a file of "
            "them with --marks, or have the plan chosen with --choose --cluster h100-8x8"
        )
    return found


def _captured(asked: DeriveOptions, made: "tuple[Any, Inputs]", rules: str) -> "Graph":
    """The graph of a model and its inputs, equal layers found."""
    from tangram.models.capturing.capture import capture
    from tangram.models.capturing.fold import folded
    from tangram.models.outlines.costs import block_names

    model, inputs = made
    start = time.perf_counter()
    graph = replace(folded(capture(model, inputs), block_names(model)), rules=rules)
    asked.seconds["capture"] = time.perf_counter() - start
    return graph


def _derived(
    asked: DeriveOptions, graph: "Graph", mesh: Mesh, marks: "Sequence[Mark]", rates: "WorkRates"
) -> "Derived":
    from tangram.sharding.derive.derive import ConflictError, derive

    try:
        with progress("deriving"):
            start = time.perf_counter()
            found = derive(graph, marks, mesh, rates=rates)
            asked.seconds["derive"] = time.perf_counter() - start
    except ConflictError as error:
        raise _conflict(asked, graph, mesh, marks, error, rates) from None
    return found


def _conflict(
    asked: DeriveOptions,
    graph: "Graph",
    mesh: Mesh,
    marks: "Sequence[Mark]",
    error: "ConflictError",
    rates: "WorkRates",
) -> UserError:
    """The sentence on marks that contradict each other; before it, where they meet and what works."""
    from tangram.sharding.derive.explain.conflicts import conflict

    with progress("looking for what works"):
        told = conflict(graph, marks, mesh, error, rates)
    if asked.json:
        print_json({"conflict": asdict(told)})
    else:
        print("\n".join(told.lines), file=sys.stderr)
    return UserError(told.sentence)


def _print(asked: DeriveOptions, found: "Derived") -> None:
    from tangram.sharding.derive.explain.show import amount, as_json, tables, total

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
    for over in found.axes:
        if over.gap:
            print(
                f"over {over.axis} the model is too wide to be exact: at most {over.gap:.2%} dearer than the cheapest"
            )


def _print_why(asked: DeriveOptions, found: "Derived", node: str, rates: "WorkRates") -> None:
    from tangram.sharding.derive.explain.why import lines, why

    with progress("asking what else it could be"):
        told = why(found, node, rates)
    if asked.json:
        print_json(told.as_json())
        return
    for title, headers, rows in lines(told):
        print_table(title, headers, rows)


def _write_page(asked: DeriveOptions, found: "Derived", path: Path) -> None:
    from tangram.sharding.derive.explain.show import amount, total
    from tangram.sharding.derive.page.page import write_page

    write_page(path, found, Path(asked.name).name)
    if asked.json:
        print_json({"page": str(path), "bytes": total(found), "seconds": asked.seconds})
    else:
        print(f'a rank receives {amount(total(found))}; all of it is in "{path}", for a browser')


def _print_difference(asked: DeriveOptions, one: "Derived", other: "Derived", files: tuple[str, str]) -> None:
    from tangram.sharding.derive.explain.diff import difference, summary, tables

    found = difference(one, other)
    if asked.json:
        print_json({"marks": files, **found.as_json()})
        return
    names = Path(files[0]).name, Path(files[1]).name
    names = names if names[0] != names[1] else files
    for title, headers, rows in tables(found, names):
        print_table(title, headers, rows)
    print(summary(found, names))
