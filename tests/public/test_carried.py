"""What a directory has beside its language model is in the export as it was, and is not trained by text."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma4Config, PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

from tangram.checkpoint.conversion.beside_text import not_there
from tangram.cli import main
from tangram.models.building.build import read_source
from tangram.training.data import BYTES
from tangram.training.state.carried import carried_by
from tangram.training.state.export_hf import export
from tangram.training.trials.local_plans import beside_text
from tests.planner.test_per_layer_fields import TOWER, text
from tests.training.small import write_text

TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
EYES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
MTP = {"mtp.fc.weight": torch.arange(64.0).reshape(8, 8), "mtp.layers.0.norm.weight": torch.ones(8)}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as Qwen3.5's: it sees, and predicts further tokens; its causal model does neither."""
    folder = tmp_path_factory.mktemp("sees")
    config = AutoConfig.for_model("qwen3_5", text_config=TEXT, vision_config=EYES)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **MTP}, file, metadata={"format": "pt"})
    return folder


def trained(folder: Path) -> PreTrainedModel:
    """Its causal model, with other values."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    return model


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_an_export_is_all_that_the_directory_was(sees: Path, tmp_path: Path, size: str, monkeypatch: Any) -> None:
    """unslothai/unsloth#5845 and modelscope/ms-swift#9172: a fine-tuned Qwen3.5 had lost its tower, and was served by
    nobody. Here in one file and in several; a second export in the same folder, as of a resumed run, is no other."""
    model, before = trained(sees), tensors(sees)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", _in_files_of(PreTrainedModel.save_pretrained, size))
    for _ in range(2):
        words = export(model, tmp_path, BYTES, read_source(None, str(sees), {}))
    assert words == "35 tensors of model.visual.*, mtp.* not trained here, which go along"
    after = tensors(tmp_path)
    assert after.keys() == before.keys()
    same = {name for name, one in before.items() if torch.equal(one, after[name])}
    assert same == {name for name in before if name.startswith(("model.visual.", "mtp."))}
    again, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again).__name__ == "Qwen3_5ForConditionalGeneration"
    assert not report["missing_keys"]
    said = [json.loads((folder / "config.json").read_text()) for folder in (sees, tmp_path)]
    assert said[0]["architectures"] == said[1]["architectures"]
    assert said[0]["vision_config"].items() <= {**said[1]["vision_config"], "dtype": "float32"}.items()
    assert torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight)


def _in_files_of(save: Any, size: str) -> Any:
    return lambda model, folder: save(model, folder, max_shard_size=size)


def test_layers_behind_the_last_go_along_but_not_as_codes(tmp_path: Path) -> None:
    """huggingface/transformers#35688: DeepSeek-V3's layer 61 is not read. GLM-4.5 has one, too, of which its
    configuration goes on to speak; in 8 bits its scales would have no word in the export."""
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, n_routed_experts=4, moe_intermediate_size=16, num_nextn_predict_layers=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    file, own = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    assert carried_by(model, tmp_path) is None
    more = {"model.layers.46.eh_proj.weight": torch.ones(4, 4), "model.layers.46.mlp.gate.weight": torch.ones(4, 4)}
    save_file({**own, **more}, file, metadata={"format": "pt"})
    found = carried_by(model, tmp_path)
    assert found is not None
    assert found.names == tuple(more)
    assert found.words() == "2 tensors of model.layers.46.* not trained here, which go along"
    more["model.layers.46.eh_proj.weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({**own, **more}, file, metadata={"format": "pt"})
    save_file({**own, **{name: torch.ones(4, 4) for name in more}}, file, metadata={"format": "pt"})
    model.save_pretrained(tmp_path / "text")
    for source, to, also in (("text", "tangram", []), ("saved", "hf", ["--config", str(tmp_path)])):
        target = tmp_path / {"tangram": "saved", "hf": "made"}[to]
        assert main(["checkpoint", "convert", str(tmp_path / source), str(target), "--to", to, *also]) == 0
    assert tensors(tmp_path / "made").keys() == {*own, *more}
    save_file({**own, **more}, file, metadata={"format": "pt"})
    words = export(model, tmp_path / "out", BYTES, read_source(None, str(tmp_path), {}))
    assert words == "2 tensors of model.layers.46.* quantised, which stay behind"
    assert tensors(tmp_path / "out").keys() == own.keys()
    plain = {"model.layers.92.eh_proj.weight": torch.ones(4, 4)}
    save_file({**own, **more, **plain}, file, metadata={"format": "pt"})
    words = export(model, tmp_path / "out", BYTES, read_source(None, str(tmp_path), {}))
    assert words.startswith("1 tensor of model.layers.92.* not trained here, which go along; 2 tensors of")
    assert tensors(tmp_path / "out").keys() == {*own, *plain}


def test_masks_that_old_models_kept_are_nothing_to_carry(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=320, n_embd=32, n_layer=1, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    save_file({**load_file(file), **mask}, file, metadata={"format": "pt"})
    assert carried_by(model, tmp_path) is None


@pytest.mark.parametrize("between", ["tangram", "dcp"])
def test_text_converted_beside_its_directory_is_all_of_it(
    between: str, sees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5817: of a Qwen3.5 trained on text its configuration goes on to speak of the tower.

    It is what the run's export is, bit for bit; without the directory's weights no half of a model is written.
    """
    model = trained(sees)
    (tmp_path / "text").mkdir()
    save_model(
        model, str(tmp_path / "text" / "model.safetensors"), metadata={"format": "pt"}
    )  # by the class's own names
    export(model, tmp_path / "export", BYTES, read_source(None, str(sees), {}))
    shutil.copytree(sees, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    convert = ["checkpoint", "convert"]
    saved, made = str(tmp_path / "saved"), tmp_path / "made"
    assert main([*convert, str(tmp_path / "text"), saved, "--to", between]) == 0
    assert main([*convert, saved, str(made), "--to", "hf", "--config", str(tmp_path / "bare")]) != 0
    assert "the weights are of Qwen3_5ForCausalLM, which is not all of" in capsys.readouterr().err
    assert main([*convert, saved, str(made), "--to", "hf", "--config", str(sees)]) == 0
    assert "taken from sees0 as they are there: 35 tensors of model.visual.*, mtp.*" in capsys.readouterr().out
    right, got = tensors(tmp_path / "export"), tensors(made)
    assert right.keys() == got.keys()
    assert not [name for name, one in right.items() if not torch.equal(one, got[name])]
    _, report = AutoModelForImageTextToText.from_pretrained(made, output_loading_info=True)
    assert not report["missing_keys"]


JOB = """
version = 3
model.path = "{model}"
[data]
tokenizer = "bytes"
sequence = 32
global_batch = 2
[[data.sources]]
path = "{text}"
[optimiser]
lr = 1e-3
warmup_steps = 1
[checkpoint]
every_steps = 1
[run]
steps = 2
{more}
"""


@pytest.mark.parametrize("more", ["", "[lora]\nrank = 2"], ids=["all of it", "adapters"])
def test_text_leaves_a_tower_as_it_was(more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """oumi-ai/oumi#2491: Gemma 4 has its tower in the model that is trained, so that adapters beside all linear layers
    stop a run, as do parameters without gradients.

    A resume is of the same model, though the configuration within the configuration has got a type.
    """
    torch.manual_seed(0)
    tower = Gemma4VisionConfig(**TOWER).to_dict()
    ids = dict(zip(("image", "boi", "eoi", "video", "audio", "boa"), range(300, 306), strict=True))
    config = Gemma4Config(
        text_config=text().to_dict(), vision_config=tower, **{f"{name}_token_id": at for name, at in ids.items()}
    )
    model = AutoModelForImageTextToText.from_config(config)
    assert beside_text(model) == ["model.vision_tower.*", "model.embed_vision.*"]
    model.save_pretrained(tmp_path / "model")
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(model=tmp_path / "model", text=write_text(tmp_path / "text"), more=more))
    said = ["train", str(job), "--processes", "1", "--out", str(tmp_path / "run")]
    assert main(said) == 0
    assert more or main([*said, "--resume", "--set", "run.steps=3", "--allow", "run.steps"]) == 0
    out = capsys.readouterr().out
    assert "text does not reach it: model.vision_tower.*, model.embed_vision.*" in out
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "run" / "export")
    assert before.keys() == after.keys()
    moved = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert moved
    assert not [name for name in moved if re.search("vision", name)]


