"""Attention by documents and places of tokens, in the place of a Hugging Face model's own.

A model whose configuration was given to `by_tokens` attends by `kernels.attention`, or by a mode of `kernels.flash`.
What its tokens are it is told as its attention mask (`mask_of`), which transformers hands on as it is because it has
four dims; without one, position ids say it, or the order of tokens. So no mask of sequence x sequence is made, and
tokens may lie in any order.

The seam is transformers' own registry of attention functions; a model that does not take one from there is refused.
"""

# ruff: noqa: N803, N806  a tensor carries its dims in its name

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from tangram.errors import UserError
from tangram.kernels.attention import ATTEND, attend
from tangram.kernels.flash.modes import MODES
from tangram.kernels.flash.operator import flash, unable
from tangram.kernels.flash.spans import by_numbers
from tangram.models.building.build import build_on_meta
from tangram.models.building.fields import values
from tangram.models.capturing.capture import CaptureError, capture

TOKENS = "tokens"
"""What computes where no mode of `kernels.flash` is named."""
_NAMES = {f"tangram_{mode}": mode for mode in (TOKENS, *MODES)}


def by_tokens(config: PreTrainedConfig, mode: str = TOKENS) -> PreTrainedConfig:
    """The configuration of a model that attends so, where its class can (`refuse_unable`)."""
    name = next(name for name, own in _NAMES.items() if own == mode)
    AttentionInterface.register(name, partial(_attention, mode))
    found = copy.deepcopy(config)
    found._attn_implementation = name  # pyright: ignore[reportPrivateUsage]  what from_config's argument sets, too
    return found


def by_torch(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a model that attends by torch's own function, whatever its class would choose."""
    found = copy.deepcopy(config)
    found._attn_implementation = "sdpa"  # pyright: ignore[reportPrivateUsage]
    return found


def mode_of(config: PreTrainedConfig) -> str | None:
    """How models of it attend by tokens; None: they do not."""
    return _NAMES.get(config._attn_implementation or "")  # pyright: ignore[reportPrivateUsage]


@contextmanager
def exactly(model: PreTrainedModel) -> Generator[None]:
    """While it lasts, a model that attends by a mode of `kernels.flash` does so without the mode's casts."""
    config = model.config
    mode = mode_of(config)
    if mode in (None, TOKENS):
        yield
        return
    before, plain = config._attn_implementation, by_tokens(config)._attn_implementation  # pyright: ignore[reportPrivateUsage]
    config._attn_implementation = plain  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        config._attn_implementation = before  # pyright: ignore[reportPrivateUsage]


def numbers_of(positions_BS: Tensor) -> Tensor:
    """Document and place of each token (B, S, 2), int64; a document begins where positions begin anew.

    A document is numbered by the place of its first token.
    """
    places_BS = torch.arange(positions_BS.shape[1], device=positions_BS.device).expand_as(positions_BS)
    begins_BS = torch.diff(positions_BS, dim=1, prepend=positions_BS[:, :1]) != 1
    begins_BS = begins_BS & (places_BS > 0)
    first_BS = torch.where(begins_BS, places_BS, 0).cummax(1)[0]
    return torch.stack([first_BS, places_BS], -1)


def mask_of(numbers_BSN: Tensor) -> Tensor:
    """What a model is given as its attention mask (B, 1, S, 2)."""
    return numbers_BSN[:, None]


def refuse_unable(model: nn.Module) -> None:
    """Raise UserError where a model (on meta) does not attend so, or would hide more than it is told.

    It is run without memory: what its code asks of attention is known only then.
    """
    own = cast(PreTrainedModel, model).config
    if mode_of(own) != TOKENS:  # this one's operator says which window it is given
        model = build_on_meta(by_tokens(own))
    config = own.get_text_config()
    kinds: list[str] = [*(getattr(config, "layer_types", None) or [])]
    if other := next((kind for kind in kinds if kind not in KINDS), None):
        raise UserError(f'{_cannot(model)}: it has "{other}" layers, which hide keys in a way of their own')
    given = {
        "input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta"),
        "attention_mask": mask_of(torch.zeros(1, 4, 2, dtype=torch.int64, device="meta")),
        "use_cache": False,
    }
    try:
        graph = capture(model, given)
    except CaptureError as error:
        if isinstance(error.__cause__, UserError):
            raise UserError(f"{_cannot(model)}: {error.__cause__}") from error
        raise UserError(f"{_cannot(model)}: {error}") from error
    windows = [node.arguments["window"] for node in graph.nodes if node.operator is ATTEND.default]
    if not windows:
        raise UserError(f"{_cannot(model)}: its attention is none that can be replaced")
    sliding = kinds.count("sliding_attention") if kinds else int(any(values(config, "sliding_window")))
    if sliding > sum(map(bool, windows)):
        raise UserError(f"{_cannot(model)}: it does not tell its attention of its sliding window")


KINDS = frozenset({"full_attention", "sliding_attention"})


def _cannot(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot attend by tokens, as run.attention asks"


def _attention(
    mode: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: (B, H, S, E), (B, G, T, E), (B, G, T, F) to (B, S, H, F)."""
    if asked := next((name for name in ("softcap", "position_bias", "cache") if others.get(name) is not None), None):
        raise UserError(f"it asks attention for {asked}, which that by tokens has not")
    if dropout:
        raise UserError(f"it drops {dropout} of what attention gives, and that by tokens drops nothing")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError("it is not causal, and attention by tokens is")
    own, seen = _numbers(attention_mask, position_ids, query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mode == TOKENS:
        out, _ = attend(query, key, value, own, seen, s_aux, scale, sliding_window or 0)
    else:
        if why := unable(mode, query.device, query.dtype, max(query.shape[-1], value.shape[-1])):
            raise UserError(why)
        out, _ = flash(query, key, value, *by_numbers(own, seen, sliding_window or 0), s_aux, scale, mode)
    return out.transpose(1, 2).contiguous(), None


def _numbers(mask: Tensor | None, positions: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries and keys: as told, else by position ids, else of one document. Queries are the last of the keys."""
    S, T = query.shape[2], key.shape[2]
    if mask is not None:
        if mask.dtype != torch.int64 or mask.shape[1] != 1 or mask.shape[3] != 2:
            raise UserError("attention by tokens takes what `mask_of` gives for an attention mask")
        return mask[:, 0], mask[:, 0]
    if positions is not None and S == T:
        numbers = numbers_of(positions.expand(query.shape[0], S))
        return numbers, numbers
    seen = numbers_of(torch.arange(T, device=key.device).expand(query.shape[0], T))
    return seen[:, T - S :], seen
