"""A copy of a model that runs without memory: every tensor is a fake one, on the CPU as far as operators can tell."""

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_twin(model: nn.Module, dtype: torch.dtype, fake: FakeTensorMode) -> nn.Module:
    """The copy, its modules in training or not as they are, with parameters of `dtype`; tied parameters stay one."""
    twin = copied(model, {})
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


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, with what `memo` has by the identity of what stands in its place.

    What a forward has left on a module, as the weight of the older weight_norm, has a history that cannot be copied: of
    it the copy has the values, until its own forward makes it anew.
    """
    for module in cast("Iterable[nn.Module]", model.modules()):
        for x in vars(module).values():
            if isinstance(x, Tensor) and not x.is_leaf:
                memo.setdefault(id(x), x.detach())
    return copy.deepcopy(model, memo)


def stacked_experts(model: nn.Module) -> bool:
    """Whether experts are stacked for one grouped product, which torch can only fake in bfloat16."""
    return any(parameter.ndim == 3 for parameter in model.parameters())
