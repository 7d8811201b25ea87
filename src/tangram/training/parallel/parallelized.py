"""A model of one's own made parallel for a loop of one's own.

parallelize(model, "dp=2 tp=4", ["*.up.weight: inner/tp hidden"], inputs={"x": x})
model(x=x).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimiser.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tangram.layout import Mesh
from tangram.sharding.derivation import marks_from, refuse_unnamed
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.discover.own_rules import OwnRules
from tangram.training.mesh.groups import device_mesh_of
from tangram.training.mesh.tensor_parallel import DerivedModel, parallel


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | str,
    marks: Sequence[str | Mark] | Mapping[str, str] | None = (),
    *,
    inputs: Mapping[str, Any],
    rules: Path | str | OwnRules | None = None,
) -> DerivedModel:
    """Shard a model in place, and have its forward communicate as the marks say. Collective over the mesh.

    `model`: with the same values on all ranks, or on meta; its parameters become DTensors over the whole mesh.
    `mesh`: a DeviceMesh whose dims are named, or text as `"dp=2 tp=4"` over all ranks of the process group that was
    begun. `marks` and `rules`: as of `tangram.derive`. `inputs`: keyword arguments of the forward, of which only sizes
    count; other sizes are derived when they come.

    Each rank calls the model with all of its inputs, and gets results that no mark names in full; gradients are those
    of one process when a backward has ended. Build the optimiser after this call. Raises UserError for what does not
    fit the mesh or cannot be run, and where ranks have other weights or, at the first call of each size, give other
    inputs; and where the model is copied afterwards.
    """
    refuse_unnamed(inputs)
    return parallel(model, marks_from(marks), device_mesh_of(model, mesh), inputs, rules)
