"""Every gradient of the first step on two ranks is that of one process, and the check can fail."""

# ruff: noqa: N806  a tensor carries its dims in its name

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tangram.models.build import build_on_meta, initial_tensors
from tangram.training import data
from tangram.training.job import model_config
from tangram.training.parallelise import materialise
from tangram.training.plan import Plan
from tests.training.conftest import Warm
from tests.training.ranks import MISTAKES, Gradients

TOLERANCE = 1e-5  # relative L2 of each parameter's gradient, in fp32


def one_process(plan: Plan) -> tuple[float, Gradients]:
    """The oracle: the whole global batch at once, the mean of the counted tokens' negative log-likelihoods in fp64."""
    config = model_config(plan)
    model = build_on_meta(config)
    materialise(model, torch.device("cpu"), initial_tensors(config, plan.seed))
    model.double()
    split, _ = data.read_corpus(plan.data)
    samples = data.sample_stream(split, plan.seed, 0, plan.data.global_batch)
    batch = data.collate(split, samples, plan.data.sequence, torch.device("cpu"))
    likelihood_BSV = model(input_ids=batch.inputs_BS).logits.log_softmax(-1)
    counted = batch.labels_BS >= 0
    picked = likelihood_BSV[counted].gather(1, batch.labels_BS[counted][:, None])
    loss = -picked.mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), {name: grad.numpy() for name, grad in gradients.items() if grad is not None}


def differences(ours: Gradients, oracle: Gradients) -> Iterator[tuple[str, float]]:
    assert ours.keys() == oracle.keys()
    for name, right in oracle.items():
        assert np.linalg.norm(right) > 0, f"the gradient of {name} is zero, so comparing it says nothing"
        yield name, float(np.linalg.norm(ours[name] - right) / np.linalg.norm(right))


@pytest.fixture(scope="module")
def oracle(warm: Warm) -> tuple[float, Gradients]:
    return one_process(warm.plan)


def test_the_ranks_count_unequal_numbers_of_tokens(warm: Warm) -> None:
    first, second = (measured.counted for measured in warm.measured)
    assert first != second  # else a mean of means would be right by chance


def test_every_gradient_is_that_of_one_process(warm: Warm, oracle: tuple[float, Gradients]) -> None:
    for measured in warm.measured:
        wrong = {name: d for name, d in differences(measured.gradients, oracle[1]) if not d <= TOLERANCE}
        assert not wrong


def test_the_parts_of_the_loss_add_up(warm: Warm, oracle: tuple[float, Gradients]) -> None:
    assert sum(measured.loss_part for measured in warm.measured) == pytest.approx(oracle[0], rel=1e-6)
    assert warm.measured[0].losses[0] == pytest.approx(oracle[0], rel=1e-6)


def test_tied_embeddings(warm: Warm) -> None:
    _, gradients = one_process(warm.tied)
    assert "lm_head.weight" not in gradients
    wrong = {name: d for name, d in differences(warm.measured[0].tied_gradients, gradients) if not d <= TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_planted_mistake_is_found(mistake: str, warm: Warm, oracle: tuple[float, Gradients]) -> None:
    found = dict(differences(warm.measured[0].wrong_gradients[mistake], oracle[1]))
    assert max(found.values()) > 100 * TOLERANCE
    if mistake == "one_layer_averaged":
        assert min(found.values()) <= TOLERANCE  # a check of one gradient, or of a norm, could have missed it
