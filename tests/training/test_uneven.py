"""Dims that an axis does not divide and index maps, on real ranks: losses, gradients and updates of one process."""

from __future__ import annotations

import pytest

from tangram.training.run.launch import run_ranks
from tests.training.oracle.warm import once
from tests.training.uneven_tasks import GPT2, HEADS, MISTAKES, VOCABULARIES, Ran, Work, run_all

BOUND = 1e-5
ORDER, FIRST = MISTAKES
ZIGZAG = ("model.layers.*: b s/cp:zigzag h",)
TWO = {
    "vocabulary and ffn": Work("llama", "tp=2", (VOCABULARIES, "*.up_proj.weight: f/tp h")),
    "heads": Work("llama", "tp=2", (HEADS,)),
    "heads in listed sizes": Work("llama", "tp=2", (HEADS.replace("heads/tp", "heads/tp:[1 4]"),)),
    "one kv head": Work("one kv head", "tp=2", ("*.q_proj.weight: (heads/tp 8) h",)),
    "gpt2 with its dropout": Work("gpt2", "tp=2", GPT2),
    "gpt2, sequence cut": Work("gpt2", "tp=2", (*GPT2, "transformer.h.*: b s/tp h"), tokens=7),
    "samples": Work("llama", "dp=2", ("model.layers.*: b/dp s h",), samples=5),
    "parameters in parts": Work(
        "llama", "dp=2", ("{lm_head.weight,*.up_proj.weight}: o/dp i -> o i", "model.layers.*: b/dp s h"), samples=5
    ),
    "tokens": Work("llama", "cp=2", ("model.layers.*: b s/cp h",), tokens=7),
    "zigzag": Work("llama", "cp=2", ZIGZAG),
    "uneven zigzag of gpt2": Work("gpt2", "cp=2", ("transformer.h.*: b s/cp:zigzag h",), tokens=13),
    "cyclic": Work("llama", "cp=2", ("model.layers.*: b s/cp:cyclic[2] h",)),
}
PLANTED = {
    ORDER: Work("llama", "cp=2", ZIGZAG, mistake=ORDER),
    FIRST: Work("gpt2", "cp=2", ("transformer.h.*: b s/cp:zigzag h",), mistake=FIRST),
}
QUICK = ("heads in listed sizes", "gpt2, sequence cut", "samples", "zigzag")
"""What is run every time; the others are slow."""
FOUR = {
    "groups of heads, none for the last": Work(
        "grouped", "tp=4", ("*.k_proj.weight: (heads/tp 8) h", "*.q_proj.weight: (kv/tp 2 8) h"), samples=5
    ),
    "a sequence in a zigzag and in parts of that": Work(
        "llama", "cp=2 tp=2", ("model.layers.*: b s/cp:zigzag/tp h", HEADS, VOCABULARIES), samples=3
    ),
    "samples, tokens, heads and vocabulary": Work(
        "llama", "dp=2 tp=2", ("model.layers.*: b/dp s/tp h", HEADS, VOCABULARIES), samples=5, tokens=9
    ),
}


def _run(works: dict[str, Work], world: int) -> dict[str, list[Ran]]:
    ranks = run_ranks(run_all, [*works.values()], world=world, on_event=lambda _: None, device="cpu")
    return {name: [own[i] for own in ranks] for i, name in enumerate(works)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ran]]:
    return once(tmp_path_factory, "uneven", lambda _: _run({**{name: TWO[name] for name in QUICK}, **PLANTED}, 2))


def _is_right(found: list[Ran]) -> None:
    assert [(one.where, one.gradient, one.value) for one in found if max(one.gradient, one.value) > BOUND] == []
    assert max(off for one in found for off in one.losses.values()) < BOUND


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ran]]:
    return once(tmp_path_factory, "uneven-others", lambda _: _run({n: w for n, w in TWO.items() if n not in QUICK}, 2))


@pytest.mark.parametrize("name", QUICK)
def test_losses_gradients_and_updates_are_those_of_one_process(ran: dict[str, list[Ran]], name: str) -> None:
    _is_right(ran[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TWO if name not in QUICK])
def test_others_too(others: dict[str, list[Ran]], name: str) -> None:
    _is_right(others[name])


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_seen(ran: dict[str, list[Ran]], name: str) -> None:
    assert max(max(*one.losses.values(), one.gradient) for one in ran[name]) > 50 * BOUND


def test_ranks_have_parts_of_unlike_sizes(ran: dict[str, list[Ran]]) -> None:
    def shapes(work: str, name: str) -> list[tuple[int, ...]]:
        return [one.parts[name] for one in ran[work]]

    assert shapes("heads in listed sizes", "model.layers.0.self_attn.q_proj.weight") == [(8, 40), (32, 40)]
    assert shapes("gpt2, sequence cut", "transformer.wte.weight") == [(19, 40), (18, 40)]
    assert shapes("gpt2, sequence cut", "transformer.h.0.attn.c_attn.weight") == [(40, 72), (40, 48)]
    assert shapes("gpt2, sequence cut", "transformer.h.0.mlp.c_fc.bias") == [(6,), (5,)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    _is_right(once(tmp_path_factory, "uneven-four", lambda _: _run(FOUR, 4))[name])
