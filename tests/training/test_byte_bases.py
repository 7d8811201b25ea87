"""LoRA beside a base in 8 bits: codes and weights by plain formulas, the losses of one process on any mesh."""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tangram.models.lora.bases import BASES
from tangram.planner.local.model_costs import Counted
from tangram.planner.local.strategies import TENSOR, Strategy
from tangram.schema.files import load
from tangram.schema.plan import Plan
from tangram.schema.tuning import LoraPlan
from tangram.training.data import tokens_of
from tangram.training.state.build_model import source_of
from tests.training import tuning_tasks
from tests.training.tuning_tasks import Traced, oracle, planned_by, run_each, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for

Key = tuple[str, str]
SET = {"data.sequence": "88", "data.global_batch": "8", "optimiser.schedule": "constant", "optimiser.lr": "1e-3"}
"""All rows are cut to one length, as a derived model has a program for each."""
WAYS: Mapping[str, Strategy] = {
    "one": Strategy("one process", "dp=1", ("dp",), shard="dp"),
    "fsdp": Strategy("FSDP", "dp=2", ("dp",), shard="dp"),
    "tp": Strategy("tensor", "tp=2", (), (TENSOR,)),
    "pp": Strategy("2 stages", "pp=2 dp=1", ("dp",), stages=2),
}
STEPS, HALF = 4, 2
WIDE = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
"""Of which two ranks have 160 columns each: one square and a part of another."""
RESUMED: Mapping[Key, Key] = {(base, "resumed"): (base, "half") for base in ("int8", "fp8")}


def by_hand(base: str, weight_OI: Tensor) -> Tensor:
    """What is left of a weight."""
    if base == "int8":
        most_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=1e-30)
        return (weight_OI * (127 / most_O1)).round() * (most_O1 / 127)  # as bitsandbytes rounds
    found = weight_OI.clone()
    for top in range(0, weight_OI.shape[0], 128):
        for left in range(0, weight_OI.shape[1], 128):
            square = weight_OI[top : top + 128, left : left + 128]
            scale = square.abs().max().clamp(min=1e-30) / 448
            found[top : top + 128, left : left + 128] = (square / scale).to(torch.float8_e4m3fn).float() * scale
    return found


@pytest.mark.parametrize("base", ["int8", "fp8"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (130, 320), (1, 5)])
def test_a_weight_is_what_a_plain_formula_makes(base: str, rows: int, columns: int) -> None:
    weight_OI = torch.from_numpy(np.random.default_rng(0).standard_normal((rows, columns), np.float32) * 0.02)
    weight_OI[:1, :3] = 0  # of a row of zeros below
    weight_OI = torch.cat([torch.zeros(200, columns), weight_OI])  # rows and squares of which nothing is left
    form = BASES[base]
    kept = form.keep(weight_OI, lambda name, whole: whole)
    assert {name: kept[name].dtype for name in form.tensors} == form.tensors
    shape = tuple(weight_OI.shape)
    assert {name: tuple(kept[name].shape) for name in kept if name not in form.tensors} == form.buffers(shape)
    numbers = [torch.arange(n) for n in weight_OI.shape]
    made = form.make(kept, numbers[0], numbers[1], shape, torch.float32)
    torch.testing.assert_close(made, by_hand(base, weight_OI), rtol=1e-6, atol=1e-9)
    assert made.isfinite().all()
    some = numbers[0][100 : 150 + rows], numbers[1][columns // 2 :]  # a part of it stands for that part
    part = {name: kept[name][some[0]][:, some[1]] if name in form.tensors else kept[name] for name in kept}
    assert torch.equal(form.make(part, *some, shape, torch.float32), made[some[0]][:, some[1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("bytes"), fields=WIDE)
    gone = shutil.copytree(folder / "chat-model", folder / "gone") / "model.safetensors"
    save_file({name: torch.zeros_like(one) for name, one in load_file(gone).items()}, gone, metadata={"format": "pt"})
    return folder


def planned(folder: Path, base: str, way: str, model: str = "chat-model", steps: int = STEPS) -> Plan:
    more = {"model.path": str(folder / model), "data.cache": str(folder / "cache"), "lora.base": f'"{base}"'}
    lora = LoraPlan(rank=4, alpha=16.0, base=base)  # pyright: ignore[reportArgumentType]  one of its words
    asked = load(folder / "sft.toml", {**SET, **more}).model_copy(update={"lora": lora})
    return planned_by(WAYS[way], asked, steps=steps)


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[Key, Traced]:
    """Of the first rank; what goes on from a checkpoint does so where the weights that it began with are gone."""
    plans = {(base, way): planned(folder, base, way) for base in ("int8", "fp8") for way in WAYS}
    plans |= {(base, "half"): planned(folder, base, "fsdp", steps=HALF) for base in ("int8", "fp8")}
    plans |= {(base, "resumed"): planned(folder, base, "tp", "gone") for base in ("int8", "fp8")}
    return {key: ranks[0] for key, ranks in run_each(plans, folder / "runs", RESUMED).items()}


@pytest.mark.parametrize("base", ["int8", "fp8"])
def test_losses_and_gradients_are_those_of_peft_beside_such_weights_on_any_mesh(
    folder: Path, ran: dict[Key, Traced], monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    plain = oracle(planned(folder, base, "one"))
    found: Any = AutoModelForCausalLM.from_pretrained

    def quantised(*args: Any, **kwargs: Any) -> Any:
        model = found(*args, **kwargs)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.data = by_hand(base, layer.weight.detach())
        return model

    monkeypatch.setattr(tuning_tasks.AutoModelForCausalLM, "from_pretrained", quantised)
    expected = oracle(planned(folder, base, "one"))
    own = ran[base, "one"]
    for way in WAYS:
        assert ran[base, way].losses == pytest.approx(expected.losses, rel=1e-5), way
    assert own.losses != pytest.approx(plain.losses, rel=1e-6)
    assert own.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        assert np.abs(own.gradients[name] - value).max() <= 1e-5 + 1e-4 * np.abs(value).max(), name
    assert ran[base, "resumed"].losses == pytest.approx(expected.losses[HALF:], rel=1e-5)  # from codes, not weights


@pytest.mark.parametrize("base", ["int8", "fp8"])
def test_what_is_kept_is_a_byte_a_number(folder: Path, ran: dict[Key, Traced], base: str) -> None:
    for way, ranks in (("one", 1), ("fsdp", 2)):
        plan = planned(folder, base, way)
        counted = Counted(plan, source_of(plan, tokens_of(plan)).config)
        trained = sum(p.numel() for p in counted.model.parameters() if p.requires_grad)
        packed = sum(p.size for p in counted.costs(2).parameters if p.quantised)
        plain = sum(p.numel() for p in counted.model.parameters()) - trained - packed
        assert packed > 4 * plain
        expected = (packed + 4 * plain + 12 * trained) / ranks
        assert 0.95 * expected <= ran[base, way].kept_bytes <= 1.05 * expected, way
