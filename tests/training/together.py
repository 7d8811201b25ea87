"""One model with everything at once: stages, FSDP2, derived tensor parallelism, recomputing, compiled blocks, and
frozen weights of eight bits under trained low-rank ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.planner.local.derived_layouts import TensorLayouts, sample_graph, tensor_layouts
from tangram.schema.plan import Plan
from tangram.training.data import Batch, RankBatches
from tangram.training.mesh.world import make_world
from tangram.training.parallel.apply import apply
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart
from tangram.training.run.launch import Rank
from tangram.training.step import loop
from tangram.training.step.objectives import next_token_loss
from tangram.training.step.optimiser_step import make_adamw

Array = npt.NDArray[np.float32]
FIELDS = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
ROWS, SEQUENCE, MICRO, DATA = 8, 16, 2, 2
STEPS = 3


class Int8Linear(nn.Module):
    """A linear layer whose weight is frozen in eight bits, a scale a row, and a low-rank one that is trained."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale) + self.up(self.down(x))


@dataclass(frozen=True)
class Seen:
    """Losses of all steps, and the gradients of the first and the last that this rank has, whole."""

    losses: tuple[float, ...]
    first: Mapping[str, Array]
    last: Mapping[str, Array]
    kinds: frozenset[str]
    """The types that parameters have."""
    graphs: int
    """Of torch's compiler."""


def quantised() -> nn.Module:
    """The model, alike in every process."""
    torch.manual_seed(0)
    model = cast(Any, AutoModelForCausalLM).from_config(AutoConfig.for_model("qwen3", **FIELDS), dtype=torch.float32)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Int8Linear(getattr(layer.mlp, name)))
    return model.train()


def plan_of(tables: Mapping[str, Any]) -> Plan:
    """Everything at once, over eight ranks; layouts as derived from the marks of the model's type."""
    model = quantised()
    config = cast(Any, model).config
    lies = tensor_layouts(config, model, sample_graph(model, SEQUENCE, torch.float32), ("tp", 2), "dp")
    assert isinstance(lies, TensorLayouts), lies
    stages = (("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm", "lm_head"))
    return Plan.model_validate(
        {
            **tables,
            "mesh": "pp=2 dp=2 tp=2",
            "axes": {"data": ["dp"], "tensor": ["tp"], "pipeline": ["pp"]},
            "pipeline": {"stages": stages},
            "layouts": {"parameters": {**lies.parameters, "*": "_/dp ..."}, "marks": dict(lies.marks)},
        }
    )


def batches(index: int, size: int) -> RankBatches:
    """A DP rank's share of the one batch, in micro-batches."""
    ids = torch.randint(64, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    mine = ids[index * ROWS // size : (index + 1) * ROWS // size]
    positions = torch.arange(SEQUENCE).expand(MICRO, SEQUENCE).contiguous()
    micro = tuple(Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions) for rows in mine.split(MICRO))
    firsts = tuple(range(index * ROWS // size, (index + 1) * ROWS // size, MICRO))
    return RankBatches(micro, ROWS * SEQUENCE, firsts)


def run(rank: Rank, plan: Plan) -> Seen:
    """The task of a rank."""
    group = dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    model = apply(quantised(), plan, world)
    kinds = frozenset(str(p.dtype) for p in model.module.parameters())
    return _trained(model, batches(world.data_index, world.data_size), kinds)


def alone(plan: Plan) -> Seen:
    """The same in this process, by nothing of Tangram's but the optimiser's groups."""
    model, mine = quantised(), batches(0, 1)
    optimiser = make_adamw(model, plan.optimiser)
    losses: list[float] = []
    kept: list[dict[str, Array]] = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        parts = [next_token_loss(ModelPart(model), batch) / mine.counted for batch in mine.micro]
        for part in parts:
            part.backward()
        losses.append(float(sum(part.detach() for part in parts)))
        kept.append(gradients(model))
        optimiser.step()
    return Seen(tuple(losses), kept[0], kept[-1], frozenset(), 0)


def gradients(model: nn.Module) -> dict[str, Array]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    return {name: g.detach().clone().numpy() for name, g in whole.items()}


def _trained(model: ParallelModel, mine: RankBatches, kinds: frozenset[str]) -> Seen:
    from torch._dynamo.utils import counters

    optimiser = make_adamw(model.module, model.plan.optimiser)
    losses: list[float] = []
    kept: list[dict[str, Array]] = []
    for _ in range(STEPS):
        done = loop.train_step(model, optimiser, mine, lr=model.plan.optimiser.lr)
        losses.append(done.loss)
        kept.append(gradients(model.module))
    breaks = [reason for reason in counters["graph_break"] if "Runtime._run" not in reason]
    assert not breaks, breaks  # only where a tensor moves inside of a module's own code, as in `Int8Linear`
    return Seen(tuple(losses), kept[0], kept[-1], kinds, counters["stats"]["unique_graphs"])
