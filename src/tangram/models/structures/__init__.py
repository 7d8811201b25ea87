"""How frameworks other than Megatron-core keep transformers' models, as data in the form of the families.

A file has the architectures that it fits, and statements from transformers' names and shapes to the framework's. Most
such differences are a rule over names (every Linear weight transposed), so one file serves many architectures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangram.errors import UserError
from tangram.models.families import Family, read_family

__all__ = ["PADDLE", "paddle_family"]

PADDLE = Path(__file__).with_name("paddle.toml")


def paddle_family(config: Mapping[str, Any]) -> Family:
    """What becomes of transformers' tensors in Paddle. Raises UserError for an architecture that is not known."""
    known = read_family(PADDLE)
    asked = [str(one) for one in config.get("architectures") or ()]
    if not set(known.architectures) & set(asked):
        said = ", ".join(asked) or f"none (its model_type is {config.get('model_type')!r})"
        raise UserError(
            f"nothing says how Paddle keeps the architecture {said}; it is known of {', '.join(known.architectures)}: "
            "give a --family FILE or a --mapping FILE of your own"
        )
    return known