def test_text_converted_alone_says_what_it_is_without(
    sees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5817 again, without a directory: what is written is the text, and that is told."""
    model = trained(sees)
    (tmp_path / "text").mkdir()
    save_model(model, str(tmp_path / "text" / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path / "text")
    convert = ["checkpoint", "convert"]
    assert main([*convert, str(tmp_path / "text"), str(tmp_path / "saved"), "--to", "tangram"]) == 0
    assert "does not read" not in capsys.readouterr().out
    words = "does not read model.visual, mtp: where the directory that training began from has them, --config DIR"
    assert main([*convert, str(tmp_path / "saved"), str(tmp_path / "made"), "--to", "hf"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert main([*convert, str(tmp_path / "saved"), str(tmp_path / "all"), "--to", "hf", "--config", str(sees)]) == 0
    assert "does not read" not in capsys.readouterr().out


def test_layers_behind_the_last_that_nobody_speaks_of_are_not_told(tmp_path: Path) -> None:
    """GLM-4.5's class knows two layers behind the last, of the model and of Air: one is the other model's own."""
    for more, said in ({"num_nextn_predict_layers": 1}, 1), ({"num_nextn_predict_layers": 0}, 0):
        config = AutoConfig.for_model(
            "glm4_moe", vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **more
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        told = not_there(model, ["model.layers.46.mlp.up_proj.weight", "lm_head.weight"])
        assert len(told) == said
        assert all("model.layers.92:" in one and "46" not in one for one in told)
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2))
    assert not_there(gpt2, ["lm_head.weight"]) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # what peft asks for
def test_adapters_of_the_text_are_merged_into_all_of_it(sees: Path, tmp_path: Path) -> None:
    """unslothai/unsloth#5845 again: adapters name `model.layers`, the directory `model.language_model.layers`."""
    torch.manual_seed(0)
    own = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(sees, dtype=torch.float32), own)
    model.save_pretrained(tmp_path / "adapter")
    words = ["checkpoint", "convert", str(sees), str(tmp_path / "merged"), "--to", "hf"]
    assert main([*words, "--adapter", str(tmp_path / "adapter")]) == 0
    before, after = tensors(sees), tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    moved = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert moved
    assert all("language_model" in name for name in moved)
    ids = torch.arange(12)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged.eval()(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)
