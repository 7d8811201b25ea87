"""FSDP2 around a model, as the plan says: what is whole when, and when ranks add up gradients.

                            parameters are gathered         gradients are reduced
    reshard = "after forward"   twice a micro-batch (ZeRO-3)    reduce_every = "micro-batch"  each time
              "after backward"  once a micro-batch              reduce_every = "step"         once a step, and until
              "after step"      once a step (ZeRO-2, and            then lie whole on every rank
                                ZeRO-1 with reduce_every = "step")

The optimiser's states are cut in all of them. What is gathered less often is whole for longer; `planner.local.estimate`
counts both. Where ranks have whole copies and nothing is cut, gathered or rounded, there is no FSDP2:
`training.parallel.data_parallel` sums the gradients, which is what DDP does.

Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of the whole global batch, and
FSDP2 left alone would divide by the number of ranks once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from tangram.planner.local.peak_memory import is_plain_ddp
from tangram.schema.plan import Plan
from tangram.training.mesh.layout_to_torch import ParameterCuts
from tangram.training.mesh.local_parts import refuse_lost_hooks
from tangram.training.mesh.mapped_tensors import mapped_like
from tangram.training.mesh.world import World
from tangram.training.mesh.written_parameters import fsdp_groups
from tangram.training.parallel.data_parallel import Replicas
from tangram.training.parallel.precision import keep_gradients, of_one_type, policy_of


def shard(
    model: nn.Module, blocks: Iterable[nn.Module], plan: Plan, cuts: Mapping[nn.Parameter, ParameterCuts], world: World
) -> Replicas | StepShards | None:
    """Cut the parameters over the data axes, each block by itself, or have their copies' gradients summed.

    What has to hear of each micro-batch before it (`before`); None where all are alike.
    """
    if world.data_size == 1 and of_one_type(plan):  # nothing to gather, reduce or round: FSDP2 would only copy
        return None
    if is_plain_ddp(plan):
        once, in_parts = plan.run.reduce_every == "step", plan.pipeline is not None
        return Replicas(model, world.devices.get_group("replicate"), once=once, in_parts=in_parts)
    for name, parameter in model.named_parameters():
        refuse_lost_hooks(name, parameter)
    dims = ("replicate", "shard") if world.devices["replicate"].size() > 1 else ("shard",)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(cuts[parameter].shard or 0)

    # A pipeline's table says when a stage is gathered and when it is cut again; between micro-batches it stays whole.
    again = None if plan.run.reshard == "after forward" and plan.pipeline is None else False
    for module in (*blocks, model):
        fully_shard(
            module,
            mesh=world.devices[dims],
            shard_placement_fn=place,
            mp_policy=policy_of(plan),
            reshard_after_forward=again,
        )
    for module in sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, even by one
    keep_gradients(model, plan)
    if plan.pipeline is None and (plan.run.reshard == "after step" or plan.run.reduce_every == "step"):
        return StepShards(model, plan)
    return None


def sharded(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters FSDP2 gathers, each by itself."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def map_padded(model: nn.Module) -> None:
    """Parts that FSDP fills up, of parameters that ranks do not divide, lie in mapped files, too."""
    for one in (one for group in fsdp_groups(model) for one in group.fsdp_params):
        part = one.sharded_param.to_local()
        if part.nbytes != one._sharded_param_data.nbytes:
            one._sharded_param_data = mapped_like(one._sharded_param_data)
            filled = one._sharded_param_data.view(one.padded_sharded_param_size)
            dim = one.fsdp_placement.dim
            one.sharded_param._local_tensor = filled.narrow(dim, 0, part.shape[dim] if part.numel() else 0)


class StepShards:
    """What differs between the micro-batches of a step and the last of them."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._whole = plan.run.reshard == "after step"
        self._once = plan.run.reduce_every == "step"
        self._last: bool | None = None

    def before(self, last: bool) -> None:
        """Before a micro-batch of a step: only after the last are parameters cut again, and gradients reduced."""
        if last == self._last:
            return
        self._last = last
        assert isinstance(self._model, FSDPModule)
        if self._whole:
            self._model.set_reshard_after_backward(last)
        if self._once:
            self._model.set_requires_gradient_sync(last)


def reshard(model: nn.Module) -> None:
    """Cut all parameters again: without a backward, FSDP2 leaves some whole."""
    for module in sharded(model):
        module.reshard()


@contextlib.contextmanager
def resharded(model: nn.Module) -> Generator[None]:
    """Cut the parameters again at the end."""
    try:
        yield
    finally:
        reshard(model)
