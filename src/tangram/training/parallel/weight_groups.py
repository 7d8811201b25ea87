"""The weights of a rank by layers, and which axes shard them: whose sums a trace keeps (`tracing.weights`)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.layout import Layout
from tangram.models.costs import block_names
from tangram.tracing.weights import WeightGroup
from tangram.training.parallel.model import ParallelModel


def weight_groups(model: ParallelModel) -> list[WeightGroup]:
    """Of the layers of a model, and of what lies outside of them."""
    layers = block_names(model.module)
    found: dict[str, list[nn.Parameter]] = {}
    axes: dict[str, set[str]] = {}
    for name, parameter in model.module.named_parameters():
        layer = next((one for one in layers if name.startswith(f"{one}.")), name.rpartition(".")[0])
        found.setdefault(layer, []).append(parameter)
        axes.setdefault(layer, set()).update(Layout.parse(model.plan.layout_of(name)).axes)
    return [WeightGroup(layer, tuple(sorted(axes[layer])), partial(_parts, some)) for layer, some in found.items()]


def _parts(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [one.to_local() if isinstance(one, DTensor) else one for one in parameters]
