"""Derive the layout of every tensor of a model from marks on a few, without ranks and without memory for weights.

    print(derive(model, "dp=2 tp=4", ["*.up.weight: inner/tp hidden"], inputs={"x": torch.empty(8, 16)}))

What `tangram shard` prints for models by name is here for modules of one's own, as values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.models.capturing.graph import Graph
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain import show
from tangram.sharding.derive.layouts import Moved, moved, value_layout
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.marking.meant import kind, meant
from tangram.sharding.derive.of_model import derive_model, graph_of, marks_or_known, refuse_idle_axes
from tangram.sharding.discover.own_rules import OwnRules, rules_text
from tangram.sharding.eager.api import marks_in
from tangram.text import plain


@dataclass(frozen=True)
class Derivation:
    """The layout of every tensor of a model over a mesh, and the communication that follows. `str` gives tables."""

    derived: Derived
    """All of it, for what is below."""

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.derived.mesh

    @property
    def parameters(self) -> Mapping[str, Layout]:
        """Of each parameter, by its name in the model."""
        return {value.name: value_layout(self.derived, v) for v, value in self._graph.of_kind("parameter")}

    @property
    def modules(self) -> Mapping[str, Layout]:
        """Of the first tensor that each module returns, by the module's name; "" is the model."""
        graph = self._graph
        return {name: value_layout(self.derived, v) for name, v in graph.results.items() if v < len(graph.values)}

    @property
    def communication(self) -> tuple[Moved, ...]:
        """Each tensor that is brought from one layout to another, with the collectives and their bytes."""
        return tuple(one for one in moved(self.derived) if one.nbytes)

    @property
    def received(self) -> float:
        """Bytes that a rank receives in one forward and backward."""
        return show.total(self.derived)

    @property
    def _graph(self) -> Graph:
        return self.derived.folded.graph

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return show.as_json(self.derived)

    def __str__(self) -> str:
        """The tables of `tangram shard`, and a line with the bytes."""
        lines = [line for table in show.tables(self.derived) for line in (*plain(*table), "")]
        return "\n".join([*lines, f"a rank receives {show.amount(self.received)}"])


def derive(
    model: nn.Module,
    mesh: Mesh | str,
    marks: Sequence[str | Mark] | Mapping[str, str] | None = (),
    *,
    inputs: Mapping[str, Any],
    rules: Path | str | OwnRules | None = None,
) -> Derivation:
    """The layouts that follow from marks; needs no processes, and no memory where the model is on meta.

    `mesh`: as `"dp=2 tp=4"`. `marks`: as `"*.up.weight: inner/tp hidden"`, or a table of names to layouts, beside those
    in the model's own code (`tangram.mark`); with none in either, those that are known for a transformers model's type,
    over `tp`. `inputs`: keyword arguments of the model's forward, of which only sizes count (tensors on meta will do).
    `rules`: a file of op rules for operators of one's own, as `tangram shard discover` writes it, each proved first.
    Results that no mark names are replicated, as `tangram.parallelize` runs them. Raises UserError for marks that name
    nothing or contradict each other, an axis that none names, and what cannot be captured.
    """
    refuse_unnamed(inputs)
    mesh = mesh_from(mesh)
    if not mesh.axes:
        raise UserError('the mesh has no axis: write each with its number of ranks, as in "dp=2 tp=4"')
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    graph = graph_of(model, inputs, dtype, rules=rules_text(rules))
    found = derive_model(graph, marks_or_known(graph, [*marks_in(model), *marks_from(marks)], mesh, model), mesh)
    refuse_idle_axes(found, model)
    return Derivation(found)


def mesh_from(mesh: Mesh | str) -> Mesh:
    """A mesh as text, read. Raises UserError for what is neither."""
    if not isinstance(cast(Any, mesh), str | Mesh):
        raise UserError(f'the mesh is {kind(mesh)}: write each axis with its number of ranks, as in "dp=2 tp=4"')
    return Mesh.parse(mesh) if isinstance(mesh, str) else mesh


def marks_from(marks: Sequence[str | Mark] | Mapping[str, str] | None) -> list[Mark]:
    """Marks as text, read; a table of names to layouts alike, None as none. Raises UserError for one that cannot be."""
    some = [marks] if isinstance(marks, str) else marks.items() if isinstance(marks, Mapping) else marks or ()
    return [one if isinstance(one, Mark) else Mark.parse(_text(one)) for one in some]


def _text(mark: object) -> str:
    """A mark as `name: layout`, also of a pair. Raises UserError for what another library has."""
    if isinstance(mark, str):
        return mark
    pair: list[object] = [*cast("tuple[object, ...]", mark)] if isinstance(mark, tuple) else []
    named = len(pair) == 2 and isinstance(pair[0], str)
    name, layout = (pair[0], pair[1]) if named else ("", cast(object, mark))
    if name and isinstance(layout, str):
        return f"{name}: {layout}"
    of = f"the mark of {name} takes a layout" if name else "a mark is a text `name: layout`"
    raise UserError(f"{of}, {meant(layout, None, (), open_end=True)}")


def refuse_unnamed(inputs: object) -> None:
    """Refuse inputs that are not by name, as the arguments of a forward are given by keyword."""
    if not isinstance(inputs, Mapping):
        raise UserError(
            f'inputs is a {type(inputs).__name__}: give a table of the forward\'s arguments by name, as {{"x": x}}'
        )
