"""Public reports of losses and gradients that depend on how a batch is cut into micro-batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tangram.training.data import Batch, RankBatches
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.pipeline import ModelPart
from tangram.training.step.loop import backward
from tests.training.small import small_plan

COUNTS = (1, 7, 3, 5)
"""Of tokens that count, by sample."""


def _batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 31, (4, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    for row, count in enumerate(COUNTS):
        labels[row, count:] = -100
    return ids, labels


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=1, **sizes))


@cache
def trained(size: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a batch in micro-batches of a size."""
    model = _model()
    pairs = zip(*(x.split(size) for x in _batch()), strict=True)
    micro = tuple(Batch(inputs, labels, None) for inputs, labels in pairs)
    batches = RankBatches(micro, sum(COUNTS), tuple(range(0, 4, size)), 0, 4)
    world: Any = None  # of one process
    sums = backward(ParallelModel(model, small_plan(Path("text")), world, (ModelPart(model),)), batches)
    return float(sums.loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mean_of_means() -> float:
    """What comes of it where each micro-batch counts alike."""
    model, (ids, labels) = _model(), _batch()
    with torch.no_grad():
        logits = model(ids).logits
    return float(torch.stack([F.cross_entropy(*row) for row in zip(logits, labels, strict=True)]).mean())


@pytest.mark.parametrize("size", [1, 2])
def test_the_loss_is_the_mean_over_the_tokens_of_the_batch(size: int) -> None:
    """huggingface/transformers#37766: the loss grows with the number of accumulated micro-batches."""
    assert trained(size)[0] == pytest.approx(trained(4)[0], rel=1e-6)
    assert _mean_of_means() != pytest.approx(trained(4)[0], rel=1e-3), "unlike counts of tokens show a mean of means"


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradients_are_those_of_the_batch_at_once(size: int) -> None:
    """transformers#35438, transformers#35203: gradients, and their norm, grow with the number of micro-batches."""
    for name, want in trained(4)[1].items():
        torch.testing.assert_close(trained(size)[1][name], want, rtol=1e-5, atol=1e-7)
