"""A directory of a chat model as others have quantised it: codes and scales in the form of their libraries."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.models.lora import dynamic_codes, nf4
from tangram.models.lora.bases import BASES, Kept


def _fp8(shape: tuple[int, int], kept: Kept) -> dict[str, Tensor]:
    codes = kept["fp8"].view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": kept["squares"]}


def _nf4(shape: tuple[int, int], kept: Kept) -> dict[str, Tensor]:
    """As bitsandbytes writes it."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape), "nested_dtype": "float32"}
    state |= {"nested_blocksize": 256, "nested_offset": float(kept["mean"])}
    return {
        "weight": kept["nf4"].reshape(-1, 1),
        "weight.absmax": kept["absmax"].reshape(-1),
        "weight.nested_absmax": kept["groups"],
        "weight.quant_map": torch.tensor(nf4.NORMAL),
        "weight.nested_quant_map": dynamic_codes.table(torch.device("cpu")),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def _int8(shape: tuple[int, int], kept: Kept) -> dict[str, Tensor]:
    return {"weight": kept["int8"], "SCB": kept["rows"]}


STORED: Mapping[str, tuple[Callable[[tuple[int, int], Kept], dict[str, Tensor]], dict[str, Any]]] = {
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "int8": (_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def write_quantised(model: Path, base: str) -> Path:
    """The model with its linear layers but the head as codes, in a directory beside it with the name of the base."""
    stored, settings = STORED[base]
    shutil.copytree(model, own := model.parent / base)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            found = stored((value.shape[0], value.shape[1]), BASES[base].keep(value, lambda _, whole: whole))
            tensors |= {f"{name.removesuffix('.weight')}.{key}": one.contiguous() for key, one in found.items()}
        else:
            tensors[name] = value
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return own
