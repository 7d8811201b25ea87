"""Fields of configurations that vary by layer: transformers raises where one is read off the whole configuration
(Gemma 4 has larger heads in its layers without a window, dots3 fewer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def of_layer(config: Any, at: int) -> Any:
    """The configuration of one layer."""
    return config.per_layer_config[at] if varies(config) else config


def by_layer(config: Any) -> Sequence[Any]:
    """The configurations of all layers; one, where they are alike."""
    return [*config.per_layer_config] if varies(config) else [config]


def varies(config: Any) -> bool:
    """Whether some field is not the same in all layers."""
    return bool(getattr(config, "is_heterogeneous", False))


def values(config: Any, name: str) -> Sequence[Any]:
    """What a field is in any layer, each value once; none where there is no such field."""
    return [*dict.fromkeys(found for one in by_layer(config) if (found := getattr(one, name, None)) is not None)]
