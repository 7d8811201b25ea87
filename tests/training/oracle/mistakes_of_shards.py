"""Mistakes that one could make where parameters are kept whole, or gradients added before ranks reduce them."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from tangram.training import loop
from tangram.training.shards import StepShards, sharded
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
    real = loop.square_sum

    def again(gradients: list[tuple[torch.Tensor, int]], ranks: int) -> torch.Tensor:
        torch._foreach_mul_([grad for grad, _ in gradients], setting.world.data_size)
        return real(gradients, ranks)

    with swapped(loop, "square_sum", again):
        yield


REFUSED = Mistake("whole in a step: fsdp", whole_over_the_update)
SHARDED_MISTAKES = {
    "whole in a step: fsdp": (only_the_last_is_reduced,),
    "reduced once: hsdp": (reduced_once_too_often,),
}
