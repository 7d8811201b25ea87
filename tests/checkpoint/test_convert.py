"""The export to Hugging Face: the same bits, proved, in bounded memory, there whole or not at all."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangram.checkpoint.formats import hf_export, read_ahead
from tangram.checkpoint.formats.hf_export import to_hugging_face
from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.store import digest
from tangram.checkpoint.store.commits import read_manifest
from tangram.errors import UserError
from tangram.layout import Region
from tests.checkpoint.making import flip, make, recommit, regions

SHAPE = (700, 1024)
TENSORS = {
    "model.a.weight": torch.randn(SHAPE),
    "model.b.weight": torch.randn(1500, 1024),
    "model.half": torch.randn(333, 7).to(torch.bfloat16),
    "model.byte": torch.arange(7, dtype=torch.uint8),
    "model.scale": torch.tensor(2.0),
    "model.none": torch.empty(0, 4),
    "model.many": torch.arange(60.0).reshape(3, 4, 5),
    "optim.step": torch.tensor(3),
}
CUTS = {
    "model.a.weight": regions(SHAPE, "_ _/tp", "tp=3"),
    "model.b.weight": regions((1500, 1024), "_/tp _", "tp=2"),
    "model.half": [Region.flat((333, 7), 0, 1000), Region.flat((333, 7), 1000, 333 * 7)],
}


def model(tensors: Mapping[str, Tensor] = TENSORS) -> dict[str, Tensor]:
    return {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    assert set(a) == set(b)
    return all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "step-1"
    beside = {"config.json": '{"dtype": "float32"}', "tokenizer.json": "{}"}
    make(path, TENSORS, CUTS, writers=3, about=About(step=1, beside=beside))
    return path


def test_one_file_has_every_bit(source: Path, tmp_path: Path) -> None:
    counted: list[int] = []
    made = to_hugging_face(source, tmp_path / "new" / "hf", on_bytes=counted.append)
    assert sorted(made.files) == ["config.json", "model.safetensors", "provenance.json", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "new" / "hf").iterdir()) == sorted(made.files)
    assert same(load_file(tmp_path / "new" / "hf" / "model.safetensors"), model())
    assert (made.tensors, made.cast, made.configured) == (7, 0, True)
    assert sum(counted) == (tmp_path / "new" / "hf" / "model.safetensors").stat().st_size
    assert made.nbytes == hf_export.size_of(source)
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "hf"]


def test_digests_of_what_was_written_are_those_of_the_checkpoint(source: Path, tmp_path: Path) -> None:
    to_hugging_face(source, tmp_path / "hf")
    manifest = read_manifest(source)
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        stored = manifest.tensors[f"model.{name}"]
        data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else torch.empty(0).numpy()
        boxes = Region.full(tensor.shape).boxes
        size, itemsize = tensor.numel(), tensor.itemsize
        sums = digest.sums(tensor.shape, itemsize, boxes[0], 0, size, data) if boxes else digest.NOTHING
        assert digest.digest(stored.spec.dtype, stored.spec.shape, sums) == stored.digest


def test_files_are_cut_at_the_size_that_was_asked_for(source: Path, tmp_path: Path) -> None:
    made = to_hugging_face(source, tmp_path / "hf", shard=3_000_000)
    names = [name for name in made.files if name.endswith(".safetensors")]
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) >= 3
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.nbytes
    found: dict[str, Tensor] = {}
    for name in names:
        part = load_file(tmp_path / "hf" / name)
        assert {index["weight_map"][key] for key in part} == {name}
        assert sum(t.nbytes for t in part.values()) <= 3_000_000 or len(part) == 1
        found |= part
    assert same(found, model())
    with safe_open(tmp_path / "hf" / names[0], "pt") as stream:
        assert stream.metadata()["format"] == "pt"


def test_the_least_memory_is_enough(source: Path, tmp_path: Path) -> None:
    to_hugging_face(source, tmp_path / "hf", memory=hf_export.LEAST)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), model())
    with pytest.raises(UserError, match="give 44 MiB or more"):
        to_hugging_face(source, tmp_path / "other", memory=hf_export.LEAST - 1)


@pytest.mark.parametrize(
    ("layout", "window"), [("_/tp _", read_ahead.WINDOW), ("_ _/tp", read_ahead.WINDOW), ("_ _/tp", 1 << 22)]
)
def test_each_block_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, window: int) -> None:
    """Also where windows of a block are made of blocks that lie across their borders."""
    tensors = {"model.w": torch.randn(4000, 1000), "model.v": torch.randn(1000, 1000)}
    cuts = {name: regions(tuple(t.shape), layout, "tp=2") for name, t in tensors.items()}
    make(tmp_path / "a", tensors, cuts, writers=2)
    read: list[tuple[str, int]] = []
    plain = read_ahead.Sources.read

    def counted(self: Any, file: str, block: int, out: Any) -> Any:
        read.append((file, block))
        return plain(self, file, block, out)

    monkeypatch.setattr(read_ahead.Sources, "read", counted)
    monkeypatch.setattr(read_ahead, "WINDOW", window)
    to_hugging_face(tmp_path / "a", tmp_path / "hf")
    assert len(read) == len(set(read)) == 6
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), model(tensors))


def test_a_cast_rounds_as_torch_does_and_only_floating_point(source: Path, tmp_path: Path) -> None:
    made = to_hugging_face(source, tmp_path / "hf", dtype="bfloat16", rounded=True)
    expected = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in model().items()}
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), expected)
    assert made.cast == 5
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"dtype": "bfloat16"}
    assert made.nbytes == hf_export.size_of(source, "bfloat16", rounded=True)


def test_files_of_a_directory_come_before_those_of_the_checkpoint(source: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    for name in ("config.json", "merges.txt", "model.safetensors.index.json", "weights.bin", ".hidden.json"):
        (config / name).write_text('{"mine": 1}')
    (config / "deep.json").mkdir()
    made = to_hugging_face(source, tmp_path / "hf", config=config)
    assert sorted(made.files) == ["config.json", "merges.txt", "model.safetensors", "provenance.json", "tokenizer.json"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"mine": 1}
    (config / "config.json").unlink()
    with pytest.raises(UserError, match=r"give a directory with a config\.json"):
        to_hugging_face(source, tmp_path / "other", config=config)


def test_without_a_configuration_it_is_said(tmp_path: Path) -> None:
    make(tmp_path / "a", {"model.w": torch.ones(2)})
    assert not to_hugging_face(tmp_path / "a", tmp_path / "hf").configured


# ---------------------------------------------------------------- transformers


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", [hf_export.SHARD, 20_000])
def test_transformers_loads_the_same_model(tmp_path: Path, tied: bool, shard: int) -> None:
    net = llama(tied).eval()
    save({"model": net}, tmp_path / "a", about=About(beside={"config.json": net.config.to_json_string()}))
    made = to_hugging_face(tmp_path / "a", tmp_path / "hf", shard=shard)
    assert (len(made.files) > 4) == (shard == 20_000)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(20).reshape(2, 10)
    assert torch.equal(loaded.eval()(input_ids=ids).logits, net(input_ids=ids).logits)


# ---------------------------------------------------------------- what goes wrong


def refused(tmp_path: Path, source: Path, words: str, error: type[UserError] = UserError, **options: Any) -> None:
    with pytest.raises(error, match=words):
        to_hugging_face(source, tmp_path / "hf", **options)
    assert [path.name for path in tmp_path.iterdir() if "hf" in path.name] == []


def test_damage_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    make(
        tmp_path / "a", {"model.w": torch.ones(9), "model.v": torch.ones(2_000_000)}, about=About(beside={"x.txt": "a"})
    )
    flip(tmp_path / "a" / "model-00001-of-00001.safetensors", 6_000_000)
    refused(tmp_path, tmp_path / "a", r"model\.v", DamagedError)
    flip(tmp_path / "a" / "model-00001-of-00001.safetensors", 6_000_000)
    flip(tmp_path / "a" / "x.txt", 0)
    refused(tmp_path, tmp_path / "a", r'its file "x\.txt" is not the one', DamagedError)


def test_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    """Every block is as it was written, but the tensor is not the one that was saved."""
    make(tmp_path / "a", {"model.w": torch.ones(9)})
    other = make(tmp_path / "b", {"model.w": torch.zeros(9)}).tensors["model.w"].digest
    recommit(
        tmp_path / "a", lambda old: replace(old, tensors={"model.w": replace(old.tensors["model.w"], digest=other)})
    )
    refused(tmp_path, tmp_path / "a", r"model\.w .* is not what was saved", DamagedError)


@pytest.mark.parametrize("target", ["file", "folder", "link"])
def test_what_is_there_is_never_replaced(source: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="is there already"):
        to_hugging_face(source, tmp_path / target)
    assert len(list(tmp_path.iterdir())) == 3


def test_other_mistakes(source: Path, tmp_path: Path) -> None:
    refused(tmp_path, source, "--dtype float23: give one of", dtype="float23")
    refused(tmp_path, source, "--dtype int8: give one of", dtype="int8")
    refused(tmp_path, tmp_path / "nowhere", "there is no checkpoint")
    make(tmp_path / "a", {"optim.w": torch.ones(2)})
    refused(tmp_path, tmp_path / "a", "has no section 'model' to export; it has optim")
    make(tmp_path / "b", {"model.w": torch.ones(2, dtype=torch.complex128)})
    refused(tmp_path, tmp_path / "b", "which safetensors has no name for")


MEASURE = """
import resource, sys, torch
from pathlib import Path
from tangram.checkpoint.formats import hf_export as convert
source, target = map(Path, sys.argv[1:])
convert.to_hugging_face(source / "small", target / "small", memory=convert.LEAST)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert.to_hugging_face(source / "large", target / "large", memory=convert.LEAST)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    large = torch.ones(25_000_000)
    make(tmp_path / "small", {"model.w": torch.ones(9)})
    make(tmp_path / "large", {"model.w": large}, {"model.w": regions((25_000_000,), "_/tp", "tp=2")}, writers=2)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / "hf")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(answer.stdout) * 1024 < (64 << 20) < large.nbytes
    found = load_file(tmp_path / "hf" / "large" / "model.safetensors")
    assert torch.equal(found["w"], large)


def test_what_others_wrote_is_like_what_we_write(source: Path, tmp_path: Path) -> None:
    """Their writer's file and ours hold the same tensors by the format's own reader."""
    save_file(model(), tmp_path / "theirs.safetensors")
    to_hugging_face(source, tmp_path / "hf")
    ours, theirs = tmp_path / "hf" / "model.safetensors", tmp_path / "theirs.safetensors"
    assert same(load_file(ours), load_file(theirs))


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("5GB", 5 * 10**9), ("1.5 KB", 1500), ("4096", 4096), ("2Ki", 2048), ("7B", 7)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert hf_export.bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "1iB", "1e9", "5gb "])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no size"):
        hf_export.bytes_of(text)
