"""Several steps on two ranks are those of a plain loop in one process; the time limit holds on all ranks at once."""

import pytest
import torch
from torch import nn

from tangram.models.build import build_on_meta, initial_tensors
from tangram.training import data, job
from tangram.training.loop import lr_at, must_be_finite
from tangram.training.parallelise import materialise
from tangram.training.plan import Plan
from tangram.training.progress import StepDone
from tests.training.conftest import Warm

CPU = torch.device("cpu")


def plain_loop(plan: Plan) -> tuple[list[float], nn.Module]:
    """The oracle: a loop as one writes it without Tangram, on the whole global batch."""
    config = job.model_config(plan)
    model = build_on_meta(config)
    materialise(model, CPU, initial_tensors(config, plan.seed))
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decays, "weight_decay": plan.optimiser.weight_decay}, {"params": others, "weight_decay": 0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    split, _ = data.read_corpus(plan.data)
    losses: list[float] = []
    for step, lr in enumerate([1e-2, 1e-2, 1e-3]):
        size = plan.data.global_batch
        samples = data.sample_stream(split, plan.seed, step * size, size)
        batch = data.collate(split, samples, plan.data.sequence, CPU)
        logits = model(input_ids=batch.inputs_BS).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
        for group in optimiser.param_groups:
            group["lr"] = lr
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.optimiser.clip_norm)
        optimiser.step()
        losses.append(loss.item())
    return losses, model


def test_losses_and_updates_are_those_of_a_plain_loop(warm: Warm) -> None:
    losses, model = plain_loop(warm.plan)
    assert list(warm.measured[0].losses) == pytest.approx(losses, rel=1e-5)
    assert warm.measured[0].losses == warm.measured[1].losses
    trained = job.load_in_one_process(warm.plan, job.model_config(warm.plan), warm.checkpoint, CPU)
    start = dict(initial_tensors(job.model_config(warm.plan), warm.plan.seed))
    for (name, ours), right in zip(trained.named_parameters(), model.parameters(), strict=True):
        update = (right - start[name]).norm()
        assert update > 0
        assert (ours - right).norm() <= 1e-3 * update, name


def test_the_learning_rate(warm: Warm) -> None:
    plan = warm.plan.model_copy(update={"optimiser": warm.plan.optimiser.model_copy(update={"warmup_steps": 4})})
    plan = plan.model_copy(update={"run": plan.run.model_copy(update={"steps": 105})})
    rates = [lr_at(step, plan) for step in range(105)]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rates[54] == pytest.approx(0.0055)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.001)


def test_all_ranks_stop_after_the_same_step_when_time_is_up(warm: Warm) -> None:
    assert [measured.hurried_steps for measured in warm.measured] == [1, 1]


def test_rank_0_alone_reports_every_step(warm: Warm) -> None:
    steps = [event for event in warm.events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == [1, 2, 3] * 2 + [1]
    assert tuple(event.loss for event in steps[:3]) == warm.measured[0].losses


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_the_run(number: float) -> None:
    with pytest.raises(FloatingPointError, match=f"the gradient norm of step 3 is {number}"):
        must_be_finite("the gradient norm of step 3", number)
    must_be_finite("the gradient norm of step 3", 0.0)
