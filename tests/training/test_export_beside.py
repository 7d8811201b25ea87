"""What is beside the weights of a chat model is exported with it, and a proof of each thing can fail."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tangram.models.building.build import Source
from tangram.training.data import Tokens, load_tokens
from tangram.training.run.end_proofs import ProofError, same_export
from tangram.training.state.build_model import build_unsharded, source_of
from tangram.training.state.export_hf import export
from tests.training.chat import BESIDE, END, SETTINGS, TEMPLATE, TURN, write_chat
from tests.training.small import small_plan, write_text

CPU = torch.device("cpu")
PROMPT = torch.tensor([list(b"value_1 = 1")])


@dataclass(frozen=True)
class Made:
    model: PreTrainedModel
    source: Source
    tokens: Tokens
    folder: Path


def made(folder: Path, model: Path, tokenizer: str = "model", **model_keys: Any) -> Made:
    data = {"tokenizer": tokenizer}
    plan = small_plan(write_text(folder / "text"), model={"preset": None, "path": str(model), **model_keys}, data=data)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"change": model_keys.get("change", {})})})
    tokens = load_tokens(plan.data, plan.model.path)
    source = source_of(plan, tokens)
    whole = build_unsharded(plan, source, CPU, values=True)
    export(whole, folder / "export", tokens, source)
    return Made(whole, source, tokens, folder / "export")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("chat")
    fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    model = write_chat(folder / "chat-1m", fields=fields)
    return made(folder, model)


def proved(made: Made) -> float:
    difference, written = same_export(made.model, made.folder, made.source, made.tokens, PROMPT)
    assert written
    return difference


def test_all_of_it_is_there(chat: Made) -> None:
    assert proved(chat) == 0.0
    for name, text in BESIDE.items():
        assert (chat.folder / name).read_text() == text
    assert json.loads((chat.folder / "generation_config.json").read_text()) == SETTINGS
    templates = AutoTokenizer.from_pretrained(chat.folder).chat_template
    assert templates == {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    config = json.loads((chat.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    trail = json.loads((chat.folder / "provenance.json").read_text())
    assert trail["side_files"]["from"] == "chat-1m"
    assert trail["config"] == ["quantization_config left out, for no tensor is quantised"]


@pytest.mark.parametrize("end", [END, TURN])
def test_it_stops_where_the_source_stops(end: int, chat: Made, tmp_path: Path) -> None:
    """A model that always writes one token: by either end it stops at once, as the source does."""
    for folder in (chat.folder, chat.source.folder):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            loaded.lm_head.weight.zero_()[end] = 1e3 * loaded.model(PROMPT).last_hidden_state[0, -1]
        assert loaded.generate(PROMPT, max_new_tokens=9)[0, PROMPT.shape[1] :].tolist() == [end]


def edit(name: str, **fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**known, **fields}))

    return change


def reword(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one end": (edit("generation_config.json", eos_token_id=END), "generates otherwise.*eos_token_id is 256"),
    "no temperature": (edit("generation_config.json", temperature=1.0), "temperature is 1.0, not 0.6"),
    "no settings": (lambda folder: (folder / "generation_config.json").unlink(), "generates otherwise"),
    "another template": (reword("chat_template.jinja", "x"), "tokenizer.*chat_template is {'default': 'x'"),
    "another end of text": (edit("tokenizer_config.json", eos_token="<|im_end|>"), "tokenizer.*special_tokens_map"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_proof_sees_what_is_lost(mistake: str, chat: Made) -> None:
    spoil, said = MISTAKES[mistake]
    before = {file: file.read_bytes() for file in chat.folder.iterdir() if file.is_file()}
    try:
        spoil(chat.folder)
        with pytest.raises(ProofError, match=said):
            proved(chat)
    finally:
        for file, data in before.items():
            file.write_bytes(data)


def test_another_tokenizer_has_its_own_ends(chat: Made, tmp_path: Path) -> None:
    """Bytes end with 256, and 257 is no token of theirs; a copy of the model's tokenizer keeps both."""
    assert chat.source.folder is not None
    plain = made(tmp_path, chat.source.folder, "bytes")
    assert proved(plain) == 0.0
    assert json.loads((plain.folder / "generation_config.json").read_text())["eos_token_id"] == 256
    assert not (plain.folder / "chat_template.jinja").exists()
    copied = tmp_path / "copied"
    AutoTokenizer.from_pretrained(chat.source.folder).save_pretrained(copied)
    more = made(tmp_path / "more", chat.source.folder, str(copied))
    assert proved(more) == 0.0
    assert json.loads((more.folder / "generation_config.json").read_text()) == SETTINGS
    assert (more.folder / "LICENSE").exists()


def test_a_configuration_alone_brings_only_how_it_generates(chat: Made, tmp_path: Path) -> None:
    assert chat.source.folder is not None
    alone = made(tmp_path, chat.source.folder / "config.json", str(chat.source.folder))
    assert alone.source.weights is None
    assert proved(alone) == 0.0
    assert json.loads((alone.folder / "generation_config.json").read_text()) == SETTINGS
    assert not (alone.folder / "LICENSE").exists()


def test_an_export_that_lost_its_settings_writes_otherwise(chat: Made) -> None:
    """Settings are compared by what they write as well: by the source's, and by those of another model."""
    from tangram.training.run.end_proofs import load_exported, unlike_writing, writing

    loaded = load_exported(chat.model, chat.folder)
    assert unlike_writing(*writing(chat.model, loaded, chat.source, chat.tokens, PROMPT)) == ""
    loaded.generation_config.temperature, loaded.generation_config.top_k = 3.0, 0
    assert unlike_writing(*writing(chat.model, loaded, chat.source, chat.tokens, PROMPT)).startswith("it goes on with")
    nowhere = replace(chat.source, folder=None)
    assert unlike_writing(*writing(chat.model, loaded, nowhere, chat.tokens, PROMPT))


def test_where_neither_can_generate_only_settings_are_compared(chat: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("a cache of this size")

    monkeypatch.setattr(type(chat.model), "generate", refuse)
    assert same_export(chat.model, chat.folder, chat.source, chat.tokens, PROMPT) == (0.0, False)
