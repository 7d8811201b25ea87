"""Build a Hugging Face model from a configuration, without memory: a model of any size is cut before it exists.

A model comes from a preset of Tangram, a Hugging Face directory with weights, or a configuration alone (`read_source`).
The configuration is all that is read here; the weights of a directory are read later, by each rank what it holds.
"""

import copy
import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tangram.errors import UserError
from tangram.models.building.directory import PICKLED, READ, UNREAD, other_weights, refuse_missing, refuse_pointers
from tangram.text import packaged

# Fields of a configuration that say how it was made, or what the training decides: all is float32.
FIXED = frozenset({"_name_or_path", "architectures", "dtype", "model_type", "transformers_version"})


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """The named model sizes of `presets.toml`."""
    return tomllib.loads(packaged("tangram.models", "presets.toml"))


def make_config(preset: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a preset with some fields changed; a field that the class does not know is refused.

    (The Hugging Face classes take any keyword in silence, so a misspelt field would train another model.)
    """
    known = presets()
    if preset not in known:
        raise UserError(f'there is no model preset "{preset}"{did_you_mean(preset, known)}')
    fields = dict(known[preset])
    model_type: str = fields.pop("model_type")
    refuse_unknown_fields(model_type, AutoConfig.for_model(model_type), changes)
    return config_of(model_type, {**fields, **changes})


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration with some fields changed; a field that its class does not know is refused."""
    kind = str(config.model_type)
    refuse_unknown_fields(kind, config, changes)
    return config_of(kind, {**config.to_dict(), **changes}) if changes else config


def refuse_unknown_fields(model_type: str, config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Raise UserError for a field that a class of configuration does not have."""
    known_fields = config.to_dict().keys() - FIXED
    for name in changes:
        if name not in known_fields:
            raise UserError(f'a {model_type} model has no field "{name}" to change{did_you_mean(name, known_fields)}')


def config_of(model_type: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration of these fields, all others as its class has them. UserError where they do not go together."""
    try:
        return AutoConfig.for_model(model_type, **{key: fields[key] for key in fields if key != "model_type"})
    except Exception as error:
        raise UserError(f"a {model_type} model cannot have these fields: {error.__cause__ or error}") from error


def did_you_mean(word: str, known: Any, *, listed: bool = True) -> str:
    """A hint at the nearest known word; when none is near, the list of all or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    others = f"; known are {', '.join(sorted(known))}" if listed else ""
    return f'; did you mean "{near[0]}"?' if near else others


def build_on_meta(config: PreTrainedConfig, head: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The model with shapes but no storage; UserError where its class can make none of this configuration.

    `head`: transformers' class that knows the models with one kind of head.
    """
    return _all_on_meta(constructed_on_meta(config, head))


def token_inputs(batch: int, sequence: int) -> dict[str, Any]:
    """What a language model is captured with: no memory of former tokens."""
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return {"input_ids": ids, "use_cache": False}


def declared_on_meta(fields: Mapping[str, Any]) -> PreTrainedModel | None:
    """The model that a config.json says, as `build_on_meta` makes it; None where transformers has no class for it.

    A class of code that lies beside the configuration (`auto_map`) is none of transformers', whatever its type.
    """
    names = fields.get("architectures") or [None]
    head: Any = getattr(transformers, str(names[0]), None if fields.get("auto_map") else AutoModelForCausalLM)
    if head is None:
        return None
    own = hasattr(head, "_from_config")
    try:
        config = config_of(str(fields.get("model_type")), fields)
        return build_on_meta(config, _Declared(head) if own else head)
    except UserError:
        return None


@dataclass(frozen=True)
class _Declared:
    """A class of models, as those that choose one are called."""

    model: Any

    def from_config(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        return self.model._from_config(config, dtype=dtype)


def constructed_on_meta(config: PreTrainedConfig, head: Any = AutoModelForCausalLM) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return cast(PreTrainedModel, head.from_config(copy.deepcopy(config), dtype=torch.float32))
    except Exception as error:
        raise UserError(
            f"a {config.model_type} model cannot be built with these fields: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error


def _all_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Some classes make a tensor from numbers of Python's, or on the CPU by name; tied ones stay one."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    if tensor not in moved:
                        empty = tensor.detach().to("meta")
                        trained = tensor.requires_grad
                        moved[tensor] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
                    cast("dict[str, Tensor]", tensors)[name] = moved[tensor]
    return model


@dataclass(frozen=True)
class Source:
    """A model before it is built."""

    name: str
    config: PreTrainedConfig
    weights: Path | None
    """The directory of its safetensors files; None: it begins from scratch."""
    folder: Path | None = None
    """The directory that its configuration is in; None: it is a preset, or a file of another name."""
    alone: bool = False
    """Whether the file of the configuration was named, and not its directory: what is beside it is not of this model
    then, but for how it generates."""


CAUSAL = cast("Mapping[str, str]", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The types of model that have a causal language model, and its class."""
PAIRED = cast("Mapping[str, str]", MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
"""The same of an encoder with a decoder."""


def read_source(
    preset: str | None,
    path: str | None,
    changes: Mapping[str, Any],
    *,
    known: Collection[str] = CAUSAL,
    weights: bool = True,
) -> Source:
    """The model of a preset, or of a directory or config.json at `path`, with fields of its configuration changed.

    `known`: the types of model that are taken. `weights`: whether those of a directory are wanted. Raises UserError for
    an unknown preset, a path without configuration, an unknown model type, one that is no causal language model, files
    that are pointers of git-lfs, and weights that are wanted and are not safetensors.
    """
    if preset is not None:
        return Source(preset, make_config(preset, changes), None)
    if path is None:
        raise UserError("the plan names no model: give model.preset or model.path")
    folder = Path(path)
    file = folder / "config.json" if folder.is_dir() else folder
    refuse_missing(folder)
    if folder.is_file() and folder.suffix in (READ, *PICKLED, *UNREAD):
        raise UserError(f'the model "{folder}" is a file of weights: give the Hugging Face directory that it is of')
    if not file.is_file():
        other = other_weights(folder)
        why = f"; its weights {other}" if other else ": give a Hugging Face directory or a configuration file"
        raise UserError(f'the model "{folder}" has no config.json{why}')
    refuse_pointers(folder if weights else file)
    config = change_config(_read_config(file, known), changes)
    if folder.is_dir():
        return Source(folder.resolve().name, config, _weights(folder) if weights else None, folder)
    return Source(folder.stem, config, None, folder.parent if folder.name == "config.json" else None, alone=True)


def _read_config(file: Path, known: Collection[str]) -> PreTrainedConfig:
    try:
        found: Any = PreTrainedConfig.get_config_dict(file)[0]
    except (OSError, ValueError) as error:
        raise UserError(f'"{file}" is no configuration of a model: {str(error).splitlines()[0]}') from None
    except TypeError:  # transformers looks for fields in whatever JSON there is
        found = None
    if not isinstance(found, dict):
        raise UserError(f'"{file}" is no configuration of a model: it is JSON, but no table of fields')
    fields = cast("dict[str, Any]", found)
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f'"{file}" names no model_type, so what it configures is unknown')
    if kind not in known:
        what = "causal language model" if known is CAUSAL else "language or image model"
        own = "tangram.parallelize takes such a model in a loop of your own"
        hint = f": {own if known is CAUSAL else 'give the FILE.py:function that makes it'}"
        hint = hint if kind in cast("Mapping[str, Any]", CONFIG_MAPPING) else did_you_mean(kind, known, listed=False)
        raise UserError(f'"{file}" has the model_type "{kind}", which this transformers has no {what} for{hint}')
    try:
        config = AutoConfig.for_model(**fields)
        config.get_text_config()  # raises where there are several, of which nobody says which one is meant
        return config
    except Exception as error:
        raise UserError(f'"{file}" cannot configure a {kind} model: {error.__cause__ or error}') from error


def _weights(folder: Path) -> Path | None:
    """The directory if it holds safetensors. Raises UserError for weights in another format."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return folder
    if other := other_weights(folder):
        raise UserError(f'the weights of "{folder}" {other}, or give its config.json to begin from scratch')
    return None
