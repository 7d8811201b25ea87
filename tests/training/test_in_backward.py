"""Updates in the backward: the losses without them, on any mesh that has them, and what is refused beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tangram.checkpoint.store.commits import committed
from tangram.errors import UserError
from tangram.planner.cost.history import key_of
from tangram.schema.plan import Plan
from tangram.training.run.launch import RankError
from tests.training import test_optimisers
from tests.training.test_optimisers import CASES, HALF, planned, run_all
from tests.training.test_stochastic_rounding import LOW
from tests.training.tuning_tasks import VOCABULARY, write_folder

ALL = {"optimiser.clip_norm": "inf", "data.global_batch": "2"}
EARLY = {**ALL, "optimiser.in_backward": "true"}
BOTH = {"late": ALL, "early": EARLY}
SKIP = {"optimiser.moments_skip": '["*embed*", "*head*"]'}
PLAIN = {"optimiser.lr": "3e-3", "optimiser.lr_of": "{}"}
ONE: dict[str, tuple[str, dict[str, str]]] = {
    **{case: (case, {}) for case in CASES if case != "sgd"},
    "8-bit": ("rates", {**PLAIN, "optimiser.moments": '"8-bit"', **SKIP}),
    "rounded": ("rates", {**LOW, "optimiser.lr": "3e-3"}),
    "low": ("rates", {**LOW, **PLAIN, "precision.accumulate": '"bfloat16"'}),
    "lora": ("rates", {**PLAIN, "lora.rank": "4"}),
    "tied": ("rates", PLAIN),
    "moe": ("rates", PLAIN),
    "dropout": ("rates", {"run.recompute": '"full"', "model.change": "{attention_dropout = 0.2}"}),
    "frozen": ("rates", {**PLAIN, "model.freeze": '["*.mlp.*", "*norm*"]'}),
}
folder = test_optimisers.folder


@pytest.fixture(scope="module")
def tied(folder: Path) -> Path:
    """Where the folder has a model whose head is its embedding, too."""
    (folder / "tied").mkdir()
    write_folder(folder / "tied", tied=True, fields={"vocab_size": VOCABULARY - 1})
    job = folder / "tied" / "sft.toml"
    job.write_text(job.read_text().replace("lora.rank = 4\n", ""))
    return folder


def made(folder: Path, name: str, way: str, **more: str) -> Plan:
    """Of ten steps."""
    case, asked = ONE[name]
    return planned(folder, f"{case} half", way, name if name in ("tied", "moe") else "dense", **{**more, **asked})


def agree(folder: Path, names: Iterable[str], ways: Mapping[str, Mapping[str, Any]], work: str) -> None:
    """Assert that one process has the same losses and norms, to the last digit, in both ways, and learns."""
    names = [*names]
    plans = {(name, key): made(folder, name, "one", **asked) for name in names for key, asked in ways.items()}
    found = run_all(folder, plans, work, {})
    for name in names:
        one, other = (found[name, key] for key in ways)
        assert one.losses == other.losses, name
        assert one.norms == other.norms, name
        assert one.losses[-1] < one.losses[0], name


def test_one_process_has_the_same_losses_to_the_last_digit(tied: Path) -> None:
    agree(tied, ONE, BOTH, "one")


def test_ranks_have_the_same_losses(tied: Path) -> None:
    """FSDP updates in its hooks; of TP what ranks hold whole waits for the end of the backward."""
    names = {"fsdp": ("adafactor", "muon", "8-bit", "rounded", "lora", "tied"), "tp": ("rates", "tied"), "ep": ("moe",)}
    keys = [(way, name, key) for way, of in names.items() for name in of for key in BOTH]
    found = run_all(
        tied, {(f"{name} {key}", way): made(tied, name, way, **BOTH[key]) for way, name, key in keys}, "ranks", {}
    )
    for way, of in names.items():
        for name in of:
            late, early = (found[f"{name} {key}", way] for key in BOTH)
            assert early.losses == pytest.approx(late.losses, rel=1e-6), (way, name)
            assert early.norms == pytest.approx(late.norms, rel=1e-5), (way, name)


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
    ):
        with pytest.raises(UserError, match=why):
            planned(folder, "rates", "one", **{**EARLY, **asked})
    plan = planned(folder, "rates", "one", **EARLY)
    with pytest.raises(ValueError, match=r"a step has 2 micro-batches.*data\.micro_batch = 2"):
        Plan.model_validate({**plan.model_dump(), "data": {**plan.data.model_dump(), "micro_batch": 1}})
    for case, way, why in (
        ("rates", "ddp", "DDP adds up .*: use FSDP"),
        ("rates", "pp", "stages of a pipeline add up the gradients of micro-batches: leave out optimiser.in_backward"),
        ("muon", "tp", "TP and EP ranks update .*muon"),
    ):
        with pytest.raises(UserError, match=why):
            planned(folder, case, way, **EARLY)


def test_the_history_tells_them_apart(folder: Path) -> None:
    asked: list[dict[str, Any]] = [ALL, EARLY, {**ALL, **LOW}, {**ALL, **LOW, "optimiser.rounding": '"nearest"'}]
    assert len({key_of(planned(folder, "rates", "one", **one)) for one in asked}) == len(asked)


def test_a_gradient_that_is_not_finite_ends_the_run(folder: Path) -> None:
    """Parameters have been updated by then: nothing of that is saved."""
    plan = planned(folder, "rates", "one", **EARLY, **{"optimiser.lr": "1e30", "optimiser.lr_of": "{}"})
    with pytest.raises(RankError, match="step 2: the gradient norm is nan"):
        run_all(folder, {("astray", "one"): plan}, "astray", {})
    assert not committed(folder / "astray" / "astray-one")
