"""The loss of routers: that of transformers on one process, and what is refused. On ranks: the cases of the oracle."""

# ruff: noqa: N806  a tensor carries its dims in its name

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.build import build_on_meta
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan
from tangram.sharding.derive.problem.states import SAME, SEVERAL, State
from tangram.training.data import BYTES, IGNORE, RankBatches
from tangram.training.mesh.local_parts import ResultPlacement
from tangram.training.mesh.world import World, make_world, of_stage
from tangram.training.objective import router_loss
from tangram.training.parallel.apply import apply
from tangram.training.state.build_model import source_of
from tangram.training.step import loop
from tangram.training.step.evaluate import evaluate
from tangram.training.step.optimiser_step import make_adamw
from tangram.training.trials.dry_run import (
    CountedStep,
    _fake_ranks,  # pyright: ignore[reportPrivateUsage]
    counted_alone,
)
from tests.training.mixtures import CPU, FIELDS, LENGTH, ROWS, as_batches, gradients, mixture, some_labels
from tests.training.oracle.axes import EP, MIXTURES, WITH_EXPERTS
from tests.training.oracle.cases import write_models
from tests.training.small import small_plan
from tests.training.strategies import EXPERTS, FOUR_STAGES, FSDP, TWO_STAGES, Strategy, derived, with_experts
from tests.training.zoo import tiny

KINDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
OTHERS = [
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "jamba",
    "jetmoe",
    "laguna",
    "mellum",
    "minimax",
    "minimax_m2",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
]
WEIGHT = 0.5


def plan_of(**changes: Any) -> Plan:
    run = {"router_loss": WEIGHT, **changes.pop("run", {})}
    return small_plan(Path("text"), mesh="dp=1", model={"preset": None, "change": {}}, run=run, **changes)


@pytest.fixture
def world() -> Iterator[World]:
    with _fake_ranks(1, 0) as group:
        yield make_world(plan_of(), 0, CPU, group, Peers())


def model_of(kind: str) -> nn.Module:
    return mixture(kind, KINDS[kind])


def batches_of(*ignored: int) -> RankBatches:
    """Micro-batches; of each so many tokens do not count."""
    micro = some_labels(len(ignored))
    for (_, labels_BS), count in zip(micro, ignored, strict=True):
        labels_BS.view(-1)[:count] = IGNORE
    return as_batches(micro)


def assert_alike(ours: nn.Module, right: nn.Module) -> None:
    one, other = gradients(ours), gradients(right)
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        assert float((gradient - other[name]).norm()) <= 1e-5 * float(other[name].norm()), name


# ------------------------------------------------------------ one process


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_transformers(kind: str, recomputed: bool, world: World) -> None:
    model, batches = model_of(kind), batches_of(0)
    right = copy.deepcopy(model)
    (batch,) = batches.micro
    found = right(input_ids=batch.inputs_BS, output_router_logits=True, use_cache=False)
    loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), batch.labels_BS.flatten())
    (loss + WEIGHT * found.aux_loss).backward()

    plan = plan_of(run={"recompute": ["model.layers.*"] if recomputed else []})
    ours = apply(model, plan, world)
    done = loop.train_step(ours, make_adamw(ours.module, plan.optimiser), batches, lr=0.0)
    assert done.loss == pytest.approx(loss.item(), rel=1e-5)
    assert done.router_loss == pytest.approx(WEIGHT * found.aux_loss.item(), rel=1e-5)
    assert done.router_loss > 1.02 * WEIGHT * 2  # two experts a token in balance
    norm = float(torch.cat([g.flatten() for g in gradients(right).values()]).norm())
    for gradient in gradients(ours.module).values():
        gradient *= max(1.0, norm / plan.optimiser.clip_norm)
    assert_alike(ours.module, right)


def test_micro_batches_count_by_their_tokens_and_only_those_with_labels(world: World) -> None:
    model, batches = model_of("qwen3_moe"), batches_of(5, 30, ROWS * LENGTH)
    right = cast(Any, copy.deepcopy(model))
    balance = sys.modules[type(right).__module__].load_balancing_loss_func
    expected = 0.0
    for batch in batches.micro[:2]:
        found = right(input_ids=batch.inputs_BS, output_router_logits=True, use_cache=False)
        mask_BS = (batch.labels_BS != IGNORE).long()
        own = balance(found.router_logits, 4, 2, mask_BS) * mask_BS.sum() / batches.counted
        loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")
        (loss / batches.counted + WEIGHT * own).backward()
        expected += WEIGHT * own.item()

    ours = apply(model, plan_of(), world)
    loop.backward(ours, batches)
    watched = ours.parts[0].routers
    assert watched is not None
    assert float(watched.pop_loss()) == pytest.approx(expected, rel=1e-5)
    assert float(watched.pop_loss()) == 0
    assert_alike(ours.module, right)


