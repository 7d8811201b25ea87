"""Why an operator moves what it moves: tensor by factor with the cuts asked for, what was chosen, what else there was.

mm(self=float32[64, 32], mat2=float32[32, 16]) over x=2
          m      k      n
  self    /x     whole
  mat2           whole  /x
  result  /x            whole
axis x of 2 ranks: cut m, 1,024 B a rank; conflict
  cut n: 4,096 B
  whole: 5,120 B
mat2: k=32 n=16/x -> k=32 n=16: all-gather over x 1,024 B
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tangram.layout import Layout
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.cut_trees import axes_of
from tangram.sharding.ops.read_inputs import PlacedInput, read
from tangram.sharding.propagation.axis_choices import HALO, SCAN, AxisChoice
from tangram.sharding.propagation.propagate import Propagation, options


@dataclass(frozen=True)
class ConflictRow:
    """What the axes do to one tensor."""

    tensor: str
    layout: str
    """As it is given; of a result, as it comes out."""
    cells: dict[str, str | None]
    """By factor: `/x/y`, or nothing where it is whole; None for a factor that the tensor lacks."""
    others: str
    """What is on no factor: `sum:x`, `@pp=1`, cuts that are to be gathered."""


@dataclass(frozen=True)
class Axis:
    """What one axis does, and what it could have done."""

    name: str
    ranks: int
    chosen: AxisChoice
    others: tuple[AxisChoice, ...]
    moved: float
    """Bytes that a rank receives over it, on average."""
    linked: float = 0.0
    """Of those, what parts need of each other, however the inputs lie."""

    @property
    def conflict(self) -> bool:
        """Whether inputs disagree, or the operator cannot run as they lie: then something moves."""
        return self.moved > self.linked


@dataclass(frozen=True)
class FactorTable:
    """A propagation for people (`str`) and programs (`as_json`)."""

    call: str
    mesh: str
    factors: tuple[str, ...]
    rows: tuple[ConflictRow, ...]
    axes: tuple[Axis, ...]
    relayouts: tuple[str, ...]

    @property
    def conflicts(self) -> tuple[Axis, ...]:
        """The axes over which something moves."""
        return tuple(axis for axis in self.axes if axis.conflict)

    def __str__(self) -> str:
        body = [("", *self.factors, "")]
        body += [(r.tensor, *(_cell(r.cells[f]) for f in self.factors), r.others) for r in self.rows]
        widths = [max(map(len, column)) for column in zip(*body, strict=True)]
        lines = [f"{self.call} over {self.mesh}"]
        lines += ["  " + "  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in body]
        for axis in self.axes:
            lines.append(
                f"axis {axis.name} of {axis.ranks} ranks: {axis.chosen}"
                + (f", {_bytes(axis.moved)} a rank" if axis.moved else "")
                + ("; conflict" if axis.conflict else "")
            )
            lines += [f"  {one}: {one.refused or _bytes(one.nbytes) + _due(one)}" for one in axis.others]
        return "\n".join([*lines, *self.relayouts])

    def as_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return {
            "call": self.call,
            "mesh": self.mesh,
            "factors": list(self.factors),
            "tensors": [
                {"tensor": r.tensor, "layout": r.layout, "factors": r.cells, "others": r.others} for r in self.rows
            ],
            "axes": [
                {
                    "axis": axis.name,
                    "ranks": axis.ranks,
                    "chosen": str(axis.chosen),
                    "bytes": axis.moved,
                    "conflict": axis.conflict,
                    "others": [
                        {
                            "option": str(one),
                            "bytes": None if one.refused else one.nbytes,
                            "due": one.due,
                            "refused": one.refused,
                        }
                        for one in axis.others
                    ],
                }
                for axis in self.axes
            ],
            "relayouts": list(self.relayouts),
        }


def factor_table(found: Propagation) -> FactorTable:
    """The factor table of a propagation. Works the choices out anew, this time with every option."""
    call, bound = found.call, found.bound
    names = list(_names(call))
    factors = tuple(dict.fromkeys(f for dims in (*bound.inputs, *bound.outputs) for dim in dims or () for f in dim))
    rows: list[ConflictRow] = []
    for i, tensor in enumerate(call.tensors):
        if tensor is not None:
            held = read(i, tensor, found.input_layouts[i], bound, found.mesh, ())
            rows.append(ConflictRow(names[i], str(held.layout), _cells(held, factors), _others(held)))
    for i, layout in enumerate(found.outputs):
        own = {f for dim in bound.outputs[i] for f in dim}
        cells = {f: _cuts(axes_of(found.trees.get(f, ()))) if f in own else None for f in factors}
        name = "result" if len(found.outputs) == 1 else f"result {i}"
        rows.append(ConflictRow(name, str(layout), cells, _suffixes(layout)))
    other = options(found)
    moved: dict[str, float] = {}
    linked: dict[str, float] = {}
    for (kind, axis), nbytes in found.moved.items():
        moved[axis] = moved.get(axis, 0.0) + nbytes
        if kind in (HALO, SCAN):
            linked[axis] = linked.get(axis, 0.0) + nbytes
    axes = [
        Axis(
            axis,
            found.mesh.axes[axis][0],
            chosen,
            tuple(one for one in other[axis] if (one.kind, str(one)) != (chosen.kind, str(chosen))),
            moved.get(axis, 0.0),
            linked.get(axis, 0.0),
        )
        for axis, chosen in found.choices.items()
    ]
    relayouts = [
        f"{names[one.place]}: {one.source} -> {one.target}: "
        + ", ".join(f"{s.kind} over {s.axis}" + (f" {_bytes(s.nbytes)}" if s.nbytes else "") for s in one.steps)
        for one in found.relayouts
    ]
    if found.totals:
        told = ", ".join(f"{s.kind} over {s.axis} {_bytes(s.nbytes)}" for s in found.totals)
        relayouts.append(f"result{'s' * (len(found.outputs) > 1)}: {told}")
    return FactorTable(str(call), str(found.mesh), factors, tuple(rows), tuple(axes), tuple(relayouts))


def _names(call: OpCall) -> Iterator[str]:
    for name, i in call.places:
        yield name if i is None else f"{name}[{i}]"


def _cells(held: PlacedInput, factors: Sequence[str]) -> dict[str, str | None]:
    return {f: _cuts(axes_of(held.trees.get(f, ()))) if f in held.factors else None for f in factors}


def _cuts(axes: Sequence[str]) -> str:
    return "".join(f"/{axis}" for axis in axes)


def _others(held: PlacedInput) -> str:
    lost = [f"/{axis} to be gathered" for axis, state in held.where.items() if state.kind == "lost"]
    return " ".join([*lost, _suffixes(held.layout)]).strip()


def _suffixes(layout: Layout) -> str:
    return str(Layout((), (), layout.pending, layout.at))


def _cell(text: str | None) -> str:
    return "" if text is None else text or "whole"


def _due(one: AxisChoice) -> str:
    return f", and {_bytes(one.due)} for what it leaves pending" if one.due else ""


def _bytes(n: float) -> str:
    return f"{n:,.0f} B"
