"""The test of the test: every mutant is refused and every right kernel accepted, on inputs that no rule was made on."""

from dataclasses import replace

import pytest
import torch

from bench._numerics.attention import emulated
from bench._numerics.cases import TENSORS, Case, Mask, Results
from bench._numerics.criterion import WAYS, Limits, by_offset, distances, judged, limits
from bench._numerics.inputs import Shape, drawn
from bench._numerics.mutant import mutated
from bench._numerics.mutants import MUTANTS
from bench._numerics.rivals import RIVALS, decibels
from tangram.kernels.lab.recipes import RECIPES, Accumulator, Freedom

INPUTS = {
    "outliers": drawn("outliers", Shape(tokens=101, width=16, mask=Mask(window=21)), seed=31),
    "channels": drawn("channels", Shape(tokens=101, width=16, mask=Mask(documents=(30, 71)), sinks=True), seed=32),
    "cross": drawn("normed", Shape(tokens=90, keys=120, width=16, mask=Mask(causal=False)), seed=33),
}
TRIED = {
    "outliers": ("bf16", "fp8 forward, bf16 backward"),
    "channels": ("fp8 per block, all of them", "nvfp4 forward, bf16 backward, K smoothed, delta high"),
    "cross": ("fp8 per tensor, dice for gradients", "int8, K smoothed, dP in bf16"),
}
BELOW_THE_NOISE = {"sums in bfloat16", "delta of the O that was cast", "E5M2 for E4M3: gradients"}
"""Mutants that change less than right kernels of a coarse recipe differ by; the page says where."""


def test_mutants_are_many_and_each_is_one_somewhere() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 25
    for mutant in MUTANTS:
        assert any(mutant.applies(recipe, case) for recipe in RECIPES.values() for case in INPUTS.values()), mutant.name


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, names in TRIED.items() for name in names])
def test_mutants_are_refused_and_right_kernels_accepted(law: str, name: str) -> None:
    recipe, case = RECIPES[name], INPUTS[law]
    own = limits(recipe, case)
    for freedom in (
        Freedom(tile=96, descending=True, seed=21),
        Freedom(tile=32, accumulate=Accumulator(4, 23), seed=22, jitter=2.0**-20, reciprocal=True),
    ):
        assert judged(emulated(recipe, case, freedom), own).accepted
    here = [one for one in MUTANTS if one.applies(recipe, case)]
    passed = {one.name for one in here if judged(mutated(one, recipe, case, own.emulation), own).accepted}
    assert len(here) > 40
    assert passed <= (BELOW_THE_NOISE if name != "bf16" else set())


def test_a_result_is_its_own_recipe_and_no_other() -> None:
    case = INPUTS["outliers"]
    own = limits(RECIPES["fp8 per tensor"], case)
    assert judged(own.emulation, own).worst == 0
    for name in ("bf16", "fp8 per tensor, E5M2 gradients", "fp8 per block", "mxfp8"):
        assert not judged(emulated(RECIPES[name], case), own).accepted
    assert not judged(own.true, own).accepted, "not even the truth is"


def test_what_is_not_finite_is_refused_by_all() -> None:
    case, recipe = INPUTS["outliers"], RECIPES["fp8 per tensor"]
    own = limits(recipe, case)
    spoiled = own.emulation._replace(dq=own.emulation.dq.index_fill(3, torch.tensor(0), torch.nan))
    assert judged(spoiled, own).where == "dQ, not finite"
    assert not any(accepts(spoiled, own.true, own.emulation, False) for accepts in RIVALS.values())


def test_another_shape_is_refused_and_another_dtype_is_not() -> None:
    own = limits(RECIPES["bf16"], INPUTS["outliers"], variants=(Freedom(tile=32),))
    assert judged(Results(*(one.bfloat16() for one in own.emulation)), own).accepted
    short = own.emulation._replace(dk=own.emulation.dk[:, :1])
    assert judged(short, own).where == "dK, (1, 1, 101, 16) for (1, 2, 101, 16)"


def test_limits_of_another_size_let_mutants_through() -> None:
    """That the rule can fail: with limits a thousand times as wide next to nothing is refused."""
    case, recipe = INPUTS["outliers"], RECIPES["fp8 forward, bf16 backward"]
    own = limits(recipe, case)
    wide = {name: {way: 1000 * own.limits[name][way] for way in WAYS} for name in TENSORS}
    loose = replace(own, limits=wide)
    doubled = Results(*(2 * one for one in own.emulation))
    assert not judged(doubled, own).accepted
    assert judged(doubled, loose).accepted


def test_differences_by_offset() -> None:
    products = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, total = by_offset(products), products.sum(0)
    wanted = [sum(float(total[i, i + d]) for i in range(5) if 0 <= i + d < 7) for d in range(-4, 7)]
    assert len(found) == 11
    assert found.tolist() == pytest.approx(wanted)


def test_one_diagonal_shows_in_its_offset() -> None:
    case = drawn("gaussian", Shape(tokens=96, width=16))
    own = limits(RECIPES["fp8 per tensor"], case)
    beside = case.v.roll(5, 2).repeat_interleave(2, 1)
    rows = own.true.o.square().sum(-1, keepdim=True).sqrt()
    off = own.emulation.o + 0.01 * beside * rows
    assert judged(own.emulation._replace(o=off), own).where == "O, offset"


def causal(tokens: int = 256) -> tuple[Case, Limits]:
    case = drawn("gaussian", Shape(tokens=tokens, width=32))
    return case, limits(RECIPES["fp8 per tensor"], case, variants=(Freedom(tile=32, seed=1),))


def test_transformer_engines_rule_accepts_nothing_and_everything() -> None:
    """All zeros, rows reversed and signs turned, under a causal mask; so research has found, and so it is."""
    _, own = causal()
    rule = RIVALS["transformer engine"]
    for spoil in (torch.zeros_like, lambda x: x.flip(2), torch.neg):
        spoiled = Results(*(spoil(one) for one in own.emulation))
        assert rule(spoiled, own.true, own.emulation, False)
        assert not judged(spoiled, own).accepted


def test_what_other_rules_miss_and_refuse() -> None:
    _, own = causal()
    right, true = own.emulation, own.true
    one_row = right._replace(dv=right.dv.clone())
    one_row.dv[:, :, 200] *= -1
    assert RIVALS["sage"](one_row, true, right, False), "a row does not show in a cosine"
    assert RIVALS["flash attention"](one_row, true, right, False), "nor in a largest difference"
    assert not judged(one_row, own).accepted
    assert not RIVALS["allclose"](right, true, right, False), "and a right fp8 kernel is not close"
    assert not RIVALS["torchao"](right, true, right, False)
    for name, accepts in RIVALS.items():
        assert accepts(true, true, right, False), f"{name}: the truth"


def test_signal_to_noise() -> None:
    x = torch.ones(10, dtype=torch.float64)
    assert decibels(x * 1.1, x) == pytest.approx(20)
    assert decibels(x * torch.nan, x) == -torch.inf


def test_distances_are_of_all_tensors_and_ways() -> None:
    case, own = causal(96)
    found = distances(own.emulation, own.true, own.true, case)
    assert {name: set(ways) for name, ways in found.items()} == {name: set(WAYS) for name in TENSORS}
    assert all(0 < value < 1 for ways in found.values() for value in ways.values())