def test_nothing_is_kept_of_an_evaluation_or_of_what_is_computed_again(world: World) -> None:
    plan = plan_of(run={"recompute": ["model.layers.*"]})
    ours, batches = apply(model_of("qwen3_moe"), plan, world), batches_of(0)
    watched = cast(Any, ours.parts[0].routers)
    loop.backward(ours, batches)
    assert watched._seen == {}
    evaluate(ours, batches.micro)
    assert watched._seen == {}


def test_without_it_no_router_is_watched(world: World) -> None:
    model = model_of("qwen3_moe")
    ours = apply(model, plan_of(run={"router_loss": 0.0}), world)
    assert ours.parts[0].routers is None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_every_type_of_transformers_that_has_it(kind: str, world: World) -> None:
    model, batches = cast(nn.Module, tiny(kind, 0).float().train()), batches_of(0)
    right = copy.deepcopy(model)
    (batch,) = batches.micro
    found = right(input_ids=batch.inputs_BS, output_router_logits=True, use_cache=False)
    loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), batch.labels_BS.flatten())
    (loss + WEIGHT * found.aux_loss).backward()
    ours = apply(model, plan_of(), world)
    loop.backward(ours, batches)
    watched = ours.parts[0].routers
    assert watched is not None
    assert float(watched.pop_loss()) == pytest.approx(WEIGHT * found.aux_loss.item(), rel=1e-5)
    assert_alike(ours.module, right)


def test_the_loss_is_scaled_with_the_other(world: World) -> None:
    one, other = (apply(model_of("qwen3_moe"), plan_of(), world) for _ in range(2))
    for model, scale in ((one, 1.0), (other, 64.0)):
        loop.backward(model, batches_of(0), scale=scale)
    right = gradients(one.module)
    for name, gradient in gradients(other.module).items():
        torch.testing.assert_close(gradient / 64, right[name], msg=name)


IN_V = Strategy("pp=2 dp=2", ("dp",), (), FSDP, stages=FOUR_STAGES, schedule="ZBVZeroBubble")
OF_EXPERTS = Strategy("pp=2 dp=2 ep=2", ("dp",), (), with_experts("dp"), EXPERTS, stages=TWO_STAGES, axes=EP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank", "neighbours", "adds", "share"),
    [
        (IN_V, 0, 2, "dp", 1.0),  # of a V the first rank has both ends, and sends to stages 1 and 2
        (IN_V, 2, 2, "", 0.0),
        (OF_EXPERTS, 7, 1, "dp x ep", 1.5),
    ],
    ids=["both ends", "the middle", "the last"],
)
def test_a_dry_run_counts_what_stages_send_and_the_last_one_adds_up(
    strategy: Strategy, rank: int, neighbours: int, adds: str, share: float, tmp_path: Path
) -> None:
    """13 numbers for four experts go beside hidden states and back; five are added up, over the last stage's ranks."""
    write_models(tmp_path)
    tables = {**strategy.tables, "precision": {"compute": "bfloat16"}}
    tables["model"] = {"preset": None, "path": str(tmp_path / "qwen3_moe.json"), "change": {}}
    found: list[CountedStep] = []
    for weight in (0.0, WEIGHT):
        plan = small_plan(Path("text"), run={"router_loss": weight}, data={"micro_batch": 1}, **tables)
        found.append(counted_alone(plan, source_of(plan, BYTES), rank)[-1])
    without, with_it = found
    micros = with_it.run.micros
    more = {
        key: (times - without.times.get(key, 0), with_it.nbytes[key] - without.nbytes.get(key, 0))
        for key, times in with_it.times.items()
    }
    passed = neighbours * micros
    expected = {("pp", kind): (passed, passed * 8 * (3 * 4 + 1)) for kind in ("send", "receive")}
    expected |= {(adds, "all-reduce"): (micros, micros * share * 8 * (4 + 1))} if adds else {}
    assert {key: some for key, some in more.items() if any(some)} == expected


