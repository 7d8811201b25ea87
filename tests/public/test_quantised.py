"""What people reported of quantised repositories, each rebuilt small."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.cli import main
from tests.checkpoint.quantising import BLOCK, METHODS, NAME, Repository, gptq, write

WEIGHT = f"{NAME}.weight"
Capture = pytest.CaptureFixture[str]


def made(method: str) -> Repository:
    return METHODS[method](np.random.default_rng(3))


def convert(folder: Path, *options: str) -> int:
    return main(["checkpoint", "convert", str(folder / "q"), str(folder / "out"), *options])


def is_right(folder: Path, repository: Repository, name: str = WEIGHT, file: str = "model.safetensors") -> None:
    expected = torch.from_numpy(repository.values[name].copy()).bfloat16()
    assert torch.equal(load_file(folder / "out" / file)[name], expected)


def refused(folder: Path, message: str, capsys: Capture, *options: str) -> None:
    assert convert(folder, *options) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (folder / "out").exists()


def test_fp8_in_blocks_to_bfloat16(tmp_path: Path) -> None:
    """deepseek-ai/DeepSeek-V3#4: FP8 weights with block scales are wanted as a plain bfloat16 repository."""
    write(tmp_path / "q", made("fp8 in blocks"))
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, made("fp8 in blocks"))
    assert set(load_file(tmp_path / "out/model.safetensors")) == {WEIGHT, "model.norm.weight", "lm_head.weight"}
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()


def test_fp8_straight_to_megatron(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3778: a published FP8 repository goes to Megatron without a bfloat16 one between."""
    from tests.checkpoint.peers.models import save
    from tests.checkpoint.test_quantised_peers import quantise

    save("qwen3", tmp_path / "plain", torch.bfloat16)
    quantise(tmp_path / "plain", tmp_path / "q", 8)
    assert convert(tmp_path, "--to", "torch_dist", "--dequantise") == 0
    options = ["--config", str(tmp_path / "plain")]
    assert main(["checkpoint", "diff", str(tmp_path / "plain"), str(tmp_path / "out"), *options]) == 0


def test_scales_that_no_mapping_names(tmp_path: Path, capsys: Capture) -> None:
    """ggml-org/llama.cpp#14781: a converter stops at `weight_scale_inv`, which it cannot map, and says nothing else."""
    write(tmp_path / "q", made("fp8 in blocks"))
    refused(tmp_path, r"is quantised with fp8.*: add --dequantise, which makes bfloat16", capsys, "--to", "torch_dist")


def test_codes_read_as_weights(tmp_path: Path, capsys: Capture) -> None:
    """Lightricks/LTX-2#172: FP8 codes cast to bfloat16 without the scale beside them are 770 times too large."""
    write(tmp_path / "q", made("fp8 of AutoFP8"))
    for options in (["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--round"]):
        refused(tmp_path, "a cast to bfloat16 would tear codes and scales apart", capsys, "--to", "hf", *options)
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, made("fp8 of AutoFP8"))


def test_scales_of_a_weight_that_is_not_quantised(tmp_path: Path, capsys: Capture) -> None:
    """unslothai/unsloth#6978: raw codes in a bfloat16 weight while its scale is dropped as an unexpected key."""
    repository = made("fp8 in blocks")
    tensors = {**repository.tensors, WEIGHT: repository.tensors[WEIGHT].bfloat16()}
    write(tmp_path / "q", replace(repository, tensors=tensors))
    refused(tmp_path, "scale_inv is there, of which fp8 says nothing", capsys, "--to", "hf", "--dequantise")


def test_codes_whose_scales_are_missing(tmp_path: Path, capsys: Capture) -> None:
    """kekzl/imp#1450: a writer kept FP8 codes of which it had used up the scales, and no reader could notice."""
    repository = made("fp8 in blocks")
    write(tmp_path / "q", replace(repository, tensors={WEIGHT: repository.tensors[WEIGHT]}))
    refused(tmp_path, "q_proj.weight is there, of which fp8 says nothing", capsys, "--to", "hf", "--dequantise")


def test_one_scale_of_no_dims_for_a_tensor(tmp_path: Path) -> None:
    """NVIDIA/Model-Optimizer#1962: a scalar `weight_scale_inv`, as Mistral's models have it, broke a kernel."""
    write(tmp_path / "q", made("fp8 of a tensor"))
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, made("fp8 of a tensor"))


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    """unslothai/unsloth-zoo#803: weights were cast to the type of their E8M0 scales before they were multiplied."""
    write(tmp_path / "q", made("fp8 by DeepSeek's own names"))
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, made("fp8 by DeepSeek's own names"))


