"""The operators of one function of torch, each on a rank's part by its rule, in the function's stead.

Slower than the function, so only for what is another operator on a part, moves between operators, or is told sizes
that are not the part's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from tangram.errors import UserError
from tangram.models.capturing.graph import Called, Node
from tangram.relayout.collectives.neighbours import fetched
from tangram.relayout.collectives.one_collective import move
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.layouts import called, part, steps_of_nodes
from tangram.sharding.derive.problem.folding import FoldedStep
from tangram.sharding.derive.problem.states import SEVERAL, cut
from tangram.sharding.local_ops import local_call, random_numbers
from tangram.sharding.local_ops.local_call import run
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.ops.bind import BoundOp
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.cut_trees import axes_of
from tangram.sharding.ops.rank_part import RankPart, stands
from tangram.sharding.propagation import halo
from tangram.sharding.propagation.halo import needed
from tangram.sharding.runtime.install import Bring
from tangram.sharding.runtime.lower import makers, places_of, written_by
from tangram.sharding.runtime.program import OpAction, draws, draws_full_tensor

Along = Callable[[str], Sequence[RankPart]]
"""The parts of the ranks of an axis, in their order."""


class Linked:
    """What passes between the ranks of some axes. `groups`: by axis."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups

    def with_halos(
        self, bound: BoundOp, part: RankPart, along: Along, local: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The tensors with what windows read of other ranks', one dim after the other. Collective."""
        found = list(local)
        for factor, window in bound.windows.items():
            if factor in part.indices:
                (axis,) = axes_of(part.cuts[factor])
                have = [stands(one, factor, window.n) for one in along(axis)]
                want = [needed(bound, one, factor) for one in along(axis)]
                x = cast(Tensor, found[window.place])
                found[window.place] = fetched(x, window.dim, have, want, self._groups[axis])
        return found

    def with_totals(self, bound: BoundOp, part: RankPart, along: Along, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results with what is before each stretch. Collective."""
        for factor, op in bound.scans.items():
            if factor in part.indices:
                (axis,) = axes_of(part.cuts[factor])
                dim = bound.outputs[0].index((factor,))

                def exchange(x: Tensor, axis: str = axis, dim: int = dim) -> Tensor:
                    return move(x, cut(dim), SEVERAL, self._groups[axis], differentiable=x.is_floating_point())

                every = [one.indices[factor] for one in along(axis)]
                results = halo.with_others(op, results, dim, part.indices[factor], every, exchange)
        return results


OTHERS_FAULT = re.compile(
    r"allocate|out of memory|CUDA|HIP|cuBLAS|CUBLAS|CUDNN|NCCL|gloo|[Cc]onnection|[Tt]imed out|ProcessGroup"
)
"""Of a plain RuntimeError: it is of memory, of a device or of a group, not of the parts."""


class Operators:
    """The operators of a derivation as one rank runs them."""

    def __init__(
        self, found: Derived, rank: int, linked: Linked | None = None, numbers: random_numbers.DrawNumbers | None = None
    ) -> None:
        self.graph = found.folded.graph
        self.steps: Mapping[int, FoldedStep] = steps_of_nodes(found)
        self._found, self._rank, self._linked, self._numbers = found, rank, linked, numbers
        self._parts: dict[int, RankPart] = {}
        self._others: dict[tuple[int, str], Sequence[RankPart]] = {}
        self.maker = makers(self.graph)

    def part(self, step: FoldedStep) -> RankPart:
        """Where the rank stands in an operator."""
        if step.number not in self._parts:
            self._parts[step.number] = part(self._found, step, self._rank)
        return self._parts[step.number]

    def as_it_is(self, i: int) -> bool:
        """Whether a node's operator is the same one on the rank's part."""
        return local_call.as_it_is(self.steps[i].bound, self.part(self.steps[i]))

    def instead(self, action: OpAction, leaves: Sequence[Any], bring: Bring) -> Any:
        """What the function of an action gives."""
        call = self.graph.calls[action.call]
        values = {v: x for v, x in zip(call.takes, leaves, strict=True) if v is not None}
        for i in self.live(call):
            node, step = self.graph.nodes[i], self.steps[i]
            if node.renews is not None:  # what it is a view of has been written by that
                values[node.results[0] or 0] = values[node.renews[0]]
                continue
            local: list[Tensor | None] = []
            for place, v in enumerate(places_of(node, step)):
                x = None if v is None else values[v]
                change = action.before.get((i, place))
                local.append(bring(x, change) if x is not None and change else x)
            for v, x in zip(node.results, self._run(node, step, local, call.takes), strict=True):
                if v is not None:
                    values[v] = bring(x, action.after[v]) if v in action.after else x
        return tree_unflatten([None if v is None else values[v] for v in call.gives], call.form)

    def refuse_unknown(self, call: Called, action: OpAction) -> None:
        """Raises UserError for a function that cannot be replaced: the operators alone do not say what it does."""
        live = [self.graph.nodes[i] for i in self.live(call)]
        made = {v for node in live for v in node.results}
        taken = {v for node in live for v in ([node.renews[0]] if node.renews else node.inputs)}
        if call.function == "grad":  # what moves in the forward moves back by itself, and would once more
            raise UserError(
                f"{call.line}: torch.autograd.grad goes back through layers that lie in parts, which is not derived: "
                "leave the parameters of what it goes through whole, as DDP and FSDP do"
            )
        said = f"{call.line}: {call.function} cannot be replaced ({action.why}):"
        if unknown := sorted(v for v in taken - made if v not in call.takes):
            what = self.graph.values[unknown[0]].name or "a tensor that another function has made"
            raise UserError(f"{said} it works with {what} without being given it")
        if any(v is None and i not in call.nothing for i, v in enumerate(call.gives)):
            raise UserError(f"{said} it gives more than tensors")

    def live(self, call: Called) -> list[int]:
        """The nodes of a call without those of which nothing comes, as the views that autograd makes anew."""
        found: list[int] = []
        wanted = {v for v in call.gives if v is not None}
        for i in reversed(range(call.first, call.stop)):
            node = self.graph.nodes[i]
            acts = not node.implied and (written_by(node) or draws(self.steps[i]) or draws_full_tensor(self.steps[i]))
            if acts or not wanted.isdisjoint(v for v in node.results if v is not None):
                found.append(i)
                wanted.update([node.renews[0]] if node.renews else node.inputs)
        return found[::-1]

    def _run(
        self, node: Node, step: FoldedStep, local: Sequence[Tensor | None], inputs: Sequence[int | None]
    ) -> Sequence[Any]:
        """What a node gives. What it writes is written into the tensor itself, which may be a view of another one.

        Raises UserError for parts that the operator itself refuses; no memory, a device or a group stay what they are.
        """
        try:
            return self._ran(node, step, local, inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            if type(error) not in (RuntimeError, ValueError, IndexError) or OTHERS_FAULT.search(str(error)):
                raise
            sizes = ", ".join(str(tuple(x.shape)) for x in local if x is not None)
            said = (str(error).splitlines() or [""])[0].rstrip(".")
            raise UserError(
                f"{node.source}: {step.call.name} cannot be run on the parts {sizes} of rank {self._rank}: {said}"
            ) from error

    def _ran(
        self, node: Node, step: FoldedStep, local: Sequence[Tensor | None], inputs: Sequence[int | None]
    ) -> Sequence[Any]:
        if step.call.name == "view":  # what is brought here may have other strides than what a model's own code has
            local = [None if t is None else t.contiguous() for t in local]
        written = written_by(node)
        if torch.is_grad_enabled() and any(
            x is not None and x.is_leaf and x.requires_grad
            for v, x in zip(places_of(node, step), local, strict=True)
            if v in written and v in inputs
        ):
            with torch.no_grad():  # as the function does itself, which torch.nn.init has
                return self._ran(node, step, local, inputs)
        call, there = called(self._found, step), bool(written)
        if draws_full_tensor(step):  # by torch's generators, on every rank, as one process draws it within DrawMode
            with DrawMode(numbers=self._numbers):
                found = run(call, step.bound, self.part(step), local)
        elif draws(step):  # all ranks, whatever they have of it: they count the same calls
            with random_numbers.using(random_numbers.fresh(), self._numbers):
                found = run(call, step.bound, self.part(step), local, in_place=there)
        elif not step.bound.linked.isdisjoint(self.part(step).indices):
            found = self._run_linked(call, step, local)
        else:
            found = run(call, step.bound, self.part(step), local, in_place=there)
        for v, x in zip(places_of(node, step), local, strict=True):
            if v in written and x is not None and found[0] is not x:
                x.copy_(found[0])
                found = (x, *found[1:])
        return found

    def _run_linked(self, call: OpCall, step: FoldedStep, local: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """An operator whose parts need each other. Collective."""
        assert self._linked is not None, "a rehearsal runs no operators"
        own, along = self.part(step), functools.partial(self._along, step)
        ready = self._linked.with_halos(step.bound, own, along, local)
        return self._linked.with_totals(step.bound, own, along, run(call, step.bound, own, ready))

    def _along(self, step: FoldedStep, axis: str) -> Sequence[RankPart]:
        """Where the ranks of an axis stand in an operator."""
        if (step.number, axis) not in self._others:
            mesh = self._found.mesh
            at = {over.axis: mesh.coords(self._rank)[over.axis] for over in self._found.axes}
            ranks = [mesh.rank({**at, axis: i}) for i in range(mesh.axes[axis][0])]
            self._others[step.number, axis] = [part(self._found, step, rank) for rank in ranks]
        return self._others[step.number, axis]
