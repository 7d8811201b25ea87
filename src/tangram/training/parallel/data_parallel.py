"""Copies of parameters over DP ranks: gradients summed over them, in buckets, while the backward goes on.

    hooks      of a parameter, as soon as its gradient of a backward is whole, bring that into its bucket
    bucket     one flat tensor, made in the backward; all-reduced when it is full, in the same order on every rank
    after it   gradients are views of the buckets; nothing else is kept between steps, and parameters stay as they are

Gradients are summed and not averaged (`training.parallel.fsdp`). A gradient that ranks have summed already, of a
micro-batch before, stays out of the next sum and is added to it. Behind the gradients of a bucket stands a one for each
that a rank has, so that ranks agree on which there are none of, though a rank that has all never looks: what only
another rank used is summed, and what nobody used has no gradient, which the loop refuses.

torch's own reducer (DistributedDataParallel with views of its buckets, a static graph and a hook that sums) was tried
and does not fit. It refuses parameters on meta and DTensors, which parameters are here when it has to be made; it keeps
its buckets from step to step; a gradient that is missing everywhere it gives as zeros; and of a pipeline's backward in
two parts, which comes by no hook, it sees nothing. A step with it takes no less time than one with this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from tangram.hardware.measuring.overheads import COPY_BUCKET_BYTES
from tangram.training.mesh.local_parts import local

BUCKET = COPY_BUCKET_BYTES
"""Bytes of a bucket."""
FIRST = 2**20
"""Of the first one, which goes on its way early."""


@dataclass(eq=False)
class Bucket:
    """Some parameters whose gradients are summed together, and where the sum is up to."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor | None = None
    """The gradients one after the other, then a number for each: over how many ranks it is summed."""
    parts: Sequence[Tensor] = ()
    """Views of it, shaped as this rank's parts of the parameters."""
    here: set[nn.Parameter] = field(default_factory=set[nn.Parameter])
    """Those whose gradient has been brought in."""
    work: dist.Work | None = None
    sums: Mapping[nn.Parameter, TensorWeakRef] = field(default_factory=dict[nn.Parameter, TensorWeakRef])
    """The gradients that were summed last, which the optimiser or its user may have let go."""

    def __post_init__(self) -> None:
        self.places = {parameter: at for at, parameter in enumerate(self.parameters)}

    @property
    def is_full(self) -> bool:
        return len(self.here) == len(self.parameters)

    def bring(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Copy a gradient in, which is a view of the bucket from now on."""
        if self.flat is None:
            self._make(local(grad))
        at = self.places[parameter]
        self.parts[at].copy_(local(grad))
        self.here.add(parameter)
        parameter.grad = self._gradient(at)

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to sum over the ranks; what is missing here counts as zeros."""
        if self.flat is None:
            self._make(local(self.parameters[0].detach()))
        assert self.flat is not None
        ones = self.flat[-len(self.parameters) :]
        ones.fill_(1.0)
        for at, parameter in enumerate(self.parameters):
            if parameter not in self.here:
                self.parts[at].zero_()
                ones[at] = 0.0
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, and give every parameter of which some rank had a gradient its own."""
        assert self.work is not None
        assert self.flat is not None
        self.work.wait()
        if not self.is_full:
            ranks = cast("list[float]", self.flat[-len(self.parameters) :].tolist())
            for at, parameter in enumerate(self.parameters):
                if parameter not in self.here:
                    parameter.grad = self._gradient(at) if ranks[at] else None
        self.sums = {p: TensorWeakRef(p.grad) for p in self.parameters if p.grad is not None}
        self.flat, self.parts, self.work = None, (), None
        self.here.clear()

    def _make(self, like: Tensor) -> None:
        locals_ = [local(parameter.detach()) for parameter in self.parameters]
        sizes = [one.numel() for one in locals_]
        self.flat = torch.empty(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        parts = cast("Sequence[Tensor]", self.flat.split([*sizes, len(sizes)]))
        self.parts = [part.view(one.shape) for part, one in zip(parts, locals_, strict=False)]

    def _gradient(self, at: int) -> Tensor:
        """A part as the parameter's gradient: of a DTensor a DTensor."""
        parameter = self.parameters[at].detach()
        if not isinstance(parameter, DTensor):
            return self.parts[at]
        return DTensor.from_local(
            self.parts[at],
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


class Replicas:
    """Sums a module's gradients over the ranks of a group that have the same parameters. All of them call alike."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, once: bool, in_parts: bool) -> None:
        """Of a module that may still be on meta.

        `once`: only after the last micro-batch of a step (`before`). `in_parts`: not by hooks, but when `reduce` is
        called: of a pipeline, whose backward does not always come by.
        """
        self._module, self._group, self._once, self._in_parts = module, group, once, in_parts
        self._sums = True
        self._running = False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._started = 0
        self._kept: dict[nn.Parameter, Tensor] = {}
        if not in_parts:
            module.register_forward_pre_hook(self._look)

    def before(self, last: bool) -> None:
        """Before a micro-batch of a step: whether its backward ends with a sum over the ranks."""
        self._sums = last or not self._once

    def reduce(self) -> None:
        self._find_buckets()
        for parameter in self._bucket_of:
            if self._is_summed(parameter):
                raise RuntimeError("gradients that ranks have summed already were added to: zero them before a step")
            self._bring(parameter)
        self._end()

    def _look(self, *_: object) -> None:
        """Put hooks on the parameters, when they have memory: before, they may still be exchanged for others."""
        if self._buckets or not torch.is_grad_enabled():
            return
        self._find_buckets()
        for parameter in self._bucket_of:
            parameter.register_hook(partial(self._keep, parameter))
            parameter.register_post_accumulate_grad_hook(self._come)

    def _find_buckets(self) -> None:
        if not self._buckets:
            self._buckets = in_buckets(reversed([p for p in self._module.parameters() if p.requires_grad]))
            self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}

    def _keep(self, parameter: nn.Parameter, _: Tensor | None = None) -> None:
        """Before a gradient is added to what is there: what ranks have summed already stays apart."""
        if parameter.grad is not None and self._is_summed(parameter):
            self._kept[parameter] = parameter.grad
            parameter.grad = None

    def _is_summed(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient is a sum over the ranks, and not this rank's own."""
        summed = self._bucket_of[parameter].sums.get(parameter)
        return summed is not None and parameter.grad is not None and summed() is parameter.grad

    def _come(self, parameter: Tensor) -> None:
        """A parameter has all of its gradient of this backward."""
        if not self._sums:
            return
        if not self._running:
            self._running = True
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._end)
        self._bring(cast(nn.Parameter, parameter))
        while self._started < len(self._buckets) and self._buckets[self._started].is_full:
            self._start_next()

    def _bring(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        if parameter in bucket.here:
            raise RuntimeError("a parameter got its gradient twice in one backward")
        if parameter.grad is not None:
            bucket.bring(parameter, parameter.grad)

    def _start_next(self) -> None:
        self._buckets[self._started].start(self._group)
        self._started += 1

    def _end(self) -> None:
        """After the backward: what it did not come by may have a gradient of a micro-batch before."""
        for parameter, bucket in self._bucket_of.items():
            if parameter not in bucket.here:
                self._keep(parameter)
                self._bring(parameter)
        while self._started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            bucket.finish()
        for parameter, before in self._kept.items():
            if parameter.grad is None:
                parameter.grad = before
            else:
                local(parameter.grad).add_(local(before))
        self._kept.clear()
        self._started, self._running = 0, False


def in_buckets(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    """Parameters, in the order in which they get gradients, by the bytes that a rank has of them."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = local(parameter.detach()).nbytes
        if room < size or not found:
            room = BUCKET if found else FIRST
            found.append([])
        found[-1].append(parameter)
        room -= size
    return [Bucket(tuple(some)) for some in found]
