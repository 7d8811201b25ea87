"""The marks that stand in a model's code (`tangram.sharding.mark`, `relayout`), as a captured graph carries them."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.errors import UserError
from tangram.layout import Layout, NotationError
from tangram.models.capturing.graph import Graph, Node
from tangram.models.capturing.noted import MARK, RELAYOUT
from tangram.sharding.derive.marking.marks import Mark

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
