"""Where a model comes from: a preset of Tangram, a Hugging Face directory with weights, or a configuration alone.

The configuration is all that is read here; the weights of a directory are read later, by each rank what it holds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tangram.errors import UserError
from tangram.models.building.build import change_config, did_you_mean, make_config
from tangram.models.building.directory import PICKLED, READ, UNREAD, other_weights, refuse_missing, refuse_pointers


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
        what = "causal language model" if known is CAUSAL else "model"
        hint = ": tangram.parallelize takes such a model in a loop of your own"
        hint = hint if kind in cast("Mapping[str, Any]", CONFIG_MAPPING) else did_you_mean(kind, known, listed=False)
        raise UserError(f'"{file}" has the model_type "{kind}", which this transformers has no {what} for{hint}')
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:
        raise UserError(f'"{file}" cannot configure a {kind} model: {error.__cause__ or error}') from error


def _weights(folder: Path) -> Path | None:
    """The directory if it holds safetensors. Raises UserError for weights in another format."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return folder
    if other := other_weights(folder):
        raise UserError(f'the weights of "{folder}" {other}, or give its config.json to begin from scratch')
    return None
