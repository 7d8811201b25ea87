"""Public reports about converting checkpoints, each with its input rebuilt small: what we do with it."""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from tangram.checkpoint.formats.detect import open_any
from tangram.cli import main
from tangram.models.building.build import build_on_meta, config_of
from tests.checkpoint.zero import values

Capture = pytest.CaptureFixture[str]
FIELDS: Mapping[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 16,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A small Llama's, by the names of its module."""
    torch.manual_seed(0)
    shapes = build_on_meta(config_of("llama", {k: v for k, v in FIELDS.items() if k != "architectures"})).state_dict()
    return {name: torch.randn(one.shape) for name, one in shapes.items()}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return beside(tmp_path / "config", FIELDS)


def beside(folder: Path, fields: Mapping[str, Any]) -> Path:
    """A directory with a configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(fields)))
    return folder


def saved(tree: Mapping[str, Any], folder: Path) -> Path:
    """A DCP of one process."""
    with warnings.catch_warnings():  # torch says that it is alone
        warnings.simplefilter("ignore", UserWarning)
        torch_checkpoint.save(dict(tree), checkpoint_id=str(folder), no_dist=True)
    return folder


def convert(source: Path, target: Path, *more: object, to: str = "hf") -> int:
    return main(["checkpoint", "convert", str(source), str(target), "--to", to, *map(str, more)])


def same(folder: Path, expected: Mapping[str, Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def module_of(weights: Mapping[str, Tensor]) -> torch.nn.Module:
    """A module that has the parameters of these names."""
    root = torch.nn.Module()
    for name, one in weights.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(one.clone()))
    return root


# ---------------------------------------------------------------- what of a checkpoint is the model


@pytest.fixture(scope="module")
def trained(weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch gives of a module and its optimiser after a step."""
    module = module_of(weights)
    optim = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    for one in module.parameters():
        one.grad = torch.ones_like(one)
    optim.step()
    return get_state_dict(module, optim)


def test_an_app_state(
    weights: Mapping[str, Tensor], trained: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, config: Path
) -> None:
    """pytorch#171706: a DCP of an application's state, of which a release wants the model alone."""
    model, optim = trained
    source = saved({"app": {"model": model, "optim": optim}}, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf", "--config", config) == 0
    same(tmp_path / "hf", weights)


def test_the_states_of_an_app_go_to_a_format_that_has_them(
    trained: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    """accelerate#3971: of a sharded checkpoint the optimiser's steps are not found when it is loaded."""
    model, optim = trained
    saved({"app": {"model": model, "optim": optim}}, tmp_path / "dcp")
    opened = open_any(tmp_path / "dcp")
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(opened.states)
    assert opened.specs["lm_head.weight.exp_avg"].shape == (16, 8)


@pytest.mark.parametrize("tied", [False, True])
def test_what_lies_beside_a_flat_model(
    weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture, tied: bool
) -> None:
    """torchtitan#1291: a DCP of torchtitan, counters of the run and all, taken to Hugging Face gives noise."""
    extra = {"train_state.step": torch.tensor(3), "lr_scheduler.last_epoch": torch.tensor(3)}
    states = {f"state.{name}.exp_avg": one for name, one in weights.items()} if tied else {}
    source = saved({**weights, **extra, **states}, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf") == 0
    same(tmp_path / "hf", weights)
    assert "left out, no tensors of the model: " in capsys.readouterr().out


def test_a_key_of_the_model_beside_one_other(weights: Mapping[str, Tensor], tmp_path: Path) -> None:
    """flame#48: names that begin twice with model, since the state dict was saved under a key."""
    source = saved({"model": dict(weights), "epoch": torch.tensor(1)}, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf") == 0
    same(tmp_path / "hf", weights)


def test_a_key_that_only_the_configuration_tells(weights: Mapping[str, Tensor], tmp_path: Path, config: Path) -> None:
    """pytorch#126047: a DCP has the model under a key of its program's own, and other readers look elsewhere."""
    source = saved({"agent.net": dict(weights), "critic": {"head": torch.ones(2)}}, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf", "--config", config / "config.json") == 0
    same(tmp_path / "hf", weights)


def test_names_of_another_model(weights: Mapping[str, Tensor], tmp_path: Path, config: Path, capsys: Capture) -> None:
    """litgpt#355: a conversion meets names that its table does not have."""
    own = {name.replace("self_attn.q_proj", "attention.wq"): one for name, one in weights.items()}
    assert convert(saved(own, tmp_path / "dcp"), tmp_path / "hf", "--config", config) == 2
    said = capsys.readouterr().err
    assert "2 of 21 names are not those of the configuration (LlamaForCausalLM)" in said
    assert not (tmp_path / "hf").exists()


def test_a_nested_file(weights: Mapping[str, Tensor], tmp_path: Path) -> None:
    """litgpt#341: a file whose state dict is under a key, one level further down than the converter looks."""
    states = {i: {"exp_avg": torch.ones(2)} for i in range(2)}
    torch.save({"app": {"model": dict(weights), "optim": {"state": states, "param_groups": []}}}, tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "hf") == 0
    same(tmp_path / "hf", weights)


WRAPPED = {
    "layers.0.": "layers.0._orig_mod.", "layers.1.": "layers.1._checkpoint_wrapped_module._orig_mod.",
    "model.": "_fsdp_wrapped_module.model.",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["dcp", "flat.pt", "keyed.pt"])
def test_names_of_wrappers(weights: Mapping[str, Tensor], tmp_path: Path, config: Path, kind: str) -> None:
    """torchtitan#2622: layers that are compiled inside a wrapper keep `_orig_mod` in the names that are saved."""
    own = dict(weights)
    for plain, wrapped in WRAPPED.items():
        own = {name.replace(plain, wrapped): one for name, one in own.items()}
    own["lm_head.weight"] = own.pop("lm_head.weight")
    if kind == "dcp":
        saved(own, tmp_path / kind)
    else:
        torch.save({"model": own} if kind == "keyed.pt" else own, tmp_path / kind)
    assert convert(tmp_path / kind, tmp_path / "hf", "--config", config) == 0
    same(tmp_path / "hf", weights)


# ---------------------------------------------------------------- tied, derived, facts


def tied_config(tmp_path: Path, **more: Any) -> Path:
    return beside(tmp_path / "tied", {**FIELDS, "tie_word_embeddings": True, **more})


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_both_names_of_a_tied_tensor(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture, to: str) -> None:
    """lmms-engine#157: FSDP saved head and embeddings as two, which are one."""
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    source = saved(both, tmp_path / "dcp")
    assert convert(source, tmp_path / "out", "--config", tied_config(tmp_path), to=to) == 0
    assert "lm_head.weight is model.embed_tokens.weight, bit for bit" in capsys.readouterr().out
    if to == "hf":
        same(tmp_path / "out", {name: one for name, one in weights.items() if name != "lm_head.weight"})


def test_tied_tensors_that_differ(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture) -> None:
    """Automodel#2511: a head that has been trained apart from the embeddings that the configuration ties it to."""
    head = weights["model.embed_tokens.weight"].clone()
    head[3, 2:5] += 1
    source = saved({**weights, "lm_head.weight": head}, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf", "--config", tied_config(tmp_path)) == 2
    assert "but 3 of 128 elements differ" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_buffers_that_are_computed(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture, to: str) -> None:
    """transformers#35255: an old repository with the frequencies of its rotary embeddings."""
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    save_file({**weights, **old}, beside(tmp_path / "old", FIELDS) / "model.safetensors")
    assert convert(tmp_path / "old", tmp_path / "out", to=to) == 0
    assert "left out, since models compute them: 2 of rotary_emb.inv_freq" in capsys.readouterr().out
    if to == "hf":
        same(tmp_path / "out", weights)


TITAN = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attention_norm",
}  # fmt: skip


def test_angles_that_a_program_stores(
    weights: Mapping[str, Tensor], tmp_path: Path, config: Path, capsys: Capture
) -> None:
    """torchtitan#634: `freqs_cis` is stored by some versions of the same model and not by others."""
    own = dict(weights)
    for name, titan in TITAN.items():
        own = {raw.replace(name, titan): one for raw, one in own.items()}
    source = saved({**own, "freqs_cis": torch.ones(4, 2, dtype=torch.complex64)}, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf", "--config", config) == 0
    assert "left out, since models compute them: 1 of freqs_cis" in capsys.readouterr().out
    assert sorted(load_file(tmp_path / "hf/model.safetensors")) == sorted(weights)


@pytest.mark.parametrize("fields", [{"head_dim": None}, {"rope_scaling": None}])
def test_fields_that_are_null(weights: Mapping[str, Tensor], tmp_path: Path, fields: Mapping[str, Any]) -> None:
    """mbridge#39: (and llama.cpp#2793) a field of the configuration is there, and null."""
    save_file(dict(weights), beside(tmp_path / "in", {**FIELDS, **fields}) / "model.safetensors")
    assert convert(tmp_path / "in", tmp_path / "core", to="torch_dist") == 0
    assert convert(tmp_path / "core", tmp_path / "back") == 0
    same(tmp_path / "back", weights)


def test_masks_of_gpt2(tmp_path: Path) -> None:
    """InternLM#296: masks that an old attention stored go; a bias by a like name stays."""
    own = {"h.0.attn.c_attn.bias": torch.ones(3), "h.0.attn.bias": torch.ones(1, 1, 2, 2)}
    (tmp_path / "old").mkdir()
    save_file({**own, "h.0.attn.masked_bias": torch.tensor(-1e4)}, tmp_path / "old/model.safetensors")
    assert convert(tmp_path / "old", tmp_path / "hf") == 0
    same(tmp_path / "hf", {"h.0.attn.c_attn.bias": torch.ones(3)})


def test_a_configuration_without_architectures(weights: Mapping[str, Tensor], tmp_path: Path) -> None:
    """vllm#3982: (and LlamaFactory#9709) a configuration without `architectures` is valid, and breaks programs."""
    folder = beside(tmp_path / "in", {key: one for key, one in FIELDS.items() if key != "architectures"})
    save_file(dict(weights), folder / "model.safetensors")
    assert convert(folder, tmp_path / "core", to="torch_dist") == 0
    assert convert(tmp_path / "core", tmp_path / "back") == 0
    same(tmp_path / "back", weights)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_nextn_predict_layers": 3}, "has num_nextn_predict_layers 3, but no weights of it are there"),
        ({"num_key_value_heads": None}, "has no num_key_value_heads, which means 2, but the weights have 1"),
        ({"num_key_value_heads": 2}, "has num_key_value_heads 2, but the weights have 1"),
        ({"num_hidden_layers": 3}, "has num_hidden_layers 3, but the weights are of 2"),
        ({"num_nextn_predict_layers": 1}, "has num_nextn_predict_layers 1, but no weights of it are there"),
        ({"vocab_size": 15}, "has vocab_size 15, but the embeddings have 16 rows"),
    ],
)
def test_facts_that_the_weights_contradict(
    weights: Mapping[str, Tensor],
    tmp_path: Path,
    capsys: Capture,
    more: Mapping[str, Any],
    said: str,
) -> None:
    """meta-llama/llama#427: (and Megatron-Bridge#5495, of MTP layers) other heads of keys than the weights have."""
    folder = beside(tmp_path / "in", {key: one for key, one in {**FIELDS, **more}.items() if one is not None})
    save_file(dict(weights), folder / "model.safetensors")
    assert convert(folder, tmp_path / "out", to="hf") == 0
    assert said in capsys.readouterr().out
    fits = "predict_layers" in said
    assert convert(folder, tmp_path / "core", to="torch_dist") == (0 if fits else 2)
    out = capsys.readouterr()
    assert said in (out.out if fits else out.err)
    assert fits or len(out.err) < 200


def test_a_directory_that_its_own_configuration_does_not_name(
    weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture
) -> None:
    """vllm-project/speculators#1131: a remap that was lost leaves tensors without weights, which are drawn anew."""
    folder = beside(tmp_path / "in", FIELDS)
    save_file({name.replace("self_attn", "attn"): one for name, one in weights.items()}, folder / "model.safetensors")
    assert convert(folder, tmp_path / "out", to="hf") == 0
    said = capsys.readouterr().out
    assert "as it was in the source: 8 of 21 names are not those of the configuration" in said, said
    save_file(dict(list(weights.items())[:-2]), folder / "model.safetensors")
    assert convert(folder, tmp_path / "again", to="hf") == 0
    assert "2 of the configuration's tensors (LlamaForCausalLM) are not there" in capsys.readouterr().out


# ---------------------------------------------------------------- what is read, and what is said of the rest


RANKS = r"""
import os, sys, torch
from pathlib import Path
from torch import distributed
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
wide = torch.arange(15.0).view(5, 3)
state = {
    "rows": distribute_tensor(wide, mesh, [Shard(0)]), "columns": distribute_tensor(wide.T, mesh, [Shard(0)]),
    "copy": distribute_tensor(torch.arange(4.0), mesh, [Replicate()]), "plain": torch.ones(3),
    "norm": distribute_tensor(torch.ones(8), mesh, [Shard(0)]), "scale": torch.tensor(2.5),
}
(folder / "ranks").mkdir(exist_ok=True)
torch.save(state, folder / f"ranks/model_world_size_2_rank_{rank}.pt")
torch.save({"state": {}}, folder / f"ranks/optim_world_size_2_rank_{rank}.pt")
save(state, storage_writer=HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True))
distributed.barrier()
os._exit(0)  # torch 2.13 aborts now and then as it ends: "terminate called without an active exception"
"""
WIDE = torch.arange(15.0).view(5, 3)
STATE = {
    "rows": WIDE, "columns": WIDE.T, "copy": torch.arange(4.0), "plain": torch.ones(3), "norm": torch.ones(8),
    "scale": torch.tensor(2.5),
}  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two real ranks write."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [subprocess.Popen([sys.executable, "-c", RANKS, str(folder), str(rank)]) for rank in range(2)]
    assert [one.wait(300) for one in started] == [0, 0]
    return folder


def test_files_of_ranks(two_ranks: Path, tmp_path: Path) -> None:
    """verl#1438: model_world_size_2_rank_0.pt and its like become a Hugging Face directory.

    verl#7610: a tensor that is no DTensor is a copy on each rank, of no dims also, and was concatenated.
    lmms-engine#160: parts that are equal byte for byte, as of a norm's ones, were taken for copies.
    """
    assert convert(two_ranks / "ranks", tmp_path / "hf") == 0
    same(tmp_path / "hf", {name: one.contiguous() for name, one in STATE.items()})


def test_a_rank_whose_file_is_missing(two_ranks: Path, tmp_path: Path, capsys: Capture) -> None:
    """verl-omni#596: files of ranks of which one is missing, or there twice, are to be refused."""
    name = "model_world_size_2_rank_0.pt"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes((two_ranks / "ranks" / name).read_bytes())
    assert convert(tmp_path / "in", tmp_path / "hf") == 2
    assert "model_world_size_2_rank_1.pt is not there" in capsys.readouterr().err


def test_the_same_file_as_two_ranks(two_ranks: Path, tmp_path: Path, capsys: Capture) -> None:
    """verl-omni#596: a rank's file copied over another's conflicts with it, though every file is sound."""
    (tmp_path / "in").mkdir()
    data = (two_ranks / "ranks/model_world_size_2_rank_1.pt").read_bytes()
    for rank in range(2):
        (tmp_path / f"in/model_world_size_2_rank_{rank}.pt").write_bytes(data)
    assert convert(tmp_path / "in", tmp_path / "hf") == 2
    assert "do not make it whole" in capsys.readouterr().err


def test_a_single_rank_with_plain_tensors(weights: Mapping[str, Tensor], tmp_path: Path) -> None:
    """verl#903: with one process the file has plain tensors, and no DTensors."""
    folder = tmp_path / "actor"
    beside(folder, {}).joinpath("config.json").unlink()
    torch.save(dict(weights), folder / "model_world_size_1_rank_0.pt")
    beside(folder / "huggingface", FIELDS)
    assert convert(folder, tmp_path / "hf") == 0
    same(tmp_path / "hf", weights)
    assert (tmp_path / "hf/config.json").is_file()


def test_torchs_hugging_face_writer(two_ranks: Path, tmp_path: Path, capsys: Capture) -> None:
    """pytorch#155566: its writer gives parts of tensors, a file for each rank, and no index any more."""
    assert convert(two_ranks / "shards", tmp_path / "hf") == 0
    same(tmp_path / "hf", {name: one.contiguous() for name, one in STATE.items()})
    (two_ranks / "shards/shard-00001-model-00001-of-00001.safetensors").rename(tmp_path / "gone")
    assert convert(two_ranks / "shards", tmp_path / "two") == 2
    assert "the shard 1 of 2 is not there" in capsys.readouterr().err
    (tmp_path / "gone").rename(two_ranks / "shards/shard-00001-model-00001-of-00001.safetensors")


def test_the_consolidated_form_of_that_writer(tmp_path: Path) -> None:
    """pytorch#156705: parts are made whole tensors when a save ends, or are so with one process."""
    writer = HuggingFaceStorageWriter(str(tmp_path / "in"), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch_checkpoint.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert torch.equal(values(open_any(tmp_path / "in"))["a"], torch.ones(3))


def test_shards_without_an_index(tmp_path: Path, capsys: Capture) -> None:
    """unsloth#2355: (and #2203) the shards are there, the file that lists them is not."""
    (tmp_path / "in").mkdir()
    for i in (1, 2):
        save_file({f"w{i}": torch.ones(i)}, tmp_path / f"in/model-0000{i}-of-00002.safetensors")
    assert convert(tmp_path / "in", tmp_path / "hf") == 0
    same(tmp_path / "hf", {"w1": torch.ones(1), "w2": torch.ones(2)})
    (tmp_path / "in/model-00002-of-00002.safetensors").unlink()
    assert convert(tmp_path / "in", tmp_path / "two") == 2
    assert "the file 2 of 2" in capsys.readouterr().err


def test_a_folder_above(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture) -> None:
    """accelerate#2848: the checkpoint's folder, where the DCP lies in one further down."""
    saved(weights, tmp_path / "checkpoint-2000/pytorch_model_fsdp_0")
    for command in (["inspect"], ["verify"], ["convert", str(tmp_path / "out"), "--to", "hf"]):
        arguments = [command[0], str(tmp_path / "checkpoint-2000"), *command[1:]]
        assert main(["checkpoint", *arguments]) == 2
        assert "pytorch_model_fsdp_0 is torch's distributed checkpoint: give that" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_lfs(tmp_path: Path, capsys: Capture, name: str) -> None:
    """DeepSeek-V3#557: a clone without git-lfs has small texts in the place of weights."""
    folder = beside(tmp_path / "in", FIELDS)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert convert(folder, tmp_path / "hf") == 2
    assert "run `git lfs pull`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("consolidated.safetensors", "names of their publisher's own"),
        ("adapter_model.safetensors", "as --adapter"),
        ("model-q4.gguf", "weights are in model-q4.gguf, which is not read"),
        ("__0_0.distcp", "that save did not end"),
        ("notes.txt", "it has notes.txt"),
    ],
)
def test_what_is_not_read(tmp_path: Path, capsys: Capture, name: str, said: str) -> None:
    """unsloth#1521: of a directory that is not recognised is said only which names were looked for."""
    (tmp_path / "in").mkdir()
    save_file({"a": torch.ones(400)}, tmp_path / "in" / name)
    assert convert(tmp_path / "in", tmp_path / "hf") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "convert"])
def test_a_name_on_the_hub(command: str, tmp_path: Path, capsys: Capture) -> None:
    """meta-llama/llama-cookbook#899: a name on the hub is given where a directory is wanted."""
    more = {"diff": ["other/model"], "convert": [str(tmp_path / "out"), "--to", "hf"]}.get(command, [])
    assert main(["checkpoint", command, "nobody/model-8B", *more]) == 2
    assert "hf download nobody/model-8B --local-dir model-8B" in capsys.readouterr().err


def test_looking_into_any_format(
    weights: Mapping[str, Tensor], two_ranks: Path, tmp_path: Path, capsys: Capture
) -> None:
    """accelerate#2772: what is in a DCP, in files of ranks, in a file of torch.save; and whether it is whole."""
    torch.save(dict(weights), tmp_path / "a.pt")
    for path in (saved(weights, tmp_path / "dcp"), tmp_path / "a.pt", two_ranks / "ranks", two_ranks / "shards"):
        assert main(["checkpoint", "inspect", str(path)]) == 0
        assert main(["checkpoint", "verify", str(path)]) == 0
    assert "whole: hf, 6 tensors" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(tmp_path / "dcp"), str(tmp_path / "a.pt")]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path / "a.pt"), "--values", "lm_head.weight", "--json"]) == 0
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-600])
    assert main(["checkpoint", "verify", str(tmp_path / "dcp")]) == 1


