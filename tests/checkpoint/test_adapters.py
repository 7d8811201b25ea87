"""LoRA adapters that peft has written, merged as a stream: what peft's own merge gives, and nothing else is changed."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.adapters import with_adapter
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.formats.opened import Opened
from tangram.checkpoint.save import save as save_own
from tangram.cli import main
from tangram.errors import UserError
from tangram.layout import Region
from tests.checkpoint.making import make, part, regions
from tests.checkpoint.peers.models import save

pytestmark = [
    # What peft says of patterns that fit parameters, and transformers of peft.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

CASES: Mapping[str, tuple[str, torch.dtype, Mapping[str, Any]]] = {
    "some layers, by a list": ("llama", torch.float32, {"target_modules": ["q_proj", "down_proj"], "r": 4}),
    "all linear layers, by an expression": (
        "qwen3", torch.float32, {"target_modules": r".*\.(self_attn|mlp)\..*_proj", "r": 3, "lora_alpha": 7},
    ),
    "patterns and the root of ranks": (
        "qwen3", torch.float32,
        {
            "target_modules": ["k_proj", "o_proj", "lm_head"], "r": 4, "use_rslora": True,
            "rank_pattern": {"layers.1.self_attn.k_proj": 9, "o_proj": 2},
            "alpha_pattern": {r"layers\.\d+\.self_attn\.o_proj": 5},
        },
    ),
    "of 16 bits": ("llama", torch.bfloat16, {"target_modules": "all-linear", "r": 5, "lora_alpha": 3}),
    "fused experts": (
        "qwen3_moe", torch.float32,
        {
            "target_modules": ["v_proj"], "target_parameters": ["experts.down_proj", "mlp.experts.gate_up_proj"],
            "r": 3, "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"0.mlp.experts.gate_up_proj": 11},
        },
    ),
}  # fmt: skip


def adapted(folder: Path, case: str) -> tuple[Any, Any]:
    """A model, saved beside an adapter of random A and B; both as peft has them."""
    from peft import LoraConfig, get_peft_model

    name, dtype, options = CASES[case]
    model: Any = save(name, folder / "hf", dtype=dtype)
    save_own({"model": model}, folder / "own")
    peft: Any = get_peft_model(model, LoraConfig(**options))
    torch.manual_seed(1)
    for key, value in peft.named_parameters():
        if "lora_" in key:
            value.data = torch.randn(value.shape).to(value.dtype) * 0.3
    peft.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model, peft.eval()


def convert(*arguments: object) -> None:
    assert main(["checkpoint", "convert", *map(str, arguments)]) == 0


def values_of(source: Opened) -> dict[str, Tensor]:
    """All elements, by plain indexing; pieces of any region."""
    found = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in source.specs.items()}
    for piece in source.pieces:
        shape = source.specs[piece.tensor].shape
        where = torch.cat([torch.arange(a, b) for a, b in piece.region.runs(shape)] or [torch.arange(0)])
        found[piece.tensor].view(-1)[where] = source.read(piece.place, piece.tensor).reshape(-1)
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_pefts_own_merge_gives(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    model, peft = adapted(tmp_path, case)
    exact = doubled(peft)
    before = open_any(tmp_path / "own")
    old = {name: value.clone() for name, value in values_of(before).items()}
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        attached = peft(tokens).logits
    merged = peft.merge_and_unload()
    theirs = merged.state_dict()

    capsys.readouterr()
    convert(tmp_path / "own", tmp_path / "merged", "--to", "hf", "--adapter", tmp_path / "adapter", "--config", tmp_path / "hf")
    assert f'"{tmp_path}/adapter" merged into {len(exact)} tensors' in capsys.readouterr().out
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    assert ours.keys() == theirs.keys() == old.keys()
    for name, value in ours.items():
        if name not in exact:
            assert torch.equal(value, old[name]), name
            continue
        assert not torch.equal(value, old[name]), name
        off, off_theirs = ((one.double() - exact[name]).abs() for one in (value, theirs[name]))
        if value.dtype == torch.float32:
            assert (off <= 1e-6 * exact[name].abs().max()).all(), name
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)
        else:
            assert (off <= off_theirs + 1e-6 * exact[name].abs()).all(), name
            step = torch.finfo(value.dtype).eps * exact[name].abs()
            assert ((value.double() - theirs[name].double()).abs() <= 2 * step).all(), name
            assert (off <= step / 2 * 1.001).all(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=model.dtype).eval()
    if model.dtype == torch.float32:
        with torch.no_grad():
            torch.testing.assert_close(loaded(tokens).logits, attached, rtol=1e-5, atol=1e-5)

    trail = json.loads((tmp_path / "merged" / "provenance.json").read_text())
    digest = hashlib.sha256((tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert trail["adapter"] == {"folder": "adapter", "sha256": digest, "tensors": len(exact)}


def doubled(peft: Any) -> dict[str, Tensor]:
    """What the merge is in float64: by peft's own increments, or for 16 bits, which it rounds, by the formula."""
    found: dict[str, Tensor] = {}
    for name, module in peft.base_model.model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        inside = name.replace(".base_layer", "")
        key = f"{inside}.{getattr(module, 'parameter_name', 'weight')}"
        a, b = (one["default"].weight.detach().double() for one in (module.lora_A, module.lora_B))
        weight = module.get_base_layer()
        weight = getattr(weight, getattr(module, "parameter_name", "weight")).detach().double()
        if weight.ndim == 3:
            a, b = a.view(len(weight), -1, a.shape[1]), b.view(len(b), -1, len(weight))
            found[key] = weight + module.scaling["default"] * torch.einsum("ore,eri->eoi", b, a)
        else:
            found[key] = weight + module.scaling["default"] * (b @ a)
    return found
