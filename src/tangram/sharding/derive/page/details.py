"""What the page says of a module, a run of operators, a tensor, or of what moves, when it is clicked on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tangram.layout import Layout
from tangram.layout.syntax import Dim
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.operators import VIEWS, line_of, module_of, states_in, title, written
from tangram.sharding.derive.explain.show import amount, folded_name
from tangram.sharding.derive.explain.why import named
from tangram.sharding.derive.layouts import input_states, layout_of, used, value_layout
from tangram.sharding.derive.page.tree import Box, Pill
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import State, part_dim

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
    nbytes = float(value.nbytes)
    for over in found.axes:
        nbytes /= over.k if v in over.used and part_dim(over.used[v]) is not None else 1
    told = _fact("lies", colours.layout(layout_of(value.shape, states)))
    told += _fact("is", f"{escape(str(value.dtype).removeprefix('torch.'))}, {amount(value.nbytes)}")
    told += _fact("on a rank", amount(nbytes))
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
