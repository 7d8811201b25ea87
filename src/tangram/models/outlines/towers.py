"""The sizes of a model's vision tower, from its parameters and its configuration.

What is the tower's is told by names: whatever is neither the language model's nor the head's. Sizes are those of its
parameters; how many patches make a token, and an image, a configuration says in one of a few ways (`MERGED`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

from torch import nn

from tangram.errors import UserError
from tangram.models.outlines.costs import block_names
from tangram.models.outlines.images import USUAL_IMAGE, Tower, tower_numbers

TEXT = re.compile(r"(^|\.)(language_model|text_model|lm_head)(\.|$)")
FEEDS = re.compile(r"mlp|fc1|fc2|feed_forward|ffn")
JOINS = re.compile(r"merg|project|connector|adapter|downsample")
PATCHES = re.compile(r"patch_embed|patch_conv")


def reads_text(name: str) -> bool:
    """Whether a parameter or a block is the language model's or the head's."""
    return TEXT.search(name) is not None


def tower_in(config: Any, model: nn.Module) -> Tower:
    """Of a model on whatever device. Raises UserError where it has no list of blocks that reads images, or blocks of
    unknown parts."""
    sizes = {key: tuple(one.shape) for key, one in model.named_parameters() if not reads_text(key)}
    stems = Counter(one.rpartition(".")[0] for one in block_names(model) if not reads_text(one))
    stem, layers = max(stems.items(), key=lambda one: one[1], default=("", 0))
    first = [shape for key, shape in sizes.items() if key.startswith(f"{stem}.0.") and FEEDS.search(key)]
    maps = [shape for shape in first if len(shape) == 2]
    outside = {key: shape for key, shape in sizes.items() if not key.startswith(f"{stem}.") and len(shape) > 1}
    patch = next((prod(shape[1:]) for key, shape in outside.items() if PATCHES.search(key)), 0)
    seen, heads = config.vision_config, _number(config.vision_config, "num_heads", "num_attention_heads")
    if not maps or not patch or not heads:
        raise UserError(f"{type(model).__name__} reads images with blocks that are not known here")
    side, pixels, full = _number(seen, "patch_size"), _number(seen, "image_size"), _full(seen)
    merged, fixed = _merged(config, patches := (pixels // side) ** 2)
    image = patches // merged if fixed and patches >= merged else USUAL_IMAGE
    projector = tuple((prod(shape[1:]), shape[0]) for key, shape in outside.items() if _joins(key))
    tower = Tower(
        layers, min(maps[0]), heads, max(maps[0]), patch, len(maps) > 2, merged, image,
        window=(_number(seen, "window_size") // side) ** 2 if full else 0, windowed=layers - len(full) if full else 0,
        projector=projector,
    )  # fmt: skip
    numbers = sum(prod(shape) for shape in sizes.values())
    return replace(tower, further=max(numbers - tower_numbers(tower), 0))


def _joins(name: str) -> bool:
    return JOINS.search(name) is not None and PATCHES.search(name) is None


def _full(seen: Any) -> Sequence[int]:
    """Layers without windows, where others have some."""
    return cast("Sequence[int]", getattr(seen, "fullatt_block_indexes", None) or ())


def _number(config: Any, *names: str) -> int:
    """The first field that is there; of a pair of sides the first; 0 for none."""
    for name in names:
        value = getattr(config, name, None)
        value = cast(Any, value[0] if isinstance(value, list | tuple) and value else value)
        if isinstance(value, int):
            return value
    return 0


def _merged(config: Any, patches: int) -> tuple[int, bool]:
    """Patches of a token, and whether an image has always as many (`patches`)."""
    fields: Mapping[str, Any] = {**config.vision_config.to_dict(), **config.to_dict()}
    if side := fields.get("spatial_merge_size"):
        return int(side) ** 2, False
    if tokens := fields.get("mm_tokens_per_image"):
        return max(patches // int(tokens), 1), True
    if ratio := fields.get("downsample_ratio") or fields.get("pixel_shuffle_ratio"):
        return round(1 / float(ratio) ** 2), True
    return int(fields.get("scale_factor") or 1) ** 2, True
