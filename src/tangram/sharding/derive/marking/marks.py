"""Marks: which tensors lie how, by name. All else follows.

    model.layers.*.self_attn.q_proj.weight    (heads/tp d) h
    model.layers.*                            b s/tp h
    *.up_proj.weight                          out/tp/dp in -> out/tp in

A name is that of a parameter, of a buffer or an input, of a module, for the first tensor that it gives, or of a result
of the model, as `logits`; with a colon that of an operator in a module, as `model.norm:rsqrt`, or `model.norm:mul#2`
for the second of that name, for the first tensor that this gives. `*` stands for any characters, `{a,b}` for either,
`{0..31}` for any of these numbers. A mark binds the axes that it names, on every tensor that it matches; one that names
no axis says that they are whole, over every axis. Over axes that none of its marks names a parameter is whole, and
another tensor is free. Of a parameter a second layout, behind an arrow, says how it is used: it lies cut over further
axes and is gathered each time, as FSDP does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from tangram.errors import UserError
from tangram.layout import Layout, Mesh, NotationError
from tangram.layout.sizes import check_cut
from tangram.layout.syntax import Dim
from tangram.models.capturing.called import MARK, RELAYOUT
from tangram.models.capturing.graph import Graph, Node
from tangram.sharding.derive.marking.nodes import operators
from tangram.sharding.derive.problem.folding import Folded
from tangram.sharding.derive.problem.states import SAME, SUM, Cutting, Gathered, State, beside, cut, parts_of
from tangram.text import alternatives

_FOREIGN = re.compile(r"\b(Shard|Replicate|Partial|P|PartitionSpec)\(")
"""How marks of other libraries begin."""


@dataclass(frozen=True)
class Mark:
    """One mark."""

    pattern: str
    layout: Layout
    used: Layout | None = field(default=None, kw_only=True)
    """How it is used, where it is gathered to be used."""

    @staticmethod
    def parse(text: str) -> Mark:
        """`name: layout` or `name: layout -> layout`. Raises UserError."""
        at = re.search(r":\s", text) or re.search(":", text)  # a colon within a name has no space behind it
        name, colon, layouts = (text[: at.start()], ":", text[at.start() + 1 :]) if at else (text, "", "")
        layout, arrow, used = layouts.partition("->")
        if not colon or not name.strip():
            raise UserError(f"a mark is written as `name: layout`, as in `*.q_proj.weight: out/tp in`, not {text!r}")
        _refuse_foreign(text, layout.strip())
        try:
            after = Layout.parse(used.strip()) if arrow else None
            return Mark(name.strip(), Layout.parse(layout.strip()), used=after)
        except NotationError as error:
            at = f" at {error.text[error.position :]!r}" if error.text[error.position :] else ""
            raise UserError(f"the layout of the mark {text!r} cannot be read{at}: {error.reason}") from None

    def on(self, graph: Graph) -> dict[str, int] | None:
        """The tensors that it is on where that is no matter of names (`derive.noted`); None where it is."""
        return None

    def __str__(self) -> str:
        return f"{self.pattern}: {self.layout}" + (f" -> {self.used}" if self.used else "")


def _refuse_foreign(text: str, layout: str) -> None:
    """Raise UserError for what another library says so, of which some would be read as dims."""
    if _FOREIGN.search(layout):
        from tangram.sharding.derive.marking.meant import meant, typed  # torch's placements take long to import

        if (other := typed(layout)) is not None:
            raise UserError(f"the mark {text!r} takes a layout, {meant(other, None, (), open_end=True)}")


def matched(graph: Graph, mark: Mark) -> dict[str, int]:
    """The tensors that a mark names. Raises UserError where there are none, or not all have the same number of dims."""
    if (own := mark.on(graph)) is not None:
        return own
    if (exact := next((i for i, value in graph.of_kind("parameter") if value.name == mark.pattern), None)) is not None:
        return {mark.pattern: exact}
    patterns, known = [*alternatives(mark.pattern)], _known(graph, mark.pattern)
    named = {name for pattern in patterns for name in matching(pattern, known)}
    found = {name: v for name, v in known.items() if name in named}
    if not found:
        close = _closest(mark.pattern, known)
        raise UserError(f"the mark `{mark}` names no tensor of the model{close}")
    ndim = {len(graph.values[v].shape) for v in found.values()}
    if len(ndim) > 1:
        some = {len(graph.values[v].shape): name for name, v in found.items()}
        shown = " and ".join(f"{name} of {n} dims" for n, name in sorted(some.items()))
        raise UserError(f"the mark `{mark}` names unlike tensors, {shown}: give each a mark of its own")
    return found


def matching(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a pattern without `{}` fits: `layers.*` are the layers, and not what is inside them."""
    found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    outer = {name for name in found if name.count(".") == pattern.count(".")}
    return outer or found if pattern.endswith("*") else found


