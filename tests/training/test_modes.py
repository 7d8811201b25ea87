"""Default dropout in derived models: masks are those of one process, in training alone; planted mistakes are seen."""

from __future__ import annotations

import pytest

from tangram.training.run.launch import run_ranks
from tests.training.modes_tasks import MISTAKES, Ran, Work, run_all
from tests.training.oracle.warm import once

BOUND = 1e-5
SAME, EVALUATED, OWN, PLACES, AGAIN = MISTAKES
WORKS = {
    "bert": Work("bert"),
    "gpt2": Work("gpt2"),
    "t5": Work("t5"),
    "gpt2, sequence cut": Work("gpt2", sequence=True),
    "bert, sequence cut, recomputed": Work("bert", sequence=True, recompute=True),
}
PLANTED = {
    SAME: Work("gpt2", mistake=SAME),
    EVALUATED: Work("gpt2", mistake=EVALUATED),
    OWN: Work("gpt2", mistake=OWN),
    PLACES: Work("gpt2", sequence=True, mistake=PLACES),
    AGAIN: Work("gpt2", mistake=AGAIN),
}
SLOW = {
    "bert, sequence cut": Work("bert", sequence=True),
    "gpt2, recomputed": Work("gpt2", recompute=True),
    "gpt2, four ranks": Work("gpt2", "tp=4", sequence=True),
    "t5, four ranks": Work("t5", "tp=4"),
}


def _run(works: dict[str, Work], world: int) -> dict[str, list[Ran]]:
    ranks = run_ranks(run_all, [*works.values()], world=world, on_event=lambda _: None, device="cpu")
    return {name: [own[i] for own in ranks] for i, name in enumerate(works)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ran]]:
    return once(tmp_path_factory, "modes", lambda _: _run({**WORKS, **PLANTED, "kinds": Work("kinds")}, 2))


def _is_right(found: list[Ran]) -> None:
    for one in found:
        assert max(one.off.values()) < BOUND
        assert one.worst < BOUND
        assert one.programs == 2, "one for training, one for evaluation"
        assert len({*one.losses.values()}) == 4, "of the five calls, the two in evaluation alone are alike"
        assert one.losses["eval"] == one.losses["eval again"]


@pytest.mark.parametrize("name", WORKS)
def test_masks_are_those_of_one_process_and_new_at_every_call(ran: dict[str, list[Ran]], name: str) -> None:
    _is_right(ran[name])


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_seen(ran: dict[str, list[Ran]], name: str) -> None:
    assert max(max(*one.off.values(), one.worst) for one in ran[name]) > 20 * BOUND


def test_what_is_cut_draws_for_a_sample_what_one_process_does_for_the_batch(ran: dict[str, list[Ran]]) -> None:
    for one in ran["kinds"]:
        assert len(one.off) > 10
        assert {kind: off for kind, off in one.off.items() if off > BOUND} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_layouts(name: str) -> None:
    _is_right(_run({name: SLOW[name]}, 4 if "four" in name else 2)[name])
