"""What a tiny model is called with: by the names that its forward has, and the sizes that its configuration says."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweep.sizes import VOCABULARY, special

BATCH, LENGTH = 4, 16


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """The first arguments of those tried that the model takes in training and evaluation, all on the CPU.

    Raises ValueError where it takes none.
    """
    refusals: list[str] = []
    for make in _tried(model):
        try:
            given = make()
            with torch.no_grad():
                for training in (False, True):
                    copy.deepcopy(model).train(training)(**given)
            return given
        except Exception as error:  # noqa: BLE001  whatever a model's class raises
            refusals.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    raise ValueError(" | ".join(dict.fromkeys(refusals)) or "it takes other arguments")


Given = Callable[[], dict[str, Any]]


def _tried(model: Any) -> Iterator[Given]:
    parameters = inspect.signature(model.forward).parameters
    names = [*parameters]
    needed = [name for name, one in parameters.items() if one.default is one.empty]
    for make in (*_with_pixels(model, names), *_with_sound(model, names), *_with_others(model, names)):
        yield lambda make=make: _completed(model, needed, make())
        for name in MORE:
            if name in names and name not in needed:
                yield lambda make=make, name=name: _completed(model, [*needed, name], make())
        beside = [name for name in names if name not in ("attention_mask", "pixel_attention_mask")]
        yield lambda make=make, beside=beside: _completed(model, beside, make())


def _completed(model: Any, needed: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    more = {name: MORE[name](model.config) for name in needed if name in MORE and name not in given}
    return more | given


def _with_pixels(model: Any, names: list[str]) -> Iterator[Given]:  # noqa: C901  a row for each kind of model
    if "input_ids" in names and "pixel_values" in names and _image_token(model.config) is not None:
        for extra in ({}, {"image_sizes": torch.tensor([[32, 32]] * BATCH)}) if "image_sizes" in names else ({},):
            yield lambda extra=extra: _with_images(model, names, extra)
            yield lambda extra=extra: _with_images(model, names, extra, several=True)
        yield lambda: _with_patches(model, names)
    if "grid_thw" in names or (names[0] in ("pixel_values", "hidden_states") and "image_grid_thw" in names):
        yield lambda: _patches(model, names)
        yield lambda: _patches(model, names, flat=False)
    if "spatial_shapes" in names or "pixel_position_ids" in names:
        yield lambda: _patch_rows(model, names)
    if "target_sizes" in names:
        yield lambda: {"pixel_values": _numbers(BATCH, 3, 8, 128), "target_sizes": torch.tensor([[4, 4]] * BATCH)}
    frames = _own(model.config, "num_frames", 8)
    if "input_ids" in names and "pixel_values" in names:
        yield lambda: _text(model, names) | _pixels(model)
        yield lambda: _text(model, names) | _video("pixel_values", model, frames)
        yield lambda: _text(model, names) | _video("pixel_values", model, 1)
    if "input_ids" in names and "pixel_values_videos" in names:
        yield lambda: _text(model, names) | _video("pixel_values_videos", model, frames)
    if "input_ids" in names:
        yield lambda: _text(model, names)
    if "pixel_values" in names:
        for size in (_own(model.config, "image_size", 32), 64, 224):
            yield lambda size=size: _pixels(model, size)
        for count in dict.fromkeys((frames, 8, 2)):
            yield lambda count=count: _video("pixel_values", model, count)
    if "pixel_values_videos" in names:
        for count in dict.fromkeys((frames, 4)):
            yield lambda count=count: _video("pixel_values_videos", model, count)


def _with_sound(model: Any, names: list[str]) -> Iterator[Given]:
    more = _decoder(model) if "decoder_input_ids" in names else {}
    texts: tuple[Given, ...] = (dict, lambda: _text(model, names)) if "input_ids" in names else (dict,)
    for text in texts:
        if "input_features" in names:
            stacked = _own(model.config, "num_stacked_frames", 1)
            for bins in dict.fromkeys(_own(model.config, name, 16) * stacked for name in _BINS):
                for shape in ((bins, 64), (64, bins), (bins, 256), (1, 64, bins), (bins, 3000)):
                    yield lambda shape=shape, text=text: text() | {"input_features": _numbers(BATCH, *shape)} | more
        if "input_values" in names:
            bins = _own(model.config, "num_mel_bins", 128)
            for shape in ((8000,), (1, 8000), (128, bins), (32000,)):
                yield lambda shape=shape, text=text: text() | {"input_values": _numbers(BATCH, *shape)} | more


_BINS = (
    "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim", "n_mels",
    "input_channels", "hidden_size",
)  # fmt: skip


def _with_others(model: Any, names: list[str]) -> Iterator[Given]:
    if "past_values" in names:
        size = _own(model.config, "num_input_channels", 1)
        yield lambda: {"past_values": _numbers(BATCH, _own(model.config, "context_length", 32), size)}
        yield lambda: {"past_values": _numbers(BATCH, 64)}
        yield lambda: {"past_values": _numbers(BATCH, _past(model.config))}
    for name in ("inputs_embeds", "hidden_states"):
        if name in names:
            yield lambda name=name: {name: _numbers(BATCH, LENGTH, _own(model.config, "hidden_size", 32))}
            yield lambda name=name: {name: _numbers(BATCH, _own(model.config, "hidden_size", 32), LENGTH)}
            yield lambda name=name: {name: _numbers(BATCH, 1, 1600)}
    if "flattened_patches" in names:
        yield lambda: _flattened(model) | _decoder(model)
    yield dict


def _past(config: Any) -> int:
    lags = getattr(config, "lags_sequence", None) or [1]
    return (getattr(config, "context_length", None) or 32) + max(lags)


def _ids(length: int = LENGTH) -> Tensor:
    return torch.randint(3, 40, (BATCH, length), generator=torch.Generator().manual_seed(2))


def _rows_of(name: str, otherwise: int, *lengths: int) -> Callable[[Any], Tensor]:
    """Numbers as wide as a configuration says."""
    return lambda config: _numbers(BATCH, *lengths, _own(config, name, otherwise))


def _ones(*lengths: int, dtype: torch.dtype = torch.long) -> Callable[[Any], Tensor]:
    return lambda _: torch.ones(BATCH, *lengths, dtype=dtype)


def _boxes(_: Any) -> Tensor:
    corners = torch.randint(0, 40, (BATCH, LENGTH, 2, 2), generator=torch.Generator().manual_seed(3))
    return torch.cat([corners.amin(2), corners.amax(2) + 1], -1)


MORE: Mapping[str, Callable[[Any], Any]] = {
    "bbox": _boxes,
    "qformer_input_ids": lambda _: _ids(8),
    "qformer_attention_mask": _ones(8),
    "task_inputs": lambda config: _ids(_own(config, "task_seq_len", 77)),
    "query_embeds": _rows_of("hidden_size", 32, 8),
    "encoder_hidden_states": _rows_of("encoder_hidden_size", 32, LENGTH),
    "visual_feats": _rows_of("visual_feat_dim", 2048, 8),
    "visual_pos": _rows_of("visual_pos_dim", 4, 8),
    "states": _rows_of("state_dim", 17, LENGTH),
    "actions": _rows_of("act_dim", 4, LENGTH),
    "rewards": lambda _: _numbers(BATCH, LENGTH, 1),
    "returns_to_go": lambda _: _numbers(BATCH, LENGTH, 1),
    "timesteps": lambda _: torch.arange(LENGTH).repeat(BATCH, 1),
    "prompt_pixel_values": lambda config: _image(config),
    "prompt_masks": lambda config: _image(config),
    "prompt_depth": lambda config: _image(config)[:, :1].abs(),
    "past_time_features": lambda config: _numbers(BATCH, _past(config), _time_features(config)),
    "past_observed_mask": lambda config: torch.ones(BATCH, _past(config)),
    "future_values": lambda config: _numbers(BATCH, config.prediction_length),
    "future_time_features": lambda config: _numbers(BATCH, config.prediction_length, _time_features(config)),
    "past_values_padding": lambda config: torch.zeros(BATCH, 64),
    "freq": lambda _: torch.zeros(BATCH, 1, dtype=torch.long),
    "state": _rows_of("max_state_dim", 32),
    "action_embeds": _rows_of("hidden_size", 32, 8),
    "noise_embeds": _rows_of("hidden_size", 32, LENGTH),
    "context_hidden_states": lambda config: _numbers(BATCH, LENGTH, config.hidden_size * len(config.target_layer_ids)),
    "latents": lambda _: _numbers(BATCH, 32, 32),
    "image_attention_mask": _ones(LENGTH, 1),
    "audio_mel": _rows_of("input_feat_size", 128, 64),
    "audio_mel_mask": _ones(64, dtype=torch.bool),
    "input_features_mask": _ones(64),
    "image_embeds_position_mask": lambda config: _first_places(_own(config, "latent_query_num", 8)),
    "input_points": lambda _: 8 * _numbers(BATCH, 1, 2, 2).abs(),
    "decoder_input_ids": lambda _: _ids(),
    "decoder_input_values": _rows_of("num_mel_bins", 80, 8),
    "pixel_attention_mask": _ones(1, 32, 32),
    "attention_mask": _ones(64),
}
"""Arguments beside."""


def _time_features(config: Any) -> int:
    return config.num_time_features + 0


def _first_places(count: int) -> Tensor:
    return (torch.arange(LENGTH) < count).long().repeat(BATCH, 1)


def _image(config: Any) -> Tensor:
    size = _own(config, "image_size", _own(config, "max_img_size", 32))
    return _numbers(BATCH, _own(config, "num_channels", 3), size, size)


def _video(name: str, model: Any, frames: int) -> dict[str, Any]:
    return {name: _image(model.config)[:, None].repeat(1, frames, 1, 1, 1)}


def _patches(model: Any, names: list[str], *, flat: bool = True) -> dict[str, Any]:
    """As the vision parts of Qwen-VL: patches of all images one after the other, and how many each has."""
    config = model.config
    merge = _own(config, "spatial_merge_size", 0) or _own(config, "merge_size", 2)
    patch, side = _own(config, "patch_size", 8), 2 * merge
    frames, channels = _own(config, "temporal_patch_size", 0), _own(config, "in_channels", 0)
    frames = frames or _own(config, "patch_temporal", 1)
    channels = channels or _own(config, "num_channels", 3)
    rows = BATCH * side * side
    pixels = _numbers(rows, channels * frames * patch * patch) if flat else _numbers(rows, channels, patch, patch)
    grid = "grid_thw" if "grid_thw" in names else "image_grid_thw"
    more = {"merge_sizes": torch.tensor([merge] * BATCH)} if "merge_sizes" in names else {}
    return {names[0]: pixels, grid: torch.tensor([[1, side, side]] * BATCH)} | more


def _patch_rows(model: Any, names: list[str]) -> dict[str, Any]:
    """As SigLIP 2: a row for each patch of an image."""
    width = _own(model.config, "num_channels", 3) * _own(model.config, "patch_size", 8) ** 2
    given: dict[str, Any] = {"pixel_values": _numbers(BATCH, 16, width)}
    at = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(BATCH, 1, 1)
    more = {
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
        "pixel_position_ids": at,
    }
    text = _text(model, names) if "input_ids" in names else {}
    return text | given | {name: x for name, x in more.items() if name in names}


def _flattened(model: Any) -> dict[str, Any]:
    """As Pix2Struct: a row for each patch, its place first."""
    width = 3 * _own(model.config, "patch_size", 8) ** 2
    width = _own(model.config, "patch_embed_hidden_size", width)
    at = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).repeat(BATCH, 1, 1)
    return {"flattened_patches": torch.cat([at.float(), _numbers(BATCH, 16, width)], -1)}


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _own(config: Any, name: str, otherwise: int) -> int:
    """What a configuration, or one inside of it, has by this name."""
    found = _find(config.to_dict(), name)
    return otherwise if found is None else int(found)


def _find(fields: Mapping[str, Any], name: str) -> Any:
    own = fields.get(name)
    own = own[0] if isinstance(own, (list, tuple)) and own else own
    if isinstance(own, int):
        return own
    inner = [value for key, value in fields.items() if isinstance(value, dict) and "config" in key]
    return next((found for value in inner if (found := _find(value, name)) is not None), None)


def _text(model: Any, names: list[str]) -> dict[str, Any]:
    taken = {*special(model.config)}
    free = torch.tensor([i for i in range(3, min(_own(model.config, "vocab_size", 96), VOCABULARY)) if i not in taken])
    generator = torch.Generator().manual_seed(1)
    ids = free[torch.randint(len(free), (BATCH, LENGTH), generator=generator)]
    given: dict[str, Any] = {"input_ids": ids}
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids.flip(1)
        if hasattr(model.config, "delay_pattern"):
            given["decoder_input_ids"] = ids.flip(1)[..., None].repeat(1, 1, len(model.config.delay_pattern))
    if "use_cache" in names:
        given["use_cache"] = False
    return given


def _decoder(model: Any) -> dict[str, Any]:
    ids = torch.randint(3, 40, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"decoder_input_ids": ids}


def _pixels(model: Any, size: int | None = None) -> dict[str, Any]:
    if size is None:
        return {"pixel_values": _image(model.config)}
    return {"pixel_values": _numbers(BATCH, _own(model.config, "num_channels", 3), size, size)}


def _image_token(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id")
    return next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None)


def _with_images(model: Any, names: list[str], extra: dict[str, Any], *, several: bool = False) -> dict[str, Any]:
    """An image before each text, as many places for it as the model makes of it. `several`: each text has a list."""
    given, pixels = _text(model, names), _pixels(model)
    if several:
        pixels = {"pixel_values": pixels["pixel_values"][:, None]}
    base = model if hasattr(model, "get_image_features") else model.model
    parameters = inspect.signature(base.get_image_features).parameters
    needed = [n for n, one in parameters.items() if one.default is one.empty]
    rows = _rows(base.get_image_features(**_completed(model, needed, pixels | extra)))
    return given | pixels | extra | _placed(model, names, given["input_ids"], rows // BATCH)


def _rows(features: Any) -> int:
    features = getattr(features, "pooler_output", features)
    features = torch.cat([*features]) if isinstance(features, (list, tuple)) else features
    return int(features.numel() // features.shape[-1])


def _placed(model: Any, names: list[str], ids: Tensor, count: int) -> dict[str, Any]:
    token = _image_token(model.config)
    assert token is not None
    places = torch.full((BATCH, count), token)
    given = {"input_ids": torch.cat([ids[:, :4], places, ids[:, 4:]], 1)}
    kinds = (given["input_ids"] == token).long()
    return given | {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in names}


def _with_patches(model: Any, names: list[str]) -> dict[str, Any]:
    """As Qwen-VL takes images: patches of all of them one after the other, and how many each has."""
    given, vision = _text(model, names), getattr(model.config, "vision_config", model.config)
    patch, merge = _own(vision, "patch_size", 8), _own(vision, "spatial_merge_size", 2)
    frames = _own(vision, "temporal_patch_size", 2) if "temporal_patch_size" in vision.to_dict() else 1
    channels = _own(vision, "in_channels", 3) if "in_channels" in vision.to_dict() else 3
    grid = torch.tensor([[1, 2 * merge, 2 * merge]] * BATCH)
    pixels = _numbers(BATCH * 4 * merge * merge, channels * frames * patch * patch)
    more = {"pixel_values": pixels, "image_grid_thw": grid} | _placed(model, names, given["input_ids"], 4)
    if "mm_token_type_ids" in names:  # else the model reads where tokens stand out of the text, of one batch alone
        more["position_ids"] = torch.arange(more["input_ids"].shape[1]).expand(3, BATCH, -1).clone()
    return given | more
