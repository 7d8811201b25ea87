"""The learning rate, the seeds of steps, and what ends a run. That training is right is shown in `oracle`."""

import pytest
import torch

from tangram.schema.optimiser import OptimiserPlan
from tangram.training.mesh.drawing import seed_for
from tangram.training.objective.step_guard import must_be_finite
from tangram.training.step.optimiser_step import lr_at


def rates(steps: int, **keys: object) -> list[float]:
    plan = OptimiserPlan.model_validate({"lr": 0.01, **keys})
    return [lr_at(step, steps, plan) for step in range(steps)]


def test_a_cosine_after_a_warm_up() -> None:
    found = rates(105, warmup_steps=4)
    assert found[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert found[54] == pytest.approx(0.0055)
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[-1] == pytest.approx(0.001)


def test_constant_and_then_linear() -> None:
    found = rates(10, schedule="wsd", warmup_steps=2, decay_steps=4, final_lr=0.2)
    assert found == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.01, 0.008, 0.006, 0.004, 0.002])


def test_constant() -> None:
    assert rates(4, schedule="constant", warmup_steps=2) == pytest.approx([0.005, 0.01, 0.01, 0.01])


def drawn(seed: int, sample: int) -> float:
    seed_for(torch.device("cpu"), seed, sample)
    return float(torch.rand(()))


def test_every_step_draws_numbers_of_its_own() -> None:
    places = [(seed, sample) for seed in range(4) for sample in range(12)]
    with torch.random.fork_rng(devices=[]):
        assert len({drawn(*place) for place in places}) == len(places)
        assert drawn(1, 2) == drawn(1, 2)


def test_seeds_leave_devices_alone_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    with torch.random.fork_rng(devices=[]):
        drawn(1, 2)
        assert asked == []
        torch.manual_seed(0)
    assert asked == [0], "this is what costs"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_the_run(number: float) -> None:
    with pytest.raises(FloatingPointError, match=f"the gradient norm is {number}"):
        must_be_finite("the gradient norm", number)
    must_be_finite("the gradient norm", 0.0)
