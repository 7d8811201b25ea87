"""Masks that transformers makes while it captures and leaves out else; when it makes them always, the shim can go."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import MistralConfig

from tangram.models.building.masks import as_captured, has_windows
from tests.models.test_stages import made


def mask_of_attention(model: nn.Module) -> Any:
    """What the first attention of a run is given as its mask."""
    seen: list[Any] = []
    attention = cast(Any, model).model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    try:
        cast(Any, model)(input_ids=torch.zeros(1, 6, dtype=torch.long), use_cache=False)
    finally:
        hook.remove()
    return seen[0]


def test_a_mask_is_made_inside_and_left_out_outside() -> None:
    model = made("llama")
    assert mask_of_attention(model) is None
    with as_captured():
        found = mask_of_attention(model)
    assert torch.equal(found[0, 0], torch.ones(6, 6).tril().bool())
    assert mask_of_attention(model) is None


def test_it_is_left_out_again_after_an_error() -> None:
    model = made("llama")
    try:
        with as_captured():
            raise KeyError
    except KeyError:
        pass
    assert mask_of_attention(model) is None


def test_a_window_of_one_layer_alone_is_one() -> None:
    """As NeoMME's: transformers raises an error where a field of layers is read of all of them."""
    for window in (8, None):
        model: Any = nn.Linear(1, 1)
        of_layers = {0: {"sliding_window": window}, 1: {"sliding_window": None, "head_dim": 4}}
        model.config = MistralConfig(num_hidden_layers=2, sliding_window=None, per_layer_config=of_layers)
        assert has_windows(model) == (window is not None)
