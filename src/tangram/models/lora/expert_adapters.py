"""Low-rank adapters of experts that lie in one tensor: beside a weight (experts, a, b) two factors are trained.

    lora_left.NAME      (experts, a, rank)
    lora_right.NAME     (experts, rank, b)
    forward             the layer's own code runs with NAME + scale * left @ right, made for it

Each dim is one of the weight or the rank, so both lie as the weight does over any mesh. peft computes the same
(`LoraConfig.target_parameters`) with the experts folded into the ranks of two matrices; a `Factor` turns one into the
other. The trade-off: a layer's weights are made once more for it, and again in the backward, where peft keeps them.

Weights are made for one call of their layer: autograd keeps none of them, the backward makes them again. The trade-off:
a weight is made twice in a step, or three times with recompute, and is there while its layer runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from tangram.models.building.twin import storage_of


class AdaptedExperts(nn.Module):
    """A module whose weights of these names, all (experts, a, b), have adapters. Factors are made on meta."""

    def __init__(self, base_layer: nn.Module, sizes: Mapping[str, tuple[int, float]]) -> None:
        """`sizes`: by name of a weight, the rank, and by what the product of its factors is multiplied."""
        super().__init__()
        self.base_layer = base_layer
        self.scales = {name: scale for name, (_, scale) in sizes.items()}
        self.weights: dict[str, Callable[[], Tensor]] = {}
        """Makes those that the layer keeps in another way than as numbers."""
        self.lora_left, self.lora_right = nn.ParameterDict(), nn.ParameterDict()
        for name, (rank, _) in sizes.items():
            experts, rows, columns = base_layer.get_parameter(name).shape
            self.lora_left[name] = nn.Parameter(torch.empty(experts, rows, rank, device="meta"))
            self.lora_right[name] = nn.Parameter(torch.empty(experts, rank, columns, device="meta"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = {name: self.made(name) for name in self.lora_left}
        with made_again(made, self.made):
            return functional_call(self.base_layer, made, args, kwargs)

    def made(self, name: str) -> Tensor:
        """A weight with its adapter, (experts, a, b)."""
        plain = self.weights[name]() if name in self.weights else self.base_layer.get_parameter(name)
        kept = plain, self.lora_left[name], self.lora_right[name]
        weight, left, right = (one.to_local() if isinstance(one, DTensor) else one for one in kept)  # in the backward
        return torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=self.scales[name])

    def __getattr__(self, name: str) -> Any:
        """What the layer has besides its weights, for code that asks the layer for it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = super().__getattr__("base_layer")
            if name in cast(nn.ParameterDict, super().__getattr__("lora_left")):
                raise AttributeError(f"{name} has an adapter and is read outside of its layer's forward") from None
            return getattr(base, name)


def stacked_weights(model: nn.Module) -> Iterator[str]:
    """The names of a model's weights that have all experts of a layer: of three dims, the first one as long as the
    configuration has experts."""
    config: Any = getattr(model, "config", None)
    facts = cast("dict[str, Any]", vars(config.get_text_config()) if config is not None else {})
    counts = {value for key, value in facts.items() if "expert" in key and type(value) is int and value > 1}
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if not type(module).__module__.startswith("torch.nn."):  # convolutions have three dims, too
            for own, weight in module.named_parameters(recurse=False):
                if weight.dim() == 3 and weight.shape[0] in counts:
                    yield f"{name}.{own}"


def adapt(model: nn.Module, sizes: Mapping[str, tuple[int, float]]) -> None:
    """Put adapters beside weights, in place, of a rank and a scale for each; their own modules keep the name of the
    layer."""
    modules: dict[str, dict[str, tuple[int, float]]] = {}
    for name, size in sizes.items():
        module, _, weight = name.rpartition(".")
        modules.setdefault(module, {})[weight] = size
    for name, some in modules.items():
        layer = model.get_submodule(name)
        ordered = {weight: some[weight] for weight, _ in layer.named_parameters(recurse=False) if weight in some}
        model.set_submodule(name, AdaptedExperts(layer, ordered))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add adapters to their weights, in place; the layers are as they were then."""
    for name, module in _adapted(model):
        for weight in module.lora_left:
            module.base_layer.get_parameter(weight).copy_(module.made(weight))
        model.set_submodule(name, module.base_layer)


@dataclass(frozen=True)
class Factor:
    """One of the two beside a weight, which peft keeps as A (experts * rank, in) or B (out, rank * experts)."""

    name: str
    stored: str
    """The name of peft's matrix, without the adapter's."""
    is_a: bool
    turned: bool
    """Weights are (experts, in, out), so that A is the left factor, and both lie the other way round."""

    def matrix(self, value: Tensor) -> Tensor:
        """What peft keeps of a factor."""
        value = value.transpose(1, 2) if self.turned else value
        matrix = value.flatten(0, 1) if self.is_a else value.permute(1, 2, 0).flatten(1)
        return matrix.contiguous()

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of peft's matrix of a factor of this shape."""
        experts, rows, columns = (shape[0], shape[2], shape[1]) if self.turned else shape
        return (experts * rows, columns) if self.is_a else (rows, columns * experts)

    def value(self, matrix: Tensor, experts: int) -> Tensor:
        """The factor that peft keeps so."""
        rows, columns = matrix.shape
        value = matrix.view(experts, -1, columns) if self.is_a else matrix.view(rows, -1, experts).permute(2, 0, 1)
        return (value.transpose(1, 2) if self.turned else value).contiguous()


def factors_of(model: nn.Module) -> Iterator[Factor]:
    """All factors of a model. peft puts one module around another for each weight of a layer, the first innermost."""
    for name, module in _adapted(model):
        turned = bool(getattr(module.base_layer, "is_transposed", False))  # as peft asks
        for depth, weight in enumerate(reversed(list(module.lora_left))):
            for side in ("left", "right"):
                is_a = (side == "left") == turned
                stored = f"{name}{'.base_layer' * depth}.lora_{'A' if is_a else 'B'}"
                yield Factor(f"{name}.lora_{side}.{weight}", stored, is_a, turned)


def _adapted(model: nn.Module) -> list[tuple[str, AdaptedExperts]]:
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    return [(name, module) for name, module in modules if isinstance(module, AdaptedExperts)]


@dataclass(frozen=True)
class _View:
    """What autograd would keep of a weight."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def made_again(made: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> AbstractContextManager[object]:
    """A block in which nothing is kept of these weights for the backward, which takes those that `make` gives by name.

    What else is kept goes to the hooks around it: recompute has some, inside of which no others would be called.
    """
    if not torch.is_grad_enabled():
        return nullcontext()
    names = {storage_of(weight): name for name, weight in made.items()}
    outer: Any = _autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportPrivateUsage]
    pack, unpack = outer or (_same, _same)

    def keep(kept: Tensor) -> Any:
        name = None if isinstance(kept, DTensor) else names.get(storage_of(kept))
        if name is None:
            return pack(kept)
        return _View(name, tuple(kept.shape), kept.stride(), int(kept.storage_offset()))

    def again(kept: Any) -> Tensor:
        if isinstance(kept, _View):
            with torch.no_grad():
                return make(kept.name).as_strided(kept.size, kept.stride, kept.offset)
        return unpack(kept)

    return saved_tensors_hooks(keep, again)


def _same(kept: Any) -> Any:
    return kept
