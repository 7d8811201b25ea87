"""Quantised weights that bitsandbytes and compressed-tensors have packed, dequantised as they do it themselves.

Both come with the extra `lowbit`; `make interop` runs this.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # both libraries warn of accelerators that are not here

SHAPE = (96, 128)  # bitsandbytes 0.50.2 dequantises wrongly on a CPU where 64 does not divide a row
NAME = "model.layers.0.self_attn.q_proj"


def dequantised(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight that a conversion makes of a module's tensors."""
    folder.mkdir()
    save_file(
        {f"{NAME}.{name}": one.detach().contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(settings)}))
    options = ["--to", "hf", "--dequantise", "--dtype", str(dtype).removeprefix("torch.")]
    assert main(["checkpoint", "convert", str(folder), str(folder.parent / "out"), *options]) == 0
    return load_file(folder.parent / "out/model.safetensors")[f"{NAME}.weight"]


@pytest.mark.parametrize(
    ("kind", "nested", "dtype"),
    [*itertools.product(("nf4", "fp4"), (False, True), (torch.float16, torch.bfloat16, torch.float32))],
)
def test_four_bits_of_bitsandbytes(kind: str, nested: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.randn(SHAPE).to(dtype)
    layer = bnb.nn.Linear4bit(SHAPE[1], SHAPE[0], bias=False)
    layer.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type=kind, compress_statistics=nested)
    layer = layer.to("cpu")
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ours = dequantised(tmp_path / "q", settings, layer.state_dict(), dtype)
    theirs = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    if nested:  # they add the offset to rounded products, in an order of their own
        assert torch.allclose(ours.float(), theirs.float(), rtol=2 * torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(ours, theirs)
    assert (ours - weight).abs().max() < 0.7


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.randn(SHAPE).half()
    codes, largest, _ = bnb.functional.int8_vectorwise_quant(weight)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ours = dequantised(tmp_path / "q", settings, tensors, torch.float32)
    theirs = bnb.functional.int8_vectorwise_dequant(codes, largest)
    assert torch.allclose(ours, theirs.float(), rtol=1e-6, atol=0)
    assert (ours - weight).abs().max() < 0.05


SCHEMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "int4 in groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 in groups, zero points": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int3 by rows": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}),
    "int8 in words": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 by rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8 by rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 of a tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMES)
def test_compressed_tensors(case: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    qparams = importlib.import_module("compressed_tensors.quantization.utils").calculate_qparams
    name, fields = SCHEMES[case]
    weights = quantization.QuantizationArgs(**fields)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    torch.manual_seed(0)
    weight = torch.randn(SHAPE).bfloat16()
    parts = weight.view(SHAPE[0], -1, fields.get("group_size", SHAPE[1]))
    low, high = (
        (parts.amin(-1), parts.amax(-1)) if fields["strategy"] != "tensor" else (weight.min()[None], weight.max()[None])
    )
    whole = (448 * 6 / weight.abs().max()).float()[None] if name.startswith("nv") else None
    scale, zero = qparams(low, high, weights, global_scale=whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    packed = compressor.compress(state, scheme)
    settings = {
        "quant_method": "compressed-tensors", "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}},
    }  # fmt: skip
    ours = dequantised(tmp_path / "q", settings, packed, torch.bfloat16)
    theirs = compressor.decompress(packed, scheme)["weight"].bfloat16()
    assert torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=0)
    assert (ours == theirs).float().mean() > 0.99  # they round scales or codes to bfloat16 before the product
    assert (ours - weight).abs().max() < 0.7
