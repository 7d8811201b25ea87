"""A derivation as nested boxes, for the page: modules in modules, what runs in each in its order, and what moves where.

    Box     a module; equal layers are one
    Run     operators that a module runs itself, one after the other
    Pill    a tensor that moves: in the innermost module that holds both who makes it and all who take it

A tensor that moves as it leaves its maker stands behind it; one that moves for one taker alone stands before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.operators import VIEWS, title
from tangram.sharding.derive.explain.show import folded_name
from tangram.sharding.derive.layouts import Moved, made, moved
from tangram.sharding.derive.problem.folding import FoldedStep


@dataclass
class Pill:
    """A tensor that moves over one axis, or over some at once, with bytes."""

    moved: Moved
    step: FoldedStep | None
    """The operator that gives it so, or needs it so; None for a parameter, a buffer or an input."""


@dataclass
class TreeRun:
    """Operators of one module in a row."""

    steps: list[FoldedStep]
    aside: bool
    """Masks and positions: nothing that gradients flow through."""


@dataclass
class TreeParameter:
    """A parameter (or a buffer, an input) of a module, with its gradient's way."""

    value: int
    name: str
    """Within the module."""
    pills: list[Pill] = field(default_factory=list[Pill])


@dataclass
class Box:
    """A module."""

    path: str
    name: str
    """Within its box, equal layers as `layers.{0..60}`."""
    times: int
    items: list[Box | TreeRun | Pill] = field(default_factory=list["Box | TreeRun | Pill"])
    parameters: list[TreeParameter] = field(default_factory=list[TreeParameter])

    def pills(self) -> Iterator[Pill]:
        """All that moves in it."""
        for parameter in self.parameters:
            yield from parameter.pills
        for item in self.items:
            if isinstance(item, Box):
                yield from item.pills()
            elif isinstance(item, Pill):
                yield item

    def steps(self) -> Iterator[FoldedStep]:
        """All that runs in it."""
        for item in self.items:
            if isinstance(item, Box):
                yield from item.steps()
            elif isinstance(item, TreeRun):
                yield from item.steps

    def received(self) -> dict[str, float]:
        """By axis, or axes at once, the bytes that a rank receives in it, in all the layers that it stands for."""
        found: dict[str, float] = {}
        for pill in self.pills():
            found[pill.moved.axis] = found.get(pill.moved.axis, 0.0) + pill.moved.nbytes
        return found


def tree(found: Derived) -> Box:
    """The whole model."""
    graph, folded = found.folded.graph, found.folded
    ran = {step.node.module for step in folded.steps} | {name for name in graph.results if name}
    boxes = {"": Box("", "the model", 1)}

    def box(path: str) -> Box:
        while path and path not in ran:
            path = path.rpartition(".")[0]
        if path not in boxes:
            above = box(path.rpartition(".")[0])
            own, outer = folded_name(found, path), folded_name(found, above.path)
            boxes[path] = Box(path, own.removeprefix(f"{outer}.") if outer else own, _times(found, path))
            above.items.append(boxes[path])
        return boxes[path]

    for step in folded.steps:
        inside, aside = box(step.node.module), folded.differentiable.isdisjoint(step.outputs)
        last = inside.items[-1] if inside.items else None
        if isinstance(last, TreeRun) and last.aside == aside:
            last.steps.append(step)
        else:
            inside.items.append(TreeRun([step], aside))
    for one in boxes.values():
        one.items = _joined(one.items)
    standing = {v: None for v, _ in graph.of_kind("parameter") if folded.classes[v] == v}
    pills = [*_placed(found)]
    moving = {pill.moved.value for pill, _, _ in pills if pill.step is None}
    held: dict[int, TreeParameter] = {}
    for v in [*standing, *(v for v in sorted(moving) if v not in standing)]:
        name = graph.values[v].name
        inside = box(name.rpartition(".")[0])
        held[v] = TreeParameter(v, name.removeprefix(f"{inside.path}.") if inside.path else name)
        inside.parameters.append(held[v])
    for pill, level, after in pills:
        if pill.step is None:
            held[pill.moved.value].pills.append(pill)
        else:
            _insert(box(level), pill, pill.step, after)
    return boxes[""]


