"""Adapters beside a directory that is quantised already: its codes as they are; saved, resumed, exported."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tangram.checkpoint.store.commits import read_manifest
from tangram.cli import main
from tangram.errors import UserError
from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training.stored import STORED, write_quantised
from tests.training.tuning_tasks import Traced, planned_by, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

SET = {"data.sequence": "88", "data.global_batch": "4", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
"""All rows are cut to one length, as a derived model has a program for each."""
WIDE = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}  # rows of blocks of 128 of which one is short
STEPS, HALF = 3, 1
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model, and beside it the same quantised, and that with its weights made again from the codes."""
    folder = write_folder(tmp_path_factory.mktemp("stored"), fields=WIDE)
    for base in STORED:
        write_quantised(folder / "chat-model", base)
    assert main(["checkpoint", "convert", str(folder / "fp8"), str(folder / "again"), "--to", "hf", "--dequantise",
                 "--dtype", "float32"]) == 0  # fmt: skip
    return folder


def planned(folder: Path, model: str, lora: LoraPlan, way: str, steps: int = STEPS) -> Plan:
    asked = load(folder / "sft.toml", {**SET, "model.path": str(folder / model), "data.cache": str(folder / "cache")})
    asked = asked.model_copy(update={"lora": lora})
    return planned_by(WAYS[way], asked, steps=steps)


ONE = "one"
RESUMED = {("fp8", "resumed"): ("fp8", "half")}


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], Traced]:
    """By directory and way; "weights" are of the plain model, quantised by the job."""
    plans = {("fp8", way): planned(folder, "fp8", LoraPlan(rank=4, base="fp8"), way) for way in WAYS}
    plans |= {("nf4", way): planned(folder, "nf4", LoraPlan(rank=4, base="nf4"), way) for way in ("one", "fsdp", "tp")}
    plans["int8", "one"] = planned(folder, "int8", LoraPlan(rank=4, base="int8"), "one")
    plans["fp8", "half"] = planned(folder, "fp8", LoraPlan(rank=4, base="fp8"), "fsdp", HALF)
    plans["fp8", "resumed"] = planned(folder, "fp8", LoraPlan(rank=4, base="fp8"), "tp")
    for base in STORED:
        plans[base, "weights"] = planned(folder, "chat-model", LoraPlan(rank=4, base=base), "one")
    plans["again", "one"] = planned(folder, "again", LoraPlan(rank=4), "one")
    return {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", RESUMED).items()}


@pytest.mark.parametrize("base", STORED)
def test_losses_are_those_of_the_same_codes_on_any_mesh(ran: dict[tuple[str, str], Traced], base: str) -> None:
    expected = ran[base, "weights"]
    assert ran[base, "one"].losses == expected.losses
    for (own, way), found in ran.items():
        if own == base and way in WAYS:
            assert found.losses == pytest.approx(expected.losses, rel=1e-5), way
            assert found.norms == pytest.approx(expected.norms, rel=1e-4), way


def test_losses_are_those_of_the_numbers_that_codes_stand_for(ran: dict[tuple[str, str], Traced]) -> None:
    assert ran["fp8", "one"].losses == pytest.approx(ran["again", "one"].losses, rel=1e-5)
    assert ran["fp8", "one"].kept_bytes < 0.5 * ran["again", "one"].kept_bytes


@pytest.mark.parametrize("base", STORED)
def test_what_is_kept_is_what_a_job_makes_of_the_same_numbers(folder: Path, base: Any) -> None:
    kept: list[dict[str, Tensor]] = []
    for model in (base, "chat-model"):
        plan = planned(folder, model, LoraPlan(rank=4, base=base), ONE)
        whole = build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
        kept.append(whole.state_dict())
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())


def test_it_goes_on_on_another_mesh(ran: dict[tuple[str, str], Traced]) -> None:
    assert ran["fp8", "resumed"].losses == pytest.approx(ran["fp8", "one"].losses[HALF:], rel=1e-5)


def test_a_whole_run_exports_weights_and_no_codes(folder: Path, tmp_path: Path) -> None:
    some = {**SET, "model.path": str(folder / "fp8"), "lora.base": '"fp8"', "data.cache": str(folder / "cache")}
    words = [word for key, value in some.items() for word in ("--set", f"{key}={value}")]
    out = ["--steps", "1", "-n", "1", "--out", str(tmp_path / "o")]
    assert main(["train", str(folder / "sft.toml"), *out, *words]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "o" / "export" / "config.json").read_text())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "o" / "export").state_dict()
    before = load_file(folder / "again" / "model.safetensors")
    assert {name for name, value in before.items() if torch.equal(exported[name], value)} == {
        name for name in before if not name.endswith("_proj.weight")
    }
    stored = read_manifest(max((tmp_path / "o" / "checkpoint").iterdir())).tensors
    assert any(name.endswith("weight_fp8") for name in stored)


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "no base": ("fp8", {}, 'are quantised .* or lora.base = "fp8" trains adapters beside them as they are'),
    "another base": ("fp8", {"base": "nf4"}, 'quantised in a way that lora.base = "nf4" does not have'),
    "a layer that has none": ("fp8", {"base": "fp8", "base_skip": ("down_proj",)}, "leave it out of lora.base_skip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(folder: Path, name: str) -> None:
    model, fields, why = REFUSED[name]
    plan = planned(folder, model, LoraPlan(rank=4, **fields), "one")
    with pytest.raises(UserError, match=why):
        build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
