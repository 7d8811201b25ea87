"""Frozen weights that are kept as NF4: codes and scales in a model's parameters, and the weight while a layer runs.

    parameters  weight_nf4, weight_absmax: uint8, frozen, cut as the weight would be, in whole blocks (`lora.nf4`); so
                FSDP2 gathers them, and a checkpoint saves and moves them as they are
    buffers     weight_groups, weight_mean: whole on every rank, a 4,000th of the weight's numbers
    forward     the layer's own code runs with the weight, made for it; autograd keeps no copy of it
    backward    where the gradient of what came in needs the weight, it is made again; it has no gradient itself

Which layers these are says `models.lora.base_layers`. What reads `weight` outside of its layer's forward fails.
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
from tangram.models.lora import nf4
from tangram.models.lora.base_layers import base_layers
from tangram.models.lora.expert_adapters import made_again
from tangram.schema.plan import Plan
from tangram.schema.tuning import COLUMNS
from tangram.training.mesh.layout_to_torch import ParameterCuts, cuts_of_one, over_model_axes
from tangram.training.mesh.local_parts import PlainPart, PlainParts, local
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.world import World
from tangram.training.parallel.precision import dtype_of

CODES, SCALES = (f"weight{end}" for end in COLUMNS)
GROUPS, MEAN = "weight_groups", "weight_mean"


@dataclass(frozen=True)
class QuantisedWeight:
    """The weight of a layer, and which of its blocks are here when nothing is cut by FSDP."""

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
        codes, scales = (local(layer.get_parameter(name)) for name in (CODES, SCALES))
        size = intervals.size(self.rows), intervals.size(self.blocks)
        if tuple(scales.shape) != size or tuple(codes.shape) != (size[0], size[1] * nf4.BLOCK // COLUMNS["_nf4"]):
            raise RuntimeError(f"{self.name} has not been gathered: its scales here are {tuple(scales.shape)}")
        rows, blocks = (_numbers(some, codes.device) for some in (self.rows, self.blocks))
        group = nf4.group_of(rows, blocks, self.shape[1] // nf4.BLOCK)
        found = nf4.values_of(scales, layer.get_buffer(GROUPS), layer.get_buffer(MEAN), group)
        return nf4.decode(codes, found, self.dtype).to(self.compute)

    def keep(self, layer: nn.Module, whole: Tensor, picked: Callable[[str, Tensor], Tensor]) -> None:
        """Give a layer a weight of which all is known. `picked`: this rank's part of what the tensor of a name keeps,
        of all of its blocks (codes: of the whole weight)."""
        largest = nf4.largest(whole)
        found = nf4.scales_of(largest)
        layer.get_buffer(GROUPS).copy_(found.groups)
        layer.get_buffer(MEAN).copy_(found.mean)
        local(layer.get_parameter(SCALES)).copy_(picked(SCALES, found.codes))
        codes = nf4.encode(picked(CODES, whole), picked(SCALES, largest))
        local(layer.get_parameter(CODES)).copy_(codes)


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
    layers = base_layers(part, lora.base_skip) if lora is not None and lora.base == "nf4" else {}
    for name, layer in layers.items():
        weight = cast(nn.Parameter, layer.weight)
        if weight.device.type != "meta":
            raise UserError("lora.base quantises weights while they are read from a directory: make the model on meta")
        whole = derived.plain[f"{name}.weight"].shape if derived and f"{name}.weight" in derived.plain else weight.shape
        own = {key: torch.empty(whole[0], whole[1] // n, dtype=torch.uint8, device="meta") for key, n in _COLUMNS}
        del layer._parameters["weight"]  # pyright: ignore[reportPrivateUsage]
        lies = {key: cuts_of_one(f"{name}.{key}", tuple(own[key].shape), plan) for key in own} if world else {}
        for key, one in own.items():
            layer.register_parameter(key, nn.Parameter(one, requires_grad=False))
        if derived is not None:
            found = derived.cut_beside(layer, {key: dict(cut.model) for key, cut in lies.items()})
            plain |= {f"{name}.{key}": part for key, part in found.items()}
        for key, cut in lies.items():
            cuts[layer.get_parameter(key)] = cut
        blocks = whole[0] * whole[1] // nf4.BLOCK
        layer.register_buffer(GROUPS, torch.empty(-(-blocks // nf4.GROUP), device="meta"))
        layer.register_buffer(MEAN, torch.empty((), device="meta"))
        rows, across = span(0, whole[0]), span(0, whole[1] // nf4.BLOCK)
        if world is not None:
            shape = whole[0], whole[1] // nf4.BLOCK
            at = world.mesh.coords(world.index)
            rows, across = (over_model_axes(shape, lies[SCALES], world.mesh, at, dim) for dim in (0, 1))
        made = QuantisedWeight(
            f"{name}.weight", tuple(whole), rows, across, weight.dtype, dtype_of(plan.precision.compute)
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
        for key in (CODES, SCALES):
            del layer._parameters[key]
        for key in (GROUPS, MEAN):
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


def _numbers(some: IntSet, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(first, last, device=device) for first, last in some])


_COLUMNS = ((CODES, COLUMNS["_nf4"]), (SCALES, COLUMNS["_absmax"]))
