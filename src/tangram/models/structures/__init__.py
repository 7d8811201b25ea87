"""How frameworks other than Megatron-core keep transformers' models, as data in the form of the families.

A file has the architectures that it fits, and statements from transformers' names and shapes to the framework's. Most
such differences are a rule over names (every Linear weight transposed), so one file serves many architectures.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tangram.errors import UserError
from tangram.models.families import Family, architectures_of, read_family

__all__ = ["FRAMEWORKS", "family_in"]

FRAMEWORKS: Mapping[str, str] = {"paddle": "Paddle", "torchtitan": "torchtitan"}
"""What a file's name begins with, and what the framework is called."""


def family_in(framework: str, config: Mapping[str, Any]) -> Family:
    """What becomes of transformers' tensors in one of `FRAMEWORKS`. Raises UserError for an unknown architecture."""
    files = _files(framework)
    architectures = set(architectures_of(config, [one for family in files for one in family.architectures]))
    for family in files:
        if architectures & set(family.architectures):
            return family
    stated = ", ".join(sorted(architectures)) or f"none (its model_type is {config.get('model_type')!r})"
    known = ", ".join(one for family in files for one in family.architectures)
    raise UserError(
        f"nothing says how {FRAMEWORKS[framework]} keeps the architecture {stated}; it is known of {known}: "
        "give a --family FILE or a --mapping FILE of your own"
    )


@lru_cache
def _files(framework: str) -> tuple[Family, ...]:
    return tuple(map(read_family, sorted(Path(__file__).parent.glob(f"{framework}*.toml"))))
