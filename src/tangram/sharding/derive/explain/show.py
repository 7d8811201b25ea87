"""A derivation for people: where every parameter lies, what each module gives, and what moves, by module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tangram.layout import Layout
from tangram.layout.syntax import Dim
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import Moved, moved, value_layout
from tangram.sharding.derive.problem.states import part_dim

Row = tuple[str, ...]


def short(layout: Layout) -> str:
    """A layout without the sizes of dims that are not cut apart: `_/tp (32 128/tp)` and not `_=4096/tp ...`."""

    def text(dim: Dim) -> str:
        if dim.terms:
            return "(" + " ".join(f"{x.n}{_cuts(x)}" for term in dim.terms for x in term) + ")" + _cuts(dim)
        return "_" + _cuts(dim)

    pending = "".join(f" {op}:{axis}" for op, axis in layout.pending)
    return " ".join(map(text, layout.dims)) + pending


def _cuts(dim: Dim) -> str:
    return "".join(f"/{cut}" for cut in dim.cuts)


def folded_name(found: Derived, name: str) -> str:
    """The name of a module or a tensor with `{n}` for the number of a layer that stands for others too."""
    graph = found.folded.graph
    for block in graph.blocks:
        if name == block.path or name.startswith(f"{block.path}."):
            same = sum(other.kind == block.kind for other in graph.blocks)
            base = re.sub(r"\d+$", "", block.path)
            numbers = [other.path.removeprefix(base) for other in graph.blocks if other.kind == block.kind]
            shown = block.path if same == 1 else f"{base}{{{numbers[0]}..{numbers[-1]}}}"
            return shown + name.removeprefix(block.path)
    return name


def parts_of(found: Derived, v: int) -> int:
    """In how many parts ranks hold a tensor as it is used."""
    own = found.folded.classes[v]
    return math.prod(over.k for over in found.axes if own in over.used and part_dim(over.used[own]) is not None)


def parameters(found: Derived) -> Iterator[Row]:
    """Of each parameter: its name, shape, layout, and its bytes on a rank."""
    graph = found.folded.graph
    for v, value in graph.of_kind("parameter"):
        if found.folded.classes[v] == v:
            shape = " x ".join(map(str, value.shape))
            yield (
                folded_name(found, value.name),
                shape,
                short(value_layout(found, v)),
                amount(value.nbytes / parts_of(found, v)),
            )


def modules(found: Derived) -> Iterator[Row]:
    """What each module gives: its name, shape and layout."""
    graph = found.folded.graph
    seen: set[str] = set()
    for name, v in graph.results.items():
        shown = folded_name(found, name) or "the model"
        if shown not in seen and v < len(graph.values):
            seen.add(shown)
            yield shown, " x ".join(map(str, graph.values[v].shape)), short(value_layout(found, v))


def traffic(found: Derived) -> Iterator[Row]:
    """What moves: where, what is done forward and backward, over which axis, how often, and the bytes of a rank."""
    for one in moved(found):
        if one.nbytes:
            bytes_each = amount(one.forward_bytes + one.backward_bytes)
            yield (
                place(found, one),
                ways(one.forward, one.backward),
                one.axis,
                str(one.times),
                bytes_each,
                amount(one.nbytes),
            )


_PAID = frozenset({"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "permute"})


def ways(forward: str, backward: str) -> str:
    """The collectives forward and backward, as `all-gather / reduce-scatter`; nothing where there is none."""
    texts = [one if _PAID.issuperset(one.split(" + ")) else "-" for one in (forward, backward)]
    return " / ".join(texts) if set(texts) != {"-"} else ""


def place(found: Derived, one: Moved) -> str:
    """Where a tensor moves: the parameter that it is, or the module whose operator makes or takes it."""
    graph = found.folded.graph
    value = graph.values[one.value]
    if value.name:
        return folded_name(found, value.name)
    if one.taker is not None:
        node = graph.nodes[one.taker]
        return f"into {folded_name(found, node.module) or 'the model'} ({node.source.rpartition('/')[2]})"
    node = graph.nodes[graph.maker[one.value]]
    return f"from {folded_name(found, node.module) or 'the model'} ({node.source.rpartition('/')[2]})"


def total(found: Derived) -> float:
    """All bytes that a rank receives in one forward and backward."""
    return sum(one.nbytes for one in moved(found))


def as_json(found: Derived) -> dict[str, Any]:
    """The same for programs; layouts with all sizes."""
    graph = found.folded.graph
    return {
        "mesh": str(found.mesh),
        "marks": [str(mark) for mark in found.marks],
        "parameters": {v.name: str(value_layout(found, i)) for i, v in graph.of_kind("parameter")},
        "modules": {name: str(value_layout(found, v)) for name, v in graph.results.items()},
        "moved": [
            {
                "where": place(found, one), "axis": one.axis, "forward": one.forward, "backward": one.backward,
                "forward_bytes": one.forward_bytes, "backward_bytes": one.backward_bytes, "times": one.times,
            }
            for one in moved(found)
            if one.nbytes
        ],
        "bytes": total(found),
        "gap": max((over.gap for over in found.axes), default=0.0),
    }  # fmt: skip


def amount(nbytes: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def signed(nbytes: float) -> str:
    """A difference of bytes: `+12 MB`, `-3 kB`, 0."""
    return f"{'-' if nbytes < 0 else '+'}{amount(abs(nbytes))}" if abs(nbytes) >= 1 else "0"


def tables(found: Derived) -> Iterable[tuple[str, Row, list[Row]]]:
    """Title, headers and rows of each table."""
    yield "Parameters", ("parameter", "shape", "layout", "on a rank"), [*parameters(found)]
    yield "What modules give", ("module", "shape", "layout"), [*modules(found)]
    headers = ("where", "forward / backward", "axis", "times", "bytes of a rank", "together")
    yield "What moves in a forward and a backward", headers, [*traffic(found)]