def names_any(graph: Graph, mark: Mark) -> bool:
    """Whether a mark names a tensor of the graph at all."""
    return any(fnmatch.fnmatchcase(name, p) for p in alternatives(mark.pattern) for name in _known(graph, mark.pattern))


def _known(graph: Graph, pattern: str) -> dict[str, int]:
    """The tensors that can be named; with a colon, what operators give."""
    if ":" in pattern:
        return operators(graph)
    return {**result_names(graph), **_others(graph)}


def result_names(graph: Graph) -> dict[str, int]:
    """What a model gives, by the names that marks have for it: `result.sample` where an input, a parameter or a module
    is called `sample`, too, and is another tensor."""
    others, found = {**graph.outputs, **_others(graph)}, dict[str, int]()
    for name, v in graph.outputs.items():
        while others.get(name, v) != v:
            name = f"result.{name}"
        found[name] = v
    return found


def _others(graph: Graph) -> dict[str, int]:
    named = {value.name: i for i, value in graph.of_kind("parameter", "buffer", "input")}
    return {**{name: v for name, v in graph.results.items() if name}, **named}


def _closest(pattern: str, known: Mapping[str, int]) -> str:
    import difflib

    plain = pattern.strip("*.{}")
    tails = {".".join(name.split(".")[-1 - plain.count(".") :]): name for name in known}  # as far as the pattern goes
    near = difflib.get_close_matches(plain, tails, 1, 0.5)
    return f"; the nearest is {tails[near[0]]}" if near else ""


def marked_states(mark: Mark, graph: Graph, value: int, mesh: Mesh) -> dict[str, State]:
    """By axis, how a tensor lies by a mark; by one that names no axis it is whole. Raises UserError."""
    of = graph.values[value]
    found = states(mark.layout, of.shape, mesh) or dict.fromkeys(mesh.axes, SAME)
    if mark.used is None:
        return found
    used = states(mark.used, of.shape, mesh)
    gathered = {axis: state for axis, state in found.items() if axis not in used}
    if of.kind != "parameter" or any(found.get(axis) != state for axis, state in used.items()) or not gathered:
        raise UserError("behind an arrow stands how a parameter is used: the same layout with fewer axes")
    return {axis: Gathered(*state) if axis in gathered else state for axis, state in found.items()}


def states(layout: Layout, shape: Sequence[int], mesh: Mesh) -> dict[str, State]:
    """By axis, how a tensor of this shape lies. Raises UserError for what a derivation cannot start from."""
    bound = layout.bind(tuple(shape))
    if bound.flat or bound.at:
        what = "`//` cuts what a rank holds" if bound.flat else "`@` places it on some ranks"
        raise UserError(f"the layout `{layout}`: {what}, which a derivation cannot follow: leave it out")
    found: dict[str, State] = {}
    for d, dim in enumerate(bound.dims):
        for axis, state in _cuts(dim, d, shape[d], layout, mesh):
            there = [a for a, own in found.items() if (own.dim, own.outer) == (d, state.outer)]
            before = next((a for a in there if _later(mesh, a, axis)), None)
            if before is not None:
                raise UserError(
                    f"the layout `{layout}` cuts over {before} before {axis}, which stands first in the mesh `{mesh}`: "
                    "change one of the two orders"
                )
            refuse_unlike(found, axis, state, shape[d], layout, mesh)
            found[axis] = state
    for op, axis in bound.pending:
        if op != "sum":
            raise UserError(f"the layout `{layout}`: a derivation knows pending sums, not {op}")
        found[axis] = SUM
    return found


