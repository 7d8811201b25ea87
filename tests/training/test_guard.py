"""Steps that are not applied: one decision on all ranks, the scale of the loss, what is written of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tangram.errors import UserError
from tangram.schema.job import Job
from tangram.training.data import BYTES, open_corpus, prepare, sample_ids
from tangram.training.objective.step_guard import AstrayError, Guard, guard_for
from tangram.training.state.checkpointer import Progress
from tangram.training.step.bad_steps import skipped_event
from tests.training.policies import OVERFLOWS, SCALE, Found
from tests.training.small import small_plan, small_tables, write_text

INF, NAN = float("inf"), float("nan")


def job(**tables: Any) -> Job:
    return small_plan(Path("text"), **tables)


def half(**scale: Any) -> Job:
    return job(precision={"compute": "float16", "scale": scale})


def torchs_scales(overflows: tuple[int, ...], steps: int) -> tuple[list[float], list[int]]:
    """The scales after each step by torch's own scaler, and the steps that it skips."""
    weight = nn.Parameter(torch.ones(1))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE["initial"], growth_interval=int(SCALE["every"]))
    scales: list[float] = []
    skipped: list[int] = []
    for step in range(steps):
        before = weight.item()
        scaler.scale((weight * (INF if step in overflows else 1.0)).sum()).backward()
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
        scales.append(scaler.get_scale())
        if weight.item() == before:
            skipped.append(step)
    return scales, skipped


def test_an_overflow_on_one_rank_skips_the_step_on_all_as_torchs_scaler_does(
    policies: list[Mapping[str, Found]],
) -> None:
    scales, skipped = torchs_scales(OVERFLOWS, 12)
    assert len(set(scales)) == 3
    for rank in policies:
        found = rank["scaled"]
        assert found["scales"] == scales
        assert found["skipped"] == skipped == list(OVERFLOWS)
        assert found["updates"] == 12 - len(OVERFLOWS)
        right = 2 * 2 * 2.0**-10 / 16  # four weights, each with the gradient of two ranks
        assert [norm for step, norm in enumerate(found["norms"]) if step not in OVERFLOWS] == pytest.approx([right] * 9)


def test_a_run_goes_on_with_the_scale_bit_for_bit(policies: list[Mapping[str, Found]]) -> None:
    for index, rank in enumerate(policies):
        found = rank["resumed"]
        assert found["whole"] == found["parts"]
        assert len(found["whole"]) == 12
        whole, parts = found["progress"]
        assert whole == parts
        assert whole["step"] == 12
        assert 0 < whole["scale"] < 2.0**24
        assert found["masters"]
        assert found["rounded"]
        if index == 0:
            assert len(found["skips"]) == whole["skipped"] >= 3
            assert found["skips"][0][1].startswith("the gradient overflows at a loss scale of 1.67772e+07")
            assert len(found["skips"]) + len(found["steps"]) == 12
            assert found["steps"][-1] == (12, whole["skipped"])


def test_a_loss_that_is_no_number_stops_the_run_and_its_samples_are_named(policies: list[Mapping[str, Found]]) -> None:
    for rank in policies:
        said = rank["astray"]["stop"]
        assert said.startswith(
            "step 2: the loss is nan: a smaller optimiser.lr may help; run once more, all numbers of the step are "
            "finite; its samples are listed in "
        )  # the test's own hook errs in the third call alone
        path = Path(said.rpartition('in "')[2].removesuffix('"'))
        told = json.loads(path.read_text())
        plan = small_plan(path.parents[1] / "text")
        batch = plan.data.global_batch
        corpus = open_corpus(plan.data, BYTES)
        right = sample_ids(corpus, plan.data, plan.seed, batch, batch)
        assert told["step"] == 2
        assert [(row["sample"], row["window"]) for row in told["samples"]] == [
            (batch + place, window) for place, (_, window) in enumerate(right)
        ]
        assert [row["data_rank"] for row in told["samples"]] == [0] * 4 + [1] * 4
        for row in told["samples"]:
            (first, *_), (end, *_) = corpus.training[0].spans([row["window"]], plan.data.sequence)
            begins = [0, *(int(at) for at in corpus.training[0].end_D)]
            inside = [n for n, at in enumerate(begins[:-1]) if at < end and begins[n + 1] > first]
            assert row["documents"] == inside


def test_where_numbers_began_to_be_not_finite_is_named(policies: list[Mapping[str, Found]]) -> None:
    """By its name in the whole model, whichever rank has it; of gradients by what comes before in the model."""
    begins = "{}: a smaller optimiser.lr may help; {} the first that is not finite, on rank {}; its samples"
    overflow = "what model.layers.1.mlp.up_proj computes is"
    steep = "the gradient of what model.layers.0.self_attn.o_proj computes is"
    right = {
        "fsdp": ("the loss is nan", overflow, 0),
        "compiled": ("the loss is nan", overflow, 0),
        "tp": ("the loss is nan", overflow, 0),
        "pp": ("the loss is nan", overflow, 1),
        "steep": ("the gradient norm is nan", steep, 1),
    }
    for rank in policies:
        assert {*rank["begins"]} == {*right}
        for name, (reason, words, first) in right.items():
            assert rank["begins"][name].startswith(f"step 1: {begins.format(reason, words, first)}"), name


def test_steps_are_skipped_where_the_plan_says_so(policies: list[Mapping[str, Found]]) -> None:
    found = policies[0]["astray"]["skip"]
    assert [(step, reason) for step, reason, _ in found["skips"]] == [(2, "the loss is nan"), (4, "the loss is nan")]
    assert all(Path(path).name == f"astray-step-{step}.json" for step, _, path in found["skips"])
    assert found["steps"] == [1, 3, 5, 6]
    for rank in policies:
        assert rank["astray"]["skip"]["progress"] == (6, 2)
        assert rank["astray"]["skip"]["metric"] > 0


