"""Axes that do not divide a model, trained from a plan: losses, gradients, norms and values of one process, kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.checkpoint.inspect.verify import verify
from tangram.errors import UserError
from tangram.models.build import build_on_meta
from tangram.planner.legality.check_plan import legal
from tangram.training.data import BYTES, prepare
from tangram.training.run.launch import run_ranks
from tangram.training.state.build_model import source_of
from tests.training.oracle.cases import Case
from tests.training.oracle.compare import findings
from tests.training.oracle.plain import plain_run
from tests.training.oracle.warm import once
from tests.training.small import write_text
from tests.training.uneven_plans import (
    CUT,
    GPT2_LAYOUTS,
    Done,
    Work,
    case,
    llama,
    run_all,
    write_models,
)

FSDP = {"*": "_/dp ..."}
BETWEEN = {"run": {"evaluate_every": 2}}


def _two(text: Path) -> Work:
    cut = case(text, "llama", "tp=2", llama(), **BETWEEN)
    clipped = case(text, "llama", "tp=2", llama(), optimiser={"clip_norm": 0.5})
    dropped = case(text, "gpt2", "tp=2", GPT2_LAYOUTS, **BETWEEN)
    wrong = {
        "a row off": ("a row off", cut),
        "blocks a row off": ("a row off", dropped),
        "counted once": ("counted once", clipped),
    }
    legs = (cut, case(text, "llama", "dp=2", FSDP), cut)
    return Work({"cut": cut, "clipped": clipped, "dropped": dropped}, legs, wrong, text.parent)


def _four(text: Path) -> Work:
    inside = case(text, "llama", "dp=2 tp=2", llama("dp"), **BETWEEN)
    return Work({"inside fsdp": inside}, (inside, case(text, "llama", "tp=4", FOUR)), {}, text.parent)


FOUR = {**llama(), **dict.fromkeys(("*.[qkvo]_proj.weight", "*.[qkv]_proj.bias"), "...")}
"""Attention whole, for three heads are fewer than four ranks."""


def _prepared(folder: Path) -> Path:
    text = write_text(folder / "text")
    write_models(folder)
    prepare(case(text, "llama", "tp=2", llama()).plan.data, BYTES, lambda event: None)
    return text


def _run(work: Work, world: int) -> tuple[Work, list[Done]]:
    return work, run_ranks(run_all, work, world=world, on_event=print, device="cpu")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, list[Done]]:
    return once(tmp_path_factory, "uneven-plans", lambda folder: _run(_two(_prepared(folder)), 2))


def _is_right(case: Case, done: list[Done], name: str) -> None:
    right = plain_run(case)
    for own in done:
        assert findings(own.traces[name], right) == []
    assert done[0].traces[name].norms == pytest.approx(right.norms, rel=1e-5)


def _goes_on(work: Work, done: list[Done]) -> None:
    """Through other layouts a run is that of one process, and what it saved is whole, and is what that has."""
    steps = CUT * len(work.legs)
    right = plain_run(Case("", work.legs[0].plan, until=steps))
    for own in done:
        assert [loss for leg in own.legs for loss in leg.losses] == pytest.approx(right.losses, rel=1e-5)
    for place in range(len(work.legs)):
        assert not verify(work.folder / f"leg-{place}" / f"step-{CUT * (place + 1):08}").findings


@pytest.mark.parametrize("name", ["cut", "clipped", "dropped"])
def test_it_is_the_run_of_one_process(two: tuple[Work, list[Done]], name: str) -> None:
    _is_right(two[0].cases[name], two[1], name)


def test_it_goes_on_at_other_layouts(two: tuple[Work, list[Done]]) -> None:
    _goes_on(*two)


@pytest.mark.parametrize("name", ["a row off", "blocks a row off", "counted once"])
def test_planted_mistakes_are_seen(two: tuple[Work, list[Done]], name: str) -> None:
    work, done = two
    assert findings(done[0].wrong[name], plain_run(work.wrong[name][1])) != []


@pytest.mark.slow
def test_on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    work, done = once(tmp_path_factory, "uneven-plans-four", lambda folder: _run(_four(_prepared(folder)), 4))
    _is_right(work.cases["inside fsdp"], done, "inside fsdp")
    _goes_on(work, done)


# ------------------------------------------------------------ what is refused, before anything starts


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({"*.[qkv]_proj.weight": "out/tp in"}, "the 3 key-value heads (num_key_value_heads) do not divide by tp=2"),
        ({"*.q_proj.weight": "(heads/tp 8) h"}, "the 3 key-value heads (num_key_value_heads) do not divide by tp=2"),
    ],
)
def test_parts_of_heads_are_refused(tmp_path: Path, layouts: dict[str, str], said: str) -> None:
    text = write_text(tmp_path / "text")
    write_models(tmp_path)
    plan = case(text, "llama", "tp=2", {**layouts, **llama()}).plan
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace(")", r"\)")):
        legal(plan, build_on_meta(source_of(plan, BYTES).config))