def test_a_scale_in_another_shard(tmp_path: Path) -> None:
    """NovaSky-AI/SkyRL#2019: in large INT4 repositories the scale of a weight is in another file than its codes."""
    repository = made("4 bits, zero points")
    write(tmp_path / "q", repository)
    tensors = load_file(tmp_path / "q/model.safetensors")
    (tmp_path / "q/model.safetensors").unlink()
    table = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(table.values()):
        save_file({name: tensors[name] for name in tensors if table[name] == file}, tmp_path / "q" / file)
    assert table[f"{WEIGHT}_packed"] != table[f"{WEIGHT}_scale"]
    (tmp_path / "q/model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, repository)


@pytest.mark.parametrize("stored", [7, 8])
def test_zero_points_of_two_versions_under_one_name(stored: int, tmp_path: Path) -> None:
    """vllm-project/vllm#38966: GPTQ's second version says it is the first, and every weight is off by a scale."""
    repository = gptq(4, even=True, stored_even=stored)(np.random.default_rng(1))
    write(tmp_path / "q", repository)
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, repository)


def test_a_configuration_that_still_says_quantised(tmp_path: Path) -> None:
    """huggingface/transformers#34847: dequantised weights saved beside a `quantization_config` do not load."""
    write(tmp_path / "q", made("nf4, nested"))
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert not {"quantization_config", "compression_config"} & set(config)
    assert config["torch_dtype"] == "float16"


def test_scales_by_a_name_that_nobody_asked_for(tmp_path: Path, capsys: Capture) -> None:
    """leejet/stable-diffusion.cpp#1898: `scale_weight` beside FP8 codes was passed over, and images came out white."""
    codes = made("fp8 of a tensor").tensors[WEIGHT]
    tensors = {WEIGHT: codes, f"{NAME}.scale_weight": torch.tensor(0.01)}
    write(tmp_path / "q", Repository({}, tensors, {}))
    refused(tmp_path, "is quantised, and a cast to bfloat16", capsys, "--to", "hf", "--dtype", "bfloat16")
    assert convert(tmp_path, "--to", "hf") == 0


def test_words_of_mlx(tmp_path: Path, capsys: Capture) -> None:
    """Blaizzy/mlx-vlm#692: MLX says `quantization` without a method, and its words of 32 bits are no weights."""
    words = torch.arange(16, dtype=torch.int32).view(2, 8).view(torch.uint32)
    tensors = {WEIGHT: words, f"{NAME}.scales": torch.ones(2, 1), f"{NAME}.biases": torch.zeros(2, 1)}
    write(tmp_path / "q", Repository({}, tensors, {}), quantization={"group_size": 64, "bits": 4})
    refused(tmp_path, "quantised with mlx", capsys, "--to", "hf", "--dtype", "float32")
    refused(tmp_path, "mlx is not among what is decoded", capsys, "--to", "hf", "--dequantise")
    assert convert(tmp_path, "--to", "hf") == 0


def test_an_adapter_beside_codes(tmp_path: Path, capsys: Capture) -> None:
    """axolotl-ai-cloud/axolotl#3803: an adapter of NVFP4 weights has nothing there to be merged into."""
    write(tmp_path / "q", made("nvfp4 of modelopt"))
    refused(
        tmp_path, "an adapter would tear .*: add --dequantise", capsys, "--to", "hf", "--adapter", str(tmp_path / "a")
    )
    assert convert(tmp_path, "--to", "hf", "--dequantise", "--json") == 0
    error = json.loads(capsys.readouterr().out)["dequantised"]["error"]
    assert 0 < error <= math.ldexp(1, -8)  # of rounding to bfloat16, measured


def test_the_size_of_blocks_is_not_that_of_the_shapes(tmp_path: Path) -> None:
    """NVIDIA/TensorRT-Model-Connect#1115: 1,000 rows in 8 blocks are blocks of 128 rows and a rest, not of 125."""
    codes, scale = torch.randn(1000, 300).to(torch.float8_e4m3fn), torch.rand(8, 3) + 0.5
    rows, columns = (torch.arange(n) // 128 for n in codes.shape)
    tensors = {WEIGHT: codes, f"{WEIGHT}_scale_inv": scale}
    value = (codes.float() * scale[rows[:, None], columns]).numpy()
    repository = Repository(BLOCK, tensors, {WEIGHT: value})
    write(tmp_path / "q", repository)
    assert convert(tmp_path, "--to", "hf", "--dequantise") == 0
    is_right(tmp_path, repository)
