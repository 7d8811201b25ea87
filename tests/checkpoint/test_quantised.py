"""Quantised repositories: decoded as their methods say, copied bit for bit, or refused; never codes without scales."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tangram.checkpoint.quantised import dequantised, quantisation_of
from tangram.checkpoint.restructure import IDENTITY, Filler
from tangram.cli import main
from tangram.layout import Region
from tangram.relayout import bind
from tests.checkpoint.quantising import FLOAT, METHODS, Repository, write
from tests.checkpoint.test_families import cut, held


def repository(method: str, folder: Path, **config: Any) -> Repository:
    made = METHODS[method](np.random.default_rng(7))
    write(folder, made, **config)
    return made


def convert(*arguments: object) -> int:
    return main(["checkpoint", "convert", *map(str, arguments)])


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    assert set(a) == set(b)
    return all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(-1).view(torch.uint8), b[n].view(-1).view(torch.uint8))
        for n in a
    )


@pytest.mark.parametrize("method", METHODS)
def test_codes_and_scales_become_the_weights_that_they_stand_for(method: str, tmp_path: Path) -> None:
    made = repository(method, tmp_path / "q")
    assert convert(tmp_path / "q", tmp_path / "out", "--to", "hf", "--dequantise") == 0
    dtype = "float16" if ".quant_state." in str(list(made.tensors)) else "bfloat16"  # the state says what it was
    expected = {name: torch.from_numpy(value.copy()).to(getattr(torch, dtype)) for name, value in made.values.items()}
    assert equal(load_file(tmp_path / "out/model.safetensors"), {**expected, **FLOAT})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == dtype


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_of_any_size_of_pieces_of_any_kind_are_the_same_weights(method: str, ranks: int) -> None:
    made = METHODS[method](np.random.default_rng(8))
    source = cut(made.tensors, ranks, dim=0) if ranks > 1 else held(made.tensors)
    config = {"config.json": json.dumps({"quantization_config": made.settings}).encode()}
    found = quantisation_of(source, config)
    assert found is not None
    for block in (1, 40_000):
        opened, rounding = dequantised(source, found, "float32", block=block)
        filler = Filler(opened, bind(IDENTITY, opened.specs), opened.specs, 1 << 20)
        for name, value in made.values.items():
            out = torch.empty(value.shape)
            filler.fill(name, Region.full(value.shape), out)
            assert torch.equal(out, torch.from_numpy(value.copy()))
        assert rounding.unused == made.unused
        assert rounding.error < 2**-23


@pytest.mark.parametrize("method", ["fp8 in blocks", "nf4, nested", "gptq, columns in an order", "mxfp4 of GPT-OSS"])
def test_without_anything_asked_all_is_copied_bit_for_bit_and_stays_quantised(method: str, tmp_path: Path) -> None:
    repository(method, tmp_path / "q")
    assert convert(tmp_path / "q", tmp_path / "dcp", "--to", "dcp") == 0
    assert convert(tmp_path / "dcp", tmp_path / "own", "--to", "tangram", "--config", tmp_path / "q") == 0
    assert convert(tmp_path / "own", tmp_path / "back", "--to", "hf") == 0
    assert equal(load_file(tmp_path / "q/model.safetensors"), load_file(tmp_path / "back/model.safetensors"))
    before, after = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("q", "back"))
    assert before["quantization_config"] == after["quantization_config"]
