"""The outline of a Hugging Face model, from its configuration, checked against the model itself.

A configuration says sizes under names that types of models share (`FIELDS`); what it does not say (whether an MLP is
gated) is seen on the model, built without memory. The outline then has to have the model's parameters, to a part in
two hundred. A model with blocks that are not known here gets its outline from its own code
(`models.outlines.outlined_graph`): each kind of block is captured once, in all sizes that it has.

What a graph does not show is told by the configuration: which layers have windows or see only their own chunk, and how
many further tokens are predicted, which the classes of Hugging Face do not build.

What is a vision tower's is told by names: whatever is neither the language model's nor the head's. Its sizes are those
of its parameters; how many patches make a token, and an image, a configuration says in one of a few ways (`MERGED`).
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tangram.errors import UserError
from tangram.models.building.build import CAUSAL, PAIRED, build_on_meta, config_of, presets, read_source
from tangram.models.building.fields import of_layer, varies
from tangram.models.building.quantised import kept_of
from tangram.models.building.strict import refuse_strange
from tangram.models.capturing.capture import CaptureError, capture, quiet
from tangram.models.capturing.fold import folded, kinds_of, run_once
from tangram.models.capturing.graph import Graph
from tangram.models.outlines.catalogue import configured, in_catalogue, no_model
from tangram.models.outlines.costs import block_names
from tangram.models.outlines.images import USUAL_IMAGE, USUAL_IMAGES, Tower, tower_numbers, with_tower
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.models.outlines.outlined_graph import Masks, outline_of_graph

FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
"""What fields of configurations are called; the first that is there counts."""
POSITIONS = ("wpe.weight", "embed_positions.weight")
TOLERATED = 0.005
"""By which share parameters may differ: norms of heads, biases, sinks."""
MASKED = cast("Mapping[str, str]", MODEL_FOR_MASKED_LM_MAPPING_NAMES)
SEEING = cast("Mapping[str, str]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
ATTENDING = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that `decoder` makes."""
SHORTEST = 64
"""Tokens of a capture, of models without chunks."""


KNOWN = frozenset({*CAUSAL, *MASKED, *PAIRED, *SEEING})


def outlined(name: str) -> Outline:
    """Of a preset, a public model's name, or a Hugging Face directory or configuration. Raises UserError."""
    if name in presets():
        return outline_of(read_source(name, None, {}).config, name)
    if not Path(name).exists():
        if (known := configured(name)) is not None:
            return outline_of(config_of(known[1].pop("model_type"), known[1]), known[0])
        if (found := in_catalogue(name)) is None:
            raise no_model(name)
        return found
    source = read_source(None, name, {}, known=KNOWN, weights=False)
    refuse_strange(name, source.config)
    return outline_of(source.config, Path(name).stem)


def outline_of(config: Any, name: str) -> Outline:
    """Of a configuration: by the usual decoder's table where it has the model's parameters, else from its graph.

    Raises UserError for an encoder-decoder, and for a model that cannot be captured, which says why.
    """
    return replace(_outline(config, name), kept=kept_of(config))


def _outline(config: Any, name: str) -> Outline:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{name} is an encoder with a decoder that reads it: a pipeline's stages would hand on two results, which "
            "is not planned yet; plan either of them by a configuration of its own"
        )
    if config.model_type in SEEING and hasattr(config, "vision_config"):
        return _outline(text, name) if config.vision_config is None else _seeing(config, text, name)
    model = build_on_meta(config) if _head(config) is AutoModelForCausalLM else None
    if model is not None and (found := _usual(text, dict(model.named_parameters()), name)) is not None:
        return found
    found = captured(config, name)
    return replace(found, predictors=_predictors(text))


def _usual(text: Any, parameters: Mapping[str, Tensor], name: str) -> Outline | None:
    """By the usual decoder's table; None where that has not the parameters."""
    if not _attends(text):
        return None
    try:
        found = decoder(dims_of(text, {key: tuple(one.shape) for key, one in parameters.items()}), name)
    except UserError:  # it says no such sizes
        return None
    numbers = sum(one.numel() for one in parameters.values())
    return found if numbers and abs(found.numbers / numbers - 1) <= TOLERATED else None


