"""What is kept of modules that are recomputed, and what runs again: counted operator by operator."""

import gc
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, read_source
from tangram.models.building.initial import initial_tensors
from tangram.models.outlines.costs import ModelCosts, block_names, costs
from tangram.planner.local.estimate import estimate
from tangram.schema.job import RunPlan
from tangram.schema.plan import Plan, matches
from tangram.training.mesh.layout_to_torch import named_modules
from tangram.training.parallel.apply import blocks_of, materialise, recompute
from tests.planner.machine import rates
from tests.training.small import SMALL_MODEL, small_plan

LAYERS = ["model.layers.*"]
ROWS, LENGTH = 2, 16
ROOT = Path(__file__).parents[2]


class Counting(TorchDispatchMode):
    """Counts operators, and holds on to what they make only as far as somebody else does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[str(func.overloadpacket)] += 1
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return result

    def products(self) -> int:
        return sum(n for name, n in self.calls.items() if name in ("aten.mm", "aten.bmm", "aten.addmm"))

    def attentions(self) -> int:
        return sum(n for name, n in self.calls.items() if "dot_product" in name and "backward" not in name)


def model_of(plan: Plan) -> nn.Module:
    config = read_source("qwen3-1m", None, {**SMALL_MODEL, "vocab_size": 64}).config
    model = build_on_meta(config)
    materialise(model, torch.device("cpu"), initial_tensors(config, 3))
    recompute({model: blocks_of(model)}, plan)
    return model.train()


def ran(**run: Any) -> tuple[dict[str, Tensor], int, Counting]:
    """The gradients, the bytes that are held after a forward, and what ran in the backward."""
    model = model_of(small_plan(Path("text"), run=run))
    ids_BS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 64  # noqa: N806
    model(input_ids=ids_BS, use_cache=False)  # so that what is made once is there
    forward, backward = Counting(), Counting()
    with forward:
        loss = model(input_ids=ids_BS, use_cache=False).logits.float().logsumexp(-1).sum()
    gc.collect()
    held = sum(nbytes for storage, nbytes in forward.made.values() if storage() is not None)
    with backward:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, held, backward


def test_products_and_attention_do_not_run_again_where_they_are_kept() -> None:
    right, everything, plain = ran()
    keeps = ((), ("attention",), ("matmuls",), ("matmuls", "attention"))
    found = [ran(recompute=LAYERS, recompute_keep=list(keep)) for keep in keeps]
    for gradients, _, _ in found:
        assert gradients.keys() == right.keys()
        assert all(torch.equal(gradients[name], right[name]) for name in right)
    # Seven products a block, of which the last is needed by nothing in the block's backward.
    assert [again.products() - plain.products() for _, _, again in found] == [12, 12, 0, 0]
    assert [again.attentions() for _, _, again in found] == [2, 0, 2, 0]
    held = [held for _, held, _ in found]
    assert held == sorted(held)
    assert len({*held, everything}) == 5
    assert held[-1] < everything


def test_what_is_held_is_what_is_predicted() -> None:
    """The difference that products and attention make is the bytes that they make."""
    plan = small_plan(Path("text"), run={"recompute": LAYERS, "recompute_keep": ["matmuls", "attention"]})
    counted = costs(model_of(small_plan(Path("text"))), LENGTH, ROWS)
    low, high = (ran(recompute=LAYERS, recompute_keep=keep)[1] for keep in ([], ["matmuls", "attention"]))
    made = sum(kind.nbytes for part in counted.blocks for kind in part.made.values())
    assert high - low == pytest.approx(made, rel=0.02)
    for part in counted.blocks:
        assert {name: kind.flops > 0 for name, kind in part.made.items()} == {"matmuls": True, "attention": True}
        assert sum(kind.flops for kind in part.made.values()) == pytest.approx(part.forward_flops)
    one = found_memory(counted, plan)
    whole, none = (found_memory(counted, small_plan(Path("text"), run=run)) for run in ({}, {"recompute": LAYERS}))
    assert none < one <= whole


def found_memory(counted: ModelCosts, plan: Plan) -> float:
    return estimate(plan, counted, counted, rates(plan.ranks)).memory.activations


def test_what_is_kept_takes_less_time_and_more_memory() -> None:
    counted = costs(model_of(small_plan(Path("text"))), LENGTH, ROWS)
    seconds = [
        estimate(plan, counted, counted, rates(plan.ranks)).seconds.products
        for plan in (
            small_plan(Path("text"), run=run)
            for run in (
                {},
                {"recompute": LAYERS, "recompute_keep": ["matmuls", "attention"]},
                {"recompute": LAYERS, "recompute_keep": ["matmuls"]},
                {"recompute": LAYERS},
            )
        )
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[1] < seconds[2] < seconds[3]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"recompute_keep": ["matmuls"]}, "no module is recomputed: name some in run.recompute"),
        ({"recompute": LAYERS, "recompute_keep": ["matmuls"], "compile": True}, "inside of a compiled block cannot"),
        ({"recompute": LAYERS, "recompute_keep": ["norms"]}, "recompute_keep"),
    ],
)
def test_what_cannot_be_kept_is_refused(run: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_plan(Path("text"), run=run)


@pytest.mark.parametrize(("patterns", "beside"), [(["*"], 4), (["model*"], 3)])
def test_a_pattern_that_fits_what_has_all_layers_inside_is_of_the_layers(patterns: list[str], beside: int) -> None:
    """Of the model as a whole nothing would be saved, and under FSDP torch raised an error of its own."""
    model = model_of(small_plan(Path("text"), run={"recompute": patterns}))
    found = {name for name, module in named_modules(model) if "forward" in vars(module)}
    assert found > {*block_names(model)}
    assert not found & {"", "model"}
    assert len(found) == 2 + beside  # embedding, norm, rotary embedding, and the head
    assert all(torch.equal(a, b) for a, b in zip(ran(recompute=patterns)[0].values(), ran()[0].values(), strict=True))


def test_what_has_all_layers_inside_is_refused_alone() -> None:
    with pytest.raises(UserError, match="one that has all layers inside"):
        model_of(small_plan(Path("text"), run={"recompute": ["model"]}))


def test_matmuls_are_kept_by_the_name_that_the_docs_give_and_by_their_former_one() -> None:
    row = next(
        line for line in (ROOT / "docs" / "planner.md").read_text("utf-8").splitlines() if "recompute_keep`" in line
    )
    named = re.findall(r'"(\w+)"', row)
    assert RunPlan.model_validate({"steps": 1, "recompute_keep": named}).recompute_keep == ("matmuls", "attention")
    assert RunPlan.model_validate({"steps": 1, "recompute_keep": ["products"]}).recompute_keep == ("matmuls",)


def test_full_is_all_layers_and_none_is_nothing() -> None:
    """As Megatron and torchtitan call it; of each type of model, whatever its layers are called."""
    full, none = (small_plan(Path("text"), run={"recompute": word}) for word in ("full", "none"))
    assert none.run.recompute == ()
    for name in ("llama", "gpt2", "gpt_neox", "qwen3_moe"):
        model = build_on_meta(AutoConfig.for_model(name, num_hidden_layers=3))
        named = [one for one, _ in named_modules(model) if matches(full.run.recompute, one)]
        outer = {one for one in named if not any(one.startswith(f"{other}.") for other in named)}
        assert outer == {*block_names(model)}, name
        assert len(outer) == 3