def with_index(folder: Path, weights: Mapping[str, Tensor], pickled: bool) -> Path:
    """A directory of one shard, and an index."""
    names = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    file = f"{names[0]}-00001-of-00001.{names[1]}"
    torch.save(dict(weights), folder / file) if pickled else save_file(dict(weights), folder / file)
    table = {"weight_map": dict.fromkeys(weights, file)}
    (folder / f"{names[0]}.{names[1]}.index.json").write_text(json.dumps(table))
    return folder / file


@pytest.mark.parametrize("pickled", [False, True])
def test_a_file_beside_an_index(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture, pickled: bool) -> None:
    """mlx-vlm#1464: another model's file lies beside the shards that the index lists. Which is meant nobody can say."""
    folder = beside(tmp_path / "in", FIELDS)
    shard = with_index(folder, weights, pickled)
    other = {name: torch.zeros_like(one) for name, one in weights.items()}
    single = "pytorch_model.bin" if pickled else "model.safetensors"
    torch.save(other, folder / single) if pickled else save_file(other, folder / single)
    assert convert(folder, tmp_path / "two") == 2
    assert f"has weights twice, in {single} and in {shard.name}" in capsys.readouterr().err
    shard.unlink()  # an index that was left over from a save before
    assert convert(folder, tmp_path / "hf") == 0
    same(tmp_path / "hf", other)