def _seeing(config: Any, text: Any, name: str) -> Outline:
    """A decoder behind a vision tower, from the parameters of both. Raises UserError for a tower of other blocks."""
    model = build_on_meta(config, AutoModelForImageTextToText)
    behind = {key: one for key, one in model.named_parameters() if reads_text(key)}
    text = copy.deepcopy(text)
    # Which the whole configuration says, and that of the text need not.
    text.tie_word_embeddings = not any(key.endswith("lm_head.weight") for key in behind)
    if getattr(text, "cross_attention_layers", None):
        raise UserError(f"{name} attends to images in layers of their own, which is not planned yet")
    tower, alone = tower_in(config, model), text.model_type in CAUSAL
    found = _usual(text, behind, name) or (_outline(text, name) if alone else captured(config, name, sees=True))
    whole, numbers = with_tower(found, tower), sum(one.numel() for one in model.parameters())
    if abs(whole.numbers / numbers - 1) > TOLERATED:
        raise UserError(
            f"{name} reads images with blocks that are not known here, or its text with others than usual: plan its "
            "text_config by a config.json of its own"
        )
    return whole


def _head(config: Any) -> Any:
    kind = str(config.model_type)
    decodes = kind in CAUSAL and (kind not in MASKED or bool(getattr(config, "is_decoder", True)))
    return AutoModelForCausalLM if decodes else AutoModelForMaskedLM


def _attends(config: Any) -> bool:
    """Whether all layers are of the kinds that `decoder` makes, as far as the configuration says kinds."""
    kinds = set(_kinds(config))
    scans = any("mamba" in name or name.startswith("linear_") for name in config.to_dict())
    return kinds <= ATTENDING and not scans and not varies(config)


def captured(config: Any, name: str, *, sees: bool = False) -> Outline:
    """From the graph of the configuration's model, whatever its blocks are. Raises UserError where it has none.

    `sees`: of a model with a vision tower what reads the text, which it is given alone.
    """
    config, head = copy.deepcopy(config), AutoModelForImageTextToText if sees else _head(config)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key, value in text.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(text, key, 0.0)  # what it takes is the framework's, which the planner adds
    model = build_on_meta(config, head)
    unseen = sum(one.numel() for key, one in model.named_parameters() if sees and not reads_text(key))
    numbers = sum(one.numel() for one in model.parameters()) - unseen
    blocks = [one for one in block_names(model) if not sees or reads_text(one)]
    if not blocks:
        raise UserError(f"{name} has no list of blocks: an outline is a table for each of them")
    tokens = _tokens(text)
    try:
        kinds = kinds_of(model, blocks)
        left = run_once(model, blocks, kinds)
        graph = folded(_graph(model, tokens, head), left)
    except CaptureError:  # perhaps of blocks that give more than hidden states
        model = build_on_meta(config, head)
        kinds, left = [*range(len(blocks))], blocks
        graph = folded(_graph(model, tokens, head), blocks)
    paths = [one.path for one in graph.blocks]
    if missing := next((path for path in left if path not in paths), None):
        raise UserError(f"{missing} of {name} does not run once and in one piece: it is no block that can be planned")
    order = [paths.index(blocks[kind]) for kind in kinds]
    masks = {blocks[kind]: _masks(text, kind, model.get_submodule(blocks[kind])) for kind in sorted({*kinds})}
    found = outline_of_graph(graph, name, masks={key: one for key, one in masks.items() if one}, order=order)
    found = replace(found, further=found.further - unseen)
    if abs(found.numbers / numbers - 1) > TOLERATED:
        raise UserError(
            f"{name} has {numbers:,} parameters, and its graph shows {found.numbers:,}: some are in blocks that do not "
            "run"
        )
    return found


