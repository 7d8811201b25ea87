"""The weights of a rank by layers, and which axes shard them: whose sums a trace keeps (`tracing.weights`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.layout import Layout
from tangram.models.outlines.costs import block_names
from tangram.tracing.weights import WeightGroup
from tangram.training.parallel.model import ParallelModel


def layers_of_trained(model: ParallelModel) -> list[str]:
    """Of each trained parameter, in order, the layer, or the module outside of all layers."""
    layers = block_names(model.module)
    return [_layer(name, layers) for name, parameter in model.module.named_parameters() if parameter.requires_grad]


def _layer(name: str, layers: Sequence[str]) -> str:
    return next((one for one in layers if name.startswith(f"{one}.")), name.rpartition(".")[0])


def weight_groups(model: ParallelModel) -> list[WeightGroup]:
    """The weights of the layers of a model, and of what lies outside of them.

    Ranks of model axes count as unlike: what they all hold whole they update by gradients that each has summed for
    itself, in an order of its own. Those of data axes update by the same bits.
    """
    layers = block_names(model.module)
    found: dict[str, list[nn.Parameter]] = {}
    axes: dict[str, set[str]] = {}
    for name, parameter in model.module.named_parameters():
        layer = _layer(name, layers)
        found.setdefault(layer, []).append(parameter)
        sharded = Layout.parse(model.plan.layout_of(name)).axes
        axes.setdefault(layer, {*model.world.axes.model}).update(sharded)
    return [WeightGroup(layer, tuple(sorted(axes[layer])), partial(_parts, some)) for layer, some in found.items()]


def _parts(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [one.to_local() if isinstance(one, DTensor) else one for one in parameters]
