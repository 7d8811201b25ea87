"""Frozen weights that are kept as codes: these and scales in a model's parameters, the weight while a layer runs.

    parameters  codes (of NF4 scales, too): integers, frozen, cut as the weight would be, in whole blocks
                (`lora.bases`); so FSDP2 gathers them, and a checkpoint saves and moves them as they are. Those of
                `X.weight` are called `X.weight_nf4`, those of experts in one tensor `X.gate_up_proj_nf4`
    buffers     what else they are made of: whole on every rank, at most some thousandths of the weight's bytes
    forward     the layer's own code runs with the weight, made for it; autograd keeps no copy of it
    backward    where the gradient of what came in needs the weight, it is made again; it has no gradient itself

Which weights these are says `models.lora.bases`. What reads one outside of its layer's forward fails. Experts with
adapters ask for the weight themselves: what their code runs with is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tangram.errors import UserError
from tangram.layout import intervals
from tangram.layout.intervals import IntSet, span
from tangram.models.capturing.called import unseen
from tangram.models.lora.bases import BASE, BASES, Base, Kept, Picked, Shape, base_weights
from tangram.models.lora.expert_adapters import AdaptedExperts, made_again
from tangram.schema.plan import Plan
from tangram.schema.tuning import COLUMNS
from tangram.training.mesh.layout_to_torch import ParameterCuts, cuts_of_one, over_model_axes
from tangram.training.mesh.local_parts import PlainPart, PlainParts, local
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.world import World
from tangram.training.parallel.precision import dtype_of


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight of a layer, and which of its blocks are here when nothing is cut by FSDP."""

    base: Base
    name: str
    """Were it there."""
    shape: Shape
    places: tuple[IntSet, ...]
    """Of each dim; of the last one, blocks."""
    dtype: torch.dtype
    """As it would be kept."""
    compute: torch.dtype
    """As the layer takes it."""

    @property
    def key(self) -> str:
        """Its name in the layer."""
        return self.name.rpartition(".")[2]

    def made(self, layer: nn.Module) -> Tensor:
        """The weight, or what model axes leave of it here, from what the layer has now."""
        with unseen():
            return self._made(layer)

    def _made(self, layer: nn.Module) -> Tensor:
        parameters = {kind: local(layer.get_parameter(f"{self.key}_{kind}")) for kind in self.base.tensors}
        *rows, blocks = map(intervals.size, self.places)
        columns = blocks * self.base.block
        for kind, one in parameters.items():
            if tuple(one.shape) != (*rows, columns // COLUMNS[kind]):
                raise RuntimeError(f"{self.name} has not been gathered: its {kind} here is {tuple(one.shape)}")
        kept = {kind: one.flatten(0, -2) for kind, one in parameters.items()}
        kept |= {kind: layer.get_buffer(f"{self.key}_{kind}") for kind in self.base.buffers(self.shape)}
        device = next(iter(kept.values())).device
        *each, across = (
            torch.cat([torch.arange(first, last, device=device) for first, last in some]) for some in self.places
        )
        places = each[0]
        for size, own in zip(self.shape[1:-1], each[1:], strict=True):
            places = (places[:, None] * size + own).flatten()
        made = self.base.make(kept, places, across, self.shape, self.dtype)
        return made.view(*rows, columns).to(self.compute)

    def put(self, layer: nn.Module, kept: Kept, picked: Picked | None = None) -> None:
        """Give a layer what keeps its weight: what `picked` leaves here of all of it, or with None as it is."""
        for kind, value in kept.items():
            name = f"{self.key}_{kind}"
            if kind not in self.base.tensors:
                layer.get_buffer(name).copy_(value)
            else:
                local(layer.get_parameter(name)).copy_(value if picked is None else picked(kind, value))


QuantisedWeights = Mapping[str, QuantisedWeight]
"""By name."""


def to_quantise(part: nn.Module, plan: Plan) -> Mapping[str, Shape]:
    """The weights that the plan keeps as codes, with their shapes: of a model, or a stage, that nothing has cut."""
    lora = plan.lora
    if lora is None or lora.base == "parameters":
        return {}
    return base_weights(part, lora.base_skip, BASES[lora.base].block)


def quantise(
    part: nn.Module,
    plan: Plan,
    weights: Mapping[str, Shape],
    cuts: dict[nn.Parameter, ParameterCuts],
    world: World | None = None,
    derived: DerivedModel | None = None,
) -> PlainParts:
    """Keep these weights of a model on meta, or of a stage, as its plan says, in place; it is without values then.

    After model axes have cut it, and before FSDP does. `cuts` gets what FSDP has to know of the new parameters. Returns
    those of them that no DTensor describes.
    """
    plain: dict[str, PlainPart] = {}
    for name, whole in weights.items():
        assert plan.lora is not None
        base, (path, _, key) = BASES[plan.lora.base], name.rpartition(".")
        layer, around = part.get_submodule(path), part.get_submodule(path.removesuffix(BASE))
        weight = part.get_parameter(name)
        if weight.device.type != "meta":
            raise UserError("lora.base quantises weights while they are read from a directory: make the model on meta")
        own = {
            f"{key}_{kind}": torch.empty(*whole[:-1], whole[-1] // COLUMNS[kind], dtype=dtype, device="meta")
            for kind, dtype in base.tensors.items()
        }
        layer.register_parameter(key, None)  # its place stays, into which others put what they make for a forward
        bound = own if world is not None else {}
        lies = {own_key: cuts_of_one(f"{path}.{own_key}", tuple(one.shape), plan) for own_key, one in bound.items()}
        for own_key, one in own.items():
            layer.register_parameter(own_key, nn.Parameter(one, requires_grad=False))
        if derived is not None:
            found = derived.cut_beside(layer, {own_key: dict(cut.model) for own_key, cut in lies.items()})
            plain |= {f"{path}.{own_key}": one for own_key, one in found.items()}
        if world is not None:
            cuts |= {layer.get_parameter(own_key): cut for own_key, cut in lies.items()}
        for kind, size in base.buffers(whole).items():
            layer.register_buffer(f"{key}_{kind}", torch.empty(size, device="meta"))
        shape = (*whole[:-1], whole[-1] // base.block)
        places = tuple(map(partial(span, 0), shape))
        if world is not None:
            at, coarsest = world.mesh.coords(world.index), [*lies.values()][-1]
            places = tuple(over_model_axes(shape, coarsest, world.mesh, at, dim) for dim in range(len(shape)))
        made = QuantisedWeight(base, name, whole, places, weight.dtype, dtype_of(plan.precision.compute))
        forward = layer.forward if isinstance(layer.forward, _With) else _With(layer, layer.forward)
        layer.forward = forward
        forward.weights[key] = made
        if isinstance(around, AdaptedExperts) and key in around.scales:
            around.weights[key] = partial(made.made, layer)
    return plain


def quantised_weights(model: nn.Module) -> QuantisedWeights:
    """What `quantise` has made of a model."""
    forwards = (vars(layer).get("forward") for layer in model.modules())
    return {one.name: one for forward in forwards if isinstance(forward, _With) for one in forward.weights.values()}


@torch.no_grad()
def dequantise(model: nn.Module) -> None:
    """Give a model that is whole in this process the weights that its base stands for, in place, as they are kept."""
    for name, one in quantised_weights(model).items():
        path = name.rpartition(".")[0]
        layer, around = cast(Any, model.get_submodule(path)), model.get_submodule(path.removesuffix(BASE))
        made = replace(one, compute=one.dtype).made(layer)
        if isinstance(layer.forward, _With):
            layer.forward = layer.forward.plain
        if isinstance(around, AdaptedExperts):
            around.weights.pop(one.key, None)
        for kind in one.base.tensors:
            del layer._parameters[f"{one.key}_{kind}"]
        for kind in one.base.buffers(one.shape):
            del layer._buffers[f"{one.key}_{kind}"]
        layer.register_parameter(one.key, nn.Parameter(made, requires_grad=False))


@dataclass(frozen=True)
class _With:
    """The forward of a layer with its weights made for it, but for those that somebody around has made."""

    layer: nn.Module
    plain: Callable[..., Any]
    weights: dict[str, QuantisedWeight] = field(default_factory=dict[str, QuantisedWeight])
    """By what the layer calls them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast("dict[str, Any]", self.layer._parameters)  # pyright: ignore[reportPrivateUsage]
        made = {key: one.made(self.layer) for key, one in self.weights.items() if own[key] is None}
        own |= {key: nn.Parameter(one, requires_grad=False) for key, one in made.items()}
        try:
            with made_again(made, lambda key: self.weights[key].made(self.layer)):
                return self.plain(*args, **kwargs)
        finally:
            own |= dict.fromkeys(made)
