"""A model by the name that a person gives: a preset, a Hugging Face directory or configuration, a type of model, or a
function of one's own.

`llama` is the class's own defaults, which for many types are those of the first published model: `deepseek_v3` is the
one of 671 billion parameters. Types have the head of the first row of `HEADS` that knows them.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tangram.errors import UserError
from tangram.models.building.build import (
    CAUSAL,
    PAIRED,
    build_on_meta,
    config_of,
    did_you_mean,
    presets,
    read_source,
    refuse_unknown_fields,
    token_inputs,
)
from tangram.models.building.code import function_of
from tangram.models.building.directory import hub_hint

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Named:
    """A model that is not built yet."""

    kind: str
    """Its type, by which marks are known; "" of a function of one's own."""
    make: Callable[[int, int], tuple[nn.Module, Inputs]]
    """The model without memory and what it is called with, for so many samples of so many tokens."""


def named(name: str, changes: Mapping[str, str]) -> Named:
    """The model by name, with fields of its configuration changed. Raises UserError."""
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        if changes:
            raise UserError(f"{name} has no configuration to change: leave out --set")
        return Named("", _own(path, function))
    config = _config(name, {key: _value(text) for key, text in changes.items()})
    head = next(head for head in HEADS if config.model_type in head.known)

    def make(batch: int, sequence: int) -> tuple[nn.Module, Inputs]:
        model = cast(Any, build_on_meta(config, head.auto)).to(torch.bfloat16)
        return model, head.inputs(config, batch, sequence)

    return Named(str(config.model_type), make)


def _config(name: str, values: Mapping[str, Any]) -> PreTrainedConfig:
    if name in presets():
        return read_source(name, None, values).config
    known = {kind: table for head in HEADS for kind, table in head.known.items()}
    if Path(name).exists():
        return read_source(None, name, values, known=known, weights=False).config
    if name in known:
        refuse_unknown_fields(name, AutoConfig.for_model(name), values)
        return config_of(name, values)
    hint = did_you_mean(name, [*presets(), *known], listed=False)
    raise UserError(
        f'"{name}" is no preset, no directory or configuration file, no type of model, and no FILE.py:function'
        f"{hub_hint(name) or hint}"
    )


