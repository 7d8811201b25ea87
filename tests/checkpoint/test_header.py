"""The header of a data file: read by the format's own library, and never believed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tangram.checkpoint.store import safetensors_header
from tangram.checkpoint.store.manifest import DTYPES, ManifestError
from tangram.errors import UserError


@pytest.mark.parametrize("dtype", sorted(safetensors_header.NAMES))
def test_the_library_reads_it(tmp_path: Path, dtype: str) -> None:
    values = torch.arange(6).to(getattr(torch, dtype)) if "float8" not in dtype else torch.zeros(6, dtype=torch.uint8)
    head, slots = safetensors_header.build(
        [("a", dtype, (2, 3)), ("b", dtype, ()), ("c", dtype, (0, 2))], {"tangram_save": "x"}
    )
    assert len(head) % safetensors_header.PAGE == 0
    data = values.view(torch.uint8).numpy().tobytes()
    one = data[: DTYPES[dtype]]
    (tmp_path / "f").write_bytes(head + data + one)
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert file.metadata() == {"tangram_save": "x"}
        found: Any = file.get_tensor("a")
        assert torch.equal(found.view(torch.uint8).reshape(-1), values.view(torch.uint8).reshape(-1))
        assert tuple(file.get_tensor("b").shape) == ()
        assert tuple(file.get_tensor("c").shape) == (0, 2)
    assert safetensors_header.parse(head, len(head) + len(data + one), "f") == (slots, {"tangram_save": "x"})


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - safetensors_header.NAMES.keys()))
def test_what_the_format_has_no_name_for_is_bytes(dtype: str) -> None:
    head, slots = safetensors_header.build([("a", dtype, (2, 3))], {})
    ((found,), _) = safetensors_header.parse(head, len(head) + slots[0].nbytes, "f")
    assert (found.dtype, found.shape, found.offset) == ("uint8", (6 * DTYPES[dtype],), slots[0].offset)


def test_many_names_take_several_pages() -> None:
    head, slots = safetensors_header.build([(f"model.layers.{i}.weight", "float32", (1,)) for i in range(1000)], {})
    assert len(head) > 10 * safetensors_header.PAGE
    assert slots[0].offset == len(head)


def raw(fields: Any, length: int | None = None) -> bytes:
    text = json.dumps(fields).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD = {
    "nothing": b"",
    "a length without end": raw({"a": ROW}, 1 << 62),
    "a length past the file": raw({"a": ROW}, 1000),
    "no JSON": (3).to_bytes(8, "little") + b"{{{",
    "deep JSON": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "a list": raw([1]),
    "a type of nobody": raw({"a": ROW | {"dtype": "F31"}}),
    "offsets past the file": raw({"a": ROW | {"data_offsets": [8, 16]}}),
    "offsets of another size": raw({"a": ROW | {"data_offsets": [0, 4]}}),
    "offsets below zero": raw({"a": ROW | {"data_offsets": [-8, 0]}}),
    "an absurd shape": raw({"a": ROW | {"shape": [1 << 40, 1 << 40]}}),
    "bytes in common": raw({"a": ROW, "b": ROW}),
    "metadata that is no text": raw({"__metadata__": {"a": 1}}),
    "no row": raw({"a": None}),
}


@pytest.mark.parametrize("harm", BAD)
def test_it_is_not_believed(harm: str) -> None:
    data = BAD[harm]
    with pytest.raises(ManifestError):
        safetensors_header.parse(data, len(data) + 8, "f")


def test_a_name_twice() -> None:
    row = json.dumps(ROW)
    text = f'{{"a": {row}, "a": {row}}}'.encode()
    with pytest.raises(ManifestError, match="twice"):
        safetensors_header.parse(len(text).to_bytes(8, "little") + text, len(text) + 16, "f")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_or_lie_inside(data: bytes, size: int) -> None:
    size = max(size, len(data))
    try:
        slots, _ = safetensors_header.parse(data, size, "f")
    except UserError:
        return
    assert all(slot.offset >= 0 and slot.offset + slot.nbytes <= size for slot in slots)
