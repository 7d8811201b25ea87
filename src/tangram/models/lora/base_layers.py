"""The layers beside adapters whose frozen weights may be kept as codes of few bits (`models.lora.bases`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from tangram.errors import UserError
from tangram.models.lora.adapters import named_by
from tangram.models.lora.expert_adapters import stacked_weights

BASE = ".base_layer"
"""What peft puts after the name of a layer that has an adapter."""


def base_layers(model: nn.Module, skip: Sequence[str] = (), block: int = 1) -> dict[str, nn.Module]:
    """Frozen linear layers by name, of a model or a stage with adapters, but for the head and those that `skip` names.

    `skip`: ends of names or patterns. Raises UserError where a weight has rows that blocks of so many numbers do not
    fill, a name fits no layer, or experts lie in one tensor and are not skipped.
    """
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
    named = {name.removesuffix(BASE): one for name, one in modules.items() if ".lora_" not in name}
    skipped = {name for one in skip for name in named_by(one, "base_skip", named)}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    found: dict[str, nn.Module] = {}
    for name, layer in modules.items():
        plain = name.removesuffix(BASE)
        if type(layer) not in (nn.Linear, Conv1D) or layer is head or plain in (*skipped, "lm_head"):
            continue
        if ".lora_" in name or ".modules_to_save." in name or name.endswith(".original_module"):
            continue
        weight = cast(nn.Parameter, layer.weight)
        if weight.requires_grad:
            continue
        if weight.shape[1] % block:
            raise UserError(
                f"{plain} has rows of {weight.shape[1]} numbers, which are no whole blocks of {block}: name it in "
                "lora.base_skip"
            )
        found[name] = layer
    for weight in stacked_weights(model):
        experts = weight.rpartition(".")[0].removesuffix(BASE)
        if experts not in skipped:
            raise UserError(
                f"{experts} has all experts of a layer in one tensor, which lora.base does not quantise: leave it out, "
                'or have experts as they are by lora.base_skip = ["experts"]'
            )
    return found
