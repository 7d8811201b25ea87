"""Gradients that are sums over ranks, in a backward or once a step, whatever programs they come from.

A parameter that every rank of an axis has whole, and uses for something of its own, has a part of its gradient on each.
Which these are is a program's, and a step may have several: a training and an evaluation whose results both go into the
loss, a last batch that no mark cuts.

    in a backward    each forward has its own added up where they come to be, so a loop of one's own need not know; an
                     all-reduce for each such parameter and backward
    once a step      all together, as `tangram train` does; the first program says for all which
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from tangram.errors import UserError
from tangram.sharding.derive.problem.states import SAME, SEVERAL
from tangram.sharding.derive.transitions import Change, StateStep
from tangram.training.mesh.groups import add_up
from tangram.training.mesh.local_parts import local

Axes = tuple[str, ...]
NONE: Axes = ()
UNLIKE = "inputs of another size or mode would sum the gradients of other parameters: mark more tensors"


class GradientSums:
    """Of a model's parameters, those whose gradients are summed, and over which axes. `bring`: by a change."""

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[str, dist.ProcessGroup],
        bring: Callable[[Tensor, Change], Tensor] = lambda x, change: x,
    ) -> None:
        self._model, self._groups, self._bring = model, groups, bring
        self.over: Mapping[str, Axes] | None = None
        """By name, those that no forward adds up for itself; None before the first forward with gradients."""
        self.in_backward = False
        """Whether gradients are added up in each backward. Else the first program of a step says which: of a forward
        before that, as a probe's, the gradients are thrown away.
        """
        self.now: Mapping[str, Axes] = {}
        """Those of the program that runs."""
        self._passing: Collection[str] = ()
        self._hooks: list[RemovableHandle] = []

    def begin(self, now: Mapping[str, Axes], passing: Collection[str], gradients_seen: bool) -> None:
        """A forward with gradients begins, of a program that has `now` sums. `passing`: parameters that go `through`.

        Raises UserError where others would be summed, of which the parameters do not.
        """
        self._passing, self.now = passing, now
        left = self._left(now)
        if left == self.over:
            return
        if self.over is not None and (not gradients_seen or any(p.grad is not None for p in self._model.parameters())):
            raise UserError(UNLIKE)
        if self.in_backward:
            self._follow(left)
        self.over = left

    def again(self, now: Mapping[str, Axes]) -> None:
        """The backward begins of a forward that had `now` sums, and other forwards have been since.

        Raises UserError where these have said that others are summed.
        """
        self.now = now
        if self._left(now) != self.over:
            raise UserError(UNLIKE)

    def _left(self, now: Mapping[str, Axes]) -> Mapping[str, Axes]:
        """Those of a program that its forward does not add up for itself."""
        return {name: axes for name, axes in now.items() if axes and not (self.in_backward and name in self._passing)}

    def _follow(self, late: Mapping[str, Axes]) -> None:
        """Add up the gradients of parameters that a backward reads as they stand in the model, as they come to be."""
        if late and any(isinstance(module, FSDPModule) for module in self._model.modules()):
            raise UserError(
                f"{next(iter(late))} is read in the backward outside of its module, and FSDP2 has its gradient before "
                "ranks of the model have added it up: let the model recompute whole modules"
            )
        while self._hooks:
            self._hooks.pop().remove()
        for name, axes in late.items():
            over = partial(_over, groups=[self._groups[axis] for axis in axes])
            self._hooks.append(cast(Any, self._model.get_parameter(name)).register_hook(over))

    def through(self, name: str, part: Tensor) -> Tensor:
        """A parameter as a forward takes it, of which the gradient is whole when a backward has ended."""
        if not self.in_backward or not part.requires_grad:
            return part
        return self._bring(part, tuple(StateStep(axis, SAME, SEVERAL) for axis in self.now.get(name, NONE)))

    def add_up(self) -> None:
        """What is left is added up, once a step. Collective over the axes."""
        if self.in_backward or self.over is None:
            return
        for axis, group in self._groups.items():
            grads = [self._model.get_parameter(name).grad for name, axes in self.over.items() if axis in axes]
            add_up([local(g) for g in grads if g is not None], group)


def _over(grad: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    found = grad.clone()
    for group in groups:
        add_up([local(found)], group)
    return found
