"""What a rank runs of a model: all of it or one stage of a pipeline, with what was put around it, by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tangram.training.mesh.drawing import DrawSource
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.objective.expert_capacity import Capacity
from tangram.training.objective.model_inputs import TokenOrder
from tangram.training.objective.router_loss import Routers
from tangram.training.parallel.data_parallel import Replicas
from tangram.training.parallel.fsdp import StepShards


@dataclass(frozen=True, eq=False)
class ModelPart:
    """A module, and what runs beside it; a plain module in one process has none of it."""

    module: nn.Module
    tokens: TokenOrder | None = None
    """None: the model does not attend by tokens."""
    derived: DerivedModel | None = None
    """The programs of tensor, context and expert parallelism."""
    draws: DrawSource | None = None
    """What numbers the elements that it draws for; None where it is not trained."""
    data_parallel: Replicas | StepShards | None = None
    """DDP's sums of gradients, or what FSDP2 has to hear of each micro-batch."""
    routers: Routers | None = None
    capacity: Capacity | None = None
