"""Dequantised repositories beside transformers' own dequantising, and DeepSeek-V3's layout in every structure."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.cli import main
from tangram.training.state.load_weights import load_pretrained
from tests.checkpoint.peers.models import save
from tests.checkpoint.test_quantised import convert, equal
from tests.training.test_weights import PLAN

pytestmark = pytest.mark.filterwarnings("ignore")  # peers warn of accelerators and groups that are not here
LINEAR = re.compile(r"(self_attn|mlp)\..*proj\.weight|kv_a_proj_with_mqa\.weight")
DEEPSEEK = {
    "hidden_size": 192, "intermediate_size": 160, "kv_lora_rank": 140, "q_lora_rank": 130, "moe_intermediate_size": 136,
    "head_dim": 4,  # of the rotary part, as transformers computes with
}  # fmt: skip


def block_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, one scale a block, and the weight that they are, block by block."""
    rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    meant = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[part].float().abs().max() / 448
            codes[part] = (weight[part].float() / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = (codes[part].float() * scales[i, j]).to(torch.bfloat16)
    return codes, scales, meant


def quantise(plain: Path, folder: Path, block: int, **settings: Any) -> dict[str, Tensor]:
    """A repository of which linear weights are FP8 in blocks; the weights become in `plain` what the codes say."""
    tensors = load_file(plain / "model.safetensors")
    made: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        made[name] = tensor
        if LINEAR.search(name):
            made[name], made[f"{name}_scale_inv"], tensors[name] = block_fp8(tensor, block)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic", **settings}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return tensors


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 in its own layout, and beside it what it says in bfloat16."""
    folder = tmp_path_factory.mktemp("deepseek")
    save("deepseek_v3", folder / "plain", torch.bfloat16, **DEEPSEEK)
    tensors = quantise(folder / "plain", folder / "fp8", 128, fmt="e4m3")
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape[0] % 128
    return folder


def test_deepseeks_own_layout_becomes_a_hugging_face_model(deepseek: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert convert(deepseek / "fp8", tmp_path / "out", "--to", "hf", "--dequantise") == 0
    assert equal(load_file(tmp_path / "out/model.safetensors"), load_file(deepseek / "plain/model.safetensors"))
    ours, plain = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (tmp_path / "out", deepseek / "plain"))
    assert ours.dtype == torch.bfloat16
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, plain(tokens).logits)


def test_deepseeks_own_layout_becomes_a_megatron_checkpoint(deepseek: Path, tmp_path: Path) -> None:
    for name, options in (("fp8", ["--dequantise"]), ("plain", [])):
        assert convert(deepseek / name, tmp_path / name, "--to", "torch_dist", *options) == 0
    assert main(["checkpoint", "diff", str(tmp_path / "fp8"), str(tmp_path / "plain")]) == 0
    assert convert(tmp_path / "fp8", tmp_path / "back", "--to", "hf") == 0
    assert equal(load_file(tmp_path / "back/model.safetensors"), load_file(deepseek / "plain/model.safetensors"))


def test_a_family_names_weights_and_not_their_scales(deepseek: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "family", str(deepseek / "fp8")]) == 0
    assert "0 missing" in capsys.readouterr().out


def test_deepseeks_own_layout_becomes_a_dcp_that_torch_loads(deepseek: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    assert convert(deepseek / "fp8", tmp_path / "dcp", "--to", "dcp", "--dequantise") == 0
    plain = load_file(deepseek / "plain/model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    checkpoint.load(state, checkpoint_id=str(tmp_path / "dcp"))
    assert equal(state, plain)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_fp8_in_blocks_is_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    save(name, tmp_path / "plain", torch.bfloat16)
    quantise(tmp_path / "plain", tmp_path / "fp8", 8)
    assert convert(tmp_path / "fp8", tmp_path / "out", "--to", "hf", "--dequantise") == 0
    asked = FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", quantization_config=asked, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert equal(ours.state_dict(), theirs.state_dict())
    trained = AutoModelForCausalLM.from_config(ours.config, dtype=torch.bfloat16)
    load_pretrained(tmp_path / "out", trained, PLAN, None)
    assert equal(trained.state_dict(), theirs.state_dict())


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-OSS whose experts are in MXFP4, and beside it what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = tmp_path_factory.mktemp("gpt-oss")
    save("gpt_oss", folder / "plain", torch.bfloat16, hidden_size=64, intermediate_size=32)
    tensors = load_file(folder / "plain/model.safetensors")
    made: dict[str, Tensor] = dict(tensors)
    torch.manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = made.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, outer, inner // 32), dtype=torch.uint8)
        made |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "plain/model.safetensors", {"format": "pt"})
    (folder / "mxfp4").mkdir()
    save_file(made, folder / "mxfp4/model.safetensors", {"format": "pt"})
    config = json.loads((folder / "plain/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "mxfp4/config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_is_what_transformers_makes_of_it(gpt_oss: Path, tmp_path: Path) -> None:
    assert convert(gpt_oss / "mxfp4", tmp_path / "out", "--to", "hf", "--dequantise") == 0
    assert equal(load_file(tmp_path / "out/model.safetensors"), load_file(gpt_oss / "plain/model.safetensors"))


def test_gpt_oss_as_it_is_published_becomes_a_megatron_checkpoint(gpt_oss: Path, tmp_path: Path) -> None:
    for name, options in (("mxfp4", ["--dequantise"]), ("plain", [])):
        assert convert(gpt_oss / name, tmp_path / name, "--to", "torch_dist", *options) == 0
    assert main(["checkpoint", "diff", str(tmp_path / "mxfp4"), str(tmp_path / "plain")]) == 0


def test_an_adapter_is_merged_into_weights_and_not_into_codes(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = save("qwen3", tmp_path / "plain", torch.bfloat16)
    quantise(tmp_path / "plain", tmp_path / "fp8", 8)
    peft: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, value in peft.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape) * 0.3)
    peft.save_pretrained(tmp_path / "adapter")
    options = ["--to", "hf", "--adapter", tmp_path / "adapter"]
    assert convert(tmp_path / "fp8", tmp_path / "refused", *options) == 2
    assert convert(tmp_path / "fp8", tmp_path / "ours", *options, "--dequantise") == 0
    assert convert(tmp_path / "plain", tmp_path / "theirs", *options) == 0
    assert equal(*(load_file(tmp_path / one / "model.safetensors") for one in ("ours", "theirs")))
