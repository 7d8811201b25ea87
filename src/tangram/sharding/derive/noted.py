"""The marks that stand in a model's code (`tangram.sharding.mark`, `relayout`), as a captured graph carries them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tangram.errors import UserError
from tangram.layout import Layout, NotationError
from tangram.models.graph import Graph
from tangram.models.noted import MARK, RELAYOUT
from tangram.sharding.derive.marks import Mark

WRITTEN = {MARK: "mark", RELAYOUT: "relayout"}


@dataclass(frozen=True)
class InCode(Mark):
    """A mark with the line that it stands in. `pattern`: the name of what it is on, or how it was written."""

    line: str = ""

    def __str__(self) -> str:
        return f'{self.pattern}(…, "{self.layout}") in {self.line}'


def parsed(text: str, line: str, written: str) -> Layout:
    """The layout of a mark in code. Raises UserError with its line."""
    try:
        return Layout.parse(text)
    except NotationError as error:
        at = f" at {error.text[error.position :]!r}" if error.text[error.position :] else ""
        raise UserError(f'{line}: the layout of {written}(…, "{text}") cannot be read{at}: {error.reason}') from None


def noted(graph: Graph) -> Iterator[tuple[Mark, str, int]]:
    """The marks of a graph's code: each with what to call its tensor, and the value; a mark is on what it takes, too."""
    for node in graph.nodes:
        written = WRITTEN.get(node.operator.name())
        if written is None or node.backward:
            continue
        mark = InCode(written, parsed(node.arguments["layout"], node.source, written), node.source)
        name = f"what {node.module or 'the model'} gives it"
        values = [v for v in node.results if v is not None] + ([*node.inputs] if written == "mark" else [])
        for v in values:
            yield mark, graph.values[v].name or name, v
