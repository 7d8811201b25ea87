"""Public reports about what lies in a folder of weights, each rebuilt small: which of it is the model."""

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tangram.checkpoint import load
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.loading.load import LoadError
from tangram.cli import main
from tests.public.test_convert import FIELDS, beside, convert, same, saved

Capture = pytest.CaptureFixture[str]
INDEX = "model.safetensors.index.json"


def overlaid(folder: Path, index: Mapping[str, str]) -> Path:
    """Two shards and an overlay that has one of their tensors anew."""
    folder.mkdir()
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, folder / "model-overlay.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(index)}))
    return folder


def test_the_index_says_which_of_two_is_meant(tmp_path: Path, capsys: Capture) -> None:
    """colibri#1479: (and 1Cat-vLLM#407) a later file supersedes tensors that are still in the first shards."""
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    source = overlaid(tmp_path / "in", {"a": one, "b": "model-overlay.safetensors", "c": two})
    assert convert(source, tmp_path / "hf") == 0
    assert f"left out, no tensors of the model: b in {one}" in capsys.readouterr().out
    same(tmp_path / "hf", {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.zeros(2)})


def test_the_index_does_not_say_which_of_two_is_meant(tmp_path: Path, capsys: Capture) -> None:
    """qwen38-27b-rtx3090#123: a tensor is in more shards than one, and the last that is read would win."""
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    source = overlaid(tmp_path / "in", {"a": one, "c": two, "d": "model-overlay.safetensors"})
    assert convert(source, tmp_path / "hf") == 2
    assert f"the tensor b twice, in {one} and in model-overlay.safetensors" in capsys.readouterr().err
    (source / INDEX).unlink()
    assert convert(source, tmp_path / "hf") == 2
    assert f"the tensor b twice, in {one} and in model-overlay.safetensors" in capsys.readouterr().err


def test_pickled_shards_without_an_index(tmp_path: Path, capsys: Capture) -> None:
    """llm2vec#162: no index can be found, though every shard is there."""
    folder = beside(tmp_path / "in", FIELDS)
    for i in (1, 2):
        torch.save({f"w{i}": torch.ones(i)}, folder / f"pytorch_model-0000{i}-of-00002.bin")
    opened = open_any(folder)
    assert {name: spec.shape for name, spec in opened.specs.items()} == {"w1": (1,), "w2": (2,)}
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    assert convert(folder, tmp_path / "hf") == 2
    assert "the file 1 of 2" in capsys.readouterr().err