def _value(text: str) -> Any:
    """A number, true, or what else Python writes so; other words as they stand."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


# ---------------------------------------------------------------- what a model is called with


class Head(NamedTuple):
    """Models that are called alike."""

    known: Mapping[str, str]
    """The types of model that have such a head."""
    auto: Any
    inputs: Callable[[PreTrainedConfig, int, int], Inputs]


def _tokens(_: PreTrainedConfig, batch: int, sequence: int) -> Inputs:
    return token_inputs(batch, sequence)


def _token_pairs(_: PreTrainedConfig, batch: int, sequence: int) -> Inputs:
    """What goes into an encoder, and into its decoder as many."""
    inputs = token_inputs(batch, sequence)
    return {**inputs, "decoder_input_ids": inputs["input_ids"]}


def _pixels(config: PreTrainedConfig, batch: int, _: int) -> Inputs:
    size: Any = getattr(config, "image_size", None)
    sides = cast("list[Any]", size) if isinstance(size, list | tuple) else [size, size]
    height, width = sides
    if not isinstance(height, int) or not isinstance(width, int):
        raise UserError(f"a {config.model_type} model does not say the size of its images: give --set image_size=224")
    channels: int = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.zeros(batch, channels, height, width, dtype=torch.bfloat16, device="meta")}


def _tokens_and_pixels(config: PreTrainedConfig, batch: int, sequence: int) -> Inputs:
    """A text of so many tokens and an image for each sample; places of an image are among the tokens.

    Raises UserError for a model of which it is not known how it takes images.
    """
    kind, tower = str(config.model_type), getattr(config, "vision_config", None) or config
    takes = inspect.signature(getattr(transformers, IMAGE_TEXT[kind]).forward).parameters
    read = next((name for name in takes if name in _READ), None)
    if "image_grid_thw" in takes and isinstance(getattr(tower, "patch_size", None), int):
        # Where each token stands is else read out of the text.
        places = {"position_ids": torch.zeros(3, batch, sequence, dtype=torch.long, device="meta")}
        found = {
            **token_inputs(batch, sequence),
            **_patches(tower, batch, sequence),
            **(places if "mm_token_type_ids" in takes else {}),
        }
        if hasattr(tower, "deepstack_visual_indexes"):  # features are added where the text has an image
            found["input_ids"] = ids = torch.zeros(batch, sequence, dtype=torch.long)
            ids[:, : len(found["pixel_values"]) // batch // tower.spatial_merge_size**2] = config.image_token_id
        return found
    if read or not hasattr(tower, "image_size"):
        why = f"reads {read}, of which there are no values here" if read else "does not say the size of its images"
        raise UserError(
            f"a {kind} model {why}: give FILE.py:FUNCTION, which makes the model and what it is called with"
        )
    pixels = _pixels(tower, batch, sequence)
    size = pixels["pixel_values"].shape[2:]
    grids: Sequence[Sequence[int]] | None = getattr(config, "image_grid_pinpoints", None)
    if grids:  # the whole image once, and its tiles on the smallest of the grids that loses nothing of it
        height, width = min((g for g in grids if g[0] >= size[0] and g[1] >= size[1]), key=math.prod, default=size)
        tiles = 1 + (height // size[0]) * (width // size[1])
        pixels = {"pixel_values": pixels["pixel_values"][:, None].repeat(1, tiles, 1, 1, 1)}
    sized = bool(grids) or getattr(tower, "model_type", "") == "pixtral"
    return {
        **token_inputs(batch, sequence),
        **pixels,
        **({"image_sizes": torch.tensor([size] * batch)} if sized else {}),
    }


def _patches(tower: Any, batch: int, sequence: int) -> Inputs:
    """An image for each sample as rows of patches, and how many it has in time, height and width: code reads these."""
    merged = getattr(tower, "spatial_merge_size", 2)
    side = max(min(_IMAGE // tower.patch_size // merged, math.isqrt(sequence)), 1) * merged
    channels: int = getattr(tower, "in_channels", None) or getattr(tower, "in_chans", 3)
    pixels = channels * getattr(tower, "temporal_patch_size", 1) * tower.patch_size**2
    return {
        "pixel_values": torch.zeros(batch * side**2, pixels, dtype=torch.bfloat16, device="meta"),
        "image_grid_thw": torch.tensor([[1, side, side]] * batch),
    }


IMAGE_TEXT = cast("Mapping[str, str]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
"""The types of model that give text for images and text, and its class."""
_IMAGE = 448
"""Pixels of a side, where a model takes images of all sizes."""
_READ = ("image_grid_thw", "spatial_shapes", "pixel_attention_mask")
"""Arguments of which code looks at the values, to cut images out of what it is given."""
HEADS = (
    Head(CAUSAL, AutoModelForCausalLM, _tokens),
    Head(PAIRED, AutoModelForSeq2SeqLM, _token_pairs),
    Head(
        cast("Mapping[str, str]", MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        AutoModelForImageClassification,
        _pixels,
    ),
    Head(
        IMAGE_TEXT,
        AutoModelForImageTextToText,
        _tokens_and_pixels,
    ),
    Head(cast("Mapping[str, str]", MODEL_FOR_MASKED_LM_MAPPING_NAMES), AutoModelForMaskedLM, _tokens),
)


def is_named(kind: str) -> bool:
    """Whether a type of model has one of these heads, so that its name is enough."""
    return any(kind in head.known for head in HEADS)


def _own(path: str, function: str) -> Callable[[int, int], tuple[nn.Module, Inputs]]:
    """The function of a file that makes a model and what it is called with. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"{path}:{function}: there is no file {path}")

    def make(batch: int, sequence: int) -> tuple[nn.Module, Inputs]:
        found = function_of(path, function, f"{path}:{function}")
        try:
            with torch.device("meta"):
                made: Any = found(batch, sequence)
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{path}:{function} does not run: {type(error).__name__}: {why}") from error
        pair = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else ()
        if len(pair) != 2 or not isinstance(pair[0], nn.Module) or not isinstance(pair[1], Mapping):
            raise UserError(f"{path}:{function} gives no pair of a module and its keyword arguments")
        return pair[0], cast("Inputs", pair[1])

    return make
