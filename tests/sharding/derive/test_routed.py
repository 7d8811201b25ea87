"""Rows that are sent to the ranks of their experts: proved on simulated ranks, and the proof finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.layout import Mesh
from tangram.models.capturing.capture import capture
from tangram.models.capturing.fold import folded
from tangram.models.outlines.costs import block_names
from tangram.sharding.derive.derive import Derived, derive
from tangram.sharding.derive.marking.marks import Mark
from tangram.sharding.derive.problem.states import OWN, SENT, SENT_ENDS, SENT_IDS, Routed
from tangram.sharding.proof import derived as proof_derived
from tangram.sharding.proof.derived import Ran, check
from tests.sharding.derive.test_marks_files import tiny

MARKS = ("*.experts.{gate_up_proj,down_proj}: e/ep _ _", "{model.embed_tokens,model.layers.*,model.norm}: b s/ep h")

QUERIES = "{*.q_proj.weight,model.embed_tokens.weight,lm_head.weight}: out/tp in"


@cache
def derived(kind: str) -> tuple[Derived, dict[str, Tensor]]:
    model = tiny(kind)
    given = {"input_ids": torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))}
    graph = folded(capture(model, {**given, "use_cache": False}), block_names(model))
    found = derive(graph, [Mark.parse(mark) for mark in MARKS], Mesh.parse("ep=2"))
    return found, {**dict(model.named_parameters()), **dict(model.named_buffers()), **given}


def checked(kind: str) -> Ran:
    return check(*derived(kind))


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_rows_that_are_sent_give_what_the_model_gives(kind: str) -> None:
    found, _ = derived(kind)
    states = [state for over in found.axes for move in over.communication.values() for state in move.outputs]
    assert {SENT, OWN} <= {state.kind for state in states if isinstance(state, Routed)}
    ran = checked(kind)
    assert ran.wrong == ""
    assert ran.gradients > 10


def test_experts_cut_over_two_axes_are_not_sent_for() -> None:
    model = tiny("qwen3_moe")
    given = {"input_ids": torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))}
    graph = folded(capture(model, {**given, "use_cache": False}), block_names(model))
    marks = (*MARKS, "*.experts.{gate_up_proj,down_proj}: e/tp _ _", "model.layers.*: b s/tp h", QUERIES)
    found = derive(graph, [Mark.parse(mark) for mark in marks], Mesh.parse("ep=2 tp=2"))
    assert not any(
        isinstance(s, Routed) for over in found.axes for move in over.communication.values() for s in move.outputs
    )
    ran = check(found, {**dict(model.named_parameters()), **dict(model.named_buffers()), **given})
    assert ran.wrong == ""


def _swapped(parts: Sequence[Tensor], target: Any) -> list[Tensor]:
    """Each rank has what is the other's, where there are as many."""
    first, second = parts
    n = min(len(first), len(second))
    return [torch.cat([second[:n], first[n:]]), torch.cat([first[:n], second[n:]])]


def _turned(parts: Sequence[Tensor], target: Any) -> list[Tensor]:
    return [part.flip(0) for part in parts]


MISTAKES: dict[str, tuple[str, Callable[[Sequence[Tensor], Any], list[Tensor]]]] = {
    "rows at the wrong rank": (SENT, _swapped),
    "rows in another order": (SENT, _turned),
    "results not put back in order": (OWN, _turned),
    "groups that end one row early": (SENT_ENDS, lambda parts, target: [(x - 1).clamp(min=0) for x in parts]),
    "experts of another row": (SENT_IDS, _turned),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_proof_finds_a_planted_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, wrong = MISTAKES[name]
    kind = "gpt_oss" if where == SENT_IDS else "qwen3_moe"  # biases are looked up by the experts of rows
    real = proof_derived._routed  # pyright: ignore[reportPrivateUsage]
    hits: list[str] = []

    def planted(parts: Sequence[Tensor], ids: Sequence[Tensor], source: Routed, target: Any) -> list[Tensor]:
        found = real(parts, ids, source, target)
        if target.kind != where:
            return found
        hits.append(target.kind)
        return wrong(found, target)

    monkeypatch.setattr(proof_derived, "_routed", planted)
    ran = checked(kind)
    assert hits
    assert ran.wrong != ""
