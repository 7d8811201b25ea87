"""Experts without room for all: what is dropped on one process, and what is refused. On ranks: the oracle's cases."""

# ruff: noqa: N806  a tensor carries its dims in its name

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.build import build_on_meta
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan
from tangram.sharding.derive.problem.states import SAME, SEVERAL, cut
from tangram.training.data import BYTES, IGNORE, RankBatches
from tangram.training.mesh.local_parts import ResultPlacement
from tangram.training.mesh.world import World, make_world
from tangram.training.objective import expert_capacity
from tangram.training.objective.packing import model_inputs
from tangram.training.objective.router_loss import routers_in
from tangram.training.parallel.apply import apply
from tangram.training.state.build_model import source_of
from tangram.training.step import loop
from tangram.training.step.evaluate import evaluate, evaluate_unsharded
from tangram.training.step.optimiser_step import make_adamw
from tangram.training.trials.dry_run import (
    CountedStep,
    _fake_ranks,  # pyright: ignore[reportPrivateUsage]
    counted_alone,
)
from tests.training.mixtures import CPU, FIELDS, LENGTH, ROWS, as_batches, gradients, mixture, some_labels
from tests.training.oracle.axes import MIXTURES, WITH_EXPERTS
from tests.training.oracle.cases import write_models
from tests.training.oracle.dropping import dropping, kept
from tests.training.small import small_plan

