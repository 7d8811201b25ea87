"""Modules that see the local parts of their parameters while they run, as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.training.mesh.layout_to_torch import named_modules


def local(x: Tensor) -> Tensor:
    """What a rank has."""
    return x.to_local() if isinstance(x, DTensor) else x


def see_local_parts(model: nn.Module, cut: Set[str], brought: Callable[[str, Tensor], Tensor]) -> None:
    """Let the forward of each module that has cut parameters see plain tensors in their place, as it uses them."""
    names = {p: name for name, p in model.named_parameters()}
    for _, module in named_modules(model):
        own: dict[str, nn.Parameter | None] = module._parameters  # pyright: ignore[reportPrivateUsage]
        keys = {key: names[p] for key, p in own.items() if p is not None and names[p] in cut}
        if keys:
            module.forward = _with_parts(module, keys, module.forward, brought)


def _with_parts(
    module: nn.Module,
    keys: Mapping[str, str],
    forward: Callable[..., Any],
    brought: Callable[[str, Tensor], Tensor],
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
        before = {key: own[key] for key in keys}
        own.update({key: brought(keys[key], local(p)) for key, p in before.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            own.update(before)

    return run
