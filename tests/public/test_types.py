"""Public reports about types of tensors that few programs write, each with its input rebuilt small."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from tangram.cli import main
from tests.checkpoint.peers.models import save
from tests.public.test_convert import convert, same

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("kind", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("to", ["hf", "dcp", "tangram"])
def test_float8_without_a_negative_zero(kind: str, to: str, tmp_path: Path) -> None:
    """huggingface/huggingface_hub#4901: types that safetensors writes and that a table beside it does not have."""
    values = torch.arange(256, dtype=torch.uint8).view(16, 16).view(getattr(torch, kind))
    (tmp_path / "hf").mkdir()
    save_file({"a.weight": values}, tmp_path / "hf/model.safetensors")
    assert main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "there"), "--to", to]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "there")]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "there"), str(tmp_path / "back"), "--to", "hf"]) == 0
    back = load_file(tmp_path / "back/model.safetensors")["a.weight"]
    assert back.dtype == values.dtype
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3"])
def test_numbers_that_are_packed(kind: str, tmp_path: Path, capsys: Capture) -> None:
    """safetensors/safetensors#839, foundation-model-stack/fastsafetensors#69: numbers of 4 bits are a KeyError. The
    sentence says which types there are.
    """
    bits = {"F4": 4, "F6_E2M3": 6}[kind]
    row = {"dtype": kind, "shape": [8, 8], "data_offsets": [0, 8 * bits]}
    head = json.dumps({"a.weight": row}).encode()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8 * bits))
    for words in (["inspect"], ["convert", str(tmp_path / "out"), "--to", "hf"]):
        assert main(["checkpoint", words[0], str(tmp_path / "hf"), *words[1:]]) == 2
        assert f"has the type {kind}, and those that are read are " in capsys.readouterr().err


@pytest.mark.parametrize("through", ["", "torch_dist", "tangram"])
def test_what_a_router_keeps_in_float32(through: str, tmp_path: Path, capsys: Capture) -> None:
    """ISEEKYAN/Megatron-LM#81: an export in bfloat16 rounds the bias that chooses experts, which transformers keeps in
    float32, so that other experts are chosen."""
    model = save("deepseek_v3", tmp_path / "hf")
    source = tmp_path / "hf"
    if through:
        assert convert(source, tmp_path / through, to=through) == 0
        source = tmp_path / through
    assert convert(source, tmp_path / "out", "--dtype", "bfloat16", "--round") == 0
    assert "2 not cast to bfloat16, as the model's class keeps them in float32" in capsys.readouterr().out
    narrow = type(model).from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)  # pyright: ignore
    narrow.save_pretrained(tmp_path / "own")
    own = load_file(tmp_path / "own/model.safetensors")
    assert {str(one.dtype) for one in own.values()} == {"torch.float32", "torch.bfloat16"}
    same(tmp_path / "out", own)
    core = tmp_path / "core16"
    assert convert(source, core, "--dtype", "bfloat16", "--round", to="torch_dist") == 0
    assert convert(core, tmp_path / "back") == 0
    same(tmp_path / "back", own)


def test_a_type_in_which_half_a_model_is_kept(tmp_path: Path) -> None:
    """ISEEKYAN/Megatron-LM#81, of float16: norms of GPT-OSS stay float32 there, and are cast in bfloat16."""
    save("gpt_oss", tmp_path / "hf")
    for kind, kept in (("float16", {"norm.weight", "layernorm.weight"}), ("bfloat16", set[str]())):
        assert convert(tmp_path / "hf", tmp_path / kind, "--dtype", kind, "--round") == 0
        made = load_file(tmp_path / kind / "model.safetensors")
        wide = {name for name, one in made.items() if one.dtype == torch.float32}
        assert {name.split(".")[-2].split("_")[-1] + ".weight" for name in wide} == kept