def _later(mesh: Mesh, axis: str, other: str) -> bool:
    axes = [*mesh.axes]
    return axes.index(axis) > axes.index(other)


def _cuts(dim: Dim, d: int, n: int, layout: Layout, mesh: Mesh) -> Iterator[tuple[str, State]]:
    """The axes that cut dim `d`, of `n` elements, each with how the tensor lies over it."""
    for part, outer in _factors(dim, 1, layout):
        left, width = part.n, n // outer // max(1, part.n)
        for one in part.cuts:
            if one.axis not in mesh.axes:
                raise UserError(f"the layout `{layout}` names the axis {one.axis}, which is none of the mesh `{mesh}`")
            k = mesh.axes[one.axis][0]
            parts = parts_of(one.map, left, k, check_cut(one, left, k), width)
            yield one.axis, cut(d, outer, parts)
            left //= k


def _factors(dim: Dim, outer: int, layout: Layout) -> Iterator[tuple[Dim, int]]:
    """The factors of a dim that are cut, each with the blocks that stand before it."""
    if len(dim.terms) > 1 or (dim.terms and dim.cuts):
        raise UserError(f"the layout `{layout}`: a derivation knows cuts of factors and of products, no others")
    for term in dim.terms:
        before = outer
        for x in term:
            yield from _factors(x, before, layout)
            before *= x.n or 1
    if dim.cuts:
        yield dim, outer


def refuse_unlike(found: Mapping[str, State], axis: str, state: State, n: int, layout: Layout, mesh: Mesh) -> None:
    """Raise UserError for a cut of a dim of `n` elements that does not go with those over other axes."""
    for other, own in found.items():
        if other != axis and own.dim == state.dim and (own.parts or state.parts):
            first, second = (other, own), (axis, state)
            if _later(mesh, other, axis):
                first, second = second, first
            if not beside(n, *(Cutting(s.outer, s.parts, mesh.axes[a][0]) for a, s in (first, second))):
                raise UserError(
                    f"the layout `{layout}` cuts one dim over {first[0]} and {second[0]} in parts of unlike sizes: a "
                    "derivation knows such parts over one axis, so cut it over one of them"
                )


