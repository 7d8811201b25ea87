"""In how many bits a configuration says that its model's weights are kept: a name that is told, and their number.

Published checkpoints say it in `quantization_config`, by a field of each method. A model is built and trained in the
types that a job says, whatever that is; frozen weights beside adapters can stay as they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

FIELDS: Mapping[str, int] = {"load_in_4bit": 4, "_load_in_4bit": 4, "load_in_8bit": 8, "_load_in_8bit": 8}
"""What is true where weights have so many bits (bitsandbytes)."""
METHODS: Mapping[str, int] = {"fp8": 8, "fbgemm_fp8": 8, "finegrained_fp8": 8, "mxfp4": 4, "awq": 4, "gptq": 4}
"""Of methods that are of so many bits where no field says more."""


@dataclass(frozen=True)
class Kept:
    """How weights of products are kept."""

    method: str
    bits: int


def kept_of(config: Any) -> Kept | None:
    """What a configuration says; None where it says nothing, or a method whose bits are not known here."""
    said: Any = getattr(config, "quantization_config", None)
    table = cast("Mapping[str, Any]", said if isinstance(said, Mapping) else vars(said) if said is not None else {})
    method = str(getattr(table.get("quant_method"), "value", table.get("quant_method") or ""))
    by_field = next((bits for name, bits in FIELDS.items() if table.get(name) is True), 0)
    told = table.get("bits")
    bits = told if isinstance(told, int) else by_field or METHODS.get(method, 0)
    return Kept(method, bits) if method and 0 < bits <= 8 else None
