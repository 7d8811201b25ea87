"""What a forward writes into parameters that FSDP2 cuts, which writes into what was gathered, and throws that away.

Gemma 3n clamps a weight so in training, and others bring weights back to length one. On one process it stays, so each
rank takes what has changed over into its part before the gathered parameter goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters of a model, of which it has no public name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups(module)


def keep_written(model: nn.Module, names: Collection[str]) -> None:
    """Have these parameters of a model keep what its forward writes into them, as far as FSDP2 cuts them.

    What is written has to be the same on all ranks. To be called again for other names.
    """
    owners = {(id(model.get_submodule(path)), last) for path, _, last in (name.rpartition(".") for name in names)}
    for module in model.modules() if owners else ():
        if isinstance(module, FSDPModule):
            own = [one for group in _groups(module) for one in group.fsdp_params if _owner(one) in owners]
            hooks = cast("dict[int, Any]", module._forward_hooks).values()  # pyright: ignore[reportPrivateUsage]
            if own and not any(isinstance(hook, _Keep) and hook.parameters == own for hook in hooks):
                module.register_forward_hook(_Keep(own), prepend=True)  # before FSDP2's own lets them go


class _Keep:
    """After the forward of a module: what it has written into some of FSDP2's parameters, into this rank's parts."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        for one in self.parameters:
            parts = torch.chunk(_local(one.unsharded_param), one.mesh_info.shard_mesh_size, one.fsdp_placement.dim)
            part, rank = _local(one.sharded_param), int(one.mesh_info.shard_mesh_rank)
            if part.numel():
                now = parts[rank]
                written = now != part.to(now.dtype)  # of others the rounding is not taken over
                part.copy_(torch.where(written, now.to(part.dtype), part))


def _groups(module: FSDPModule) -> list[Any]:
    return cast(Any, module)._get_fsdp_state()._fsdp_param_groups


def _owner(parameter: Any) -> tuple[int, str]:
    return id(parameter._module_info.module), parameter._module_info.param_name


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
