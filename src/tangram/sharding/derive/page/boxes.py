"""The boxes of the page: modules in modules, runs of operators, parameters, and what moves, each with what it says."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.operators import VIEWS, line_of, title
from tangram.sharding.derive.explain.show import amount, folded_name
from tangram.sharding.derive.layouts import input_states, layout_of, used, value_layout
from tangram.sharding.derive.page import details
from tangram.sharding.derive.page.details import Colours, where
from tangram.sharding.derive.page.tree import Box, Pill, TreeParameter, TreeRun

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
        about = details.of_module(self.found, self.colours, name, box, own)
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
        body = details.operators(self.found, self.colours, run.steps)
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
            details.of_tensor(self.found, self.colours, one.value, full),
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
        body = details.of_pill(self.found, self.colours, pill)
        words = f"{one.axis} {one.forward} {one.backward}"
        heading = f"{escape(paid)} over {self.colours.axis(one.axis)}"
        return self._row(kind, heading, body, words, inner, f' style="--heat:{heat}%"')
