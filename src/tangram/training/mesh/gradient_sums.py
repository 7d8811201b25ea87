"""Gradients that are sums over ranks, once a step, whatever programs they come from.

A parameter that every rank of an axis has whole, and uses for something of its own, has a part of its gradient on each:
they are added up once, at the end of a step. Which these are is a program's, and a step may have several: a training
and an evaluation whose results both go into the loss, a last batch that no mark cuts. So the first program says it for
all; in the forward of another one, the parameters of which that is not true get gradients that are parts all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tangram.errors import UserError

Axes = tuple[str, ...]
NONE: Axes = ()
UNLIKE = "inputs of another size or mode would sum the gradients of other parameters: mark more tensors"


class GradientSums:
    """Of a model's parameters, those whose gradients are summed, and over which axes."""

    def __init__(self, model: nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._model, self._groups = model, groups
        self.over: Mapping[str, Axes] | None = None
        """By name; None before the first forward with gradients."""
        self.converts = False
        """Whether gradients of other programs are made such sums. Else, and under FSDP2, which puts parameters of its
        own in the place of a module's, the first program of a step says it: of a forward before that, as a probe's,
        the gradients are thrown away.
        """
        self.now: Mapping[str, Axes] = {}
        """Those of the program that runs."""
        self._passing: Collection[str] = ()

    def begin(self, now: Mapping[str, Axes], passing: Collection[str], gradients_seen: bool) -> None:
        """A forward with gradients begins, of a program that has `now` sums. `passing`: parameters that go `through`.

        Raises UserError where others would be summed, of which the parameters do not.
        """
        self._passing = passing
        self.now, self.over = now, now if self.over is None else self.over
        if not self._unlike(now):
            return
        if not gradients_seen or any(p.grad is not None for p in self._model.parameters()):
            raise UserError(UNLIKE)
        self.over = now

    def again(self, now: Mapping[str, Axes]) -> None:
        """The backward begins of a forward that had `now` sums, and other forwards have been since.

        Raises UserError where these have said that others are summed.
        """
        self.now = now
        if self._unlike(now):
            raise UserError(UNLIKE)

    def _unlike(self, now: Mapping[str, Axes]) -> bool:
        """Whether gradients of a program are other sums, and stay so."""
        over = self.over or {}
        unlike = {name for name in {*over, *now} if over.get(name, NONE) != now.get(name, NONE)}
        return bool(unlike) and not (self.converts and unlike.issubset(self._passing) and not _fsdp(self._model))

    def through(self, name: str, part: Tensor) -> Tensor:
        """A parameter as a forward takes it, of which the gradient becomes one that is summed as `over` says."""
        over, now = (self.over or {}).get(name, NONE), self.now.get(name, NONE)
        if over == now or not part.requires_grad:
            return part
        adding = [self._groups[axis] for axis in now if axis not in over]
        first = all(dist.get_rank(self._groups[axis]) == 0 for axis in over if axis not in now)
        return _Summed.apply(part, adding, first)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


class _Summed(torch.autograd.Function):
    """The same tensor; of its gradient, the sum over groups, and zeros on all ranks but the first of others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, adding: list[dist.ProcessGroup], first: bool) -> Tensor:
        ctx.adding, ctx.first = adding, first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        for group in ctx.adding:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=group)
        return (grad if ctx.first else torch.zeros_like(grad)), None, None


def _fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 has put parameters of its own in the place of a module's."""
    return any(isinstance(module, FSDPModule) for module in model.modules())
