"""The tensors that a conversion makes: their types, and what each is made of.

Some stay float32 where the others are cast to 16 bits, as their model's class says: in bfloat16 a router's
`e_score_correction_bias` chooses other experts, and transformers never casts it.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from tangram.checkpoint.formats.common.optimiser_names import split
from tangram.checkpoint.formats.hf_export import cast_of
from tangram.checkpoint.store.manifest import DTYPES
from tangram.layout import Region
from tangram.relayout import BoundMapping, TensorSpec
from tangram.relayout.mapping.states import States

NARROW = ("float16", "bfloat16")
WIDE = "float32"
CORES = {"e_score_correction_bias": "router.expert_bias"}
"""Tensors that are kept so, by their names in transformers and in Megatron-core."""


@dataclass(frozen=True)
class NewTensor:
    """What becomes of a tensor."""

    name: str
    spec: TensorSpec
    sources: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * DTYPES[self.spec.dtype]

    def as_json(self) -> dict[str, Any]:
        spec = {"shape": list(self.spec.shape), "dtype": self.spec.dtype}
        return {"name": self.name, **spec, "of": list(self.sources)}


def cast_specs(
    bound: BoundMapping, dtype: str | None, states: States, rounded: bool = False, config: bytes | None = None
) -> dict[str, TensorSpec]:
    """The tensors that are made, in a natural order; those of a model in another type where that is asked.

    `states`: of the optimiser, which are never cast. `config`: the model's config.json, whose class may keep some in
    float32. Raises UserError where bits would be lost and `rounded` is not said.
    """
    owners = split(bound.target.specs, states)
    wide = kept_wide(config, dtype)
    made: dict[str, TensorSpec] = {}
    for name, spec in sorted(bound.target.specs.items(), key=lambda item: _natural(item[0])):
        kept = dtype is None or owners[name][1]
        stays = wide is not None and not kept and spec.dtype != dtype and wide.search(name) is not None
        wanted = WIDE if stays else dtype
        made[name] = spec if kept else TensorSpec(spec.shape, cast_of(name, spec.dtype, wanted, rounded))
    return made


def steps_of(bound: BoundMapping, made: Mapping[str, TensorSpec]) -> list[NewTensor]:
    """Every new tensor, as it is cast, and what it is made of."""
    found: list[NewTensor] = []
    for name, spec in made.items():
        family, region = bound.target.lift(name, Region.full(spec.shape))
        sources: dict[str, None] = {}
        for cell in bound.cells[family.name]:
            hit = any(cell.target.boxes(box) for box in region.boxes)
            if hit and cell.source is not None:
                sources[cell.source.tensor] = None
        found.append(NewTensor(name, spec, tuple(sources)))
    return found


def kept_wide(config: bytes | None, dtype: str | None) -> re.Pattern[str] | None:
    """What is in the names of tensors that transformers keeps in float32 when it casts this model to `dtype`.

    None where it keeps none, or has no class for the config.json.
    """
    return _kept(config, dtype) if config is not None and dtype in NARROW else None


@lru_cache(maxsize=4)
def _kept(config: bytes, dtype: str) -> re.Pattern[str] | None:
    from tangram.models.building.build import declared_on_meta  # loads transformers

    try:
        fields: Any = json.loads(config)
    except ValueError:
        return None
    stated = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
    model: Any = declared_on_meta(stated) if "model_type" in stated else None
    plan: list[str] = [] if model is None else [*model._get_dtype_plan(getattr(torch, dtype))]
    plan += [CORES[part] for part in plan if part in CORES]
    return re.compile("|".join(re.escape(part).replace(r"\*", ".*") for part in plan)) if plan else None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Names with their numbers in order: layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
