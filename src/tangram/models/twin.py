"""A copy of a model that runs without memory: every tensor is a fake one, on the CPU as far as operators can tell."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]


def fake_twin(model: nn.Module, dtype: torch.dtype, fake: FakeTensorMode) -> nn.Module:
    """The copy, in training mode, with parameters of `dtype`; tied parameters stay one. The model is not changed."""
    twin = copy.deepcopy(model).train()
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


def stacked_experts(model: nn.Module) -> bool:
    """Whether experts are stacked for one grouped product, which torch can only fake in bfloat16."""
    return any(parameter.ndim == 3 for parameter in model.parameters())


Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def module_shapes(model: nn.Module, batch: int, sequence: int) -> Shapes:
    """The shapes of what goes into each module first and of what comes out, where both are one tensor, by name."""
    fake = FakeTensorMode()
    twin = fake_twin(model, torch.bfloat16 if stacked_experts(model) else torch.float32, fake)
    shapes: Shapes = {}

    def note(name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        given = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        if given is not None and isinstance(result, Tensor):
            shapes[name] = (tuple(given.shape), tuple(result.shape))

    for name, module in cast("Iterable[tuple[str, nn.Module]]", twin.named_modules()):
        module.register_forward_hook(partial(note, name), with_kwargs=True)
    with fake, torch.no_grad():
        ids_BS = torch.zeros(batch, sequence, dtype=torch.long)  # noqa: N806  a tensor carries its dims in its name
        positions_BS = torch.arange(sequence).expand(batch, sequence)  # noqa: N806
        twin(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)
    return shapes
