"""Out of memory: the phase, the part of the prediction that was exceeded, and what to lower, in one sentence."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tangram.schema.optimiser import OptimiserPlan
from tangram.training.run.out_of_memory import (
    MemoryInUse,
    NoMemoryError,
    explained,
    is_no_memory,
    memory_in_use,
    sentence,
)
from tangram.training.step.optimiser_step import make_adamw
from tests.training.policies import PREDICTED, Found, too_much

WITHIN = MemoryInUse(parameters=2e6, gradients=2e6, optimiser=4e6, flows=4e6)


def test_the_phase_and_the_part_are_named_on_every_rank(policies: list[Mapping[str, Found]]) -> None:
    for rank in policies:
        for phase in ("forward", "backward"):
            said = rank["no memory"][phase]
            assert said.startswith(f"out of memory in the {phase}: what flows (activations 3.0 MB, logits 1.0 MB, gath")
            assert "where 4.5 MB were predicted: lower data.micro_batch or data.sequence, or recompute blocks" in said
            assert "you tried to allocate 4611686018427387904 bytes" in said
            assert "\n" not in said


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("parameters", "parameters took 9.0 MB where 2.0 MB were predicted: cut parameters over more ranks, or keep"),
        ("gradients", "gradients took 9.0 MB where 2.0 MB were predicted: cut parameters over more ranks, or freeze"),
        ("optimiser", "optimiser took 9.0 MB where 4.0 MB were predicted"),
        ("flows", "gathered parameters 0.5 MB) took 9.0 MB where 4.5 MB were predicted: lower data.micro_batch"),
    ],
)
def test_the_part_that_exceeds_its_prediction_most(part: str, message: str) -> None:
    here = replace(WITHIN, **{part: 9e6})
    assert message in sentence("the forward", here, PREDICTED)


def test_where_all_is_as_predicted_the_machine_has_less() -> None:
    said = sentence("the update", WITHIN, replace(PREDICTED, optimiser=8e6))
    assert said.startswith("out of memory in the update: no part exceeds its prediction, 116.5 MB")
    assert "most is optimiser: cut parameters" in said


def test_gradients_that_come_as_activations_go_are_no_excess() -> None:
    """The prediction is of one moment; at another there is more of the one and less of the other."""
    said = sentence("the backward", replace(WITHIN, gradients=6.2e6, flows=0.1e6), PREDICTED)
    assert "no part exceeds its prediction" in said
    said = sentence("the backward", replace(WITHIN, gradients=9e6, flows=0.1e6), PREDICTED)
    assert "gradients took 9.0 MB" in said


def test_without_a_prediction_the_parts_are_told() -> None:
    said = sentence("the forward", WITHIN, None)
    assert "parameters 2.0 MB, gradients 2.0 MB, optimiser 4.0 MB, activations and all else 4.0 MB: lower" in said


def test_what_a_rank_has_is_measured() -> None:
    model = nn.Linear(300, 300, bias=False).bfloat16()
    optimiser = make_adamw(model, OptimiserPlan(lr=1e-3))
    model(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
    optimiser.step()
    found = memory_in_use(model, optimiser, process=0.0)
    assert (found.parameters, found.gradients, found.optimiser) == (180_000, 180_000, 3 * 360_000 + 4)
    assert found.flows > 1e7  # Python and torch themselves


def test_the_update_is_a_phase() -> None:
    model = nn.Linear(2, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    optimiser.register_step_pre_hook(too_much)
    with pytest.raises(NoMemoryError, match="out of memory in the update"), explained(model, optimiser, PREDICTED):
        optimiser.step()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_what_says_that_there_is_no_memory(error: BaseException) -> None:
    assert is_no_memory(error)
    with pytest.raises(NoMemoryError, match="out of memory in training"), explained(None, None, None):
        raise error


def test_other_errors_pass() -> None:
    assert not is_no_memory(RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"), explained(None, None, None):
        raise RuntimeError("shapes do not fit")


def test_an_error_is_explained_once() -> None:
    first: Any = None
    with pytest.raises(NoMemoryError) as caught, explained(None, None, None), explained(None, None, PREDICTED):
        too_much()
    first = str(caught.value)
    assert first.count("out of memory in") == 1