def read_marks(file: str | Path) -> list[Mark]:
    """The marks of a file, one a line; `#` begins a comment. Raises UserError with the line."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'the marks "{file}" cannot be read: {error}') from None
    return _parsed(text, str(file))


def marks_of(model_type: str) -> list[Mark] | None:
    """The marks that come with Tangram for tensor and sequence parallelism over `tp`; None where there are none."""
    file = resources.files("tangram.sharding.marks").joinpath(f"{model_type}.marks")
    return _parsed(file.read_text(encoding="utf-8"), file.name) if file.is_file() else None


def marked_types() -> list[str]:
    """The types of models that marks come with, by name."""
    files = resources.files("tangram.sharding.marks").iterdir()
    return sorted(file.name.removesuffix(".marks") for file in files if file.name.endswith(".marks"))


def marks_for(config: Any) -> list[Mark] | None:
    """The same for the model of a configuration: where all queries share one head of keys and values that comes with
    them out of one weight (Falcon's `multi_query`), no rank has heads of its own, and that weight has no mark."""
    found = marks_of(str(config.model_type))
    if not found or not getattr(config, "multi_query", False) or getattr(config, "new_decoder_architecture", False):
        return found
    names = [
        [one for one in alternatives(mark.pattern) if not one.endswith("query_key_value.weight")] for mark in found
    ]
    return [replace(mark, pattern="{" + ",".join(own) + "}") for mark, own in zip(found, names, strict=True)]


def _parsed(content: str, file: str) -> list[Mark]:
    found: list[Mark] = []
    for number, line in enumerate(content.splitlines(), 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text:
            try:
                found.append(Mark.parse(text))
            except UserError as error:
                raise UserError(f"{file}, line {number}: {error}") from None
    return found


class ConflictError(UserError):
    """Marks that no layouts fit, over `axis`; `derive.conflicts` looks for what would work. `because`: if known."""

    def __init__(self, said: str, axis: str, because: str = "") -> None:
        super().__init__(said)
        self.axis, self.because = axis, because


def fixed_by(
    folded: Folded, marks: Sequence[Mark], mesh: Mesh, *, all_axes: bool = True
) -> dict[int, dict[str, State]]:
    """By class and axis, the states that marks fix. `all_axes`: a parameter is whole over those that no mark names."""
    graph = folded.graph
    found: dict[int, dict[str, State]] = {}
    by: dict[tuple[int, str], str] = {}
    for mark in marks:
        for name, v in matched(graph, mark).items():
            own = found.setdefault(folded.classes[v], {})
            lies = _states_of(mark, name, graph, v, mesh)
            for axis, state in lies.items():
                k = mesh.axes[axis][0]
                if k == 1:  # whatever a mark says, the one rank has all
                    continue
                if state.kind == "cut":
                    refuse_unlike(own, axis, state, graph.values[v].shape[state.dim], mark.layout, mesh)
                if own.setdefault(axis, state) != state:
                    other = by[folded.classes[v], axis]
                    said = f"the marks `{other}` and `{mark}` contradict each other on {name} over {axis}"
                    raise ConflictError(said, axis)
                by[folded.classes[v], axis] = str(mark)
    for v, own in found.items():
        if all_axes and graph.values[v].kind == "parameter":
            own.update({axis: SAME for axis in mesh.axes if axis not in own})
    return found


def _states_of(mark: Mark, name: str, graph: Graph, value: int, mesh: Mesh) -> dict[str, State]:
    try:
        return marked_states(mark, graph, value, mesh)
    except UserError as error:
        raise UserError(f"the mark `{mark}` does not fit {name}: {error}") from None


WRITTEN = {MARK: "mark", RELAYOUT: "relayout"}


@dataclass(frozen=True)
class InCode(Mark):
    """A mark with its line. `pattern`: the name of the module or parameter that keeps it; else how it was called."""

    line: str = ""

    def on(self, graph: Graph) -> dict[str, int] | None:
        """What it is on: what the calls give and, of `mark`, what they take; what a model is given stays whole."""
        if self.pattern not in WRITTEN.values():
            return None
        found: dict[str, int] = {}
        for node in graph.nodes:
            if not node.backward and _same(node, self):
                for v in (*node.results, *(node.inputs if self.pattern == "mark" else ())):
                    if v is not None and graph.values[v].kind not in ("input", "buffer"):
                        name = graph.values[v].name or f"what {node.module or 'the model'} gives {self.pattern}"
                        found[f"{name}#{len(found)}" if found.get(name, v) != v else name] = v
        return found

    def __str__(self) -> str:
        if self.pattern in WRITTEN.values():
            return f'{self.pattern}(…, "{self.layout}") in {self.line}'
        return f"{self.pattern}: {self.layout} (marked in {self.line})"


def parsed(text: str, line: str, written: str) -> Layout:
    """The layout of a mark in code. Raises UserError with its line."""
    try:
        return Layout.parse(text)
    except NotationError as error:
        at = f" at {error.text[error.position :]!r}" if error.text[error.position :] else ""
        raise UserError(f'{line}: the layout of {written}(…, "{text}") cannot be read{at}: {error.reason}') from None


def noted(graph: Graph) -> list[Mark]:
    """The marks of a graph's code: one for each layout in each line. Raises UserError for one that cannot be read."""
    found: dict[Mark, None] = {}
    for node in graph.nodes:
        written = WRITTEN.get(node.operator.name())
        if written is not None and not node.backward:
            found[InCode(written, parsed(node.arguments["layout"], node.source, written), node.source)] = None
    return [*found]


def _same(node: Node, mark: InCode) -> bool:
    written = WRITTEN.get(node.operator.name())
    return (
        written == mark.pattern and node.source == mark.line and Layout.parse(node.arguments["layout"]) == mark.layout
    )
