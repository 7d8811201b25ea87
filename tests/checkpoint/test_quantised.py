"""Quantised repositories: decoded as their methods say, copied bit for bit, or refused; never codes without scales."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.conversion.convert import IDENTITY, Filler
from tangram.checkpoint.conversion.quantised import dequantised, quantisation_of
from tangram.cli import main
from tangram.layout import Region
from tangram.relayout import bind
from tests.checkpoint.quantising import FLOAT, METHODS, NAME, Repository, write
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


# ---------------------------------------------------------------- refused


def refused(folder: Path, message: str, *options: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(folder, folder.parent / "out", *options) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert "--round" not in said
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--to hf --dtype bfloat16", r"quantised with fp8, and a cast to bfloat16 .*: give --dequantise in place of"),
        ("--to hf --dtype bfloat16 --round", r"a cast to bfloat16 .*: give --dequantise in place of --dtype"),
        ("--to hf --dtype float32", r"a cast to float32 .*: add --dequantise, which makes bfloat16"),
        ("--to hf --adapter lora", r"an adapter would tear codes and scales apart: add --dequantise"),
        ("--to hf --mapping own.txt", r"a mapping would tear codes and scales apart: add --dequantise"),
        ("--to torch_dist", r"the structure of Megatron-core's .* would tear .*: add --dequantise"),
        ("--to paddle", r"the structure of Paddle's .* would tear .*: add --dequantise"),
        ("--to hf --dequantise --dtype int8", r"--dtype int8: weights are dequantised to one of bfloat16"),
    ],
)
def test_what_would_tear_codes_and_scales_apart_is_refused(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository("fp8 in blocks", tmp_path / "q")
    (tmp_path / "own.txt").write_text("{name*} -> {name*}")
    words = [str(tmp_path / word) if word == "own.txt" else word for word in options.split()]
    refused(tmp_path / "q", message, *words, capsys=capsys)


@pytest.mark.parametrize("settings", [{"quant_method": "hqq"}, {"quant_method": "torchao"}, {"version": 3}])
def test_a_method_that_nobody_knows_here_is_copied_and_nothing_else(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "q", replace(METHODS["gptq"](np.random.default_rng(1)), settings=settings))
    method = settings.get("quant_method", "an unknown method")
    refused(tmp_path / "q", rf"quantised with {method}, and a cast", "--to", "hf", "--dtype", "float32", capsys=capsys)
    refused(tmp_path / "q", rf"{method} is not among what is decoded", "--to", "hf", "--dequantise", capsys=capsys)
    assert convert(tmp_path / "q", tmp_path / "out", "--to", "hf") == 0
    assert equal(load_file(tmp_path / "q/model.safetensors"), load_file(tmp_path / "out/model.safetensors"))


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(next(one for one in tensors if one.endswith(name)))


def other(name: str, tensor: Tensor) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({next(one for one in tensors if one.endswith(name)): tensor})


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("fp8 in blocks", without("_scale_inv"), r"q_proj.weight is there, of which fp8 says nothing"),
        ("fp8 in blocks", without(".weight"), r"weight_scale_inv is there, of which fp8 says nothing"),
        ("fp8 in blocks", other("_scale_inv", torch.ones(3, 2)), r"_scale_inv of shape \[3, 2\] does not fit .*weight"),
        ("nf4, nested", without("weight.absmax"), r"q_proj.weight.* is there, of which bitsandbytes says nothing"),
        ("nf4, nested", without(".nested_absmax"), r"does not fit|says nothing"),
        ("nf4, nested", without("__nf4"), r"q_proj.weight.* is there, of which bitsandbytes says nothing"),
        ("gptq", without(".qzeros"), r"is there, of which gptq says nothing"),
        ("gptq", other(".qzeros", torch.ones(4, 9, dtype=torch.int32)), r"qzeros of shape \[4, 9\] does not fit"),
        ("gptq, columns in an order", other(".g_idx", torch.full((128,), 4, dtype=torch.int32)), "names groups that"),
        ("awq", other(".scales", torch.ones(3, 64)), r"scales of shape \[3, 64\] does not fit"),
        ("4 bits", other("_shape", torch.tensor([36, 99])), r"of none of \[4\] bits"),
        ("4 bits", without("_shape"), r"is there, of which compressed-tensors says nothing"),
        ("4 bits", other("_scale", torch.ones(36, 5)), r"does not fit"),
        ("mxfp4 of GPT-OSS", other("_scales", torch.ones(3, 20, 4, dtype=torch.uint8)), r"does not fit"),
        ("nvfp4 of modelopt", without("_scale_2"), r"does not fit|says nothing"),
        ("bitsandbytes, 8 bits", without("SCB"), r"is there, of which bitsandbytes says nothing"),
    ],
)
def test_groups_that_are_not_whole_are_refused(
    method: str,
    change: Callable[[dict[str, Any]], None],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = METHODS[method](np.random.default_rng(1))
    tensors = dict(made.tensors)
    change(tensors)
    write(tmp_path / "q", replace(made, tensors=tensors))
    refused(tmp_path / "q", message, "--to", "hf", "--dequantise", capsys=capsys)
    refused(tmp_path / "q", "would tear codes and scales apart", "--to", "hf", "--dtype", "float32", capsys=capsys)


def test_without_a_configuration_that_says_how_nothing_is_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = METHODS["fp8 in blocks"](np.random.default_rng(1))
    write(tmp_path / "q", replace(made, settings={}))
    refused(
        tmp_path / "q",
        r"no quantization_config says how .*q_proj.weight is",
        "--to",
        "hf",
        "--dequantise",
        capsys=capsys,
    )
    refused(tmp_path / "q", r"is quantised, and a cast", "--to", "hf", "--dtype", "float32", capsys=capsys)
    write(tmp_path / "said", made, model_type="of-one-layer")  # a whole model is not here
    options = ["--to", "hf", "--dequantise", "--config", tmp_path / "said"]
    assert convert(tmp_path / "q", tmp_path / "out", *options) == 0
    name, value = next(iter(made.values.items()))
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[name], torch.from_numpy(value).bfloat16())


def test_a_configuration_that_is_silent_does_not_hide_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = METHODS["fp8 in blocks"](np.random.default_rng(1))
    write(tmp_path / "q", made, model_type="of-one-layer")
    write(tmp_path / "plain", Repository({}, {}, {}))
    refused(
        tmp_path / "q", "says nothing of it: leave it out", "--to", "hf", "--config", tmp_path / "plain", capsys=capsys
    )
    assert convert(tmp_path / "q", tmp_path / "own", "--to", "tangram") == 0
    refused(tmp_path / "own", "a cast to float32 would tear", "--to", "hf", "--dtype", "float32", capsys=capsys)
    assert convert(tmp_path / "own", tmp_path / "out", "--to", "hf", "--dequantise") == 0
    name, value = next(iter(made.values.items()))
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[name], torch.from_numpy(value).bfloat16())


def test_a_mapping_of_ones_own_takes_weights(tmp_path: Path) -> None:
    made = repository("gptq", tmp_path / "q")
    (tmp_path / "own.txt").write_text(f"{NAME}.weight: o i -> turned: i o\n{{name*}} -> {{name*}}")
    options = ["--to", "hf", "--dequantise", "--mapping", tmp_path / "own.txt"]
    assert convert(tmp_path / "q", tmp_path / "out", *options) == 0
    expected = torch.from_numpy(made.values[f"{NAME}.weight"].copy()).bfloat16().T
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["turned"], expected)


def test_numbers_that_a_type_does_not_have_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = METHODS["fp8 of a tensor"](np.random.default_rng(1))
    tensors = {**made.tensors, f"{NAME}.weight_scale_inv": torch.tensor(1000.0)}
    write(tmp_path / "q", replace(made, tensors=tensors), torch_dtype="float16")
    refused(
        tmp_path / "q",
        "has numbers that float16 does not: give a wider one",
        "--to",
        "hf",
        "--dequantise",
        capsys=capsys,
    )


# ---------------------------------------------------------------- what is told


def converted(folder: Path, capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    capsys.readouterr()
    assert convert(folder, folder.parent / "out", "--to", "hf", "--dequantise", "--json", *options) == 0
    return json.loads(capsys.readouterr().out)["dequantised"]


def test_the_error_is_that_of_the_values_that_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = repository("fp8 in blocks", tmp_path / "q")
    told = converted(tmp_path / "q", capsys)
    codes, scale = (made.tensors[f"{NAME}.weight{end}"].double() for end in ("", "_scale_inv"))
    exact = codes * scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :192]
    written = load_file(tmp_path / "out/model.safetensors")[f"{NAME}.weight"].double()
    error = ((written - exact).abs() / exact.abs())[exact != 0].max()
    assert told["error"] == pytest.approx(float(error), rel=1e-4)
    assert 2**-10 < told["error"] < 2**-8
    assert json.loads((tmp_path / "out/provenance.json").read_text())["dequantised"]["tensors"] == 1


def test_what_is_exact_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository("mxfp4 of GPT-OSS", tmp_path / "q")
    assert converted(tmp_path / "q", capsys)["error"] == 0


def test_scales_of_activations_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository("fp8 of AutoFP8", tmp_path / "q")
    assert converted(tmp_path / "q", capsys)["unused"] == 1
    left = json.loads((tmp_path / "out/provenance.json").read_text())["dequantised"]["left_out"]
    assert left == [f"{NAME}.input_scale"]


def test_a_quantised_checkpoint_is_compared_by_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository("fp8 in blocks", tmp_path / "q")
    converted(tmp_path / "q", capsys)
    assert main(["checkpoint", "diff", str(tmp_path / "q"), str(tmp_path / "out")]) == 0
    assert "3 tensors the same in both" in capsys.readouterr().out
    other = load_file(tmp_path / "out/model.safetensors")
    other[f"{NAME}.weight"][3, 5] += 1
    save_file(other, tmp_path / "out/model.safetensors")
    assert main(["checkpoint", "diff", str(tmp_path / "q"), str(tmp_path / "out")]) == 1
    assert "1 of 30,720" in capsys.readouterr().out