def test_too_many_skips_in_a_row_stop_the_run(policies: list[Mapping[str, Found]]) -> None:
    for rank in policies:
        assert rank["astray"]["limit"].startswith(
            "step 4: the loss is nan, and 2 steps in a row were skipped already (run.skips_in_a_row)"
        )


def test_the_scale_stays_at_one_and_then_the_plan_decides() -> None:
    guard = Guard(half(initial=4.0))
    assert [guard.judge(1.0, INF) is not None for _ in range(2)] == [True, True]
    assert (guard.scale.value, guard.skipped, guard.astray) == (1.0, 2, 0)
    with pytest.raises(AstrayError, match="the gradient norm is inf"):
        guard.judge(1.0, INF)


def test_a_scale_is_taken_up_where_it_was_left() -> None:
    guard = Guard(half(every=5), scale=32.0, good=4, skipped=7)
    assert guard.judge(1.0, 1.0) is None
    assert (guard.scale.value, guard.scale.good, guard.skipped) == (64.0, 0, 7)


def test_skips_in_a_row_begin_anew_after_a_good_step() -> None:
    guard = Guard(job(run={"on_nonfinite": "skip", "skips_in_a_row": 1}))
    for _ in range(3):
        assert guard.judge(NAN, 1.0) == "the loss is nan"
        assert guard.judge(1.0, 1.0) is None
    guard.judge(1.0, NAN)
    with pytest.raises(AstrayError, match=r"the gradient norm is nan, and 1 steps in a row were skipped"):
        guard.judge(1.0, NAN)


DIVERGED = {"above": 2.0, "steps": 3, "window": 5}


def test_a_loss_that_stays_high_has_diverged() -> None:
    guard = Guard(job(run={"diverged": DIVERGED}))
    for loss in (9.0, 4.0, 4.0, 4.0, 4.0, 9.0, 9.0, 4.0, 9.0, 9.0):  # two high ones, twice, are no divergence
        assert guard.judge(loss, 1.0) is None
    with pytest.raises(
        AstrayError, match="it is 9, and in 3 steps in a row it was above 2 times the median of 4 before"
    ):
        guard.judge(9.0, 1.0)


def test_steps_that_have_diverged_are_skipped_where_the_plan_says_so() -> None:
    guard = Guard(job(run={"diverged": DIVERGED, "on_nonfinite": "skip"}))
    given = [*[4.0] * 5, 9.0, 9.0, 9.0, 9.0, 4.0]
    assert [guard.judge(loss, 1.0) is None for loss in given] == [*[True] * 7, False, False, True]
    assert guard.skipped == 2


def test_who_goes_on_judges_as_who_was_never_interrupted() -> None:
    plan = job(run={"diverged": DIVERGED, "on_nonfinite": "skip", "skips_in_a_row": 2})
    given = [9.0, *[4.0] * 6, 9.0, 9.0, 9.0, 9.0, 4.0, 9.0, 9.0, 9.0, 9.0]

    def judged(*, interrupted: bool) -> list[str | None]:
        guard, found = Guard(plan), list[str | None]()
        for loss in given:
            found.append(guard.judge(loss, 1.0))
            if interrupted:
                guard = Guard(plan, skipped=guard.skipped, judged=guard.judged)
        with pytest.raises(AstrayError, match="2 steps in a row were skipped already"):
            guard.judge(9.0, 1.0)
        return found

    assert judged(interrupted=True) == judged(interrupted=False)


def test_losses_are_not_compared_unless_the_plan_says_so() -> None:
    guard = Guard(job())
    assert all(guard.judge(10.0**n, 1.0) is None for n in range(60))


def test_a_float16_step_without_a_guard_is_refused() -> None:
    with pytest.raises(UserError, match="the loss of a float16 computation is scaled: make one Guard"):
        guard_for(half(), None)
    assert guard_for(job(), None).scale.value == 1


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"diverged": {"above": 0.5}}}, "losses above 0.5 times their median are usual"),
        ({"run": {"on_nonfinite": "ignore"}}, "on_nonfinite"),
        ({"run": {"skips_in_a_row": 0}}, "skips_in_a_row"),
        ({"precision": {"scale": {"growth": 1.0}}}, "growth"),
        ({"precision": {"scale": {"backoff": 1.0}}}, "backoff"),
        ({"precision": {"scale": {"initial": 0.5}}}, "initial"),
    ],
)
def test_policies_that_make_no_sense_are_refused(tables: dict[str, Any], message: str) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match=message):
        Job.model_validate({k: v for k, v in small_tables(Path("text"), **tables).items() if k in Job.model_fields})


def test_samples_of_a_skipped_step_are_those_of_where_the_run_stands(tmp_path: Path) -> None:
    plan = small_plan(write_text(tmp_path / "text"), run={"on_nonfinite": "skip"})
    prepare(plan.data, BYTES, lambda event: None)
    corpus = open_corpus(plan.data, BYTES)
    done = ("the loss is nan", True)
    # After a resume with another global batch a step's first sample is not its number times the batch.
    progress = Progress(step=6, samples=100)
    event = skipped_event(done, tmp_path, corpus, plan, progress, Guard(plan))
    assert (event.step, event.reason) == (6, "the loss is nan")
    listed = json.loads(Path(event.samples).read_text())
    batch = plan.data.global_batch
    assert [one["sample"] for one in listed["samples"]] == list(range(100 - batch, 100))
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    told = skipped_event(done, nowhere, corpus, plan, progress, Guard(plan))
    assert told.samples == ""
    assert "its samples could not be written" in told.reason