@pytest.mark.slow
def test_a_dry_run_counts_what_it_moves(tmp_path: Path) -> None:
    """Of each micro-batch a number for each of four experts and one of tokens; of four ranks each gets half more."""
    write_models(tmp_path)
    tables = {**WITH_EXPERTS["experts and fsdp"][1].tables, "precision": {"compute": "bfloat16"}}
    tables["model"] = {"preset": None, "path": str(tmp_path / "qwen3_moe.json"), "change": {}}
    found: list[list[CountedStep]] = []
    for weight in (0.0, WEIGHT):
        plan = small_plan(Path("text"), run={"router_loss": weight}, **tables)
        found.append(counted_alone(plan, source_of(plan, BYTES), 0))
    for without, with_it in zip(*found, strict=True):
        micros = with_it.run.micros
        place = ("all ranks", "all-reduce")
        assert with_it.times[place] == without.times[place] + micros
        assert with_it.nbytes[place] == without.nbytes[place] + micros * 1.5 * 8 * (4 + 1)
        assert {key for key in with_it.times if with_it.times[key] != without.times[key]} == {place}


# ------------------------------------------------------------ ranks


@pytest.mark.parametrize(("state", "part"), [(SAME, 1.0), (SEVERAL, 0.5)], ids=["same", "several"])
def test_ranks_that_see_the_same_count_once(
    state: State, part: float, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks with all tokens: where their gradients are added up, each has half of one."""
    ours, (batch,) = apply(model_of("qwen3_moe"), plan_of(), world), batches_of(7).micro
    logits_TE = torch.randn(ROWS * LENGTH, 4, requires_grad=True)
    watched = cast(Any, ours.parts[0].routers)

    def seen() -> tuple[Tensor, float]:
        watched._seen.update({f"model.layers.{n}.mlp.gate": (logits_TE, 0) for n in range(2)})
        (gradient,) = torch.autograd.grad(watched.loss(watched.sums(batch.labels_BS), 41), logits_TE)
        return gradient, float(watched.pop_loss())

    alone, told = seen()
    watched._world = replace(world, mesh=Mesh.parse("dp=1 tp=2"))
    monkeypatch.setattr(
        router_loss, "result_placement", lambda *_: ResultPlacement({"tp": state}, Mesh.parse("tp=2"), {"tp": 0}, {})
    )
    monkeypatch.setattr(router_loss, "summed", lambda x, group: 2 * x)
    gradient, half = seen()
    torch.testing.assert_close(gradient, part * alone)
    assert half == pytest.approx(told / 2)


@pytest.mark.parametrize(
    ("mesh", "ranks", "rank", "alike"),
    [
        ("pp=2 dp=2", 4, 2, [2, 3]),
        ("dp=2 pp=2", 4, 3, [1, 3]),
        ("pp=2 dp=1", 2, 1, [1]),
        ("pp=2 dp=2 tp=2", 8, 5, [4, 5, 6, 7]),
        ("dp=2 pp=2 tp=2", 8, 1, [0, 1, 4, 5]),
        ("pp=1 dp=2 tp=2", 4, 3, [0, 1, 2, 3]),
    ],
)
def test_the_ranks_of_a_stage_are_all_that_have_it(mesh: str, ranks: int, rank: int, alike: list[int]) -> None:
    tensor = ("tp",) if "tp" in mesh else ()
    schedule = "InterleavedZeroBubble" if "pp=1" in mesh else "1F1B"  # which takes several stages a rank
    lies = derived("dp") if tensor else FSDP
    strategy = Strategy(mesh, ("dp",), tensor, lies, stages=TWO_STAGES, schedule=schedule)
    plan = small_plan(Path("text"), **strategy.tables)
    with _fake_ranks(ranks, rank) as group:
        place = make_world(plan, rank, CPU, group, Peers())
        assert dist.get_process_group_ranks(of_stage(place)) == alike
        assert of_stage(place) is of_stage(place)


# ------------------------------------------------------------ refusals


def test_models_without_routers_or_without_such_a_loss_are_refused() -> None:
    dense = build_on_meta(AutoConfig.for_model("qwen3", **FIELDS))
    with pytest.raises(
        UserError, match=r"^run\.router_loss is of routers, and Qwen3ForCausalLM has none: leave it out$"
    ):
        router_loss.refuse(dense, plan_of())
    router_loss.refuse(dense, plan_of(run={"router_loss": 0.0}))
    biased = build_on_meta(AutoConfig.for_model("deepseek_v3", **{**FIELDS, **MIXTURES["deepseek_v3"]}))
    with pytest.raises(UserError, match="for DeepseekV3ForCausalLM it has none of this form"):
        router_loss.refuse(biased, plan_of())
