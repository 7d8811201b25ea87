"""Adapters that are not all alike: ranks and alphas by layer, layers without any, biases; beside peft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta
from tangram.models.lora.adapter_files import stored_adapters
from tangram.models.lora.adapters import Adapters, add_adapters, initial_adapters
from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.files import load
from tangram.schema.parallelism import LayoutsPlan
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training.tuning_tasks import (
    VOCABULARY,
    Traced,
    assert_as_expected,
    oracle,
    planned_by,
    run_each,
    saved_and_merged,
    write_folder,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

SET = {"data.sequence": "96", "data.global_batch": "4", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
STEPS = 3
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
JOBS: Mapping[str, tuple[LoraPlan, dict[str, Any]]] = {
    "bias": (LoraPlan(rank=4, alpha=16.0, targets=("q_proj", "v_proj"), lora_bias=True), {"lora_bias": True}),
    "patterns": (
        LoraPlan(
            rank=4, rslora=True, ranks={"model.layers.1.*.q_proj": 6, "v_proj": 2}, alphas={"v_proj": 32.0},
            exclude=("down_proj", "model.layers.0.mlp"), init="gaussian",
        ),
        {
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 6, "v_proj": 2}, "alpha_pattern": {"v_proj": 32.0},
            "exclude_modules": r".*\.down_proj|.*layers\.0\.mlp\..*", "init_lora_weights": "gaussian",
        },
    ),
    "all biases": (LoraPlan(rank=4, targets=("v_proj", "down_proj"), bias="all"), {"bias": "all"}),
    "biases beside": (LoraPlan(rank=4, targets=("v_proj", "down_proj"), bias="lora_only"), {"bias": "lora_only"}),
    "rows": (
        LoraPlan(rank=4, targets=("v_proj",), trainable_token_indices=(256, 10, 7)),
        {"trainable_token_indices": [256, 10, 7]},
    ),
    "layers": (LoraPlan(rank=4, targets=LINEAR, layers=(1,)), {"layers_to_transform": [1]}),
    "A as drawn": (LoraPlan(rank=4, alpha=16.0), {}),
}  # fmt: skip
"""In a job's words and in peft's."""
FROZEN: Mapping[str, tuple[str, ...]] = {"A as drawn": ("*.lora_A.*",)}
"""Of adapters what is not trained (LoRA-FA; Zhang et al. 2023)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 2: queries, keys and values have biases."""
    return write_folder(tmp_path_factory.mktemp("kinds"), family="qwen2", fields={"vocab_size": VOCABULARY - 1})


def _plan(folder: Path, lora: LoraPlan, way: str, frozen: tuple[str, ...] = ()) -> Plan:
    asked = load(folder / "sft.toml", {**SET, "data.cache": str(folder / "cache")})
    asked = asked.model_copy(update={"lora": lora, "model": asked.model.model_copy(update={"freeze": frozen})})
    return planned_by(WAYS[way], asked, steps=STEPS)


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], list[Traced]]:
    some = {job: ("one",) if job in ("layers", "biases beside") else WAYS for job in JOBS}
    plans = {
        (job, way): _plan(folder, JOBS[job][0], way, FROZEN.get(job, ())) for job, ways in some.items() for way in ways
    }
    return run_each(plans, folder / "runs")


@pytest.mark.parametrize("job", JOBS)
def test_losses_and_gradients_are_those_of_peft(
    folder: Path, ran: dict[tuple[str, str], list[Traced]], job: str
) -> None:
    lora, options = JOBS[job]
    expected = oracle(_plan(folder, lora, "one", FROZEN.get(job, ())), **options)
    for (own, way), ranks in ran.items():
        if own == job:
            assert_as_expected(ranks, expected, way, STEPS)


@pytest.mark.parametrize("job", JOBS)
def test_what_is_saved_is_read_merged_and_begun_with(folder: Path, tmp_path: Path, job: str) -> None:
    plan, adapter = _plan(folder, JOBS[job][0], "one", FROZEN.get(job, ())), tmp_path / "adapter"
    ids, logits = saved_and_merged(plan, adapter)
    with torch.no_grad():
        lora = JOBS[job][0].model_copy(update={"start": str(adapter)})
        started = _plan(folder, lora, "one", FROZEN.get(job, ()))
        again = build_unsharded(
            started, source_of(started, tokens_of(started)), torch.device("cpu"), values=True
        ).eval()
        torch.testing.assert_close(again(ids).logits, logits)
        assert (
            main(
                [
                    "checkpoint",
                    "convert",
                    str(plan.model.path),
                    str(tmp_path / "m"),
                    "--to",
                    "hf",
                    "--adapter",
                    str(adapter),
                ]
            )
            == 0
        )
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # another model for two ranks
def test_what_begins_as_weights_are_is_theirs_where_ranks_have_unlike_parts(tmp_path: Path) -> None:
    """Lengths of rows (DoRA), and rows of embeddings: of weights that TP does not cut evenly."""
    own = write_folder(tmp_path, family="qwen2", fields={"num_attention_heads": 3, "num_key_value_heads": 3})
    lora = LoraPlan(rank=4, dora=True, trainable_token_indices=(10, 256))
    plan = _plan(own, lora, "tp")
    heads = {"*.[qkv]_proj.weight": "(heads/tp d) h", "*.[qkv]_proj.bias": "(heads/tp d)"}
    heads |= {"*.o_proj.weight": "h (heads/tp d)"}
    marks = {name: text for name, text in heads.items() if "bias" not in name}
    layouts = LayoutsPlan(parameters={**heads, "*": "..."}, marks=marks, sizes={"d": 8})
    plan = plan.model_copy(update={"layouts": layouts})
    ((_, ranks),) = run_each({("dora", "tp"): plan}, tmp_path / "runs").items()
    expected = oracle(_plan(own, lora, "one"), trainable_token_indices=[10, 256])
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert ranks[0].norms == pytest.approx(expected.norms, rel=1e-4)


def test_frozen_adapters_begin_as_stored_ones_where_a_stage_has_some_of_them(folder: Path, tmp_path: Path) -> None:
    """They were left as drawn, for want of gradients; in one process they were refused."""
    job = "A as drawn"
    plan = _plan(folder, JOBS[job][0], "one", FROZEN[job])
    saved_and_merged(plan, tmp_path)
    model = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"))
    stored = {name for name, _ in stored_adapters(model, tmp_path, all_of_it=False)}
    assert stored == {name for name, _ in model.named_parameters() if ".lora_" in name}


def test_a_normal_begin_has_the_spread_of_peft(folder: Path) -> None:
    model = build_on_meta(source_of(*_of_job(folder)).config)
    add_adapters(model, Adapters(rank=16, alpha=16.0, init="gaussian", ranks={"q_proj": 4}))
    for name, value in initial_adapters(model, 0):
        if ".lora_A." in name:
            rank = 4 if "q_proj" in name else 16
            assert float(value.std()) == pytest.approx(1 / rank, rel=0.2), name


def _of_job(folder: Path) -> tuple[Any, Any]:
    asked = load(folder / "sft.toml")
    return asked, tokens_of(asked)


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "no bias": (
        {"lora_bias": True},
        "to the biases of layers, and model.layers.0.mlp.down_proj has none",
    ),
    "no such layer": ({"layers": [7]}, "lora.layers names 7, and the layers that lora.targets names are 0, 1"),
    "nothing left": ({"exclude": ["model.layers"]}, "leave no layer of lora.targets"),
    "no such row": (
        {"trainable_token_indices": [9999]},
        "indices has 9999, and there are 259 tokens",
    ),
    "rows twice": (
        {"trainable_token_indices": [1], "targets": ["embed_tokens"]},
        "_indices trains rows of it",
    ),
    "no rank": ({"ranks": {"q_prj": 2}}, 'lora.ranks names "q_prj", which fits no module'),
    "not there": ({"exclude": ["vision"]}, 'lora.exclude names "vision"'),
}


def test_what_is_refused(folder: Path) -> None:
    config = source_of(*_of_job(folder)).config
    for name, (options, why) in REFUSED.items():
        with pytest.raises(UserError) as refused:
            add_adapters(build_on_meta(config), Adapters(rank=2, alpha=2.0, **options))
        assert why in str(refused.value), name
    with pytest.raises(ValidationError, match="peft knows no bias of adapters with dora"):
        LoraPlan(lora_bias=True, dora=True)
