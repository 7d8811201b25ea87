"""What the code of a module sees of parameters that are cut: plain local tensors, as it uses them, while it runs.

Outside of forwards they are DTensors. A module's code sees those that it has itself; where it reads one of another
module (of a `ParameterList`, the table of an embedding for logits), that one's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.models.graph import Graph
from tangram.training.mesh.layout_to_torch import named_modules


def local(x: Tensor) -> Tensor:
    """A rank's part."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass
class Parameters:
    """Which modules of a model have each parameter, by its first name, and as what: by the modules' names."""

    model: nn.Module
    owners: Mapping[str, Mapping[str, tuple[nn.Module, str]]] = field(init=False)

    def __post_init__(self) -> None:
        names = {p: name for name, p in self.model.named_parameters()}
        found: dict[str, dict[str, tuple[nn.Module, str]]] = {name: {} for name in names.values()}
        for path, module in named_modules(self.model):
            for key, parameter in module.named_parameters(recurse=False):
                found[names[parameter]][path] = module, key
        self.owners = found

    def read_elsewhere(self, graph: Graph) -> set[tuple[str, str]]:
        """Modules, and names of parameters that their code reads and that none of them has."""
        names = {v: value.name for v, value in graph.of_kind("parameter")}
        return {
            (node.module, names[v])
            for node in graph.nodes
            if not node.backward
            for v in node.inputs
            if v in names and node.module not in self.owners[names[v]]
        }


def see_local_parts(model: nn.Module, brought: Callable[[str, Tensor], Tensor]) -> None:
    """Let the forward of each module that has cut parameters see plain tensors in their place, as it uses them."""
    names = {p: name for name, p in model.named_parameters()}
    for _, module in named_modules(model):
        own: dict[str, nn.Parameter | None] = module._parameters  # pyright: ignore[reportPrivateUsage]
        keys = {key: names[p] for key, p in own.items() if isinstance(p, DTensor)}
        if keys:
            module.forward = with_parts(module, keys, module.forward, brought)


def with_parts(
    module: nn.Module,
    keys: Mapping[str, str],
    forward: Callable[..., Any],
    brought: Callable[[str, Tensor], Tensor],
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
        before = {key: own[key] for key in keys}
        plain = {key: brought(keys[key], local(p)) for key, p in before.items() if isinstance(p, DTensor)}
        own.update(plain)  # what a module around it has brought already, it keeps
        try:
            return forward(*args, **kwargs)
        finally:
            own.update(before)

    return run
