"""Each type that a plan names is the type in which it happens, and the masters are what is updated."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn

from tangram.training.updates.ruled_optimiser import MASTER, RuledOptimiser
from tests.training.policies import LITTLE, Found

KEYS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_small_gradients_add_up_in_the_type_that_the_plan_says(policies: list[Mapping[str, Found]]) -> None:
    whole = 1 + LITTLE * 2.0**-9
    for rank in policies:
        added = rank["added"]
        for name in ("low, computed", "low, reduced", "low, kept", "half, kept", "once"):
            assert added[name][:2] == ["float32", whole], name
        assert added["low, added"][:2] == ["bfloat16", 1.0]  # what the other type is for
        assert added["once, low"][:2] == ["float32", 1.0]  # added in the type of the reduction, and cast after


def test_parameters_and_states_have_the_types_that_the_plan_says(policies: list[Mapping[str, Found]]) -> None:
    moments = {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    kept = {name: found[2] for name, found in policies[0]["added"].items()}
    assert kept["low, computed"] == {"parameter": "float32", **moments}
    assert kept["low, kept"] == {"parameter": "bfloat16", **moments, "master": "float32"}
    assert kept["half, kept"] == {"parameter": "float16", **moments, "master": "float32"}
    lowest = {"step": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}
    assert kept["lowest"] == {"parameter": "bfloat16", **lowest}


adamw = partial(RuledOptimiser, rule="adamw")


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [nn.Parameter(torch.randn(5, 3).bfloat16().to(dtype)) for _ in range(2)]


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
def test_masters_are_updated_as_float32_parameters_are(gradients: torch.dtype) -> None:
    low, right = parameters(torch.bfloat16), parameters(torch.float32)
    ours, theirs = adamw(low, torch.float32, **KEYS), torch.optim.AdamW(right, **KEYS)
    for step in range(20):
        for one, other in zip(low, right, strict=True):
            grad = torch.sin(torch.arange(15.0).view(5, 3) + step).to(gradients)
            one.grad_dtype = gradients
            one.grad, other.grad = grad, grad.float()
        ours.step()
        theirs.step()
    for one, other in zip(low, right, strict=True):
        assert torch.equal(ours.state[one][MASTER], other)
        assert torch.equal(one, other.bfloat16())


def test_without_masters_small_updates_are_lost() -> None:
    (low, _), (right, _) = parameters(torch.bfloat16), parameters(torch.float32)
    ours = adamw([low], torch.bfloat16, **{**KEYS, "lr": 1e-5, "weight_decay": 0.0})
    theirs = adamw([right], torch.float32, **{**KEYS, "lr": 1e-5, "weight_decay": 0.0})
    before = right.detach().clone()
    for _ in range(100):
        low.grad, right.grad = torch.ones_like(low), torch.ones_like(right)
        ours.step()
        theirs.step()
    assert float((before - right).detach().min()) == pytest.approx(1e-3, rel=1e-2)
    assert int((low == before).sum()) > 10


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        adamw(parameters(torch.bfloat16), torch.float32, **KEYS).step(lambda: 1.0)
