"""Updates in the backward: the losses without them, on any mesh that has them, and what is refused beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.planner.cost.history import key_of
from tangram.schema.plan import Plan
from tests.training import test_optimisers
from tests.training.test_optimisers import CASES, HALF, planned, run_all
from tests.training.test_stochastic_rounding import LOW

ALL = {"optimiser.clip_norm": "inf", "data.global_batch": "2"}
EARLY = {**ALL, "optimiser.in_backward": "true"}
SKIP = {"optimiser.moments_skip": '["*embed*", "*head*"]'}
MORE = {
    "adamw": {"optimiser.lr": "3e-3"},
    "8-bit": {"optimiser.lr": "3e-3", "optimiser.moments": '"8-bit"', **SKIP},
}
ROUNDED = {**LOW, "optimiser.lr": "3e-3"}
ONE: dict[str, tuple[str, dict[str, str]]] = {
    **{case: (case, {}) for case in CASES},
    **{name: ("rates", {"optimiser.lr_of": "{}", **asked}) for name, asked in MORE.items()},
    "rounded": ("rates", ROUNDED),
    "lora": ("rates", {"lora.rank": "4", "optimiser.lr_of": "{}"}),
    "recompute": ("rates", {"run.recompute": '"full"'}),
    "frozen": ("rates", {"model.freeze": '["*.mlp.*", "*norm*"]', "optimiser.lr_of": "{}"}),
}
folder = test_optimisers.folder


def made(folder: Path, name: str, way: str, *, early: bool, **more: str) -> Plan:
    case, asked = ONE[name]
    return planned(folder, case, way, **{**(EARLY if early else ALL), **asked, **more})


def test_one_process_has_the_same_losses_to_the_last_digit(folder: Path) -> None:
    plans = {(name, f"{early}"): made(folder, name, "one", early=early) for name in ONE for early in (False, True)}
    found = run_all(folder, plans, "one", {})
    for name in ONE:
        assert found[name, "True"].losses == found[name, "False"].losses, name
        assert found[name, "True"].norms == found[name, "False"].norms, name
        assert found[name, "True"].losses[-1] < found[name, "True"].losses[0], name


def test_ranks_have_the_same_losses(folder: Path) -> None:
    """FSDP updates in its hooks; of TP what ranks hold whole waits for the end of the backward."""
    names = {"fsdp": [*CASES, "8-bit", "rounded", "lora", "recompute"], "tp": ["sgd", "rates", "8-bit", "recompute"]}
    keys = [(way, name, early) for way, of in names.items() for name in of for early in (False, True)]
    plans = {(f"{name} {early}", way): made(folder, name, way, early=early) for way, name, early in keys}
    found = run_all(folder, plans, "ranks", {})
    for way, of in names.items():
        for name in of:
            alike, ours = (found[f"{name} {early}", way] for early in (False, True))
            assert ours.losses == pytest.approx(alike.losses, rel=1e-6), (way, name)
            assert ours.norms == pytest.approx(alike.norms, rel=1e-5), (way, name)


def test_it_goes_on_with_and_without(folder: Path) -> None:
    """The states are those of the same optimiser: a run that began without goes on with, elsewhere."""
    plans = {
        ("rates half", "fsdp"): planned(folder, "rates half", "fsdp", **ALL),
        ("rates resumed", "fsdp"): planned(folder, "rates", "fsdp", **EARLY),
        ("rates", "fsdp"): planned(folder, "rates", "fsdp", **ALL),
    }
    found = run_all(folder, plans, "resumed", {("rates resumed", "fsdp"): ("rates half", "fsdp")})
    assert found["rates resumed", "fsdp"].losses == found["rates", "fsdp"].losses[HALF:]


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    for asked, why in (
        ({"optimiser.clip_norm": "1.0"}, r"optimiser\.clip_norm: .* set optimiser\.clip_norm = inf"),
        ({"precision.compute": '"float16"'}, r"precision\.compute: .*take bfloat16"),
        ({"run.on_nonfinite": '"skip"'}, r'run\.on_nonfinite: .*= "stop"'),
        ({"data.global_batch": "8"}, r"data\.micro_batch: a step has 4 micro-batches.*data\.micro_batch = 8"),
    ):
        with pytest.raises(UserError, match=why):
            planned(folder, "rates", "one", **{**EARLY, **asked})
    for case, way, why in (
        ("rates", "ddp", r"whole copies .*: use FSDP"),
        ("rates", "pp", "micro-batches"),
        ("muon", "tp", "TP and EP ranks update .*muon"),
    ):
        with pytest.raises(UserError, match=why):
            planned(folder, case, way, **EARLY)


def test_the_history_tells_them_apart(folder: Path) -> None:
    asked: list[dict[str, Any]] = [ALL, EARLY, {**ALL, **LOW}, {**ALL, **LOW, "optimiser.rounding": '"nearest"'}]
    assert len({key_of(planned(folder, "rates", "one", **one)) for one in asked}) == len(asked)
