"""What a tiny model is called with: by the names that its forward has, and the sizes that its configuration says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweep.sizes import VOCABULARY, special

BATCH, LENGTH = 4, 16


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """The first arguments of those tried that the model takes, all on the CPU; ValueError where it takes none."""
    refusals: list[str] = []
    model.eval()
    for make in _tried(model):
        try:
            with torch.no_grad():
                given = make()
                model(**given)
            return given
        except Exception as error:  # noqa: BLE001  whatever a model's class raises
            refusals.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    raise ValueError(" | ".join(dict.fromkeys(refusals)))


def _tried(model: Any) -> Iterator[Callable[[], dict[str, Any]]]:  # noqa: C901  a row for each kind of model
    names = [*inspect.signature(model.forward).parameters]
    if "input_ids" in names and "pixel_values" in names and _image_token(model.config) is not None:
        for extra in ({}, {"image_sizes": torch.tensor([[32, 32]] * BATCH)} if "image_sizes" in names else {}):
            yield lambda extra=extra: _with_images(model, names, extra)
            yield lambda extra=extra: _with_images(model, names, extra, several=True)
        yield lambda: _with_patches(model, names)
    if "input_ids" in names and "pixel_values" in names:
        yield lambda: _text(model, names) | _pixels(model)
    if "input_ids" in names:
        yield lambda: _text(model, names)
        yield lambda: _text(model, names) | {"bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)}
    if "pixel_values" in names:
        for size in (_own(model.config, "image_size", 32), 64, 224):
            yield lambda size=size: _pixels(model, size)
    if "pixel_values_videos" in names:
        yield lambda: {"pixel_values_videos": _pixels(model)["pixel_values"][:, None].repeat(1, 4, 1, 1, 1)}
    if "pixel_values" in names:
        yield lambda: {"pixel_values": _pixels(model)["pixel_values"][:, None].repeat(1, 8, 1, 1, 1)}
    more = _decoder(model) if "decoder_input_ids" in names else {}
    if "input_features" in names:
        bins = _own(model.config, "num_mel_bins", 16)
        for shape in ((BATCH, bins, 64), (BATCH, 64, bins), (BATCH, bins, 256), (BATCH, bins, 3000)):
            yield lambda shape=shape: {"input_features": _numbers(*shape), **more}
    if "input_values" in names:
        yield lambda: {"input_values": _numbers(BATCH, 1600), **more}
        yield lambda: {"input_values": _numbers(BATCH, 1, 1600)}
        yield lambda: {"input_values": _numbers(BATCH, 128, _own(model.config, "num_mel_bins", 128))}
    if "past_values" in names:
        size = _own(model.config, "num_input_channels", 1)
        yield lambda: {"past_values": _numbers(BATCH, _own(model.config, "context_length", 32), size)}
        yield lambda: {"past_values": _numbers(BATCH, 64)}
    if "inputs_embeds" in names:
        yield lambda: {"inputs_embeds": _numbers(BATCH, LENGTH, _own(model.config, "hidden_size", 32))}
    if "hidden_states" in names:
        yield lambda: {"hidden_states": _numbers(BATCH, LENGTH, _own(model.config, "hidden_size", 32))}


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
    if "use_cache" in names:
        given["use_cache"] = False
    return given


def _decoder(model: Any) -> dict[str, Any]:
    ids = torch.randint(3, 40, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"decoder_input_ids": ids}


def _pixels(model: Any, size: int | None = None) -> dict[str, Any]:
    size = size or _own(model.config, "image_size", 32)
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
    rows = _rows(base.get_image_features(**pixels, **extra))
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
    more = {"pixel_values": pixels, "image_grid_thw": grid}
    return given | more | _placed(model, names, given["input_ids"], 4)
