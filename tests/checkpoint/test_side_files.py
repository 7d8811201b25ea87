"""What is beside the weights goes along through every format, and config.json is true of the new tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tangram.checkpoint.conversion.convert import IDENTITY, restructure
from tangram.checkpoint.formats.common.config_json import is_quantised, true_of
from tangram.checkpoint.formats.common.side_files import PROVENANCE, side_files, with_provenance, write_side_files
from tangram.checkpoint.formats.detect import open_any
from tangram.cli import main
from tangram.errors import UserError
from tangram.relayout import TensorSpec, bind

REPOSITORY: Mapping[str, str] = {
    "README.md": "# A model\n![](figures/loss.png)",
    "LICENSE": "do what you like",
    "NOTICE.txt": "by us",
    "generation_config.json": '{"eos_token_id": [1, 3], "temperature": 0.6}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "merges.txt": "a b",
    "qwen.tiktoken": "IQ== 0",
    "sentencepiece.bpe.model": "pieces",
    "preprocessor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "modeling_mine.py": "class Mine: ...",
    "layers/attention.py": "class Attention: ...",
    "1_Pooling/config.json": "{}",
    "figures/loss.png": "a picture",
    "config (copy).json": "{}",
}
LEFT: Mapping[str, str] = {
    "onnx/model.onnx": "weights",
    "onnx/config.json": "{}",
    "original/consolidated.00.pth": "weights",
    "train.jsonl": "{}",
}
NEVER: Mapping[str, str] = {
    ".gitattributes": "*.bin filter=lfs",
    "pytorch_model.bin.index.json": "{}",
    "tf_model.h5": "weights",
    "adapter_config.json": "{}",
}
TENSORS = {"model.embed_tokens.weight": torch.randn(12, 4), "lm_head.weight": torch.randn(12, 4)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "mine-7b"
    for name, text in {**REPOSITORY, **LEFT, **NEVER}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "vocab_size": 12, "dtype": "float32"}))
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "elsewhere").symlink_to(folder.parent, target_is_directory=True)
    return folder


def tree(folder: Path) -> dict[str, str]:
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return {name: (folder / name).read_text() for name in names if name in REPOSITORY or name in {**LEFT, **NEVER}}


@pytest.mark.parametrize("way", [("hf",), ("tangram", "hf"), ("dcp", "hf"), ("tangram", "dcp", "tangram", "hf")])
def test_they_go_through_every_format(way: tuple[str, ...], repository: Path, tmp_path: Path) -> None:
    folder = repository
    for at, to in enumerate(way):
        source = open_any(folder)
        folder = tmp_path / f"{at}-{to}"
        restructure(source, bind(IDENTITY, source.specs), folder, to)
    assert tree(folder) == REPOSITORY
    trail = json.loads((folder / PROVENANCE).read_text())
    assert set(trail["side_files"]["files"]) >= REPOSITORY.keys()
    while "before" in trail:
        trail = trail["before"]
    assert trail["side_files"]["from"] == "mine-7b"
    assert set(trail["side_files"]["left_out"]) == {"onnx/", "original/", "train.jsonl", "elsewhere/"}


def test_the_command_says_what_it_leaves(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = open_any(repository)
    restructure(source, bind(IDENTITY, source.specs), tmp_path / "own", "tangram")
    for source_, config in ((repository, []), (tmp_path / "own", ["--config", str(repository)])):
        target = tmp_path / f"hf-{len(config)}"
        asked = [str(source_), str(target), "--to", "hf", *config, *(() if config else ("--size", "x=1"))]
        mapping = tmp_path / "as-it-is"
        mapping.write_text(IDENTITY)
        assert main(["checkpoint", "convert", *asked, "--mapping", str(mapping)]) == 0
        assert tree(target) == REPOSITORY
        assert "not carried: elsewhere/, onnx/, original/, train.jsonl" in capsys.readouterr().out


def test_the_export_of_a_checkpoint_as_it_is_has_them_too(repository: Path, tmp_path: Path) -> None:
    source = open_any(repository)
    restructure(source, bind(IDENTITY, source.specs), tmp_path / "own", "tangram")
    assert main(["checkpoint", "convert", str(tmp_path / "own"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert tree(tmp_path / "hf") == REPOSITORY
    assert json.loads((tmp_path / "hf" / PROVENANCE).read_text())["from"] == "tangram"


def test_a_name_that_leads_out_is_refused(tmp_path: Path) -> None:
    for name in ("../escaped.json", "/tmp/escaped.json"):
        with pytest.raises(UserError, match="leads out"):
            write_side_files(tmp_path / "a", {name: b"{}"})
    assert not (tmp_path / "escaped.json").exists()


def test_large_and_countless_files_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.checkpoint.formats.common import side_files as small

    monkeypatch.setattr(small, "LARGEST_OTHER", 10)
    monkeypatch.setattr(small, "MOST_INSIDE", 2)
    for name in ("notes", "long", "few/1.txt", "few/2.txt", "many/1.txt", "many/2.txt", "many/3.txt", "big/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1234567890 more" if name in ("long", "big/1.txt") else "few")
    found = side_files(tmp_path)
    assert set(found.files) == {"notes", "few/1.txt", "few/2.txt"}
    assert found.left == ("big/", "long", "many/")


def test_provenance_keeps_what_was_said_before() -> None:
    first = with_provenance({"config.json": b"{}"}, {"from": "hf"}, "mine", ["onnx/"])
    second = json.loads(with_provenance(first, {"from": "dcp"}, "theirs")[PROVENANCE])
    assert second["side_files"] == {"from": "theirs", "files": ["config.json"], "left_out": []}
    assert second["before"]["side_files"] == {"from": "mine", "files": ["config.json"], "left_out": ["onnx/"]}


# ---------------------------------------------------------------- config.json


Others = Mapping[str, tuple[str, tuple[int, ...]]]


def specs(dtype: str = "float32", others: Others = MappingProxyType({})) -> dict[str, TensorSpec]:
    plain = {"model.embed_tokens.weight": TensorSpec((12, 4), dtype), "model.norm.weight": TensorSpec((4,), dtype)}
    return plain | {name: TensorSpec(shape, kind) for name, (kind, shape) in others.items()}


FP8 = {"quantization_config": {"quant_method": "fp8"}}
CASES: Mapping[str, tuple[dict[str, Any], dict[str, TensorSpec], dict[str, Any]]] = {
    "type": ({"torch_dtype": "bfloat16"}, specs(), {"torch_dtype": "float32"}),
    "type of a part": (
        {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}, specs("float16"),
        {"dtype": "float16", "text_config": {"dtype": "float16"}},
    ),
    "type that some have": ({"dtype": "bfloat16"}, specs(others={"w": ("bfloat16", (2,))}), {"dtype": "bfloat16"}),
    "no type": ({}, specs(), {}),
    "stale quantisation": ({"dtype": "float32", **FP8}, specs(), {"dtype": "float32"}),
    "stale in a part": ({"text_config": FP8}, specs(), {"text_config": {}}),
    "true quantisation": (
        FP8, specs(others={"a.weight": ("float8_e4m3fn", (4, 4)), "a.weight_scale_inv": ("float32", (1, 1))}), FP8,
    ),
    "true, packed": (FP8, specs(others={"a.qweight": ("int32", (4, 4)), "a.scales": ("float16", (1, 1))}), FP8),
    "more rows": ({"vocab_size": 10}, specs(), {"vocab_size": 12}),
    "rows of a part": ({"text_config": {"vocab_size": 10}}, specs(), {"text_config": {"vocab_size": 12}}),
    "not this one's": ({"vocab_size": 10}, {"a.b": TensorSpec((3, 4), "float32")}, {"vocab_size": 10}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_is_true(case: str) -> None:
    fields, tensors, right = CASES[case]
    files, said = true_of({"config.json": json.dumps(fields).encode(), "quant_config.json": b"{}"}, tensors)
    assert json.loads(files["config.json"]) == right
    assert ("quant_config.json" in files) == is_quantised(tensors)
    assert bool(said) == (fields != right or not is_quantised(tensors))


def test_fewer_rows_than_configured_are_refused() -> None:
    with pytest.raises(UserError, match=r"has 12 rows, and config\.json a vocab_size of 16.*--config"):
        true_of({"config.json": b'{"vocab_size": 16}'}, specs())


def test_buffers_of_whole_numbers_are_no_quantisation() -> None:
    others = {
        "a.attn.bias": ("uint8", (1, 1, 4, 4)),
        "a.position_ids": ("int64", (1, 8)),
        "a.masked_bias": ("bool", ()),
    }
    assert not is_quantised(specs(others=others))
    assert is_quantised(specs(others={"a.weight": ("int8", (4, 4))}))
