"""Mistakes that one could make where parameters are kept whole, or gradients added before ranks reduce them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from tangram.training.parallel import data_parallel
from tangram.training.parallel.fsdp import StepShards, sharded
from tangram.training.step import loop
from tangram.training.step.optimiser_step import LocalGradient
from tests.training.oracle.ranks import Mistake, Setting, swapped

Planted = Iterator[None]


@contextlib.contextmanager
def whole_over_the_update(setting: Setting) -> Planted:
    """After the last micro-batch parameters stay whole: the update changes the parts, the next step takes the rest."""
    real = StepShards.before

    def kept(self: StepShards, last: bool) -> None:
        real(self, last)
        cast(Any, self)._model.set_reshard_after_backward(False)

    with swapped(StepShards, "before", kept):
        yield


@contextlib.contextmanager
def only_the_last_is_reduced(setting: Setting) -> Planted:
    """What was added up on a rank before the last micro-batch is lost where that is reduced."""
    real = StepShards.before

    def forgotten(self: StepShards, last: bool) -> None:
        real(self, last)
        if last:
            for module in sharded(cast(Any, self)._model):
                for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None

    with swapped(StepShards, "before", forgotten):
        yield


@contextlib.contextmanager
def reduced_once_too_often(setting: Setting) -> Planted:
    """What ranks have added up already is added up again: the reduced sum is left beside what comes next."""
    real = loop.norms_of

    def again(gradients: Sequence[LocalGradient]) -> torch.Tensor:
        torch._foreach_mul_([one.part for one in gradients], setting.world.data_size)
        return real(gradients)

    with swapped(loop, "norms_of", again):
        yield


# ------------------------------------------------------------ of whole copies


@contextlib.contextmanager
def copies_averaged(setting: Setting) -> Planted:
    """The sum over ranks is divided by their number, as DistributedDataParallel does it."""
    real = data_parallel.Bucket.start

    def averaged(self: data_parallel.Bucket, group: Any) -> None:
        if self.flat is not None:
            self.flat /= setting.world.data_size
        real(self, group)

    with swapped(data_parallel.Bucket, "start", averaged):
        yield


@contextlib.contextmanager
def one_bucket_not_reduced(setting: Setting) -> Planted:
    """Of several buckets the last stays as it is on each rank."""
    real = data_parallel.Replicas._start_next

    def forgotten(self: data_parallel.Replicas) -> None:
        own = cast(Any, self)
        if own._started == len(own._buckets) - 1 > 0:
            own._buckets[-1].work = torch.futures.Future()
            own._buckets[-1].work.set_result(None)
            own._started += 1
        else:
            real(self)

    with (
        swapped(data_parallel, "FIRST", 2**12),
        swapped(data_parallel, "BUCKET", 2**13),
        swapped(data_parallel.Replicas, "_start_next", forgotten),
    ):
        yield


@contextlib.contextmanager
def sums_summed_again(setting: Setting) -> Planted:
    """What ranks have summed of a micro-batch goes into the sum of the next."""
    with swapped(data_parallel.Replicas, "_keep", lambda self, parameter, _=None: None):
        yield


@contextlib.contextmanager
def earlier_micro_batches_forgotten(setting: Setting) -> Planted:
    """Of every micro-batch but the last nothing is left where ranks sum once a step."""
    real = data_parallel.Replicas.before

    def forgotten(self: data_parallel.Replicas, last: bool) -> None:
        real(self, last)
        if last:
            cast(Any, self)._module.zero_grad()

    with swapped(data_parallel.Replicas, "before", forgotten):
        yield


@contextlib.contextmanager
def stages_of_copies_not_reduced(setting: Setting) -> Planted:
    """A pipeline's table ends without the sum over copies."""
    with swapped(data_parallel.Replicas, "reduce", lambda self: None):
        yield


REFUSED = Mistake("whole in a step: fsdp", whole_over_the_update)
SHARDED_MISTAKES = {
    "whole in a step: fsdp": (only_the_last_is_reduced,),
    "reduced once: hsdp": (reduced_once_too_often,),
    "copies": (copies_averaged, one_bucket_not_reduced),
    "one by one: derived inside copies": (sums_summed_again,),
    "reduced once: copies": (earlier_micro_batches_forgotten,),
    "stages inside copies": (stages_of_copies_not_reduced,),
}
