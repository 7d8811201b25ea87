"""What all tables of jobs and plans share: exact types, mistakes that name a key, common kinds of numbers."""

from datetime import date
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Mistake(ValueError):
    """What is wrong between several keys, and the dotted key that is best changed (its line is shown)."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(why)
        self.key = key


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Day = Annotated[date, BeforeValidator(lambda text: date.fromisoformat(text) if isinstance(text, str) else text)]
PathText = Annotated[str, Field(min_length=1)]


def _renamed(kind: object) -> object:
    """A kind of operators by the name that it has now."""
    return "matmuls" if kind == "products" else kind


Kind = Annotated[Literal["matmuls", "attention"], BeforeValidator(_renamed)]
"""Of operators."""


def _patterns(value: object) -> object:
    """What Megatron and torchtitan call it, as patterns: layers are what stands under a number."""
    return {"full": ("*.[0-9]*",), "none": ()}.get(value, value) if isinstance(value, str) else value


Recomputed = Annotated[tuple[str, ...], BeforeValidator(_patterns)]
"""Name patterns of modules, or "full", all layers, or "none"."""


class TomlTable(BaseModel):
    """A table of the plan: exact types, no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _arrays(cls, tables: Any) -> Any:
        """Arrays of the file are tuples here: what is frozen has no list."""
        if not isinstance(tables, dict):
            return tables
        items = cast(dict[Any, Any], tables).items()
        return {key: tuple(cast(list[Any], value)) if isinstance(value, list) else value for key, value in items}
