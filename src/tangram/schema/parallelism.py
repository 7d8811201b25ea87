"""The tables of a plan that say its strategy: what each axis is for, how tensors lie, stages, and contexts.

What they have to be among themselves and to the job is checked by `schema.plan`.
"""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from tangram.layout import Layout, Mesh
from tangram.schema.schedules import MAKERS
from tangram.schema.tables import PathText, Positive, TomlTable


def _check_mesh(text: str) -> str:
    Mesh.parse(text)
    return text


def _check_layout(text: str) -> str:
    Layout.parse(text)
    return text


def _check_mark(text: str) -> str:
    sides = text.split("->")
    if len(sides) > 2:
        raise ValueError(f'"{text}" is no mark: write one layout, or two as in "out/tp in -> out in"')
    for side in sides:
        Layout.parse(side.strip())
    return text


def _check_schedule(text: str) -> str:
    if text not in (*MAKERS, "table"):
        raise ValueError(f'"{text}" is no schedule: give one of {", ".join(MAKERS)}, or "table" for your own')
    return text


def marked(text: str) -> Layout:
    """How a tensor lies by a mark of a plan; how it is used, where a parameter is gathered, stands behind an arrow."""
    return Layout.parse(text.partition("->")[0].strip())


MeshText = Annotated[str, AfterValidator(_check_mesh)]
LayoutText = Annotated[str, AfterValidator(_check_layout)]
MarkText = Annotated[str, AfterValidator(_check_mark)]
ScheduleText = Annotated[str, AfterValidator(_check_schedule)]


class AxesPlan(TomlTable):
    """What each axis of the mesh is for; every axis has one role."""

    data: tuple[str, ...] = ()
    """The batch is cut over these. Those that also cut parameters are FSDP's, the others hold copies."""
    tensor: tuple[str, ...] = ()
    """These cut what modules compute, as the layouts of parameters and marks say."""
    context: tuple[str, ...] = ()
    """These cut the sequence, as `layouts.marks` say."""
    expert: tuple[str, ...] = ()
    """These cut a mixture's experts, as the layouts of parameters and marks say."""
    pipeline: tuple[str, ...] = ()

    @property
    def model(self) -> tuple[str, ...]:
        """Tensor, context and expert axes: their ranks share one part of the batch and compute it together."""
        return (*self.tensor, *self.context, *self.expert)


class LayoutsPlan(TomlTable):
    """How tensors lie over the mesh, by name pattern."""

    parameters: Annotated[dict[str, LayoutText], Field(min_length=1)]
    marks: dict[str, MarkText] = Field(default_factory=dict[str, MarkText])
    """Name pattern of a parameter, a module (what it gives) or a result of the model -> how it lies over model axes.
    "out/tp in -> out in" of a parameter: it lies in parts, and is gathered each time that it is used. How all else
    lies, and what moves, is derived from these and from how parameters lie."""
    sizes: dict[str, Positive] = Field(default_factory=dict[str, Positive])
    """Sizes of factors that the shapes do not tell, as head_dim in "(heads/tp head_dim) h"."""


class PipelinePlan(TomlTable):
    """Which modules are computed on which rank of the pipeline axis, and in what order micro-batches pass them."""

    schedule: ScheduleText = "1F1B"
    """As torch.distributed.pipelining names them (`schema.schedules`); "table": one's own."""
    table: PathText | None = None
    """The file of one's own (`schema.schedule_table`): CSV, what each rank does in each slot."""
    stages: tuple[tuple[str, ...], ...]
    """For each stage the modules whose parameters it has, by name, in the order in which they are computed. What has no
    parameters, as rotary embeddings, every stage computes. Which rank has it, the schedule says."""
    tied: tuple[str, ...] = ()
    """Modules of earlier stages whose parameters the last one has, too, as its head is tied to embeddings: both ranks
    keep and update them, by the sum of their gradients."""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, tables: Any) -> Any:
        """Arrays in the array of stages are tuples, too."""
        if not isinstance(tables, dict):
            return tables
        given = cast("dict[str, Any]", tables)
        stages = given.get("stages")
        if not isinstance(stages, list | tuple):
            return given
        found = [tuple(cast("list[Any]", x)) if isinstance(x, list) else x for x in cast("list[Any]", stages)]
        return {**given, "stages": tuple(found)}

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = [name for stage in self.stages for name in stage]
        for name in names:
            other = next((o for o in names if o != name and f"{name}.".startswith(f"{o}.")), None)
            if names.count(name) > 1 or other is not None:
                raise ValueError(f'"{name}" is in two places of the stages{f": also in {other}" if other else ""}')
        if wrong := [name for name in self.tied if not any(name in stage for stage in self.stages[:-1])]:
            raise ValueError(f'"{wrong[0]}" is tied and in no stage before the last: name a module of one')
        if empty := [i for i, stage in enumerate(self.stages) if not stage]:
            raise ValueError(f"stage {empty[0]} has no modules: give each stage one at least")
        if (self.schedule == "table") != (self.table is not None):
            raise ValueError('schedule = "table" and table, the file of it, go together: give both or neither')
        return self


class ContextPlan(TomlTable):
    """What is done over context axes, where run.attention is "tokens"."""

    keys: Literal["gathered", "ring"] = "gathered"
    """Of other ranks: put together on each before it attends, or passed on from rank to rank, so that none has all."""
    order: Literal["given", "balanced"] = "given"
    """Of the tokens. "balanced": each rank has a piece from the front and one from the back, which for a causal model
    is as much work for all."""