def _graph(model: nn.Module, tokens: int, head: Any) -> Graph:
    given: dict[str, Any] = {"input_ids": torch.zeros(1, tokens, dtype=torch.long, device="meta")}
    if head is not AutoModelForMaskedLM:
        given["use_cache"] = False
    with quiet("transformers"):  # of kernels that are not installed: what they would compute is captured
        return capture(model, given, loss=_loss, dtype=torch.bfloat16)


def _loss(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits.float().sum()


def _tokens(config: Any) -> int:
    """Two chunks of the largest that the model cuts a sequence into, so that what passes between them is seen."""
    sizes = [getattr(config, name, 0) for name in ("chunk_size", "mamba_chunk_size")]
    return 2 * max([*(size for size in sizes if isinstance(size, int)), SHORTEST // 2])


def _masks(config: Any, at: int, block: nn.Module) -> Masks | None:
    """What the configuration says of a layer's attention; None where the graph shows all of it."""
    kinds = _kinds(config)
    kind = kinds[at] if at < len(kinds) else ""
    window = _window(of_layer(config, at)) if kind == "sliding_attention" or not kinds else 0
    chunk = int(getattr(config, "attention_chunk_size", 0) or 0) if kind == "chunked_attention" else 0
    causal = all(bool(one.is_causal) for one in block.modules() if hasattr(one, "is_causal"))
    return Masks(window, chunk, causal) if window or chunk or not causal else None


def _kinds(config: Any) -> Sequence[str]:
    """Of each layer, as far as the configuration says kinds; where it says none, all layers are alike."""
    return cast("Sequence[str]", getattr(config, "layer_types", None) or ())


def _window(config: Any) -> int:
    """How many keys a query of a layer with a window sees; 0 where no layer has one."""
    used = getattr(config, "use_sliding_window", True) is not False
    return int(getattr(config, "sliding_window", 0) or 0) if used else 0


def _predictors(config: Any) -> int:
    """How many tokens further than the next are predicted, each by a block of its own."""
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def int_field(config: Any, names: Sequence[str]) -> tuple[str, int] | None:
    """The first of some fields that a configuration has a number in, and the number; None where it has none.

    Some fields raise when they are read, as those that vary by layer.
    """
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # noqa: BLE001  configurations raise what they like
            value = None
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def dims_of(config: Any, sizes: Mapping[str, tuple[int, ...]]) -> Dims:
    """The dims that a configuration says, and what the shapes of parameters by name show beyond it."""
    said = {name: found[1] if (found := int_field(config, keys)) else 0 for name, keys in FIELDS.items()}
    if said["kv_rank"]:
        said["head_dim"] = int(config.qk_nope_head_dim)
    else:
        said["value_dim"] = 0
    said["ffn"] = said["ffn"] or 4 * said["hidden"]  # GPT-2's, where none is given
    experts = said["experts"] > 1
    expert_ffn = said["expert_ffn"] or said["ffn"]
    if experts and not said["shared_ffn"]:
        said["shared_ffn"] = int(getattr(config, "n_shared_experts", 0) or 0) * expert_ffn
    kinds, window = _kinds(config), _window(config)
    return Dims(
        **{**said, "per_token": max(said["per_token"], 1), "expert_ffn": expert_ffn if experts else 0},
        gated=any(".gate_proj." in key or "gate_up" in key or ".w1." in key or ".w3." in key for key in sizes),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        bias=sum(".bias" in key for key in sizes) > said["layers"],
        positions=next((shape[0] for key, shape in sizes.items() if key.endswith(POSITIONS)), 0),
        window=window,
        windowed=kinds.count("sliding_attention") if kinds else said["layers"] if window else 0,
        predictors=_predictors(config),
        all_rows=False,  # which a graph shows, and no field
    )


TEXT = re.compile(r"(^|\.)(language_model|text_model|lm_head)(\.|$)")
FEEDS = re.compile(r"mlp|fc1|fc2|feed_forward|ffn")
JOINS = re.compile(r"merg|project|connector|adapter|downsample")
PATCHES = re.compile(r"patch_embed(?!.*position)|patch_conv|(?<!video_)patch_proj|embeddings\.proj\.")


def reads_text(name: str) -> bool:
    """Whether a parameter or a block is the language model's or the head's."""
    return TEXT.search(name) is not None


def tower_in(config: Any, model: nn.Module) -> Tower:
    """Of a model on whatever device. Raises UserError where it has no list of blocks that reads images, or blocks of
    unknown parts."""
    sizes = {key: tuple(one.shape) for key, one in model.named_parameters() if not reads_text(key)}
    stems = Counter(one.rpartition(".")[0] for one in block_names(model) if not (reads_text(one) or "audio" in one))
    stem, layers = max(stems.items(), key=lambda one: one[1], default=("", 0))
    first = [shape for key, shape in sizes.items() if key.startswith(f"{stem}.0.") and FEEDS.search(key)]
    maps = [shape for shape in first if len(shape) == 2]
    outside = {key: shape for key, shape in sizes.items() if not key.startswith(f"{stem}.") and len(shape) > 1}
    hidden, patch = next(((s[0], prod(s[1:])) for key, s in outside.items() if PATCHES.search(key)), (0, 0))
    seen, heads = config.vision_config, _number(config.vision_config, "num_heads", "num_attention_heads")
    side, pixels, full = _number(seen, "patch_size"), _number(seen, "image_size"), _full(seen, layers)
    if not patch or not heads or not side or not any(hidden in shape for shape in maps):
        raise UserError(f"{type(model).__name__} reads images with blocks that are not known here")
    merged, fixed = _merged(config, patches := (pixels // side) ** 2)
    usual = USUAL_IMAGES.get(seen.model_type, USUAL_IMAGE)
    image = patches // merged if fixed and patches >= merged else usual
    projector = tuple((prod(shape[1:]), shape[0]) for key, shape in outside.items() if _joins(key))
    ffn = next((n for shape in maps for n in shape if n != hidden), hidden)
    tower = Tower(
        layers, hidden, heads, ffn, patch, len(maps) > 2, merged, image,
        window=(_number(seen, "window_size") // side) ** 2 if full else 0, windowed=layers - len(full) if full else 0,
        projector=projector, kv_heads=_number(seen, "num_key_value_heads"),
    )  # fmt: skip
    numbers = sum(prod(shape) for shape in sizes.values())
    return replace(tower, further=max(numbers - tower_numbers(tower), 0))


def _joins(name: str) -> bool:
    return JOINS.search(name) is not None and PATCHES.search(name) is None


def _full(seen: Any, layers: int) -> Sequence[int]:
    """Layers without windows, where others have some."""
    full = cast("Sequence[int]", getattr(seen, "fullatt_block_indexes", None) or ())
    return [at for at in full if at < layers]


def _number(config: Any, *names: str) -> int:
    """The first field that is there; of a pair of sides the first; 0 for none."""
    for name in names:
        value = getattr(config, name, None)
        value = cast(Any, value[0] if isinstance(value, list | tuple) and value else value)
        if isinstance(value, int):
            return value
    return 0


MERGED = ("spatial_merge_size", "merge_size", "pooling_kernel_size")
"""What the side of a square of patches that make a token is called."""


def _merged(config: Any, patches: int) -> tuple[int, bool]:
    """Patches of a token, and whether an image has always as many (`patches`)."""
    fields: Mapping[str, Any] = {**config.vision_config.to_dict(), **config.to_dict()}
    if side := next((fields[name] for name in MERGED if fields.get(name)), None):
        return int(side) ** 2, False
    if tokens := fields.get("mm_tokens_per_image"):
        return max(patches // int(tokens), 1), True
    if ratio := fields.get("downsample_ratio") or fields.get("pixel_shuffle_ratio"):
        return round(1 / float(ratio) ** 2), True
    return int(fields.get("scale_factor") or 1) ** 2, True