def cached(folder: Path, *, whole: bool = True) -> Path:
    """A model in the hub's cache: its folder, with a snapshot of links."""
    snapshot = folder / "models--x--y/snapshots/0123abc"
    (folder / "models--x--y/blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "models--x--y/blobs/9f")
    for name, blob in (("model.safetensors", "9f" if whole else "9e"), ("config.json", "9d")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (folder / "models--x--y/blobs/9d").write_text(json.dumps(dict(FIELDS)))
    return folder / "models--x--y"


def test_a_folder_of_the_hubs_cache(tmp_path: Path, capsys: Capture) -> None:
    """lmstudio-bug-tracker#1338: the cache's folder is given, and the model is two below, in a snapshot."""
    folder = cached(tmp_path)
    assert convert(folder, tmp_path / "hf") == 2
    assert "snapshots/0123abc is a Hugging Face directory: give that" in capsys.readouterr().err
    assert convert(folder / "snapshots/0123abc", tmp_path / "dcp", to="dcp") == 0
    assert list(open_any(folder / "snapshots/0123abc").specs) == ["w"]


def test_a_snapshot_without_its_weights(tmp_path: Path, capsys: Capture) -> None:
    """sglang#34117: the cache has a snapshot, of which the download never brought the weights."""
    folder = cached(tmp_path, whole=False)
    assert convert(folder / "snapshots/0123abc", tmp_path / "hf") == 2
    assert "model.safetensors is a link to nothing: download it again" in capsys.readouterr().err


@pytest.mark.parametrize("holder", ["app", "state", "train_state", "checkpoint"])
def test_states_under_any_holder(holder: str, tmp_path: Path) -> None:
    """pytorch#171706: model and optimiser of an application's state, under whatever key it has."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    optim = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optim.step()
    states: dict[str, Mapping[str, Any]] = {name: optim.state[one] for name, one in module.named_parameters()}
    saved({holder: {"model": module.state_dict(), "optim": {"state": states}}}, tmp_path / "dcp")
    opened = open_any(tmp_path / "dcp")
    wanted = {name: one.detach() for name, one in module.named_parameters()}
    wanted |= {f"{name}.{state}": value for name, table in states.items() for state, value in table.items()}
    assert set(opened.specs) == set(wanted)
    assert not opened.beside
    for piece in opened.pieces:
        assert torch.equal(opened.read(piece.place, piece.tensor), wanted[piece.tensor])


@pytest.mark.parametrize("kind", ["dcp", "hf", "bin", "empty"])
def test_loading_what_another_program_wrote(kind: str, tmp_path: Path) -> None:
    """pytorch#118207: a checkpoint of one kind is given to the reader of another."""
    weights: dict[str, Tensor] = {"w": torch.ones(2)}
    folder = tmp_path / kind
    folder.mkdir()
    if kind == "dcp":
        saved(weights, folder)
    elif kind == "hf":
        save_file(weights, folder / "model.safetensors")
    elif kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(LoadError) as error:
        load({"model": {"w": torch.zeros(2)}}, folder, no_dist=True)
    assert ("tangram checkpoint convert" in str(error.value)) == (kind != "empty")


def test_complex_numbers_of_double_precision(tmp_path: Path, capsys: Capture) -> None:
    """safetensors#489: the format has no place for the complex numbers of a model."""
    torch.save({"freqs_cis": torch.ones(2, dtype=torch.complex128)}, tmp_path / "model.pt")
    assert convert(tmp_path / "model.pt", tmp_path / "hf") == 2
    said = capsys.readouterr().err
    assert "freqs_cis is complex128" in said
    assert "give --to dcp or tangram" in said
    assert "--dtype" not in said
    assert main(["checkpoint", "convert", str(tmp_path / "model.pt"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0


@pytest.mark.parametrize("to", ["hf", "dcp", "tangram"])
def test_a_disk_that_takes_no_more(to: str, tmp_path: Path, capsys: Capture) -> None:
    """lightning#19970: a save that ends halfway leaves something that is taken for a checkpoint."""
    torch.save({"w": torch.ones(1 << 16)}, tmp_path / "w.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        assert convert(tmp_path / "w.pt", tmp_path / "out", to=to) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert "File too large" in said
    assert "None" not in said
    assert [file.name for file in tmp_path.iterdir()] == ["w.pt"]
    assert convert(tmp_path / "w.pt", tmp_path / "out", to=to) == 0


def test_a_checkpoint_of_the_old_megatron(tmp_path: Path, capsys: Capture) -> None:
    """RLinf/RLinf#322, alibaba/Pai-Megatron-Patch#124: a file for each rank, as Megatron-LM wrote before torch_dist."""
    (tmp_path / "iter_0000010/mp_rank_00").mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "iter_0000010/mp_rank_00/model_optim_rng.pt")
    assert convert(tmp_path / "iter_0000010", tmp_path / "out") == 2
    assert "Megatron-LM's format before torch_dist: save it by --ckpt-format torch_dist" in capsys.readouterr().err


def test_a_folder_of_many_steps(tmp_path: Path, capsys: Capture) -> None:
    """The output folder of a trainer is given for one of its checkpoints, as in LlamaFactory#10832."""
    for step in (10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / f"checkpoint-{step}/model.safetensors")
        (tmp_path / f"checkpoint-{step}/config.json").write_text(json.dumps(dict(FIELDS)))
    assert convert(tmp_path, tmp_path / "out") == 2
    assert "checkpoint-20 is a Hugging Face directory: give one of them" in capsys.readouterr().err


def cut_by_ranks(folder: Path, parts: int) -> Path:
    """A Llama whose MLPs were written in parts, each by a rank, and the rest once; the index names the first rank's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    folder = beside(folder, model.config.to_dict())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    cut = {name: p.chunk(parts, int("down_proj" in name)) for name, p in weights.items() if ".mlp." in name}
    common = {name: p for name, p in weights.items() if name not in cut}
    save_file(common, folder / "pytorch_model-00000-TP-common.safetensors")
    for rank in range(parts):
        own = {name: p[rank].contiguous() for name, p in cut.items()}
        save_file(own, folder / f"pytorch_model-00001-TP-00{rank}.safetensors")
    files = {False: "pytorch_model-00000-TP-common.safetensors", True: "pytorch_model-00001-TP-000.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: files[name in cut] for name in weights}}))
    return folder


def test_a_directory_of_which_each_rank_has_a_part(tmp_path: Path, capsys: Capture) -> None:
    """sglang#36438: of weights that were written in parts, one for each rank, every name is there in the first file,
    so that a model of a quarter of its MLPs was loaded and nothing said."""
    source = cut_by_ranks(tmp_path / "in", 4)
    assert convert(source, tmp_path / "hf") == 0
    out = capsys.readouterr().out
    assert (
        "not those of the configuration (LlamaForCausalLM): model.layers.0.mlp.down_proj.weight is 16 x 8, not 16 x 32"
        in out
    )
    assert "config.json has intermediate_size 32, but up_proj has 8 rows" in out
    assert "TP-001.safetensors (which has 3 of the same names again)" in out
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert "config.json has intermediate_size 32, but up_proj has 8 rows" in capsys.readouterr().out
    # With a configuration that is given for what comes out, it is refused.
    asked = ["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "again"), "--to", "hf", "--config"]
    assert main([*asked, str(source)]) == 2
    assert "model.layers.0.mlp.down_proj.weight is 16 x 8, not 16 x 32" in capsys.readouterr().err
    (source / INDEX).unlink()
    assert convert(source, tmp_path / "other") == 2
    assert "twice, in pytorch_model-00001-TP-000.safetensors and in " in capsys.readouterr().err