def test_a_file_that_the_index_does_not_list(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture) -> None:
    """ml-explore/mlx-swift-lm#408: tensors of a file that the index leaves out were taken for the model's."""
    folder = beside(tmp_path / "in", FIELDS)
    save_file(dict(weights), folder / "model.safetensors")
    save_file({"mtp.norm.weight": torch.ones(3)}, folder / "mtp.safetensors")
    table = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    assert convert(folder, tmp_path / "hf") == 0
    same(tmp_path / "hf", weights)
    assert "left out, no tensors of the model: mtp.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("apart", [False, True])
def test_a_head_and_embeddings_that_were_trained_apart(
    weights: Mapping[str, Tensor], tmp_path: Path, apart: bool
) -> None:
    """unslothai/unsloth#9331: an adapter has copies of a tied head and embeddings, and the merge dropped the head."""
    base = {name: one for name, one in weights.items() if name != "lm_head.weight"}
    save_file(base, tied_config(tmp_path) / "model.safetensors")
    adapter, words = tmp_path / "adapter", weights["model.embed_tokens.weight"] + 1
    adapter.mkdir()
    saved_whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    saved_whole |= {"modules_to_save": ["embed_tokens", "lm_head"], "fan_in_fan_out": False}
    (adapter / "adapter_config.json").write_text(json.dumps(saved_whole))
    head = words + 1 if apart else words.clone()
    names = ("model.embed_tokens.weight", "lm_head.weight")
    own = {f"base_model.model.{name}": one for name, one in zip(names, (words, head), strict=True)}
    for lora in (f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)):
        own |= {f"{lora}.lora_A.weight": torch.ones(2, 8), f"{lora}.lora_B.weight": torch.ones(8, 2)}
    save_file(own, adapter / "adapter_model.safetensors")
    assert convert(tmp_path / "tied", tmp_path / "hf", "--adapter", adapter) == 0
    found = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], words)
    assert ("lm_head.weight" in found) == apart
    assert json.loads((tmp_path / "hf/config.json").read_text())["tie_word_embeddings"] is not apart
    if apart:
        assert torch.equal(found["lm_head.weight"], head)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(found[q], weights[q] + 4.0)  # 4 / 2 times a sum of 2


