"""A copy of a model that runs without memory: every tensor is a fake one, on the CPU as far as operators can tell."""

import copy
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_twin(model: nn.Module, dtype: torch.dtype, fake: FakeTensorMode, buffers: bool = False) -> nn.Module:
    """The copy, its modules in training or not as they are, with parameters of `dtype`; tied parameters stay one.

    `buffers`: those in floating point have `dtype`, too.
    """
    twin = copy.deepcopy(model)
    made: dict[Tensor, Tensor] = {}

    def faked(tensor: Tensor) -> Tensor:
        if tensor not in made:
            with fake:
                cast_too = tensor.is_floating_point() and (buffers or isinstance(tensor, nn.Parameter))
                kind = dtype if cast_too else tensor.dtype
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


def stacked_experts(model: nn.Module) -> bool:
    """Whether experts are stacked for one grouped product, which torch can only fake in bfloat16."""
    return any(parameter.ndim == 3 for parameter in model.parameters())
