"""What is to happen while a model runs as derived: at the borders of modules, and around functions that they call.

A program is data. It says nothing of ranks and groups: a runtime (`install`) does it on one rank's tensors, with real
collectives or, to rehearse it, with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tangram.models.capturing.graph import Called, Graph
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import steps_of_nodes
from tangram.sharding.derive.problem.folding import Folded
from tangram.sharding.derive.problem.folding import FoldedStep as FoldedStep
from tangram.sharding.derive.transitions import Change
from tangram.sharding.local_ops.random_ops import makes_random

Place = tuple[int, int]
"""A tensor that an operator takes: the number of its node, and the place."""
CallKey = tuple[str, str, int]
"""A function that a run calls: the line, the function's name, and how often it was called there before."""


@dataclass
class Border:
    """What happens to the tensors that a module takes and gives, by their place among all its leaves."""

    takes: dict[int, Change] = field(default_factory=dict[int, Change])
    gives: dict[int, Change] = field(default_factory=dict[int, Change])


@dataclass
class OpAction:
    """What happens around a function of torch, or in its stead."""

    call: int
    """In `Graph.calls`."""
    takes: dict[int, Change] = field(default_factory=dict[int, Change])
    gives: dict[int, Change] = field(default_factory=dict[int, Change])
    before: dict[Place, Change] = field(default_factory=dict[Place, Change])
    """The same, by the operators inside."""
    after: dict[int, Change] = field(default_factory=dict[int, Change])
    """By the value that an operator inside makes."""
    why: str = ""
    """Not empty: the operators are run one by one in the function's stead, and why."""


@dataclass
class Program:
    """All that happens in one forward, and by the duals of what moves in its backward."""

    derived: Derived
    borders: dict[int, Border]
    """By the number of the run in the graph."""
    actions: dict[int, dict[CallKey, OpAction]]
    """By the number of the run."""
    summed: Mapping[str, tuple[str, ...]]
    """Parameters that every rank of some axes has whole and uses for something of its own: gradients are summed."""

    gathered: Mapping[str, Change] = field(default_factory=dict[str, Change])
    """Parameters that lie in parts and are put together each time that their module runs; their gradients are cut."""
    windows: bool = False
    """Whether attention may have windows."""

    @property
    def graph(self) -> Graph:
        """What the model's code ran when it was captured."""
        return self.derived.folded.graph

    @cached_property
    def answers(self) -> Mapping[int, Mapping[CallKey, Any]]:
        """By the number of the run, what its code has read out of tensors in the capture, and has to read again."""
        found: dict[int, dict[CallKey, Any]] = {}
        for one in self.derived.folded.graph.answers:
            found.setdefault(one.run, {})[one.line, one.function, one.turn] = one.answer
        return found

    @cached_property
    def cuts_queries(self) -> bool:
        """Whether attention is to have the mask of the capture: queries are cut, or its operators run one by one.

        Attention that was captured as products (its heads give other sizes than they take) may be both. So is it where
        masks are made of parts: whether there is one depends on the documents that a rank sees. And where code sees a
        part, and its mask is of the whole: of what is shorter than a window transformers leaves it out.
        """
        calls, steps = self.derived.folded.graph.calls, steps_of_nodes(self.derived)
        replaced = [calls[action.call] for own in self.actions.values() for action in own.values() if action.why]
        if any("scaled_dot_product" in steps[i].call.name for call in replaced for i in range(call.first, call.stop)):
            return True
        if self._around_attention():
            return True
        for call in calls:
            own = [steps[i] for i in range(call.first, call.stop)] if "scaled_dot_product" in call.function else []
            cut = any(over.communication[step.number].label is not None for step in own for over in self.derived.axes)
            if cut and not any("scaled_dot_product" in step.call.name for step in own):
                return True
        attends = any("scaled_dot_product" in call.function for call in calls)
        masks = _of_no_weights(self.derived.folded) if attends else []
        if any(over.communication[step.number].label is not None for step in masks for over in self.derived.axes):
            return True
        numbers = {step.number for step in masks} if self.windows else ()
        if any(steps[i].number in numbers for call in replaced for i in range(call.first, call.stop)):
            return True
        for step in self.derived.folded.steps:
            query = step.bound.inputs[0] if "scaled_dot_product" in step.call.name else None
            labels = [over.communication[step.number].label for over in self.derived.axes]
            if query and any(label is not None and label.factor in query[-2] for label in labels):
                return True
        return False

    def _around_attention(self) -> bool:
        """Whether something is done in the code around attention, which runs or not by whether there is a mask.

        transformers repeats keys and values for heads of queries where there is one.
        """
        calls = self.derived.folded.graph.calls
        files = {_file(call) for call in calls if "scaled_dot_product" in call.function}
        there = (calls[action.call] for own in self.actions.values() for action in own.values())
        return any("scaled_dot_product" not in call.function and _file(call) in files for call in there)

    @cached_property
    def sure(self) -> Mapping[int, frozenset[CallKey]]:
        """By run, the functions that something is done with for tensors that have gradients: the code must call them.

        Of others, as of masks, code may need none.
        """
        graph = self.derived.folded.graph
        found: dict[int, frozenset[CallKey]] = {}
        for run, own in self.actions.items():
            some = {key: [v for v in graph.calls[action.call].gives if v is not None] for key, action in own.items()}
            found[run] = frozenset(
                key for key, gives in some.items() if any(graph.values[v].differentiable for v in gives)
            )
        return found

    @cached_property
    def random(self) -> bool:
        """Whether a forward draws random numbers, of whatever kind."""
        return any(_random(step) for step in self.derived.folded.steps)

    @cached_property
    def uncounted(self) -> str:
        """The first operator whose random numbers are not drawn by the element; "" where all are."""
        there = (step for step in self.derived.folded.steps if _random(step) and not draws(step))
        return next((f"{step.call.name} in {step.node.source}" for step in there), "")

    @property
    def inside(self) -> int:
        """How many functions are not called as they are."""
        return sum(len(own) for own in self.actions.values())


def _file(call: Called) -> str:
    return call.line.rpartition(":")[0]


def draws(step: FoldedStep) -> bool:
    """Whether an operator draws a random number for each element of the whole tensor
    (`sharding.local_ops.random_ops`)."""
    return step.bound.rule.note("counted") is not None or makes_random(step.call)


def draws_full_tensor(step: FoldedStep) -> bool:
    """Whether an operator draws on every rank for the whole tensor: what makes one of random numbers, and what is not
    known to draw by the element (`aten.rrelu_with_noise`, `aten.poisson`)."""
    return makes_random(step.call) or (_random(step) and not draws(step))


def _random(step: FoldedStep) -> bool:
    return step.bound.rule.note("random") is not None or makes_random(step.call)


def _of_no_weights(folded: Folded) -> list[FoldedStep]:
    """The operators on positions and masks: nothing that they take follows from a parameter or has gradients."""
    others = set(folded.standing | folded.differentiable)
    found: list[FoldedStep] = []
    for step in folded.steps:
        if others.isdisjoint((*step.inputs, *step.outputs)):
            found.append(step)
        else:
            others.update(step.outputs)
    return found
