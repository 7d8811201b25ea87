"""Moments of 8 bits: the updates of bitsandbytes, those of one process on any mesh, saved and read as they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tangram.errors import UserError
from tangram.layout import Layout, LayoutError, Mesh, Region, region
from tangram.layout.blocks import flat_blocks, refuse_cut_blocks, shape_of_blocks
from tangram.planner.legality.engine import Facts
from tangram.planner.legality.trainer_support import KINDS, RULES
from tangram.planner.local.estimate import estimate
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.peak_memory import STATES
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.planner.space.grid import grid
from tangram.planner.space.optimisers_and_offload import OPTIMISERS
from tangram.schema.files import load
from tangram.schema.optimiser import OptimiserPlan, RuleName
from tangram.schema.plan import Plan
from tangram.training.run.launch import run_ranks
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tangram.training.updates.update_rules import BLOCK, DECODED_AT_ONCE
from tests.training.chat import write_chat
from tests.training.data.test_chat import CHATML, tokenizer_of
from tests.training.tuning_tasks import VOCABULARY, Traced, counted_for, run_each, run_in_turn, write_folder

# ---------------------------------------------------------------- the arithmetic


def adamw(p: torch.nn.Parameter, *, lr: float, rule: str = "adamw-8bit", **keys: Any) -> RuledOptimiser:
    settings: dict[str, Any] = {"rule": rule, "lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **keys}
    return RuledOptimiser([p], torch.float32, **settings)


def dynamic(signed: bool) -> np.ndarray[Any, Any]:
    """The tables by their definition."""
    more = 0 if signed else 1
    parts = [
        10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / 2 ** (i + more)) for i in range(7) for j in range(2 ** (i + more))
    ]
    return np.sort([*parts, *([-p for p in parts] if signed else []), 0.0, 1.0]).astype(np.float32)


def coded(values: np.ndarray[Any, Any], signed: bool) -> np.ndarray[Any, Any]:
    """What is left of numbers, with plain numpy."""
    table, out = dynamic(signed), np.empty_like(values)
    for first in range(0, values.size, BLOCK):
        some = values[first : first + BLOCK]
        most = np.abs(some).max()
        out[first : first + BLOCK] = table[np.abs(some[:, None] / (most or 1) - table).argmin(1)] * most
    return out


@pytest.mark.parametrize("shape", [(64, 256), (5000,), (33, 130)])
def test_it_is_what_plain_numpy_makes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    own = adamw(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    w = p.detach().numpy().reshape(-1).astype(np.float64)
    first, second = (np.zeros(w.size, np.float32) for _ in range(2))
    for step in range(1, 5):
        p.grad = torch.randn(shape) * 10.0 ** (-step)
        p.grad.view(-1)[: BLOCK + 7] = 0  # a block of which nothing is left
        own.step()
        g = p.grad.numpy().reshape(-1)
        first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g * g
        w = w * (1 - 1e-3) - 1e-2 / (1 - 0.9**step) * first / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        np.testing.assert_allclose(p.detach().numpy().reshape(-1), w, atol=2e-5)
        first, second = coded(first.astype(np.float32), True), coded(second.astype(np.float32), False)
    state = own.state[p]
    assert state["state1"].dtype == torch.uint8
    assert sum(one.nbytes for one in state.values()) <= 2 * p.numel() + 8 * (p.numel() // BLOCK + 1) + 4


@pytest.mark.parametrize("later", [0.0, 1e-9])  # of a table by itself, and of one that is the head, too
def test_a_token_that_is_rare_moves_no_further_than_others(later: float) -> None:
    """unslothai/unsloth-zoo#962: where codes lose the second moment beside larger ones, the first was divided by eps.

    Here of rows that share a block: once a gradient a ten-thousandth of another's, and then none.
    """
    rows = [torch.nn.Parameter(torch.zeros(256, 64)) for _ in range(2)]
    exact = torch.optim.AdamW(rows[1:], lr=1e-3, weight_decay=0.0)
    own = adamw(rows[0], lr=1e-3)
    for step in range(6):
        for p in rows:
            p.grad = torch.full(p.shape, later)
            p.grad[0] = 1.0
            p.grad[1] = later if step else 1e-4
        own.step()
        exact.step()
    moved = [p.detach()[1].abs() for p in rows]
    assert bool((moved[0] <= moved[1]).all())
    assert bool((moved[0] > 0).all())
    torch.testing.assert_close(rows[0][0], rows[1][0], rtol=1e-3, atol=0.0)


def test_parts_of_a_large_parameter_are_updated_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values, gradients = torch.randn(3, 1000), [torch.randn(3, 1000) for _ in range(3)]
    found: list[torch.Tensor] = []
    for at_once in (DECODED_AT_ONCE, 512):
        monkeypatch.setattr("tangram.training.updates.update_rules.DECODED_AT_ONCE", at_once)
        p = torch.nn.Parameter(values.clone())
        own = adamw(p, lr=1e-2)
        for p.grad in gradients:
            own.step()
        found.append(p.detach())
    assert torch.equal(*found)


def test_masters_are_updated_and_rounded() -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 256)
    low, high = (torch.nn.Parameter(x) for x in (values.bfloat16(), values.bfloat16().float()))
    for p in (low, high):
        own = adamw(p, lr=1e-4)
        for step in range(3):
            p.grad = torch.full(values.shape, 0.5 + step, dtype=p.dtype)
            own.step()
        assert ("master" in own.state[p]) == (p is low)
    assert torch.equal(low.detach(), high.detach().bfloat16())
    assert torch.equal(low.detach(), values.bfloat16()) is False


@pytest.mark.parametrize("kind", ["masters", "8-bit"])
def test_a_run_without_memory_updates_too(kind: str) -> None:
    """There a step has no number that could be read."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        p = torch.nn.Parameter(torch.zeros(64, 256, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        own = adamw(p, lr=1e-3, rule="adamw-8bit" if kind == "8-bit" else "adamw")
        own.step()
        own.step()
        assert sum(one.nbytes for one in own.state[p].values()) == (4 + (2 if kind == "8-bit" else 8)) * p.numel() + (
            516 if kind == "8-bit" else 4
        )


