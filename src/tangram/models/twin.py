"""Copies of a model that have no memory: on meta, or of fake tensors, on the CPU as far as operators can tell."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_twin(model: nn.Module, dtype: torch.dtype, fake: FakeTensorMode) -> nn.Module:
    """The copy, its modules in training or not as they are, with parameters of `dtype`; tied parameters stay one."""
    twin = copy.deepcopy(model)
    made: dict[Tensor, Tensor] = {}

    def faked(tensor: Tensor) -> Tensor:
        if tensor not in made:
            with fake:
                kind = dtype if tensor.is_floating_point() and isinstance(tensor, nn.Parameter) else tensor.dtype
                empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[tensor]

    for module in cast("Iterable[nn.Module]", twin.modules()):
        for tensors in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in tensors.items():
                if tensor is not None:
                    cast("dict[str, Tensor]", tensors)[name] = faked(tensor)
    return twin


def without_memory(model: nn.Module) -> nn.Module:
    """A copy on meta, for fake ones or for none; tied parameters stay one."""
    memo: dict[int, Any] = {}
    for t in [*model.parameters(), *cast("Sequence[Tensor]", [*model.buffers()])]:
        empty = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(empty, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def stacked_experts(model: nn.Module) -> bool:
    """Whether experts are stacked for one grouped product, which torch can only fake in bfloat16."""
    return any(parameter.ndim == 3 for parameter in model.parameters())
