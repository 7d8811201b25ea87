"""Public reports about exports, what is beside weights, weight decay and added tokens, rebuilt small."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tangram.checkpoint.conversion.convert import IDENTITY, restructure
from tangram.checkpoint.formats.detect import open_any
from tangram.errors import UserError
from tangram.models.building.build import build_on_meta, read_source
from tangram.relayout import bind
from tangram.schema.optimiser import OptimiserPlan
from tangram.schema.plan import Plan
from tangram.training.data import load_tokens
from tangram.training.run.end_proofs import same_export
from tangram.training.state.build_model import build_unsharded, source_of
from tangram.training.state.export_hf import export
from tangram.training.step.weight_decay import why_not
from tests.training.causal_models import write_config
from tests.training.chat import END, SETTINGS, TURN, write_chat
from tests.training.small import small_tables, write_text

PROMPT = torch.tensor([list(b"value_1 = 1")])
CPU = torch.device("cpu")


def plan(folder: Path, model: Path, tokenizer: str = "model", **change: Any) -> Plan:
    tables = small_tables(write_text(folder / "text"), data={"tokenizer": tokenizer})
    return Plan.model_validate({**tables, "model": {"path": str(model), "change": change}})


def exported(folder: Path, model: Path, tokenizer: str = "model", **change: Any) -> Path:
    """The export of a model as training would leave it, proved."""
    asked = plan(folder, model, tokenizer, **change)
    tokens = load_tokens(asked.data, asked.model.path)
    source = source_of(asked, tokens)
    whole = build_unsharded(asked, source, CPU, values=True)
    export(whole, folder / "export", tokens, source)
    assert same_export(whole, folder / "export", source, tokens, PROMPT) == (0.0, True)
    return folder / "export"


def converted(source: Path, target: Path) -> Path:
    opened = open_any(source)
    restructure(opened, bind(IDENTITY, opened.specs), target, "hf")
    return target


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("hub") / "chat-1m")


@pytest.fixture(scope="module")
def trained(chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("run"), chat)


def test_an_exported_chat_model_stops(trained: Path) -> None:
    """LlamaFactory#10834: the export has the base model's end alone, and generation goes on past the end of a turn."""
    loaded = AutoModelForCausalLM.from_pretrained(trained)
    assert loaded.generation_config.eos_token_id == [END, TURN]
    assert (loaded.generation_config.do_sample, loaded.generation_config.temperature) == (True, 0.6)
    with torch.no_grad():
        loaded.lm_head.weight.zero_()[TURN] = 1e3 * loaded.model(PROMPT).last_hidden_state[0, -1]
    assert loaded.generate(PROMPT, max_new_tokens=9)[0, PROMPT.shape[1] :].tolist() == [TURN]


def test_the_template_is_exported(trained: Path) -> None:
    """LlamaFactory#8399: (and Qwen3-VL#1488) a fine-tuned model has no chat template."""
    message = [{"role": "user", "content": "hello"}]
    assert AutoTokenizer.from_pretrained(trained).apply_chat_template(message, tokenize=False) == "<|im_start|>hello"


def test_custom_code_goes_along(chat: Path, trained: Path, tmp_path: Path) -> None:
    """transformers#15224: (and #20884, Automodel#794, #810) files of code are not beside the weights that are saved."""
    for folder in (trained, converted(chat, tmp_path / "hf")):
        assert (folder / "modeling_mine.py").read_text() == (chat / "modeling_mine.py").read_text()


def test_preprocessors_go_along(chat: Path, trained: Path, tmp_path: Path) -> None:
    """llama-cookbook#737: a conversion of a fine-tuned model has no preprocessor_config.json."""
    for folder in (trained, converted(chat, tmp_path / "hf")):
        assert (folder / "preprocessor_config.json").is_file()


def test_plain_weights_are_not_called_quantised(chat: Path, tmp_path: Path) -> None:
    """transformers#34847: config.json keeps its quantization_config though the weights were dequantised."""
    stale = write_chat(tmp_path / "stale", fields={"quantization_config": {"quant_method": "fp8"}})
    assert "quantization_config" in json.loads((stale / "config.json").read_text())
    for folder in (exported(tmp_path / "run", stale), converted(stale, tmp_path / "hf")):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        AutoModelForCausalLM.from_pretrained(folder)
    assert converted(chat, tmp_path / "as-it-was").is_dir()


@pytest.mark.parametrize(
    ("family", "free"),
    [
        ("gpt_oss", ("gate_up_proj_bias", "down_proj_bias", "sinks")),
        ("recurrent_gemma", ("input_gate_bias", "recurrent_gate_bias", "recurrent_param")),
        ("mamba", ("A_log", "D")),
        ("qwen3_next", ("A_log", "dt_bias")),
    ],
)
def test_weight_decay_is_for_matrices(family: str, free: tuple[str, ...], tmp_path: Path) -> None:
    """Fast-LLM#545: biases, scales and a scan's A_log and dt_bias are decayed."""
    model: nn.Module = build_on_meta(read_source(None, str(write_config(tmp_path, family)), {}).config)
    whys = why_not(model, OptimiserPlan(lr=1e-3, weight_decay=0.1))
    for last in free:
        names = [name for name in whys if name.endswith(f".{last}")]
        assert names
        assert all(whys[name] for name in names)
    decaying = {name.split(".")[-1] for name, why in whys.items() if not why}
    assert "weight" in decaying


def test_weights_that_are_not_finite_are_named(chat: Path, tmp_path: Path) -> None:
    """LLaVA#1278: (and ludwig#3740) weights of a fine-tuned model hold NaN, which nothing says when they are loaded."""
    bad = write_chat(tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.norm.weight"][4] = float("nan")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    asked = plan(tmp_path, bad)
    with pytest.raises(UserError, match=r"model\.norm\.weight in .* has 1 value that is not finite"):
        build_unsharded(asked, source_of(asked, load_tokens(asked.data, asked.model.path)), CPU, values=True)


def test_added_tokens_load_after_saving(tmp_path: Path) -> None:
    """unsloth#237: (and #978, peft#1457) after tokens were added, what was saved has other sizes than its config."""
    model = write_chat(tmp_path / "more", added=("<a>", "<b>"))
    with pytest.raises(UserError, match=r"set model\.change\.vocab_size = 261"):
        exported(tmp_path / "refused", model)
    folder = exported(tmp_path / "run", model, vocab_size=261)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.vocab_size == len(loaded.lm_head.weight) == len(AutoTokenizer.from_pretrained(folder)) == 261


def test_more_rows_than_tokens_stay(tmp_path: Path) -> None:
    """peft#2415: embeddings that have more rows than the tokenizer has tokens are cut, and no longer fit."""
    folder = exported(tmp_path, write_chat(tmp_path / "wide", fields={"vocab_size": 320}))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 320
    assert len(load_file(folder / "model.safetensors")["lm_head.weight"]) == 320
    assert json.loads((folder / "generation_config.json").read_text()) == SETTINGS
