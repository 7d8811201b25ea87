"""What a plan says of a step's calls is what ranks call, and mistakes that all ranks make alike are named by it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.schema.job import ModelPlan
from tangram.schema.tuning import LoraPlan
from tests.tracing.due import Held, Work, all_held
from tests.training.chat import write_chat
from tests.training.oracle.cases import Case, cases
from tests.training.oracle.warm import once, prepared

ADAPTED = ("copies", "hsdp", "derived inside fsdp", "whole in a step: fsdp")
QUICK = ("frozen: fsdp", "copies", "hsdp", "derived inside fsdp", "ZBVZeroBubble of fsdp", "whole in a step: fsdp")
OPTIMISERS = (("muon", "hsdp"), ("muon", "copies"), ("muon", "derived inside fsdp"), ("adafactor", "hsdp"))
"""Of which ranks exchange more in an update than plans say, and each with what it is tried on."""
PLANTED = {
    "a layer outside": ("hsdp", "a layer outside of FSDP"),
    "not summed": ("copies", "a bucket not summed"),
    "alone": ("copies", "norms of a rank alone"),
    "unmoved": ("derived inside fsdp", "not moved in the forward"),
    "gradient unmoved": ("derived inside fsdp", "not moved in the backward"),
    "a layer outside, adapted": ("adapted: hsdp", "a layer outside of FSDP"),
    "not summed, adapted": ("adapted: copies", "a bucket not summed"),
    "a layer outside, int8": ("int8 base: hsdp", "a layer outside of FSDP"),
    "a layer outside, muon": ("muon: hsdp", "a layer outside of FSDP"),
}
Measured = tuple[Mapping[str, Case], list[dict[str, Held]]]


def measure(folder: Path, *, slow: bool) -> Measured:
    """All of it in one start of ranks."""
    prepared(folder)
    every = {
        name: case
        for name, case in cases(folder / "text").items()
        # Cases dealt by hand have other numbers of micro-batches than their plans say.
        if case.ranks == 4 and not case.own and not case.shares and (slow or name in QUICK)
    }
    tuned = {"lora": LoraPlan(rank=4), "model": ModelPlan(path=str(write_chat(folder / "chat")))}
    every |= {f"adapted: {of}": replace(every[of], plan=every[of].plan.model_copy(update=tuned)) for of in ADAPTED}
    for base in ("int8", "fp8"):
        quantised = {**tuned, "lora": LoraPlan(rank=4, base=base)}
        every[f"{base} base: hsdp"] = replace(every["hsdp"], plan=every["hsdp"].plan.model_copy(update=quantised))
    for name, of in OPTIMISERS:
        plan = every[of].plan
        settings = plan.optimiser.model_copy(update={"name": name})
        every[f"{name}: {of}"] = replace(every[of], plan=plan.model_copy(update={"optimiser": settings}))
    return every, all_held(Work(every, {} if slow else PLANTED, folder), 4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return once(tmp_path_factory, "due-calls", lambda folder: measure(folder, slow=False))


def test_ranks_call_what_the_plan_says(measured: Measured) -> None:
    every, held = measured
    assert every.keys() > {*QUICK}
    for name in every:
        assert [rank[name].deviations for rank in held] == [()] * 4, name
    assert held[0]["hsdp"].planned == (
        "5 all-gather over dp",
        "3 reduce-scatter over dp",
        "3 all-reduce over rep",
        "1 all-reduce over rep dp at the end",
    )
    assert held[0]["ZBVZeroBubble of fsdp"].planned[2] == "10 send over pp (rank 1 of it)"


def replicas(held: list[dict[str, Held]], name: str) -> dict[tuple[object, ...], list[int]]:
    """The sums of the ranks that hold the same, by what they hold."""
    found: dict[tuple[object, ...], list[int]] = {}
    for rank in held:
        for part, total in rank[name].weights.items():
            found.setdefault(part, []).append(total)
    return found


def test_replicas_hold_the_same_bits_after_their_updates_and_no_others_are_taken_for_replicas(
    measured: Measured,
) -> None:
    every, held = measured
    for name in every:
        assert all(len({*sums}) == 1 for sums in replicas(held, name).values()), name
    alike = {name: {len(sums) for sums in replicas(held, name).values()} for name in every}
    assert {name: sums for name, sums in alike.items() if ": " not in name or "whole" in name} == {
        "adapted: whole in a step: fsdp": {1},
        "copies": {4},
        "hsdp": {2},
        "derived inside fsdp": {1},
        "ZBVZeroBubble of fsdp": {1},
        "whole in a step: fsdp": {1},
    }
    assert any(len({*sums}) > 1 for sums in replicas(held, "not summed").values()), "each has its own gradients"


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        ("a layer outside", ("parameters in the root in step 1 with", "reduce-scatter", "all-reduce over rep")),
        ("not summed", ("ended the backward of step 1 without all-reduce over dp for gradients: 1 of 1 such calls",)),
        (
            "a layer outside, adapted",
            ("parameters in the root in step 1 with", "reduce-scatter", "all-reduce over rep"),
        ),
        ("a layer outside, int8", ("in the root in step 1 with", "reduce-scatter", "all-reduce over rep")),
        ("a layer outside, muon", ("in the root in step 1 with", "reduce-scatter", "all-reduce over rep")),
        ("not summed, adapted", ("ended the backward of step 1 without all-reduce over dp for gradients: 1 of 1",)),
        ("alone", ("ended step 1 without all-reduce over dp for loss, gradient norm, wishes to stop: 1 of 1",)),
        (
            "unmoved",
            ("skipped reduce-scatter over tp in model.layers.0.mlp.down_proj in step 1, which the plan has",),
        ),
        (
            "gradient unmoved",
            ("the backward of step 1 without reduce-scatter over tp: in the backward 1 of its calls",),
        ),
    ],
)
def test_what_all_ranks_do_unlike_the_plan_is_named_in_the_first_step(
    mistake: str, texts: tuple[str, ...], measured: Measured
) -> None:
    _, held = measured
    for rank in held:
        found = rank[mistake].deviations
        assert len(found) == len(texts), found
        assert all(text in one for text, one in zip(texts, found, strict=True)), found
    assert len({rank[mistake].deviations for rank in held}) == 1, "all ranks say the same"


@pytest.mark.slow
def test_ranks_call_what_the_plan_says_in_every_case_of_the_oracle(tmp_path: Path) -> None:
    every, held = measure(tmp_path, slow=True)
    assert len(every) > 40
    assert sum(bool(held[0][name].planned) for name in every) > 35
    wrong = {name: rank[name].deviations for name in every for rank in held if rank[name].deviations}
    assert not wrong
    assert not [name for name in every if any(len({*sums}) > 1 for sums in replicas(held, name).values())]
