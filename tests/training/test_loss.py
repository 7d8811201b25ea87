"""The loss from logits in parts: when they are in parts and when whole, what is refused, what it saves."""

# ruff: noqa: N806  a tensor carries its dims in its name

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.planner.legality.check_plan import legal
from tangram.planner.local.derived_layouts import CollectiveTraffic, plan_communication, sample_graph
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan
from tangram.training.data import BYTES, Batch
from tangram.training.mesh.world import make_world
from tangram.training.objective.loss import leaving, logits_placement
from tangram.training.parallel.apply import apply, give_storage
from tangram.training.state.build_model import source_of
from tangram.training.step.evaluate import logits_of
from tangram.training.trials.dry_run import (
    CountedStep,
    _fake_ranks,  # pyright: ignore[reportPrivateUsage]
    counted_alone,
)
from tests.training.oracle.vocabulary import OVER_VOCABULARY, VOCABULARY
from tests.training.small import SMALL_MODEL, small_tables

WHOLE = {"logits": "b s v"}
CPU = torch.device("cpu")
ROWS, LENGTH = 2, 32


def plan_of(name: str, vocabulary: int = VOCABULARY, marks: Mapping[str, str] | None = None, **changes: Any) -> Plan:
    """A strategy, with further marks."""
    tables = small_tables(
        Path("text"), model={"change": {**SMALL_MODEL, "num_hidden_layers": 1, "vocab_size": vocabulary}}, **changes
    )
    strategy = OVER_VOCABULARY[name][1].tables
    layouts = {**strategy["layouts"], "marks": {**strategy["layouts"]["marks"], **(marks or {})}}
    return Plan.model_validate({**tables, **strategy, "layouts": layouts})


def shapes(plan: Plan, gradients: bool = True) -> tuple[list[int], list[int], dict[str, str]]:
    """Of the logits on the first rank: as the loss takes them, as anybody else; how they lie for the loss.

    `gradients`: as in training, else as in an evaluation, which is derived by itself.
    """
    ids_BS = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    batch = Batch(ids_BS, ids_BS, None)
    with _fake_ranks(plan.ranks, 0) as group:
        model = apply(build_on_meta(source_of(plan, BYTES).config), plan, make_world(plan, 0, CPU, group, Peers()))
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            give_storage(model.module, CPU)
            derived = model.parts[0].derived
            with torch.set_grad_enabled(gradients):
                with leaving(derived):
                    own = logits_of(model, batch)
                lies = logits_placement(derived)
                assert lies is not None
                states = {axis: str(state) for axis, state in lies.states.items()}
                return [*own.shape], [*logits_of(model, batch).shape], states


def test_logits_are_in_parts_for_the_loss_alone() -> None:
    own, whole, states = shapes(plan_of("vocabulary and context"))
    assert own == [ROWS, LENGTH // 2, VOCABULARY // 2]
    assert whole == [ROWS, LENGTH, VOCABULARY]
    assert states == {"cp": "cut 1", "tp": "cut 2"}


def test_an_evaluation_is_cut_as_training_is() -> None:
    """Without gradients nothing moves back; ranks of the context axis would compute all tokens, to save that."""
    plan = plan_of("vocabulary and context")
    assert shapes(plan, gradients=False) == shapes(plan)


def test_a_mark_keeps_them_whole() -> None:
    own, whole, states = shapes(plan_of("vocabulary and context", marks=WHOLE))
    assert own == whole == [ROWS, LENGTH, VOCABULARY]
    assert states == {"cp": "same", "tp": "same"}


def test_an_uneven_vocabulary_over_two_axes_is_refused() -> None:
    plan = plan_of("vocabulary over two axes", 257)
    with pytest.raises(UserError, match=r"the 257 places of dim 0 of lm_head.weight do not divide by tq x tp=4"):
        legal(plan, build_on_meta(source_of(plan, BYTES).config))


def counted(plan: Plan) -> CountedStep:
    return counted_alone(plan, source_of(plan, BYTES), 0)[0]


def received(step: CountedStep, kind: str) -> float:
    return sum(nbytes for (_, one), nbytes in step.nbytes.items() if one == kind)


@pytest.mark.slow
def test_a_dry_run_shows_what_is_saved() -> None:
    vocabulary, low = 2**14, {"compute": "bfloat16"}
    parts = counted(plan_of("vocabulary over two", vocabulary, precision=low))
    whole = counted(plan_of("vocabulary over two", vocabulary, WHOLE, precision=low))
    one = 2 * ROWS * LENGTH * vocabulary  # bytes of all logits
    saved = sum(whole.memory.values()) - sum(parts.memory.values())
    # In parts half of the logits and of their gradient; whole, those of the rank's part are there beside them, too.
    assert one <= saved <= 2 * one
    assert received(whole, "all-gather") - received(parts, "all-gather") == pytest.approx(one / 2)
    more = received(parts, "all-reduce") - received(whole, "all-reduce")
    assert more == pytest.approx(3 * 4 * ROWS * LENGTH)  # of each token three numbers


def test_the_planner_counts_what_the_loss_moves() -> None:
    plan = plan_of("vocabulary over two")
    graph = sample_graph(build_on_meta(source_of(plan, BYTES).config), LENGTH, torch.float32)
    moves = plan_communication(plan, graph)
    assert [CollectiveTraffic(4.0 * LENGTH, 1), CollectiveTraffic(8.0 * LENGTH, 1)] == [*moves[-2:]]
    assert all(one.nbytes < 4 * LENGTH * VOCABULARY / 2 for one in moves)  # of no logits
