"""A model's masks as they were when it was captured.

transformers leaves a causal mask out where attention can make it by itself (`is_causal`), but not while it is traced.
Of a part of the queries attention would make another mask: then a run has to make them as the capture did. So it has
to where code sees a part that is shorter than a window, and attention the whole.

A shim: `is_tracing` of transformers.masking_utils decides it, for which a caller has no argument
(https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py, `_ignore_causal_mask_sdpa`).
When `tests/models/test_masks.py` finds a mask outside of it, it can go.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tangram.models.building.fields import values


@contextmanager
def as_captured() -> Generator[None]:
    """Inside, transformers makes every mask, as while it is traced. Without transformers nothing changes."""
    own: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(own, "is_tracing", None)
    if before is None:
        yield
        return
    own.is_tracing = _always
    try:
        yield
    finally:
        own.is_tracing = before


def has_windows(model: nn.Module) -> bool:
    """Whether a configuration of a model, or of a part of it, names windows or chunks of attention."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(any(values(config, key)) for config in configs for key in ("sliding_window", "attention_chunk_size"))


def _always(tensor: object = None) -> bool:
    return True
