"""The table of codecs of quantised weights, and which of them a checkpoint's tensors are of. A new one is a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tangram.relayout.mapping.errors import RelayoutError
from tangram.relayout.mapping.names import TensorSpec
from tangram.relayout.quantised.bytes16 import (
    bind_blockwise,
    bind_fp4,
    bind_mxfp4,
    decode_blockwise,
    decode_fp4,
    decode_mxfp4,
)
from tangram.relayout.quantised.grids import bind_rows, bind_scaled, decode_rows, decode_scaled
from tangram.relayout.quantised.groups import GroupCodec, Read, Settings, TensorGroup
from tangram.relayout.quantised.words import bind_awq, bind_gptq, bind_packed, decode_awq, decode_gptq, decode_packed

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NF4 = {"scale": ".absmax", "map": ".quant_map"}
NESTED = {"nested": ".nested_absmax", "nested_map": ".nested_quant_map"}
STORAGE = ("uint8", "int8", "bfloat16", "float16", "float32")
"""Types that bitsandbytes keeps 4-bit codes in: FSDP wants that of the other parameters."""
SCALED = ("compressed-tensors", "fbgemm_fp8", "modelopt", "fp8")
GPTQ = {"scale": ".scales", "zero": ".qzeros"}

GROUP_CODECS: Mapping[str, GroupCodec] = {
    "nf4": GroupCodec(
        ("bitsandbytes",), "", "", STORAGE, {**NF4, "state": ".quant_state.bitsandbytes__nf4"},
        bind_blockwise, decode_blockwise, NESTED,
    ),
    "bnb_fp4": GroupCodec(
        ("bitsandbytes",), "", "", STORAGE, {**NF4, "state": ".quant_state.bitsandbytes__fp4"},
        bind_blockwise, decode_blockwise, NESTED,
    ),
    "bnb_int8": GroupCodec(
        ("bitsandbytes",), ".weight", ".weight", ("int8",), {"scale": ".SCB"}, bind_rows, decode_rows,
        {"format": ".weight_format"},
    ),
    "nvfp4": GroupCodec(
        ("modelopt",), "", "", ("uint8",), {"scale": "_scale", "times": "_scale_2"}, bind_fp4, decode_fp4,
    ),
    "nvfp4_packed": GroupCodec(
        ("compressed-tensors",), "_packed", "", ("uint8",), {"scale": "_scale", "under": "_global_scale"}, bind_fp4,
        decode_fp4,
    ),
    "mxfp4_packed": GroupCodec(
        ("compressed-tensors",), "_packed", "", ("uint8",), {"scale": "_scale"}, bind_fp4, decode_fp4,
    ),
    "mxfp4": GroupCodec(
        ("mxfp4",), "_blocks", "", ("uint8",), {"scale": "_scales"}, bind_mxfp4, decode_mxfp4,
    ),
    "fp4_inv": GroupCodec(("fp8",), "", "", ("int8",), {"scale": "_scale_inv"}, bind_fp4, decode_fp4),
    "fp8_inv": GroupCodec(("fp8",), "", "", FLOAT8, {"scale": "_scale_inv"}, bind_scaled, decode_scaled),
    "fp4_plain": GroupCodec(("fp8",), ".weight", ".weight", ("int8",), {"scale": ".scale"}, bind_fp4, decode_fp4),
    "fp8_plain": GroupCodec(("fp8",), ".weight", ".weight", FLOAT8, {"scale": ".scale"}, bind_scaled, decode_scaled),
    "scaled": GroupCodec(
        SCALED, "", "", (*FLOAT8, "int8"), {"scale": "_scale"}, bind_scaled, decode_scaled, {"zero": "_zero_point"},
    ),
    "packed": GroupCodec(
        ("compressed-tensors",), "_packed", "", ("int32",), {"scale": "_scale", "shape": "_shape"}, bind_packed,
        decode_packed, {"zero": "_zero_point", "order": "_g_idx"},
    ),
    "gptq": GroupCodec(
        ("gptq",), ".qweight", ".weight", ("int32",), GPTQ, bind_gptq, decode_gptq, {"order": ".g_idx"},
    ),
    "awq": GroupCodec(("awq",), ".qweight", ".weight", ("int32",), GPTQ, bind_awq, decode_awq),
}  # fmt: skip
"""By name; of each stored tensor the first that fits is it."""


def matched(specs: Mapping[str, TensorSpec], method: str | None = None) -> Iterator[TensorGroup]:
    """Groups by their names and types alone, of one method or of any; their tensors have no shape yet."""
    rows: dict[str, list[tuple[str, GroupCodec]]] = {}  # by the type of the codes: most tensors have one of no row
    for key, row in GROUP_CODECS.items():
        for dtype in row.dtypes if method is None or method in row.methods else ():
            rows.setdefault(dtype, []).append((key, row))
    for name, spec in specs.items():
        for key, row in rows.get(spec.dtype, ()):
            if not name.endswith(row.codes):
                continue
            stem = name[: len(name) - len(row.codes)]
            if all(stem + end in specs for end in row.needs.values()):
                others = {role: stem + end for role, end in {**row.needs, **row.may}.items()}
                members = {"codes": name, **{role: one for role, one in others.items() if one in specs}}
                yield TensorGroup(stem + row.decoded, key, members, {role: specs[one] for role, one in members.items()})
                break


def find_groups(specs: Mapping[str, TensorSpec], method: str, settings: Settings, read: Read) -> list[TensorGroup]:
    """The groups of a method with the shapes of their tensors. Raises RelayoutError for one that does not fit."""
    groups: list[TensorGroup] = []
    for group in matched(specs, method):
        if group.name in specs and group.name != group.members["codes"]:
            raise RelayoutError(f"{group.name} is there both quantised and by itself")
        form = GROUP_CODECS[group.codec].bind(group, settings, read)
        groups.append(TensorGroup(group.name, group.codec, group.members, group.specs, form))
    return groups
