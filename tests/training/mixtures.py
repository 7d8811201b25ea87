"""Small mixtures of experts of random values, and micro-batches for them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.training.data import IGNORE, Batch, RankBatches
from tests.training.small import SMALL_MODEL

FIELDS = {**SMALL_MODEL, "vocab_size": 64}
ROWS, LENGTH = 3, 16
CPU = torch.device("cpu")


def mixture(kind: str, fields: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**FIELDS, **fields})
    model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                parameter.normal_()  # so that it prefers some experts
    return model


def some_labels(count: int) -> list[tuple[Tensor, Tensor]]:
    """The inputs and labels of micro-batches, all of which count yet."""
    drawn = (
        torch.randint(64, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(number))
        for number in range(count)
    )
    return [(ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].clone()) for ids_BS in drawn]


def as_batches(micro: Sequence[tuple[Tensor, Tensor]]) -> RankBatches:
    counted = sum(int((labels_BS != IGNORE).sum()) for _, labels_BS in micro)
    batches = tuple(Batch(inputs_BS, labels_BS, None) for inputs_BS, labels_BS in micro)
    return RankBatches(batches, counted, tuple(range(len(batches))))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
