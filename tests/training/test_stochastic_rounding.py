"""Stochastic rounding of bfloat16 parameters: right on average, the same bits on any mesh and after a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench._memory.counter import FlowCounter
from tangram.errors import UserError
from tangram.planner.local.peak_memory import ROUNDED_BYTES
from tangram.schema.optimiser import OptimiserPlan, Rounding, RuleName
from tangram.training.run.launch import run_ranks
from tangram.training.step.optimiser_step import make_adamw
from tangram.training.updates.ruled_optimiser import RuledOptimiser, round_into
from tangram.training.updates.update_rules import ParameterShards
from tests.training import test_optimisers
from tests.training.rounding_tasks import RULES, unlike
from tests.training.test_optimisers import HALF, planned, run_all

LOW = {
    "precision.compute": '"bfloat16"', "precision.parameters": '"bfloat16"', "precision.masters": '"bfloat16"',
    "optimiser.rounding": '"stochastic"',
}  # fmt: skip
folder = test_optimisers.folder


def rounded(
    values: Tensor, key: str = "", shards: ParameterShards | None = None, reduced: tuple[int, ...] = ()
) -> Tensor:
    found = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(found, values, key, shards or ParameterShards(tuple(values.shape)), reduced)
    return found


# ---------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("value", [1.0 + 2**-10, -1.0 - 2**-9, 3.0e-5, 2.0 - 2**-9, 1e-39])
def test_its_mean_is_the_number_and_it_is_one_of_both_neighbours(value: float) -> None:
    values = torch.full((1000, 400), value)
    found = rounded(values, "mean").double()
    below, above = float(found.min()), float(found.max())
    assert bool(((found == below) | (found == above)).all())
    exact = float(values[0, 0])
    assert below < exact < above
    share = (exact - below) / (above - below)
    deviation = math.sqrt(share * (1 - share) / values.numel())
    assert abs(float((found == above).double().mean()) - share) < 5 * deviation


def test_rows_columns_steps_and_parameters_are_drawn_apart() -> None:
    values = torch.full((512, 512), 1.0 + 2**-8)  # half way between two neighbours
    ones = {key: (rounded(values, key) > 1).double() - 0.5 for key in ("1:a", "2:a", "1:b")}
    least = 5 * 0.25 / 512
    for one, other in (("1:a", "2:a"), ("1:a", "1:b"), ("2:a", "1:b")):
        assert abs(float((ones[one] * ones[other]).mean())) < least
    a = ones["1:a"]
    for shifted in (a.roll(1, 0), a.roll(1, 1), a.T):
        assert abs(float((a * shifted).mean())) < least
    assert torch.equal(rounded(values, "1:a"), rounded(values, "1:a"))


def test_what_bfloat16_has_and_what_is_not_finite_stays() -> None:
    exact = torch.randn(64, 64).bfloat16().float()
    assert torch.equal(rounded(exact).float(), exact)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    torch.testing.assert_close(rounded(odd).float(), odd, rtol=0, atol=0, equal_nan=True)
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(nans).isnan().all()


@pytest.mark.parametrize("shape", [(7, 12), (4, 6, 5), (13,), ()])
def test_a_part_is_rounded_as_it_is_in_the_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape)
    whole = rounded(values, "k")
    for dim, n in enumerate(shape):
        places = torch.tensor([*range(0, n, 3)])
        own = tuple(places if d == dim else torch.arange(0) for d in range(len(shape)))
        part = rounded(values.index_select(dim, places), "k", ParameterShards(shape, own))
        assert torch.equal(part, whole.index_select(dim, places))
    if len(shape) == 2:
        assert torch.equal(rounded(values.T.contiguous().T, "k"), whole)  # however it lies in memory
        column = values[:, :1]  # a state of the rows
        cut = ParameterShards(shape, (torch.tensor([1, 2]), torch.tensor([3])))
        wanted = rounded(column, "k", ParameterShards(shape), (1,))
        assert torch.equal(rounded(column[1:3], "k", cut, (1,)), wanted[1:3])


# ---------------------------------------------------------------- the optimiser


def optimiser(
    rule: str, shape: tuple[int, ...], rounding: Rounding = "stochastic"
) -> tuple[nn.Parameter, RuledOptimiser]:
    p = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]  as training has it
    settings: dict[str, Any] = {
        "lr": 1e-3 if rule == "muon" else 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.9,
    }
    one = RuledOptimiser([p], torch.bfloat16, rounding=rounding, rule=rule, adjust_lr="original", **settings)
    return p, one


@pytest.mark.parametrize("rule", ["adamw", "adamw-8bit", "sgd", "sgd-momentum", "adafactor", "muon"])
def test_small_updates_add_up_that_are_lost_otherwise(rule: str) -> None:
    """As many as move a float32 parameter; a bfloat16 one stays where it is when it is rounded to the nearest."""
    torch.manual_seed(0)
    gradient = torch.rand(64, 80) + 0.5
    ends: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    both: tuple[Rounding, ...] = ("stochastic", "nearest")
    for rounding in both:
        p, one = optimiser(rule, (64, 80), rounding)
        for step in range(60):
            p.grad = gradient.clone()
            one.round_for(f"{step}")
            one.step()
        settings = {key: value for key, value in one.param_groups[0].items() if key != "params"}
        ends[rounding] = p.detach().double()
    exact = nn.Parameter(torch.ones(64, 80))
    other = RuledOptimiser([exact], torch.float32, **settings)
    for _ in range(60):
        exact.grad = gradient.clone()
        other.step()
    moved = float(1 - exact.detach().double().mean())
    assert moved > 1e-4
    assert float(1 - ends["stochastic"].mean()) == pytest.approx(moved, rel=0.1)
    assert abs(float(1 - ends["nearest"].mean()) - moved) > 0.5 * moved


def test_a_step_that_is_not_named_is_refused() -> None:
    p, one = optimiser("adamw", (4, 4))
    p.grad = torch.ones(4, 4)
    with pytest.raises(UserError, match="round_for"):
        one.step()
    one.round_for("0")
    one.step()
    with pytest.raises(UserError, match="round_for"):  # the same dice twice are no dice
        one.step()
    with pytest.raises(UserError, match="make_optimiser"):
        make_adamw(nn.Linear(2, 2).bfloat16(), OptimiserPlan(lr=1e-3, rounding="stochastic"), "bfloat16")


def test_other_masters_are_refused(folder: Path) -> None:
    for masters in ({}, {**LOW, "precision.masters": '"float32"'}):
        with pytest.raises(UserError, match=r"optimiser\.rounding: .*precision\.masters"):
            planned(folder, "sgd", "one", **{**masters, "optimiser.rounding": '"stochastic"'})


@pytest.mark.parametrize("rule", ROUNDED_BYTES)
def test_memory_of_an_update_is_what_the_planner_counts(rule: RuleName) -> None:
    p, one = optimiser(rule, (2048, 2048))
    one.param_groups[0]["weight_decay"] = 0.1  # which SGD makes a gradient of its own for
    for step in ("0", "1"):
        p.grad = torch.ones(2048, 2048)
        one.round_for(step)
        states = [x for x in one.state[p].values() if isinstance(x, Tensor)]
        with FlowCounter([p, p.grad, *states]) as counter:
            one.step()
    assert max(counter.flow.peaks.values()) / p.numel() == pytest.approx(ROUNDED_BYTES[rule], rel=0.05)


# ---------------------------------------------------------------- on ranks


def test_ranks_round_as_one_process_does_bit_for_bit() -> None:
    """With the same gradients; each of four ranks has a part, cut evenly, unevenly, in two dims, or all of it."""
    found: list[Mapping[tuple[str, str], int]] = run_ranks(unlike, RULES, world=4, on_event=print, device="cpu")
    for one in found:
        assert one
        assert {key: count for key, count in one.items() if count} == {}


def test_a_run_goes_on_with_the_same_bits_and_is_near_on_ranks(folder: Path) -> None:
    asked = {**LOW, "optimiser.lr": "1e-3"}
    ways = [("rates half", "fsdp"), ("rates resumed", "fsdp"), *(("rates", way) for way in ("one", "fsdp", "tp", "pp"))]
    plans = {key: planned(folder, *key, **asked) for key in ways}
    ran = run_all(folder, plans, "rounded", {("rates resumed", "fsdp"): ("rates half", "fsdp")})
    assert ran["rates resumed", "fsdp"].losses == ran["rates", "fsdp"].losses[HALF:]
    for way, near in (("fsdp", 1e-6), ("pp", 1e-6), ("tp", 2e-3)):  # TP's sums in bfloat16 are others
        assert ran["rates", way].losses == pytest.approx(ran["rates", "one"].losses, rel=near), way