def test_an_index_of_more_files_than_there_are(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture) -> None:
    """CoSER#3: the index lists 30 files, of which half are there."""
    folder = beside(tmp_path / "in", FIELDS)
    with_index(folder, weights, False)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00001-of-00001", "00002-of-00002", 3))
    assert convert(folder, tmp_path / "hf") == 2
    assert "its file model-00002-of-00002.safetensors is not there" in capsys.readouterr().err


def test_parts_of_tensor_parallel_ranks(tmp_path: Path, capsys: Capture) -> None:
    """sglang#36438: of weights that are published in parts by rank one part was taken for the whole."""
    folder = beside(tmp_path / "in", FIELDS)
    for rank in range(2):
        save_file({"model.norm.weight": torch.ones(4)}, folder / f"pytorch_model-00001-TP-00{rank}.safetensors")
    assert convert(folder, tmp_path / "hf", to="dcp") == 2
    said = capsys.readouterr().err
    assert "the tensor model.norm.weight twice, in pytorch_model-00001-TP-000.safetensors and" in said


@pytest.mark.parametrize("target", ["/proc/out", "/dev/null/out"])
def test_a_place_that_is_none(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture, target: str) -> None:
    """unsloth#7190: a destination that cannot be written to is found out when all of the work is done."""
    torch.save(dict(weights), tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", Path(target)) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: no directory can be made in")
    assert "\n" not in said


