"""A model by the name that a person gives: a preset, a Hugging Face directory or configuration, or a type of model.

`llama` is the class's own defaults, which for many types are those of the first published model: `deepseek_v3` is the
one of 671 billion parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tangram.errors import UserError
from tangram.models.build import build_on_meta, config_of, did_you_mean, presets, refuse_unknown_fields
from tangram.models.source import read_source


def named_config(name: str, changes: Mapping[str, str]) -> PreTrainedConfig:
    """The configuration of a model by name, with fields changed. Raises UserError."""
    values = {key: _value(text) for key, text in changes.items()}
    if name in presets():
        return read_source(name, None, values).config
    if Path(name).exists():
        return read_source(None, name, values).config
    known = cast("Mapping[str, str]", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if name in known:
        refuse_unknown_fields(name, AutoConfig.for_model(name), values)
        return config_of(name, values)
    hint = did_you_mean(name, [*presets(), *known], listed=False)
    raise UserError(f'"{name}" is no preset, no directory or configuration file, and no type of model{hint}')


def _value(text: str) -> Any:
    """A number, true, or what else Python writes so; other words as they stand."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory, in bfloat16."""
    return cast(Any, build_on_meta(config)).to(torch.bfloat16)


def token_inputs(batch: int, sequence: int) -> dict[str, Any]:
    """What a language model is captured with: no memory of former tokens."""
    ids: Tensor = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return {"input_ids": ids, "use_cache": False}
