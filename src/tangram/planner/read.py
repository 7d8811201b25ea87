"""The plan file: what `tangram train` reads, checked before anything starts.

A plan is TOML with a version. Keys that are not known are refused, and every mistake is one sentence with the line, the
key and, for a misspelt key, the nearest one that exists. Reading a plan loads neither torch nor transformers, so a
mistake shows at once.

Trade-off: TOML parsers keep no positions, so the line of a key is found by a second look at the text.
"""

import difflib
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tangram.errors import UserError
from tangram.layout import Layout, Mesh

AXIS = "dp"  # the one mesh axis that this version trains over


def _check_mesh(text: str) -> str:
    mesh = Mesh.parse(text)
    if set(mesh.axes) != {AXIS}:
        raise ValueError(f'this version trains over the one mesh axis {AXIS}, as in "{AXIS}=2"; the mesh is "{text}"')
    return text


def _check_layout(text: str) -> str:
    Layout.parse(text)
    return text


MeshText = Annotated[str, AfterValidator(_check_mesh)]
LayoutText = Annotated[str, AfterValidator(_check_layout)]


class _Table(BaseModel):
    """A table of the plan: exact types, no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelPlan(_Table):
    """Which model: a preset of `tangram.models`, with fields of its configuration changed."""

    preset: str
    change: dict[str, bool | int | float | str] = {}


class DataPlan(_Table):
    """Which text, cut into which samples, and how many of them make a step."""

    root: str
    """A folder, relative to the plan file, or "stdlib": the sources of the Python that runs."""
    pattern: str = "**/*.py"
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share of files, chosen by the hash of their path, that is never trained on, nor is a copy of them."""
    held_out_samples: Annotated[int, Field(gt=0)] = 64
    sequence: Annotated[int, Field(gt=1)]
    global_batch: Annotated[int, Field(gt=0)]
    """Samples in one step over all ranks and micro-batches."""
    micro_batch: Annotated[int, Field(gt=0)]
    """Samples that one rank takes through the model at once."""


class OptimiserPlan(_Table):
    """AdamW: linear warm-up, then a cosine down to a tenth of `lr` at the last step."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Applies to matrices only."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the whole gradient that is applied unscaled."""


class RunPlan(_Table):
    """When to stop, and on what to run."""

    steps: Annotated[int, Field(gt=0)]
    max_seconds: Annotated[float, Field(gt=0)] = float("inf")
    """Training stops after the step in which this time has passed, if that is before `steps`."""
    device: Literal["auto", "cpu"] = "auto"


class Plan(_Table):
    """A whole plan file."""

    version: Literal[1]
    seed: Annotated[int, Field(ge=0)] = 0
    mesh: MeshText
    model: ModelPlan
    layouts: dict[str, LayoutText]
    """Parameter name pattern -> layout; the first pattern that matches a name decides."""
    data: DataPlan
    optimiser: OptimiserPlan
    run: RunPlan

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        width = self.data.micro_batch * self.ranks
        if self.data.global_batch % width:
            raise ValueError(
                f"data.global_batch = {self.data.global_batch} is not a multiple of data.micro_batch x ranks = "
                f"{self.data.micro_batch} x {self.ranks} = {width}"
            )
        return self

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return Mesh.parse(self.mesh).size

    def layout_of(self, name: str) -> str:
        """The layout text of a parameter, by the first rule that matches its name."""
        for pattern, layout in self.layouts.items():
            if fnmatchcase(name, pattern):
                return layout
        raise UserError(
            f'no rule in [layouts] matches the parameter "{name}": add one, for instance "*" = "_/{AXIS} ..."'
        )


def load_plan(path: Path, *, processes: int | None = None, steps: int | None = None) -> Plan:
    """Read and check a plan file; `steps` replaces its number of steps, `processes` must agree with its mesh."""
    text = _read(path)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: this is not TOML: {error}") from None
    if steps is not None and isinstance(tables.get("run"), dict):
        tables["run"]["steps"] = steps
    try:
        plan = Plan.model_validate(tables)
    except ValidationError as error:
        raise UserError(_sentence(path, text, error.errors(include_url=False))) from None
    if processes is not None and processes != plan.ranks:
        raise UserError(
            f'--processes {processes} does not agree with {path}, whose mesh "{plan.mesh}" has {plan.ranks} rank(s): '
            "leave the option out or change the mesh"
        )
    if plan.data.root == "stdlib":
        return plan
    data = plan.data.model_copy(update={"root": str(path.parent / plan.data.root)})
    return plan.model_copy(update={"data": data})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no plan file {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: this is not TOML: it is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"the plan file {path} cannot be read: {error.strerror}") from None


def _sentence(path: Path, text: str, errors: list[ErrorDetails]) -> str:
    """All that is wrong as one sentence: the first mistake in full, a misspelt key before the key it leaves missing."""
    error = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    keys = [str(key) for key in error["loc"]]
    line = _line_of(text, keys)
    where = f"{path}, line {line}" if line else f"{path}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {_what(error, keys)}{more}"


def _what(error: ErrorDetails, keys: list[str]) -> str:
    key = ".".join(keys)
    match error["type"]:
        case "extra_forbidden":
            known = _keys_at(keys[:-1])
            near = difflib.get_close_matches(keys[-1], known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(known)}"
            return f'unknown key "{key}"; {hint}'
        case "missing":
            return f'the key "{key}" is missing'
        case "value_error":  # our own sentences
            reason = " ".join(str(error.get("ctx", {}).get("error", error["msg"])).split())
            return f"{key}: {reason}" if key else reason
        case _:
            return f"{key} = {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _keys_at(keys: list[str]) -> list[str]:
    """The known keys of the table at `keys`."""
    table: Any = Plan
    for key in keys:
        annotation = table.model_fields[key].annotation
        table = next((kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")), None)
        if table is None:
            return []
    return list(table.model_fields)


def _line_of(text: str, keys: list[str]) -> int | None:
    """The line on which a key stands, or its table when the key itself is not there; None when neither is."""
    found: int | None = None
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            if table == keys[: len(table)]:
                found = number
        elif entry := re.match(r"""\s*("[^"]*"|'[^']*'|[\w.-]+)\s*=""", line):
            here = [*table, entry[1].strip("\"'")]
            if here == keys[: len(here)]:
                return number
    return found