def test_names_that_are_kept(weights: Mapping[str, Tensor], tmp_path: Path, capsys: Capture) -> None:
    """accelerate#2772: a sharded save is merged into one of whole tensors: the same bits, of odd types too."""
    odd = {"f8": torch.ones(3).to(torch.float8_e5m2), "none": torch.empty(0, 2), "one": torch.tensor(True), **weights}
    assert convert(saved(odd, tmp_path / "dcp"), tmp_path / "hf") == 0
    assert "names kept" in capsys.readouterr().out
    same(tmp_path / "hf", odd)
    assert convert(tmp_path / "hf", tmp_path / "again", to="dcp") == 0
    assert main(["checkpoint", "diff", str(tmp_path / "dcp"), str(tmp_path / "again")]) == 0


def test_a_head_that_is_tied_is_in_no_index(weights: Mapping[str, Tensor], tmp_path: Path) -> None:
    """pytorch/torchtitan#3764: the index that was written named a head which is tied, and its file held nothing."""
    own = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    config = beside(tmp_path / "config", {**FIELDS, "tie_word_embeddings": True})
    source = saved(own, tmp_path / "dcp")
    assert convert(source, tmp_path / "hf", "--config", config, "--shard-size", "1KB") == 0
    listed: dict[str, str] = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    held = {path.name: load_file(path) for path in (tmp_path / "hf").glob("*.safetensors")}
    assert {(name, file) for file, some in held.items() for name in some} == {*listed.items()}
    assert all(held.values())
    found = {name: one for some in held.values() for name, one in some.items()}
    assert found.keys() == own.keys() - {"lm_head.weight"}
    assert all(torch.equal(one, own[name]) for name, one in found.items())


TITANS = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def test_norms_and_fewer_heads_of_keys_by_torchtitans_names(
    weights: Mapping[str, Tensor], tmp_path: Path, config: Path
) -> None:
    """pytorch/torchtitan#1454: norms before attention and MLP were taken for each other; ggml-org/llama.cpp#3364: keys
    were put in another order by the number of heads of queries."""
    titan: dict[str, Tensor] = {}
    for name, one in weights.items():
        if "q_proj" in name or "k_proj" in name:  # from halves of a head to pairs of neighbours
            one = one.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2)
        for own, theirs in TITANS.items():
            name = name.replace(own, theirs)
        titan[name] = one
    assert convert(saved(titan, tmp_path / "dcp"), tmp_path / "hf", "--config", config) == 0
    same(tmp_path / "hf", weights)
