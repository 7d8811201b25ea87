"""What stands beside the language model in a model of images or sounds: its towers and what joins them to it."""

from __future__ import annotations

from torch import nn


def beside_text(model: nn.Module) -> list[str]:
    """Patterns of the names of parameters that text alone does not reach, as `model.vision_tower.*`."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = getattr(model, prefix, None)
    if not isinstance(base, nn.Module) or not isinstance(getattr(base, "language_model", None), nn.Module):
        return []
    others = (name for name, one in base.named_children() if name != "language_model" and [*one.parameters()])
    return [f"{prefix}.{name}.*" for name in others]
