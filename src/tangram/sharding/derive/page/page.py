"""A derivation as one page for a browser: the model as nested boxes, with every layout and everything that moves.

On the left the modules in the order in which they run, equal layers once, with the layouts of their parameters and of
what they give; between them what moves, forward and backward, coloured by axis. On the right what a click asks for: the
operators with their rules and source lines. The page carries all that it shows; its own policy forbids the browser to
load anything, and without scripts it is still the tree. All text goes through `escape`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

import tangram
from tangram.layout import Layout
from tangram.layout.syntax import Dim
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.operators import VIEWS, line_of, module_of, states_in, title, written
from tangram.sharding.derive.explain.show import amount, folded_name, parts_of, place
from tangram.sharding.derive.explain.why import named
from tangram.sharding.derive.layouts import input_states, layout_of, used, value_layout
from tangram.sharding.derive.page.tree import Box, Pill, TreeParameter, TreeRun, tree
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import State
from tangram.text import packaged, write_file

_SHOWN = 9
"""Operators of a run that are named."""


class BoxDrawing:
    """Boxes as they are drawn. `details` and `places` fill as they are."""

    def __init__(self, found: Derived, root: Box) -> None:
        self.found, self.root, self.colours = found, root, Colours(found.mesh.axes)
        sizes = [pill.moved.nbytes for pill in root.pills()]
        self.all, self.largest = sum(sizes) or 1.0, max(sizes, default=0.0) or 1.0
        self.layers = {block.path for block in found.folded.graph.blocks}
        self.details: list[str] = []
        self.places: dict[int, str] = {}
        """Of a pill, by its identity, the name of what is said of it."""

    def drawn(self) -> str:
        """The whole model."""
        return self._box(self.root, 0)

    def _row(self, kind: str, heading: str, body: str, words: str, inner: str, more: str = "") -> str:
        """A line that can be clicked on, and keep what is said then."""
        name = f"d{len(self.details)}"
        self.details.append(f'<article id="{name}" hidden><h2>{heading}</h2>{body}</article>')
        return (
            f'<div class="{kind}" tabindex="0" role="button" data-asks="{name}" '
            f'data-words="{escape(words.lower())}"{more}>{inner}</div>'
        )

    def _box(self, box: Box, depth: int) -> str:
        """A module with all that is in it."""
        given = self.found.folded.graph.results.get(box.path)
        chip = "" if given is None else self.colours.layout(value_layout(self.found, given))
        name = where(self.found, box.path)
        own = [step for item in box.items if isinstance(item, TreeRun) for step in item.steps]
        leaf = not any(isinstance(item, Box) for item in box.items)
        parameters = "".join(self._parameter(one) for one in box.parameters)
        alone = [item for item in box.items if isinstance(item, TreeRun)] if len(box.items) == 1 else []
        only = "".join(self._run(run, box, leaf) for run in alone)
        items = "" if alone else "".join(self._item(item, box, depth, leaf) for item in box.items)
        inner = f'<div class="parameters">{parameters}</div>' if parameters else ""
        inner += f'<div class="items">{items}</div>' if items else ""
        fold = '<button class="fold" aria-label="fold" aria-expanded="true"></button>' if inner else "<span></span>"
        times = f'<i class="times">× {box.times}</i>' if box.times > 1 and box.path in self.layers else ""
        head = f'{fold}<span class="name">{escape(box.name)}</span>{times}'
        about = of_module(self.found, self.colours, name, box, own)
        row = self._row("row head", escape(name), about, name, head)
        line = f'<div class="line">{row}{only}<span class="side">{self._bar(box.received())}{chip}</span></div>'
        return f'<section class="box depth{depth % 3}{" leaf" * leaf}">{line}{inner}</section>'

    def _item(self, item: Box | TreeRun | Pill, box: Box, depth: int, leaf: bool) -> str:
        if isinstance(item, Box):
            return self._box(item, depth + 1)
        return self._pill(item) if isinstance(item, Pill) else self._run(item, box, leaf)

    def _run(self, run: TreeRun, box: Box, leaf: bool) -> str:
        names = [title(step) for step in run.steps]
        flows = self.found.folded.differentiable
        shown = [title(s) for s in run.steps if not flows.isdisjoint(s.outputs) and title(s) not in VIEWS]
        once = [*dict.fromkeys(name.strip("_").removesuffix("_for_cpu") for name in shown or names)]
        said = " · ".join(once[:_SHOWN]) + (f" · {len(once) - _SHOWN} more" if len(once) > _SHOWN else "")
        if run.aside:
            said = f"{len(names)} operators without gradients"
        lines = sorted({line_of(step.node.source) for step in run.steps})
        heading = f"{escape(where(self.found, box.path))} <small>{escape(', '.join(lines[:3]))}</small>"
        kind = "row run" + " aside" * run.aside + " views" * (not shown) + " small" * leaf
        body = operators(self.found, self.colours, run.steps)
        inner = f'<span class="name">{escape(said)}</span>'
        return self._row(kind, heading, body, " ".join([*names, *lines]), inner)

    def _parameter(self, one: TreeParameter) -> str:
        value = self.found.folded.value(one.value)
        full = folded_name(self.found, value.name)
        layout = layout_of(value.shape, input_states(self.found, one.value) or used(self.found, one.value))
        inner = f'<span class="name">{escape(one.name)}</span>{self.colours.layout(layout)}'
        row = self._row(
            "row parameter",
            escape(full),
            of_tensor(self.found, self.colours, one.value, full),
            full,
            inner,
        )
        pills = "".join(self._pill(pill) for pill in one.pills)
        return f'<div class="line">{row}{pills}</div>'

    def _bar(self, received: Mapping[str, float]) -> str:
        """What a module receives, as a part of all."""
        total = sum(received.values())
        parts = "".join(
            f'<i class="b{self.colours.number(axis)}" style="width:{100 * nbytes / self.all:.2f}%"></i>'
            for axis, nbytes in received.items()
        )
        said = f'<em>{amount(total)}</em><span class="track">{parts}</span>' if total else ""
        return f'<span class="bar">{said}</span>'

    def _pill(self, pill: Pill) -> str:
        one = pill.moved
        each = [("▼", "forward", one.forward, one.forward_bytes), ("▲", "backward", one.backward, one.backward_bytes)]
        ways = "".join(
            f'<span title="{way}">{arrow} {escape(what)} <em>{amount(nbytes)}</em></span>'
            for arrow, way, what, nbytes in each
            if nbytes
        )
        times = f'<span class="times">× {one.times}</span>' if one.times > 1 else ""
        inner = f'{self.colours.axis(one.axis)}{ways}{times}<em class="sum">{amount(one.nbytes)}</em>'
        paid = " and ".join(what for _, _, what, nbytes in each if nbytes)
        self.places[id(pill)] = f"d{len(self.details)}"
        heat = max(1, round(100 * one.nbytes / self.largest))
        kind = f"pill c{self.colours.number(one.axis)}" + " faint" * (one.nbytes < self.all / 1000)
        body = of_pill(self.found, self.colours, pill)
        words = f"{one.axis} {one.forward} {one.backward}"
        heading = f"{escape(paid)} over {self.colours.axis(one.axis)}"
        return self._row(kind, heading, body, words, inner, f' style="--heat:{heat}%"')


COLOURS = 6
"""Axes that have a colour of their own; more begin anew."""


class Colours:
    """Axes in texts, coloured."""

    def __init__(self, axes: Iterable[str]) -> None:
        self.of = {axis: i % COLOURS for i, axis in enumerate(axes)}
        names = "|".join(re.escape(axis) for axis in self.of)
        self._text = re.compile(rf"(?<=[/:])({names})(?!\w)")

    def number(self, axis: str) -> int:
        """Of its colour; of several, that of the first."""
        return self.of[axis.split()[0]]

    def axis(self, axis: str) -> str:
        """Its name in its colour; of several, each."""
        return " ".join(f'<b class="a{self.of[one]}">{escape(one)}</b>' for one in axis.split())

    def text(self, text: str) -> str:
        """A text in the notation, escaped, every `/axis` and `sum:axis` in its colour."""
        return self._text.sub(lambda one: self.axis(one[0]), escape(text))

    def layout(self, layout: Layout) -> str:
        """A layout by its sizes, in a frame."""
        cut = any(dim.axes for dim in layout.dims) or bool(layout.pending)
        return f'<code class="chip{"" if cut else " whole"}">{self.text(sized(layout))}</code>'


def sized(layout: Layout) -> str:
    """A layout by sizes, `8 4096/tp (32 128)`: what a reader wants who knows no names."""

    def text(dim: Dim) -> str:
        inner = " ".join(text(x) for term in dim.terms for x in term)
        return (f"({inner})" if dim.terms else str(dim.n)) + "".join(f"/{cut}" for cut in dim.cuts)

    pending = [f"{op}:{axis}" for op, axis in layout.pending]
    return " ".join([*map(text, layout.dims), *pending]) or "()"


def of_module(found: Derived, colours: Colours, name: str, box: Box, steps: Sequence[FoldedStep]) -> str:
    """A module: what it receives, how its result lies, its own operators."""
    graph = found.folded.graph
    value = graph.results.get(box.path)
    told = ""
    if value is not None:
        told += _fact("gives", colours.layout(value_layout(found, value)))
    received = box.received()
    if received:
        texts = (f"{colours.axis(axis)} {amount(nbytes)}" for axis, nbytes in received.items())
        told += _fact("a rank receives in it", ", ".join(texts))
    if box.times > 1:
        told += _fact("stands for", f"{box.times} equal ones")
    own = f"<h3>Its own operators</h3>{operators(found, colours, steps)}" if steps else ""
    return f"<dl>{told}</dl>{own}{_ask(name)}"


def of_tensor(found: Derived, colours: Colours, v: int, name: str) -> str:
    """A parameter, a buffer or an input: how it lies, and who needs it how."""
    value = found.folded.value(v)
    states = input_states(found, v) or used(found, v)
    told = _fact("lies", colours.layout(layout_of(value.shape, states)))
    told += _fact("is", f"{escape(str(value.dtype).removeprefix('torch.'))}, {amount(value.nbytes)}")
    told += _fact("on a rank", amount(value.nbytes / parts_of(found, v)))
    if found.folded.times[v] > 1:
        told += _fact("stands for", f"{found.folded.times[v]} equal ones")
    takers = [step for step in found.folded.steps if v in step.inputs]
    return f"<dl>{told}</dl><h3>Taken by</h3>{operators(found, colours, takers)}{_ask(name)}"


def of_pill(found: Derived, colours: Colours, pill: Pill) -> str:
    """What moves: from which layout to which, why there, and how many bytes."""
    one, value = pill.moved, found.folded.value(pill.moved.value)
    others = used(found, one.value)
    before, after = ({**others, **dict(zip(one.axes, side, strict=True))} for side in (one.source, one.target))
    told = _fact("tensor", escape(named(found, one.value)))
    told += _fact("from", _placement(colours, value.shape, before)) + _fact(
        "to", _placement(colours, value.shape, after)
    )
    for way, what, nbytes in (
        ("forward", one.forward, one.forward_bytes),
        ("backward", one.backward, one.backward_bytes),
    ):
        told += _fact(way, f"{escape(what)}, {amount(nbytes)} a rank" if nbytes else escape(what) or "nothing")
    times = f" × {one.times} = {amount(one.nbytes)}" if one.times > 1 else ""
    told += _fact("together", f"{amount(one.forward_bytes + one.backward_bytes)}{times}")
    if one.taker is not None and pill.step is not None:
        return f"<dl>{told}</dl><h3>For this operator alone</h3>{operators(found, colours, [pill.step])}"
    makers = [step for step in found.folded.steps if one.value in step.outputs]
    takers = [step for step in found.folded.steps if one.value in step.inputs]
    own = f"<h3>Made by</h3>{operators(found, colours, makers)}" if makers else ""
    return f"<dl>{told}</dl>{own}<h3>Taken by</h3>{operators(found, colours, takers)}"


def operators(found: Derived, colours: Colours, steps: Sequence[FoldedStep]) -> str:
    """Operators with their rules, source lines, and how each of their tensors is needed."""
    rows: list[str] = []
    for step in steps:
        quiet = ' class="view"' if title(step) in VIEWS else ""
        where = f"{module_of(found, step)} · {line_of(step.node.source)}"
        rule = colours.text(written(step, found.axes))
        rows.append(
            f'<li{quiet}><div><b title="{escape(step.node.operator.name())}">{escape(title(step))}</b>'
            f'<small title="{escape(step.node.source)}">{escape(where)}</small></div><code>{rule}</code>'
            f"{_gathered(found, colours, step)}</li>"
        )
    return f'<ol class="operators">{"".join(rows)}</ol>'


def _gathered(found: Derived, colours: Colours, step: FoldedStep) -> str:
    """What the operator needs otherwise than it is used."""
    texts: list[str] = []
    for i, v in enumerate(step.inputs):
        if v is None:
            continue
        needs, has = states_in(step, found.axes, i), used(found, v)
        if any(state != has.get(axis, state) and state.kind in ("cut", "sum", "same") for axis, state in needs.items()):
            shape = found.folded.value(v).shape
            both = _placement(colours, shape, needs), _placement(colours, shape, has)
            texts.append(f'<p class="need">needs {both[0]}, is {both[1]}</p>')
    return "".join(texts)


def _placement(colours: Colours, shape: Sequence[int], states: Mapping[str, State]) -> str:
    """A layout, and over which axes its gradient is a pending sum."""
    several = [axis for axis, state in states.items() if state.kind == "several"]
    pending = f" its gradient {colours.text(' '.join(f'sum:{axis}' for axis in several))}" if several else ""
    return colours.layout(layout_of(shape, states)) + pending


def _fact(name: str, text: str) -> str:
    return f"<dt>{name}</dt><dd>{text}</dd>"


def _ask(name: str) -> str:
    """The words that explain it on the command line."""
    return f'<p class="ask">On the command line: <code>--why {escape(shlex.quote(name))}</code></p>'


def where(found: Derived, path: str) -> str:
    """A module in words."""
    return folded_name(found, path) or "the model"


_MOST = 6
"""Of what moves most."""


def write_page(path: Path, found: Derived, model: str) -> None:
    """Write the page. `model`: what it is called. Raises UserError where the file cannot be written."""
    write_file(path, page(found, model), "the page")


def page(found: Derived, model: str) -> str:
    """The page."""
    drawing = BoxDrawing(found, tree(found))
    body = drawing.drawn()
    return Template(packaged("tangram.sharding.derive.page", "page.html")).substitute(
        title=escape(f"{model}: layouts over {found.mesh}"),
        css=packaged("tangram.sharding.derive.page", "page.css"),
        head=_head(found, model, drawing),
        body=body,
        details="\n".join(drawing.details),
        script=packaged("tangram.sharding.derive.page", "page.js"),
        version=escape(tangram.__version__),
    )


def _head(found: Derived, model: str, drawing: BoxDrawing) -> str:
    """The name, the marks, and what moves by axis and collective."""
    graph = found.folded.graph
    whole = sum(value.nbytes for _, value in graph.of_kind("parameter"))
    held = sum(value.nbytes / parts_of(found, v) for v, value in graph.of_kind("parameter"))
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
