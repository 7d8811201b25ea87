"""A tiny chat model as a repository has it: several ends, settings of generation, templates, code, licence."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tangram.training.state.export_hf import byte_tokenizer
from tests.training.small import SMALL_MODEL

END, TURN = 256, 257
"""The tokens that end a document and a turn."""
SETTINGS: Mapping[str, Any] = {"eos_token_id": [END, TURN], "pad_token_id": END, "do_sample": True, "temperature": 0.6}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
BESIDE: Mapping[str, str] = {
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "preprocessor_config.json": "{}",
    "modeling_mine.py": "class Mine: ...",
    "LICENSE": "do what you like",
    "README.md": "# Mine",
}


def write_chat(
    folder: Path,
    *,
    added: tuple[str, ...] = (),
    fields: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
    family: str = "qwen3",
) -> Path:
    """The directory. `added`: tokens of the tokenizer beyond the model's vocabulary; `fields`: of the configuration."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    vocabulary = len(tokenizer)
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(family, **{**SMALL_MODEL, "vocab_size": vocabulary, "eos_token_id": END, **fields})
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(dict(SETTINGS)))
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder
