"""Frozen weights that are kept as codes: these and scales in a model's parameters, the weight while a layer runs.

    parameters  codes (of NF4 scales, too): integers, frozen, cut as the weight would be, in whole blocks
                (`lora.bases`); so FSDP2 gathers them, and a checkpoint saves and moves them as they are
    buffers     what else they are made of: whole on every rank, at most some thousandths of the weight's bytes
    forward     the layer's own code runs with the weight, made for it; autograd keeps no copy of it
    backward    where the gradient of what came in needs the weight, it is made again; it has no gradient itself

Which layers these are says `models.lora.bases`. What reads `weight` outside of its layer's forward fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.layout import intervals
from tangram.layout.intervals import IntSet, span
from tangram.models.lora.bases import BASES, Base, Kept, Picked, base_layers
from tangram.models.lora.expert_adapters import made_again
from tangram.schema.plan import Plan
from tangram.schema.tuning import COLUMNS
from tangram.training.mesh.layout_to_torch import ParameterCuts, cuts_of_one, over_model_axes
from tangram.training.mesh.local_parts import PlainPart, PlainParts, local
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.world import World
from tangram.training.parallel.precision import dtype_of


@dataclass(frozen=True)
class QuantisedWeight:
    """The weight of a layer, and which of its blocks are here when nothing is cut by FSDP."""

    base: Base
    name: str
    """Of the weight, were it there."""
    shape: tuple[int, ...]
    rows: IntSet
    blocks: IntSet
    """Of a row."""
    dtype: torch.dtype
    """As it would be kept."""
    compute: torch.dtype
    """As the layer takes it."""

    def made(self, layer: nn.Module) -> Tensor:
        """The weight, or what model axes leave of it here, from what the layer has now."""
        kept = {name: local(layer.get_parameter(name)) for name in self.base.tensors}
        size = intervals.size(self.rows), intervals.size(self.blocks) * self.base.block
        for name, one in kept.items():
            if tuple(one.shape) != (size[0], size[1] // COLUMNS[name.removeprefix("weight")]):
                raise RuntimeError(f"{self.name} has not been gathered: its {name} here is {tuple(one.shape)}")
        kept |= {name: layer.get_buffer(name) for name in self.base.buffers(*self.shape)}
        device = next(iter(kept.values())).device
        rows, blocks = (
            torch.cat([torch.arange(first, last, device=device) for first, last in some])
            for some in (self.rows, self.blocks)
        )
        return self.base.make(kept, rows, blocks, self.shape[1], self.dtype).to(self.compute)

    def put(self, layer: nn.Module, kept: Kept, picked: Picked | None = None) -> None:
        """Give a layer what keeps its weight: what `picked` leaves here of all of it, or with None as it is."""
        for name, value in kept.items():
            if name not in self.base.tensors:
                layer.get_buffer(name).copy_(value)
            else:
                local(layer.get_parameter(name)).copy_(value if picked is None else picked(name, value))


QuantisedWeights = Mapping[str, QuantisedWeight]
"""By the name of the layer."""


def quantise(
    part: nn.Module,
    plan: Plan,
    cuts: dict[nn.Parameter, ParameterCuts],
    world: World | None = None,
    derived: DerivedModel | None = None,
) -> PlainParts:
    """Keep the base of a model on meta, or of a stage, as its plan says, in place; it is without values then.

    After model axes have cut it, and before FSDP does. `cuts` gets what FSDP has to know of the new parameters. Returns
    those of them that no DTensor describes.
    """
    plain: dict[str, PlainPart] = {}
    lora = plan.lora
    if lora is None or lora.base == "parameters":
        return plain
    base = BASES[lora.base]
    layers = base_layers(part, lora.base_skip, base.block)
    for name, layer in layers.items():
        weight = cast(nn.Parameter, layer.weight)
        if weight.device.type != "meta":
            raise UserError("lora.base quantises weights while they are read from a directory: make the model on meta")
        whole = derived.plain[f"{name}.weight"].shape if derived and f"{name}.weight" in derived.plain else weight.shape
        own = {
            key: torch.empty(whole[0], whole[1] // COLUMNS[key.removeprefix("weight")], dtype=dtype, device="meta")
            for key, dtype in base.tensors.items()
        }
        del layer._parameters["weight"]  # pyright: ignore[reportPrivateUsage]
        lies = {key: cuts_of_one(f"{name}.{key}", tuple(own[key].shape), plan) for key in own} if world else {}
        for key, one in own.items():
            layer.register_parameter(key, nn.Parameter(one, requires_grad=False))
        if derived is not None:
            found = derived.cut_beside(layer, {key: dict(cut.model) for key, cut in lies.items()})
            plain |= {f"{name}.{key}": part for key, part in found.items()}
        for key, cut in lies.items():
            cuts[layer.get_parameter(key)] = cut
        for key, size in base.buffers(*whole).items():
            layer.register_buffer(key, torch.empty(size, device="meta"))
        shape = whole[0], whole[1] // base.block
        rows, across = (span(0, n) for n in shape)
        if world is not None:
            at, coarsest = world.mesh.coords(world.index), [*lies.values()][-1]
            rows, across = (over_model_axes(shape, coarsest, world.mesh, at, dim) for dim in (0, 1))
        made = QuantisedWeight(
            base, f"{name}.weight", tuple(whole), rows, across, weight.dtype, dtype_of(plan.precision.compute)
        )
        layer.forward = _With(layer, made, layer.forward)
    return plain


def quantised_weights(model: nn.Module) -> QuantisedWeights:
    """What `quantise` has made of a model."""
    modules = cast("Iterable[tuple[str, Any]]", model.named_modules())
    return {name: layer.forward.weight for name, layer in modules if isinstance(vars(layer).get("forward"), _With)}


@torch.no_grad()
def dequantise(model: nn.Module) -> None:
    """Give a model that is whole in this process the weights that its base stands for, in place, as they are kept."""
    for name, one in quantised_weights(model).items():
        layer: Any = model.get_submodule(name)
        made = replace(one, compute=one.dtype).made(layer)
        layer.forward = layer.forward.plain
        for key in one.base.tensors:
            del layer._parameters[key]
        for key in one.base.buffers(*one.shape):
            del layer._buffers[key]
        layer.register_parameter("weight", nn.Parameter(made, requires_grad=False))


class _With:
    """The forward of a layer with its weight made for it."""

    def __init__(self, layer: nn.Module, weight: QuantisedWeight, plain: Callable[..., Any]) -> None:
        self.weight, self.plain, self._layer = weight, plain, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast("dict[str, Any]", self._layer._parameters)  # pyright: ignore[reportPrivateUsage]
        made = self.weight.made(self._layer)
        own["weight"] = nn.Parameter(made, requires_grad=False)
        try:
            with made_again({"weight": made}, lambda name: self.weight.made(self._layer)):
                return self.plain(*args, **kwargs)
        finally:
            del own["weight"]
