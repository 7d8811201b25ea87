"""Adapters beside a directory that is quantised already: its codes as they are; saved, resumed, exported."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tangram.checkpoint.store.commits import read_manifest
from tangram.cli import main
from tangram.errors import UserError
from tangram.models.lora import dynamic_codes, nf4
from tangram.models.lora.bases import BASES, Kept
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy, plan_of
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import prepare, tokens_of
from tangram.training.state.build_model import build_unsharded, source_of
from tests.training.tuning_tasks import Traced, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

SET = {"data.sequence": "96", "data.global_batch": "4", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
WIDE = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}  # rows of blocks of 128 of which one is short
STEPS, HALF = 3, 1
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}


def _fp8(shape: tuple[int, int], kept: Kept) -> dict[str, Tensor]:
    codes = kept["weight_fp8"].view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": kept["weight_squares"]}


def _nf4(shape: tuple[int, int], kept: Kept) -> dict[str, Tensor]:
    """As bitsandbytes writes it."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape), "nested_dtype": "float32"}
    state |= {"nested_blocksize": 256, "nested_offset": float(kept["weight_mean"])}
    return {
        "weight": kept["weight_nf4"].reshape(-1, 1),
        "weight.absmax": kept["weight_absmax"].reshape(-1),
        "weight.nested_absmax": kept["weight_groups"],
        "weight.quant_map": torch.tensor(nf4.NORMAL),
        "weight.nested_quant_map": dynamic_codes.table(torch.device("cpu")),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def _int8(shape: tuple[int, int], kept: Kept) -> dict[str, Tensor]:
    return {"weight": kept["weight_int8"], "SCB": kept["weight_rows"]}


STORED: Mapping[str, tuple[Callable[[tuple[int, int], Kept], dict[str, Tensor]], dict[str, Any]]] = {
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "int8": (_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model, and beside it the same quantised, and that with its weights made again from the codes."""
    folder = write_folder(tmp_path_factory.mktemp("stored"), fields=WIDE)
    plain = load_file(folder / "chat-model" / "model.safetensors")
    for base, (stored, settings) in STORED.items():
        shutil.copytree(folder / "chat-model", own := folder / base)
        tensors: dict[str, Tensor] = {}
        for name, value in plain.items():
            module = name.removesuffix(".weight")
            if name.endswith("_proj.weight"):
                kept = BASES[base].keep(value, lambda _, whole: whole)
                found = stored((value.shape[0], value.shape[1]), kept)
                tensors |= {f"{module}.{key}": one.contiguous() for key, one in found.items()}
            else:
                tensors[name] = value
        save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert main(["checkpoint", "convert", str(folder / "fp8"), str(folder / "again"), "--to", "hf", "--dequantise",
                 "--dtype", "float32"]) == 0  # fmt: skip
    return folder


def _plan(folder: Path, model: str, lora: LoraPlan, way: str, steps: int = STEPS) -> Plan:
    asked = load(folder / "sft.toml", {**SET, "model.path": str(folder / model), "data.cache": str(folder / "cache")})
    asked = asked.model_copy(update={"lora": lora})
    prepare(asked.data, tokens_of(asked), lambda event: None)
    plan = plan_of(WAYS[way], asked, Counted(asked, source_of(asked, tokens_of(asked)).config), 2)
    return plan.model_copy(update={"run": plan.run.model_copy(update={"steps": steps})})


RESUMED = {("fp8", "resumed"): ("fp8", "half")}


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[tuple[str, str], Traced]:
    """By directory and way; "weights" are of the plain model, quantised by the job."""
    plans = {("fp8", way): _plan(folder, "fp8", LoraPlan(rank=4, base="fp8"), way) for way in WAYS}
    plans |= {("nf4", way): _plan(folder, "nf4", LoraPlan(rank=4, base="nf4"), way) for way in ("one", "fsdp", "tp")}
    plans["int8", "one"] = _plan(folder, "int8", LoraPlan(rank=4, base="int8"), "one")
    plans["fp8", "half"] = _plan(folder, "fp8", LoraPlan(rank=4, base="fp8"), "fsdp", HALF)
    plans["fp8", "resumed"] = _plan(folder, "fp8", LoraPlan(rank=4, base="fp8"), "tp")
    for base in STORED:
        plans[base, "weights"] = _plan(folder, "chat-model", LoraPlan(rank=4, base=base), "one")
    plans["again", "one"] = _plan(folder, "again", LoraPlan(rank=4), "one")
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
    plan = _plan(folder, model, LoraPlan(rank=4, **fields), "one")
    with pytest.raises(UserError, match=why):
        build_unsharded(plan, source_of(plan, tokens_of(plan)), torch.device("cpu"), values=True)