KINDS = {**MIXTURES, "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}


def plan_of(factor: float = 0.7, **run: Any) -> Plan:
    run = {"expert_capacity": factor, **run}
    return small_plan(Path("text"), mesh="dp=1", model={"preset": None, "change": {}}, run=run)


def run_of(factor: float, by: str) -> Any:
    return plan_of().run.model_copy(update={"expert_capacity": factor, "drop_by": by})


@pytest.fixture
def world() -> Iterator[World]:
    with _fake_ranks(1, 0) as group:
        yield make_world(plan_of(), 0, CPU, group, Peers())


def model_of(kind: str) -> nn.Module:
    return mixture(kind, KINDS[kind])


def batches_of(*empty: int) -> RankBatches:
    """Micro-batches; the last rows of each are empty, so many."""
    micro = some_labels(len(empty))
    for (_, labels_BS), count in zip(micro, empty, strict=True):
        labels_BS[ROWS - count :] = IGNORE
        labels_BS[:, :2] = IGNORE  # a row of which some count is not empty
    return as_batches(micro)


# ------------------------------------------------------------ one process


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"drop_by": "position"}),
        ("qwen3_moe", {"recompute": ["model.layers.*"]}),
        ("deepseek_v3", {"drop_by": "position", "recompute": ["model.layers.*"]}),
        ("gpt_oss", {}),
    ],
)
def test_each_expert_takes_its_share_and_no_more(kind: str, run: dict[str, Any], world: World) -> None:
    plan, batches = plan_of(**run), batches_of(0, 1)
    model = model_of(kind)
    right = copy.deepcopy(model)
    shares: list[float] = []
    for batch, rows in zip(batches.micro, (ROWS, ROWS - 1), strict=True):
        with dropping(right, plan.run.expert_capacity, plan.run.drop_by) as found:
            logits = right(input_ids=batch.inputs_BS[:rows], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS[:rows].flatten(), reduction="sum")
        (loss / batches.counted).backward()
        shares += [rows * share / len(found) for share, _ in found]

    ours = apply(model, plan, world)
    done = loop.train_step(ours, make_adamw(ours.module, plan.optimiser), batches, lr=0.0)
    assert done.dropped == pytest.approx(sum(shares) / (2 * ROWS - 1))
    assert done.dropped > 0.25
    expected, ours_of = gradients(right), gradients(ours.module)
    norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
    assert done.norm == pytest.approx(norm, rel=1e-5)
    assert ours_of.keys() == expected.keys()
    for name, gradient in expected.items():
        wanted = gradient * min(1.0, plan.optimiser.clip_norm / norm)
        torch.testing.assert_close(ours_of[name], wanted, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("by", ["probs", "position"])
@pytest.mark.parametrize("low", [False, True], ids=["distinct", "many alike"])
def test_the_largest_are_found_digit_by_digit(by: str, low: bool, world: World) -> None:
    """Against choices taken one by one; in bfloat16 most weights are those of others, and earlier tokens go first."""
    generator = torch.Generator().manual_seed(len(by))
    model = model_of("qwen3_moe")
    ours = cast(Any, expert_capacity.Capacity(model, None, routers_in(model), run_of(0.0, by), world, world.group))
    for experts, factor in ((4, 0.5), (7, 1.1), (5, 3.0), (4, 0.01)):
        weights_TE = torch.rand(ROWS * LENGTH, experts, generator=generator)
        weights_TE = weights_TE.bfloat16() if low else weights_TE - 0.5  # of a sort that has some below zero
        top = weights_TE.float().topk(2)
        weights_TK, experts_TK = top.values.to(weights_TE.dtype), top.indices
        ours._factor = factor
        ours.before(model_inputs(None, batches_of(0).micro[0]))
        found_TK = ours.kept("model.layers.0.mlp.gate", 1, weights_TK, experts_TK, experts)
        assert torch.equal(found_TK, kept(weights_TK.float(), experts_TK, experts, factor, by))
        assert found_TK.all() == (factor == 3.0)
    assert low == (weights_TK.unique().numel() < weights_TK.numel() - 1)


def test_nothing_is_dropped_where_nothing_is_trained(world: World) -> None:
    model, batch = model_of("qwen3_moe"), batches_of(0).micro[0]
    right = float(evaluate_unsharded(copy.deepcopy(model), [batch]))
    ours = apply(model, plan_of(0.1), world)
    assert evaluate(ours, [batch]) == right
    ours.module.train()
    with pytest.raises(UserError, match=r"^run\.expert_capacity is over what all ranks train on at once"):
        ours.module(input_ids=batch.inputs_BS)


def test_with_room_for_all_or_none_asked_for_nothing_is_dropped(world: World) -> None:
    model, batches = model_of("qwen3_moe"), batches_of(0)
    (plain, asked) = (apply(copy.deepcopy(model), plan_of(factor), world) for factor in (0.0, 4.0))
    assert plain.parts[0].capacity is None
    assert not any(module._forward_hooks for module in plain.module.modules())
    for one in (plain, asked):
        loop.backward(one, batches)
    for name, gradient in gradients(asked.module).items():
        assert torch.equal(gradient, gradients(plain.module)[name])
    watched = asked.parts[0].capacity
    assert watched is not None
    assert float(watched.pop_dropped()) == 0


@pytest.mark.slow
def test_a_dry_run_counts_what_it_moves(tmp_path: Path) -> None:
    """Of each micro-batch one number; of each of two layers 256 for each of four experts, a round for eight bits."""
    write_models(tmp_path)
    tables = {**WITH_EXPERTS["experts and fsdp"][1].tables, "precision": {"compute": "bfloat16"}}
    tables["model"] = {"preset": None, "path": str(tmp_path / "qwen3_moe.json"), "change": {}}
    found: list[list[CountedStep]] = []
    for factor in (0.0, 0.8):
        plan = small_plan(Path("text"), run={"expert_capacity": factor}, **tables)
        found.append(counted_alone(plan, source_of(plan, BYTES), 0))
        total = plan.data_ranks * plan.data.micro_batch * plan.data.sequence
    rounds = -(-(32 + (total - 1).bit_length()) // 8)
    for without, with_it in zip(*found, strict=True):
        micros = with_it.run.micros
        place = ("all ranks", "all-reduce")
        assert with_it.times[place] == without.times[place] + micros * (1 + 2 * rounds)
        numbers = 1 + 2 * rounds * 4 * 256
        assert with_it.nbytes[place] == without.nbytes[place] + micros * 1.5 * 8 * numbers
        assert {key for key in with_it.times if with_it.times[key] != without.times[key]} == {place}


# ------------------------------------------------------------ ranks


def test_ranks_that_see_the_same_tokens_count_them_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks of a model axis one counts what both see; each counts its own where tokens are cut."""
    model, places_T = model_of("qwen3_moe"), torch.arange(8)
    mesh = Mesh.parse("dp=1 tp=2")
    found: dict[tuple[str, int], tuple[list[int], bool]] = {}
    for rank in range(2):
        place = replace(world, mesh=mesh, index=rank, axes=replace(world.axes, model=("tp",)))
        run = run_of(1.0, "probs")
        ours = cast(Any, expert_capacity.Capacity(model, None, routers_in(model), run, place, place.group))
        for state in (SAME, SEVERAL, cut(0), cut(1)):
            lies = ResultPlacement({"tp": state}, Mesh.parse("tp=2"), {"tp": rank}, {})
            monkeypatch.setattr(expert_capacity, "result_placement", lambda *_, lies=lies: lies)
            if state == cut(1):
                with pytest.raises(UserError, match="is no whole rows on each rank"):
                    ours._part("gate", 1, places_T, places_T >= 0)
            else:
                here_T, counts_T, own = ours._part("gate", 1, places_T, places_T >= 0)
                assert len(here_T) == len(counts_T)
                found[state.kind, rank] = here_T.tolist(), own
    every = [*range(8)]
    assert found["same", 0] == found["several", 0] == (every, True)
    assert found["same", 1] == found["several", 1] == (every, False)
    assert found["cut", 0] == (every[:4], True)
    assert found["cut", 1] == (every[4:], True)


# ------------------------------------------------------------ refusals


def test_models_whose_routers_do_not_say_what_they_choose_are_refused() -> None:
    dense = build_on_meta(AutoConfig.for_model("qwen3", **FIELDS))
    with pytest.raises(UserError, match=r"^run\.expert_capacity is of experts, and Qwen3ForCausalLM has no routers"):
        expert_capacity.refuse(dense, plan_of())
    expert_capacity.refuse(dense, plan_of(0.0))
    for kind in KINDS:
        expert_capacity.refuse(build_on_meta(AutoConfig.for_model(kind, **{**FIELDS, **KINDS[kind]})), plan_of())
    other = build_on_meta(AutoConfig.for_model("jetmoe", **FIELDS, num_local_experts=4, kv_channels=4))
    with pytest.raises(UserError, match="needs routers that give the experts of each token and their weights"):
        expert_capacity.refuse(other, plan_of())