def _joined(items: list[Box | TreeRun | Pill]) -> list[Box | TreeRun | Pill]:
    """Without runs of a few operators beside the others, as a detached copy."""
    found: list[Box | TreeRun | Pill] = []
    for item in items:
        last = found[-1] if found else None
        if isinstance(item, TreeRun) and isinstance(last, TreeRun) and _alike(last, item):
            found[-1] = TreeRun([*last.steps, *item.steps], all(one.aside or _views(one) for one in (last, item)))
        else:
            found.append(item)
    return found


def _alike(one: TreeRun, other: TreeRun) -> bool:
    return one.aside == other.aside or _slight(one) or _slight(other)


def _slight(run: TreeRun) -> bool:
    """Whether it is no run of its own: a few operators that no gradient flows through, or views."""
    return (run.aside and len(run.steps) <= _FEW) or _views(run)


def _views(run: TreeRun) -> bool:
    return all(title(step) in VIEWS for step in run.steps)


_FEW = 5


def _times(found: Derived, path: str) -> int:
    """How many equal layers a module stands for."""
    graph = found.folded.graph
    for block in graph.blocks:
        if path == block.path or path.startswith(f"{block.path}."):
            return sum(other.kind == block.kind for other in graph.blocks)
    return 1


def _placed(found: Derived) -> Iterator[tuple[Pill, str, bool]]:
    """Everything that moves, the module that it stands in, and whether behind its operator or before it."""
    makers: dict[int, list[FoldedStep]] = {}
    takers: dict[int, list[str]] = {}
    by_number: dict[int, FoldedStep] = {}
    for step in found.folded.steps:
        by_number[step.number] = step
        for v in step.outputs:
            makers.setdefault(v, []).append(step)
        for v in step.inputs:
            if v is not None:
                takers.setdefault(v, []).append(step.node.module)
    for one in moved(found):
        if not one.nbytes:
            continue
        if one.taker is not None:
            step = by_number[one.taker]
            sources = [maker.node.module for maker in makers.get(one.value, ())] or [step.node.module]
            yield Pill(one, step), _common([step.node.module, *sources[:1]]), False
        elif one.value not in makers:
            yield Pill(one, None), "", True
        else:
            step = _maker(found, one, makers)
            yield Pill(one, step), _common([step.node.module, *takers.get(one.value, ())]), True


def _maker(found: Derived, one: Moved, makers: Mapping[int, list[FoldedStep]]) -> FoldedStep:
    """Of those that make a class (a layer's result is the next one's input), the one that gives it as it moves."""
    some = makers[one.value]
    given = ((step, made(found, step, step.outputs.index(one.value))) for step in some)
    fits = [step for step, own in given if tuple(own[axis] for axis in one.axes) == one.source]
    return (fits or some)[0]


def _common(paths: list[str]) -> str:
    """The innermost module that holds all."""
    split = [path.split(".") if path else [] for path in paths]
    same: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        same.append(names[0])
    return ".".join(same)


def _insert(box: Box, pill: Pill, step: FoldedStep, after: bool) -> None:
    """Put what moves behind the operator, or the module that runs it, or before it."""
    for i, item in enumerate(box.items):
        if isinstance(item, TreeRun) and step in item.steps:
            cut = item.steps.index(step) + after
            parts = [TreeRun(some, item.aside) for some in (item.steps[:cut], item.steps[cut:])]
            box.items[i : i + 1] = [one for one in (parts[0], pill, parts[1]) if isinstance(one, Pill) or one.steps]
            return
        if isinstance(item, Box) and any(own is step for own in item.steps()):
            box.items.insert(i + after, pill)
            return