# ---------------------------------------------------------------- where blocks lie

MESH = Mesh.parse("dp=2 tp=2")


@pytest.mark.parametrize(
    ("shape", "text", "fits"),
    [
        ((8, 512), "o/dp i", True), ((8, 512), "o i/tp", True), ((8, 512), "o/tp i/dp", True), ((8, 512), "o i", True),
        ((7, 512), "o/dp i", True), ((8, 256), "o i/tp", False), ((4, 2, 512), "e/dp o i/tp", True),
        ((8, 128), "o/dp i", True), ((6, 128), "o/dp i", False), ((15, 128), "o/dp i", True),
        ((8, 96), "o/dp i", False), ((16, 96), "o/dp i", True), ((16, 96), "o i/dp", False),
        ((1024,), "o/dp", True), ((1000,), "o/dp", False),
    ],
)  # fmt: skip
def test_parts_have_whole_blocks_or_are_refused(shape: tuple[int, ...], text: str, fits: bool) -> None:
    layout = Layout.parse(text).bind(shape)
    if not fits:
        with pytest.raises(LayoutError, match="cuts blocks of 256 consecutive numbers apart"):
            refuse_cut_blocks(layout, shape, BLOCK, MESH)
        return
    refuse_cut_blocks(layout, shape, BLOCK, MESH)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    blocks = np.arange(np.prod(shape_of_blocks(shape, BLOCK))).reshape(shape_of_blocks(shape, BLOCK))
    for rank in range(MESH.size):
        part = region(layout, MESH, rank)
        own, kept = _picked(numbers, part), _picked(blocks, flat_blocks(part, shape, BLOCK))
        assert np.array_equal(np.unique(own // BLOCK), np.unique(kept))
        assert np.array_equal(own[::BLOCK] // BLOCK, kept)  # in the order in which they lie there


def _picked(whole: np.ndarray[Any, Any], part: Region) -> np.ndarray[Any, Any]:
    (box,) = part.boxes
    return whole[np.ix_(*[[i for a, b in one for i in range(a, b)] for one in box])].reshape(-1)


# ---------------------------------------------------------------- on ranks

SET = {
    "data.sequence": "64", "data.global_batch": "4", "optimiser.schedule": "constant", "optimiser.lr": "3e-3",
    "optimiser.weight_decay": "0.1", "optimiser.moments": '"8-bit"',
}  # fmt: skip
STEPS = 6
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
    "fsdp x tp": Strategy("FSDP x TP", "dp=2 tp=2", ("dp",), (TENSOR,), "dp"),
}
RESUMED = {("resumed", "tp"): ("half", "fsdp"), ("resumed", "one"): ("half", "fsdp")}
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("eight"), fields={"vocab_size": VOCABULARY - 1})
    model = write_chat(folder / "wide", fields=WIDE)
    tokenizer_of(model)
    (model / "chat_template.jinja").write_text(CHATML)
    text = (folder / "sft.toml").read_text().replace("chat-model", "wide").replace("lora.rank = 4\n", "")
    (folder / "full.toml").write_text(text)
    return folder


@cache
def counted(job: Path, **change: str) -> Counted:
    """What a model costs, whatever its optimiser is."""
    asked = load(job, {**SET, "data.cache": str(job.parent / "cache"), **change})
    return counted_for(asked)


def planned(folder: Path, way: str, steps: int = STEPS, **more: str) -> Plan:
    asked = load(folder / "full.toml", {**SET, "data.cache": str(folder / "cache"), **more})
    change = {key: value for key, value in more.items() if key.startswith("model.")}
    plan = plan_of(WAYS[way], asked, counted(folder / "full.toml", **change), 2)
    return plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps})})


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], Traced]:
    """Of the first rank."""
    plans = {("all", way): planned(folder, way) for way in ("one", "fsdp", "tp")}
    plans["plain", "one"] = planned(folder, "one", **{"optimiser.moments": '"as masters"'})
    plans["half", "fsdp"] = planned(folder, "fsdp", 3)
    plans |= {key: planned(folder, key[1]) for key in RESUMED}
    return {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", RESUMED).items()}


def test_any_mesh_has_the_losses_of_one_process(ran: dict[tuple[str, str], Traced]) -> None:
    one = ran["all", "one"]
    assert one.losses[-1] < one.losses[0] - 0.3
    assert one.losses[2:] != pytest.approx(ran["plain", "one"].losses[2:], rel=1e-5)
    for way in ("fsdp", "tp"):
        assert ran["all", way].losses == pytest.approx(one.losses, rel=3e-5), way


def test_it_goes_on_elsewhere_with_the_same_codes(ran: dict[tuple[str, str], Traced]) -> None:
    for key in RESUMED:
        assert ran[key].losses == pytest.approx(ran["all", "one"].losses[3:], rel=3e-5), key


def test_what_is_kept_is_what_is_predicted(folder: Path, ran: dict[tuple[str, str], Traced]) -> None:
    from tangram.hardware.measuring.rates import rates

    for key in (("all", "one"), ("all", "fsdp"), ("plain", "one")):
        plan = planned(folder, key[1], **({"optimiser.moments": '"as masters"'} if key[0] == "plain" else {}))
        costs = counted(folder / "full.toml").costs(2)
        memory = estimate(plan, costs, costs, rates()).memory
        assert ran[key].kept_bytes == pytest.approx(memory.parameters + memory.optimiser, rel=0.02), key
    assert ran["all", "one"].kept_bytes < 0.55 * ran["plain", "one"].kept_bytes


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pp", "fsdp x tp"])
def test_more_meshes_have_the_losses_of_one_process(folder: Path, ran: dict[tuple[str, str], Traced], way: str) -> None:
    skip = {"optimiser.moments_skip": '["*.embed_tokens.weight", "lm_head.weight"]'}  # of 259 rows, which 4 ranks cut
    more = skip if way == "fsdp x tp" else {}
    found: dict[str, list[Traced]] = {"one": [ran["all", "one"]]}
    for one in (way, "one") if more else (way,):
        plan = planned(folder, one, **more)
        done: list[dict[tuple[str, str], Traced]] = run_ranks(
            run_in_turn, ({("more", one): plan}, folder / "runs", {}), world=plan.ranks, on_event=print, device="cpu"
        )
        found[one] = [rank["more", one] for rank in done]
    for rank in found[way]:
        assert rank.losses == pytest.approx(found["one"][0].losses, rel=3e-5)


def test_a_layout_that_cuts_blocks_apart_is_refused_once_for_all(folder: Path) -> None:
    narrow = {"model.change.intermediate_size": "384"}  # two ranks would have a block and a half of each row
    with pytest.raises(UserError, match=r"does not fit its moments of 8 bits: .*; set optimiser.moments_skip =") as why:
        planned(folder, "tp", **narrow)
    assert "(so it is of 1 more)" in str(why.value)
    skip = str(why.value).partition("moments_skip = ")[2]
    assert "layers.*.mlp" in skip
    assert planned(folder, "tp", **narrow, **{"optimiser.moments_skip": skip})
    assert planned(folder, "tp", **narrow, **{"optimiser.moments_skip": '["*.down_proj.weight"]'})
    assert planned(folder, "tp", **narrow, **{"optimiser.moments": '"as masters"'})


def test_what_is_planned_for_a_cluster_can_be_run() -> None:
    """Row by row: what the planner ranks, and what a job can say."""
    (rule,) = (one for one in RULES if one.name == "optimisers")
    some = grid(batch=8, sequence=32, optimiser=np.arange(len(OPTIMISERS)))
    holds = rule.holds(Facts(), some)
    assert {code for code, one in enumerate(holds) if one} == set(KINDS)
    assert {OPTIMISERS[code].name for code in KINDS} == set(get_args(RuleName)) == set(STATES)
    job = OptimiserPlan(lr=1e-3, betas=(0.8, 0.9), lr_of={"*": 1e-4})
    for kind in KINDS.values():
        made = OptimiserPlan.model_validate(job.of_kind(kind))
        assert (made.kind, made.lr_of, made.mistake(2)) == (kind, job.lr_of, None)
        assert OptimiserPlan.model_validate(made.of_kind("adamw")).kind == "adamw"
