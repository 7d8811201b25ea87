"""A derivation as one page for a browser: the model as nested boxes, with every layout and everything that moves.

On the left the modules in the order in which they run, equal layers once, with the layouts of their parameters and of
what they give; between them what moves, forward and backward, coloured by axis. On the right what a click asks for: the
operators with their rules and source lines. The page carries all that it shows; its own policy forbids the browser to
load anything, and without scripts it is still the tree. All text goes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import tangram
from tangram.errors import UserError
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.show import amount, place
from tangram.sharding.derive.page.boxes import BoxDrawing
from tangram.sharding.derive.page.tree import tree
from tangram.sharding.derive.problem.states import part_dim

_MOST = 6
"""Of what moves most."""


def write_page(path: Path, found: Derived, model: str) -> None:
    """Write the page. `model`: what it is called. Raises UserError where the file cannot be written."""
    text = page(found, model)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f'the page "{path}" cannot be written: {error.strerror}') from None


def page(found: Derived, model: str) -> str:
    """The page."""
    drawing = BoxDrawing(found, tree(found))
    body = drawing.drawn()
    return Template(_part("page.html")).substitute(
        title=escape(f"{model}: layouts over {found.mesh}"),
        css=_part("page.css"),
        head=_head(found, model, drawing),
        body=body,
        details="\n".join(drawing.details),
        script=_part("page.js"),
        version=escape(tangram.__version__),
    )


@cache
def _part(name: str) -> str:
    return resources.files("tangram.sharding.derive.page").joinpath(name).read_text(encoding="utf-8")


def _head(found: Derived, model: str, drawing: BoxDrawing) -> str:
    """The name, the marks, and what moves by axis and collective."""
    graph = found.folded.graph
    whole = sum(value.nbytes for _, value in graph.of_kind("parameter"))
    held = sum(_bytes_of(found, v) for v, _ in graph.of_kind("parameter"))
    marks = "".join(f"<li><code>{drawing.colours.text(str(mark))}</code></li>" for mark in found.marks)
    inputs = ", ".join(f"{value.name} {' x '.join(map(str, value.shape))}" for _, value in graph.of_kind("input"))
    plural = "s" if len(found.marks) != 1 else ""
    return (
        f"<h1>{escape(model)}</h1><p>mesh <code>{escape(str(found.mesh))}</code> · {escape(inputs)} · "
        f"{amount(whole)} of parameters, {amount(held)} on a rank</p>"
        f'<div class="facts"><div><h3>A rank receives, forward and backward</h3>{"".join(_axes(found, drawing))}</div>'
        f"<div><h3>What moves most</h3>{_most(found, drawing)}</div>"
        f'<div><h3>From {len(found.marks)} mark{plural}</h3><ol class="marks">{marks}</ol></div></div>'
    )


def _bytes_of(found: Derived, v: int) -> float:
    nbytes, own = float(found.folded.graph.values[v].nbytes), found.folded.classes[v]
    for over in found.axes:
        if own in over.used and part_dim(over.used[own]) is not None:
            nbytes /= over.k
    return nbytes


def _axes(found: Derived, drawing: BoxDrawing) -> Iterator[str]:
    """A line for each axis, and for axes that something moves over at once: bytes, by collective."""
    ways: dict[str, dict[str, float]] = {axis: {} for axis in found.mesh.axes}
    for pill in drawing.root.pills():
        one = pill.moved
        for what, nbytes in ((one.forward, one.forward_bytes), (one.backward, one.backward_bytes)):
            if nbytes:
                own = ways.setdefault(one.axis, {})
                own[what] = own.get(what, 0.0) + nbytes * one.times
    most = max((sum(own.values()) for own in ways.values()), default=0.0) or 1.0
    for axis, own in ways.items():
        k, total = math.prod(found.mesh.axes[one][0] for one in axis.split()), sum(own.values())
        told = ", ".join(f"{what} {amount(n)}" for what, n in sorted(own.items(), key=lambda x: -x[1]))
        idle = "nothing moves" if any(over.axis == axis for over in found.axes) else "no mark names it"
        width = 100 * total / most
        yield (
            f'<div class="axis"><div>{drawing.colours.axis(axis)} <span>{k} ranks</span> <em>{amount(total)}</em></div>'
            f'<span class="track"><i class="b{drawing.colours.number(axis)}" style="width:{width:.2f}%"></i>'
            f"</span><small>{escape(told or idle)}</small></div>"
        )


def _most(found: Derived, drawing: BoxDrawing) -> str:
    """The largest moves, each a way to its place."""
    some = sorted(drawing.root.pills(), key=lambda pill: -pill.moved.nbytes)[:_MOST]
    rows = "".join(
        f'<li><a href="#{drawing.places[id(pill)]}">{escape(place(found, pill.moved))}</a>'
        f"<em>{drawing.colours.axis(pill.moved.axis)} {amount(pill.moved.nbytes)}</em></li>"
        for pill in some
    )
    return f'<ol class="most">{rows}</ol>' if rows else "<p>Nothing moves.</p>"
