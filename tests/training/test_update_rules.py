"""Rules of updates: the numbers of torch's own optimisers, what is refused, which parameter has which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import optimization

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, read_source
from tangram.schema.optimiser import OptimiserPlan
from tangram.training.run.launch import run_ranks
from tangram.training.step.optimiser_step import lr_at, make_adamw
from tangram.training.step.weight_decay import rules_of
from tangram.training.updates import update_rules
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tangram.training.updates.update_rules import RULES
from tests.training.optimiser_tasks import PARTS, differences

SETTINGS: dict[str, Any] = {
    "lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.9, "adjust_lr": "original",
}  # fmt: skip
Torch = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SAME_AS: dict[str, Torch] = {
    "sgd": lambda some: torch.optim.SGD(some, lr=3e-3, weight_decay=0.1),
    "sgd-momentum": lambda some: torch.optim.SGD(some, lr=3e-3, weight_decay=0.1, momentum=0.9),
    "adafactor": lambda some: torch.optim.Adafactor(some, lr=3e-3, weight_decay=0.1),
    "muon": lambda some: torch.optim.Muon(some, lr=3e-3, weight_decay=0.1, momentum=0.9),
    "muon, as large": lambda some: torch.optim.Muon(
        some, lr=3e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    ),
}
SHAPES = {"muon": [(7, 12), (12, 7), (1, 9)]}
ALL_SHAPES = [(7, 12), (12, 7), (1, 9), (13,), (1,), (3, 5, 4), ()]


def pairs(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], ...]:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    return tuple([nn.Parameter(value.to(one, copy=True)) for value in values] for one in (dtype, torch.float32))


def ruled(some: list[nn.Parameter], rule: str, **keys: Any) -> RuledOptimiser:
    settings: dict[str, Any] = {**SETTINGS, "rule": rule, **keys}
    return RuledOptimiser(some, torch.float32, **settings)


@pytest.mark.parametrize("at_once", [1 << 24, 100])
@pytest.mark.parametrize("name", SAME_AS)
def test_it_is_what_torch_makes(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_rules, "AT_ONCE", at_once)
    rule, _, large = name.partition(", ")
    ours, theirs = pairs(SHAPES.get(rule, ALL_SHAPES))
    keys = {**SETTINGS, "adjust_lr": "match_rms_adamw" if large else "original"}
    own, other = ruled(ours, rule, **keys), SAME_AS[name](theirs)
    for step in range(20):
        for one, its in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape) * 10.0 ** (step % 3 - 1)
            its.grad = one.grad.clone()
        own.step()
        other.step()
    for one, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, its, rtol=1e-6, atol=1e-6)
        found, wanted = own.state[one], other.state[its]
        for key in wanted:
            if wanted[key] is not None:
                torch.testing.assert_close(found[key], wanted[key], rtol=1e-5, atol=1e-7)
        assert {*wanted} <= {*found}


@pytest.mark.parametrize("rule", RULES)
def test_masters_are_updated_and_rounded(rule: str) -> None:
    low, high = pairs([(8, 16)], torch.bfloat16)
    high[0].data.copy_(low[0].detach())
    for some in (low, high):
        own = ruled(some, rule, lr=1e-4)
        for step in range(3):
            some[0].grad = torch.full((8, 16), 0.5 + step, dtype=some[0].dtype)
            own.step()
        assert ("master" in own.state[some[0]]) == (some is low)
    assert torch.equal(low[0].detach(), high[0].detach().bfloat16())


@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_without_gradient_is_left_as_it_is(rule: str) -> None:
    some, _ = pairs([(8, 16), (8, 16)])
    before = some[1].detach().clone()
    own = ruled(some, rule)
    some[0].grad = torch.ones(8, 16)
    own.step()
    assert torch.equal(some[1].detach(), before)
    assert some[1] not in own.state or not own.state[some[1]]


@pytest.mark.parametrize("rule", RULES)
def test_a_run_without_memory_updates_too(rule: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        p = nn.Parameter(torch.zeros(64, 256))
        p.grad = torch.zeros_like(p)
        own = ruled([p], rule)
        own.step()
        own.step()
        kept = {"sgd": 4, "adafactor": 4 * (64 + 256 + 1), "muon": 4 * 64 * 256, "sgd-momentum": 4 * 64 * 256}
        assert sum(one.nbytes for one in own.state[p].values()) == kept.get(
            rule, sum(one.nbytes for one in own.state[p].values())
        )


def test_stacked_matrices_are_one_each_to_muon() -> None:
    (stacked,), _ = pairs([(3, 5, 4)])
    apart = [nn.Parameter(one.clone()) for one in stacked.detach()]
    gradients = torch.randn(3, 5, 4)
    for some in ([stacked], apart):
        own = ruled(some, "muon")
        for one, grad in zip(some, [gradients] if some[0] is stacked else gradients, strict=True):
            one.grad = grad.clone()
        own.step()
    assert torch.equal(stacked.detach(), torch.stack([one.detach() for one in apart]))


def test_parts_on_ranks_are_updated_as_the_whole_is() -> None:
    """Cut along any dims, evenly or not, by groups of ranks of their own."""
    work = {rule: {**SETTINGS, "rule": rule} for rule in RULES if rule != "adamw-8bit"}
    for found in run_ranks(differences, work, world=4, on_event=print, device="cpu"):
        far = {key: off for key, off in found.items() if off > (2e-4 if key[0] == "muon" else 1e-6)}
        assert not far
        assert len(found) == len(work) * len(PARTS) - 1  # no vector is Muon's


# ---------------------------------------------------------------- which parameter has which


def rules(preset: str, **keys: Any) -> Mapping[str, str]:
    model = build_on_meta(read_source(preset, None, {}).config)
    return rules_of(model, OptimiserPlan.model_validate({"lr": 1e-3, **keys}))


def test_muon_is_for_matrices_of_layers() -> None:
    found = rules("qwen3-1m", name="muon")
    assert found["model.layers.0.mlp.up_proj.weight"] == "muon"
    others = {name.removeprefix("model.layers.") for name, rule in found.items() if rule != "muon"}
    assert {name for name in others if "norm" not in name} <= {"model.embed_tokens.weight", "lm_head.weight"}
    assert found["model.embed_tokens.weight"] == "adamw"
    assert {*rules("qwen3-1m", name="sgd").values()} == {"sgd"}
    assert {*rules("qwen3-1m", name="sgd", momentum=0.9).values()} == {"sgd-momentum"}


def test_what_is_no_matrix_within_layers_is_of_adamw() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv = nn.Linear(4, 6), nn.Conv1d(4, 4, 3)
            self.table, self.norm = nn.Embedding(9, 4), nn.LayerNorm([3, 4])
            self.experts, self.experts_bias = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 4, 6), (2, 6)))

    model = nn.Module()
    model.layers = nn.ModuleList([Layer()])
    model.head = nn.Linear(4, 9)
    found = rules_of(model, OptimiserPlan(name="muon", lr=1.0, no_decay=("*linear*",)))
    assert [name for name, rule in found.items() if rule == "muon"] == ["layers.0.experts", "layers.0.linear.weight"]


# ---------------------------------------------------------------- schedules and rates


def test_a_linear_schedule_is_that_of_transformers() -> None:
    steps, warm = 20, 5
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = cast(Any, optimization).get_linear_schedule_with_warmup(optimiser, warm, steps)
    wanted: list[float] = []
    for _ in range(steps):
        wanted.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    plan = OptimiserPlan(lr=0.3, schedule="linear", warmup_steps=warm, final_lr=0.0)
    found = [lr_at(step, steps, plan) for step in range(steps)]
    assert found[warm:] == pytest.approx(wanted[warm:], rel=1e-12)
    assert found[: warm - 1] == pytest.approx(wanted[1:warm], rel=1e-12)  # whose first step does nothing
    half = plan.model_copy(update={"final_lr": 0.5})
    assert lr_at(steps - 1, steps, half) == pytest.approx(0.3 * (0.5 + 0.5 / 15))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"name": "sgd", "eps": 1e-6}, 'only the optimiser "adamw" or "muon" has eps'),
        ({"name": "adafactor", "momentum": 0.9}, 'only the optimiser "sgd" or "muon" has momentum'),
        ({"name": "muon", "moments": "8-bit"}, 'only the optimiser "adamw" has moments'),
        ({"adjust_lr": "original"}, 'only the optimiser "muon" has adjust_lr'),
    ],
)
def test_keys_of_another_optimiser_are_refused(keys: dict[str, Any], said: str) -> None:
    mistake = OptimiserPlan.model_validate({"lr": 1e-3, **keys}).mistake(10)
    assert said in str(mistake)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError):
        OptimiserPlan.model_validate({"lr": 1e-3, "lr_of": {"*": 0.0}})


def test_adamw_alone_is_made_of_a_module() -> None:
    with pytest.raises(UserError, match=r'makes AdamW, and the plan has "sgd": take make_optimiser'):
        make_adamw(nn.Linear(2, 2), OptimiserPlan(name="sgd", lr=1.0))
