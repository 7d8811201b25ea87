"""Small quantised repositories of each method, packed here by plain numpy, with the values that their codes stand for.

Codes and scales are drawn and packed; the values follow from the codes before they were packed, element by element, in
float32 as the methods' own libraries compute them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Array = np.ndarray[Any, Any]
FP4 = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SHAPE = (160, 192)
"""Of a weight; blocks of 128 divide neither side."""
FLOAT = {"model.norm.weight": torch.linspace(0, 1, 7), "lm_head.weight": torch.ones(5, 3, dtype=torch.bfloat16)}
"""What is not quantised, beside it."""


@dataclass(frozen=True)
class Repository:
    """What is written, and what it means."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Array]
    unused: int = 0


def write(folder: Path, repository: Repository, **config: Any) -> Path:
    """As a Hugging Face directory."""
    folder.mkdir(parents=True)
    save_file(
        {**FLOAT, **{name: one.contiguous() for name, one in repository.tensors.items()}}, folder / "model.safetensors"
    )
    fields = {"model_type": "llama", "torch_dtype": "bfloat16", **config}
    if repository.settings:
        fields["quantization_config"] = dict(repository.settings)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def e4m3(codes: Array) -> Array:
    """The numbers of E4M3 by their bits: sign, 4 of exponent, 3 of mantissa."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(int), (codes & 7).astype(np.float32)
    size = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return (size * np.where(sign, -1, 1)).astype(np.float32)


def words(codes: Array, bits: int, dim: int = -1) -> Tensor:
    """Codes in words of 32 bits along a dim: as one stream of bits, the lowest first, padded with zeros."""
    flat = np.moveaxis(codes, dim, -1).astype(np.uint32)
    stream = (flat[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    stream = stream.reshape(*flat.shape[:-1], -1)
    stream = np.concatenate([stream, np.zeros((*flat.shape[:-1], -stream.shape[-1] % 32), np.uint32)], -1)
    whole = (stream.reshape(*flat.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(whole.astype(np.uint32).view(np.int32), -1, dim)))


def nibbles(codes: Array, high_first: bool = False) -> Tensor:
    """Codes of 4 bits two a byte along the last dim."""
    one, other = codes[..., 0::2].astype(np.uint8), codes[..., 1::2].astype(np.uint8)
    return torch.from_numpy(one << 4 | other if high_first else other << 4 | one)


def bits8(draw: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Array]:
    """E4M3 codes without NaN, and their numbers."""
    codes = draw.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 127 == 127] = 1
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), e4m3(codes)


def _scales(draw: np.random.Generator, *shape: int) -> Array:
    return (0.001 + draw.random(shape) * 0.01).astype(np.float32)


def _of(
    name: str, value: Array, tensors: Mapping[str, Any], settings: Mapping[str, Any], unused: int = 0
) -> Repository:
    made = {f"{name}{end}": torch.as_tensor(one) for end, one in tensors.items()}
    key = name if ".experts." in name else f"{name}.weight"
    return Repository(settings, made, {key: value.astype(np.float32)}, unused)


NAME = "model.layers.0.self_attn.q_proj"


def _fp8(
    scale_of: Callable[[np.random.Generator], Array],
    spread: Callable[[Array], Array],
    settings: Any,
    end: str,
    **more: Any,
):
    def make(draw: np.random.Generator) -> Repository:
        codes, numbers = bits8(draw, SHAPE)
        scale = scale_of(draw)
        return _of(NAME, numbers * spread(scale), {".weight": codes, end: scale, **more}, settings, len(more))

    return make


def _blocks(scale: Array) -> Array:
    return scale[np.arange(SHAPE[0])[:, None] // 128, np.arange(SHAPE[1]) // 128]


def _schemes(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def _int8(draw: np.random.Generator) -> Repository:
    codes = draw.integers(-128, 128, SHAPE).astype(np.int8)
    scale, zero = _scales(draw, SHAPE[0], 6), draw.integers(-9, 9, (SHAPE[0], 6)).astype(np.int8)
    group = np.arange(SHAPE[1]) // 32
    value = (codes.astype(np.float32) - zero[:, group]) * scale[:, group]
    tensors = {".weight": codes, ".weight_scale": scale, ".weight_zero_point": zero}
    return _of(NAME, value, tensors, _schemes(num_bits=8, type="int", group_size=32, strategy="group"))


def _packed(bits: int, columns: int, groups: int, zeros: bool = False, order: bool = False):
    def make(draw: np.random.Generator) -> Repository:
        rows, half = 36, 1 << (bits - 1)
        codes = draw.integers(0, 2 * half, (rows, columns))
        scale = torch.from_numpy(_scales(draw, rows, groups)).bfloat16()
        group = np.arange(columns) // (columns // groups)
        if order:
            group = draw.permutation(group)
        zero = draw.integers(0, 2 * half, (rows, groups))
        value = (codes - (zero[:, group] if zeros else half)).astype(np.float32) * scale.float().numpy()[:, group]
        tensors: dict[str, Any] = {
            ".weight_packed": words(codes, bits), ".weight_scale": scale, ".weight_shape": np.array([rows, columns]),
        }  # fmt: skip
        if zeros:
            tensors[".weight_zero_point"] = words(zero, bits, 0)
        if order:
            tensors[".weight_g_idx"] = group.astype(np.int32)
        return _of(NAME, value, tensors, {**_schemes(num_bits=bits, type="int"), "format": "pack-quantized"})

    return make


def _nvfp4(divided: bool):
    def make(draw: np.random.Generator) -> Repository:
        codes = draw.integers(0, 16, SHAPE)
        stored, numbers = bits8(draw, (SHAPE[0], SHAPE[1] // 16))
        whole = np.float32(37.5 if divided else 0.0123)
        scale = numbers / whole if divided else numbers * whole
        value = FP4[codes] * scale[:, np.arange(SHAPE[1]) // 16]
        if divided:
            tensors = {".weight_packed": nibbles(codes), ".weight_scale": stored, ".weight_global_scale": [whole]}
            return _of(NAME, value, {**tensors, ".input_global_scale": [whole]}, _schemes(num_bits=4, type="float"), 1)
        tensors = {".weight": nibbles(codes), ".weight_scale": stored, ".weight_scale_2": whole, ".input_scale": whole}
        return _of(NAME, value, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 1)

    return make


def _mx(draw: np.random.Generator) -> Repository:
    codes, powers = draw.integers(0, 16, SHAPE), draw.integers(110, 130, (SHAPE[0], 6)).astype(np.uint8)
    value = FP4[codes] * 2.0 ** (powers.astype(np.float32) - 127)[:, np.arange(SHAPE[1]) // 32]
    tensors = {".weight_packed": nibbles(codes), ".weight_scale": powers}
    return _of(NAME, value, tensors, _schemes(num_bits=4, type="float", group_size=32))


def _fp4_in_int8(draw: np.random.Generator) -> Repository:
    codes, powers = draw.integers(0, 16, SHAPE), draw.integers(110, 130, (SHAPE[0], 6)).astype(np.uint8)
    value = FP4[codes] * 2.0 ** (powers.astype(np.float32) - 127)[:, np.arange(SHAPE[1]) // 32]
    scale = torch.from_numpy(powers).view(torch.float8_e8m0fnu)
    tensors = {".weight": nibbles(codes).view(torch.int8), ".weight_scale_inv": scale}
    return _of(NAME, value, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def _deepseeks_names(draw: np.random.Generator) -> Repository:
    codes, numbers = bits8(draw, SHAPE)
    powers = draw.integers(110, 130, (2, 2)).astype(np.uint8)
    tensors = {".weight": codes, ".scale": torch.from_numpy(powers).view(torch.float8_e8m0fnu)}
    value = numbers * _blocks(2.0 ** (powers.astype(np.float32) - 127))
    return _of(NAME, value, tensors, {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]})


def _gpt_oss(draw: np.random.Generator) -> Repository:
    codes = draw.integers(0, 16, (3, 20, 5, 32))
    powers = draw.integers(110, 130, (3, 20, 5)).astype(np.uint8)
    value = (FP4[codes] * 2.0 ** (powers.astype(np.float32) - 127)[..., None]).reshape(3, 20, 160)
    tensors = {"_blocks": nibbles(codes), "_scales": powers}
    return _of("model.layers.0.mlp.experts.down_proj", value.transpose(0, 2, 1), tensors, {"quant_method": "mxfp4"})


def _blockwise(kind: str, nested: bool, storage: torch.dtype = torch.uint8):
    def make(draw: np.random.Generator) -> Repository:
        codes, table = draw.integers(0, 16, SHAPE), np.sort(draw.random(16) * 2 - 1).astype(np.float32)
        blocks = codes.size // 64
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(SHAPE)}
        tensors: dict[str, Any] = {".quant_map": table}
        if nested:
            outer, inner = draw.random(256).astype(np.float32), draw.integers(0, 256, blocks).astype(np.uint8)
            scale = _scales(draw, -(-blocks // 256))
            state |= {"nested_blocksize": 256, "nested_offset": 0.03125, "nested_dtype": "float32"}
            tensors |= {".absmax": inner, ".nested_absmax": scale, ".nested_quant_map": outer}
            largest = (outer[inner] * scale[np.arange(blocks) // 256] + np.float32(0.03125)).astype(np.float32)
        else:
            largest = _scales(draw, blocks)
            tensors[".absmax"] = largest
        value = (table[codes].reshape(-1) * largest[np.arange(codes.size) // 64]).reshape(SHAPE)
        tensors[""] = nibbles(codes.reshape(-1), high_first=True)[:, None].contiguous().view(-1).view(storage)[:, None]
        tensors[f".quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        made = {f"{NAME}.weight{end}": torch.as_tensor(one) for end, one in tensors.items()}
        return Repository(settings, made, {f"{NAME}.weight": value})

    return make


def _bnb8(draw: np.random.Generator) -> Repository:
    codes, largest = draw.integers(-127, 128, SHAPE).astype(np.int8), _scales(draw, SHAPE[0])
    value = codes * (largest / np.float32(127))[:, None]
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": np.uint8(0)}
    return _of(NAME, value, tensors, {"load_in_8bit": True})


def gptq(bits: int, form: str = "gptq", order: bool = False, even: bool = False, stored_even: int | None = None):
    """`even`: symmetric, with the middle as zero. `stored_even`: what is stored for it."""

    def make(draw: np.random.Generator) -> Repository:
        inner, out, size = 128, 64, 32
        codes, groups = draw.integers(0, 1 << bits, (inner, out)), inner // size
        less = int(form == "gptq")
        middle = 1 << (bits - 1)
        zero = np.full((groups, out), middle) if even else draw.integers(less, 1 << bits, (groups, out))
        packed = zero - less if stored_even is None else np.full_like(zero, stored_even)
        scale = torch.from_numpy(_scales(draw, groups, out)).half()
        group = np.arange(inner) // size
        if order:
            group = draw.permutation(group)
        value = (codes - zero[group]).astype(np.float32) * scale.float().numpy()[group]
        tensors: dict[str, Any] = {".qweight": words(codes, bits, 0), ".qzeros": words(packed, bits), ".scales": scale}
        if order:
            tensors[".g_idx"] = group.astype(np.int32)
        settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": even, "checkpoint_format": form}
        return _of(NAME, value.T, tensors, settings)

    return make


def _awq(draw: np.random.Generator) -> Repository:
    inner, out, size = 128, 64, 32
    codes, zero = draw.integers(0, 16, (inner, out)), draw.integers(0, 16, (inner // size, out))
    scale = torch.from_numpy(_scales(draw, inner // size, out)).half()
    group = np.arange(inner) // size
    value = (codes - zero[group]).astype(np.float32) * scale.float().numpy()[group]
    order = np.arange(out).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    tensors = {".qweight": words(codes[:, order], 4), ".qzeros": words(zero[:, order], 4), ".scales": scale}
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return _of(NAME, value.T, tensors, settings)


BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
METHODS: Mapping[str, Callable[[np.random.Generator], Repository]] = {
    "fp8 in blocks": _fp8(lambda d: _scales(d, 2, 2), _blocks, BLOCK, ".weight_scale_inv"),
    "fp8 of a tensor": _fp8(
        lambda d: _scales(d).reshape(()), lambda s: s, {"quant_method": "fp8", "weight_block_size": None},
        ".weight_scale_inv", **{".activation_scale": torch.ones(())},
    ),
    "fp8 of AutoFP8": _fp8(
        lambda d: _scales(d, 1), lambda s: s, {"quant_method": "fp8", "activation_scheme": "static"}, ".weight_scale",
        **{".input_scale": torch.ones(1)},
    ),
    "fp8 by rows": _fp8(
        lambda d: _scales(d, SHAPE[0], 1), lambda s: s, {"quant_method": "fbgemm_fp8"}, ".weight_scale",
    ),
    "fp8 of modelopt": _fp8(
        lambda d: _scales(d).reshape(()), lambda s: s, {"quant_method": "modelopt", "quant_algo": "FP8"},
        ".weight_scale", **{".input_scale": torch.ones(())},
    ),
    "fp8 of compressed-tensors": _fp8(
        lambda d: _scales(d, 2, 2), _blocks, _schemes(num_bits=8, type="float", block_structure=[128, 128]),
        ".weight_scale",
    ),
    "int8 in groups": _int8,
    "4 bits": _packed(4, 96, 3),
    "4 bits, zero points": _packed(4, 96, 3, zeros=True),
    "4 bits, columns in an order": _packed(4, 96, 3, zeros=True, order=True),
    "4 bits, the last word not full": _packed(4, 60, 1),
    "3 bits, codes go on in the next word": _packed(3, 96, 3),
    "8 bits": _packed(8, 96, 3, zeros=True),
    "nvfp4": _nvfp4(True),
    "nvfp4 of modelopt": _nvfp4(False),
    "mxfp4 of compressed-tensors": _mx,
    "fp4 in int8": _fp4_in_int8,
    "fp8 by DeepSeek's own names": _deepseeks_names,
    "mxfp4 of GPT-OSS": _gpt_oss,
    "nf4": _blockwise("nf4", nested=False),
    "nf4, nested": _blockwise("nf4", nested=True),
    "fp4, kept as bfloat16": _blockwise("fp4", nested=True, storage=torch.bfloat16),
    "bitsandbytes, 8 bits": _bnb8,
    "gptq": gptq(4),
    "gptq, 2 bits": gptq(2),
    "gptq, 3 bits": gptq(3),
    "gptq, 8 bits, columns in an order": gptq(8, order=True),
    "gptq, columns in an order": gptq(4, order=True, even=True),
    "gptq, version 2": gptq(4, "gptq_v2"),
    "gptq, version 2 under the name of version 1": gptq(4, even=True, stored_even=8),
    "awq": _awq,
}  # fmt: skip
