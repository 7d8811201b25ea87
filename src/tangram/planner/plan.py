"""The plan: everything that a run needs to know, as one versioned artefact.

A `Plan` is a job (`planner.job`) with its strategy: the mesh, what each of its axes is for, how parameters and
activations lie over it, and the stages of a pipeline. `tangram plan` makes plans of a job; `tangram train` runs them.
`tangram.planner.read` reads and writes the files.

Layout rules are `name pattern -> layout`, in the one notation; the first pattern that matches a name decides. Loads
neither torch nor transformers, so that a mistake shows at once.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.planner.job import Job, Mistake, Positive, Table


def _check_mesh(text: str) -> str:
    Mesh.parse(text)
    return text


def _check_layout(text: str) -> str:
    Layout.parse(text)
    return text


def _check_flow(text: str) -> str:
    flow(text)
    return text


def flow(text: str) -> tuple[Layout, Layout]:
    """The two layouts of an activation rule "input -> output". Raises ValueError without exactly one arrow."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f'"{text}" is no activation rule: write input and output, as in "b s h -> b s (n/tp d)"')
    return Layout.parse(sides[0]), Layout.parse(sides[1])


MeshText = Annotated[str, AfterValidator(_check_mesh)]
LayoutText = Annotated[str, AfterValidator(_check_layout)]
FlowText = Annotated[str, AfterValidator(_check_flow)]


class AxesPlan(Table):
    """What each axis of the mesh is for; every axis has one role."""

    data: tuple[str, ...] = ()
    """The batch is cut over these. Those that also cut parameters are FSDP's, the others hold copies."""
    tensor: tuple[str, ...] = ()
    """These cut what a module computes, as `layouts.activations` say."""
    pipeline: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()


class LayoutsPlan(Table):
    """How tensors lie over the mesh, by name pattern."""

    parameters: Annotated[dict[str, LayoutText], Field(min_length=1)]
    activations: dict[str, FlowText] = Field(default_factory=dict[str, FlowText])
    """Module name pattern -> "input -> output": how what goes into the module and what comes out lie over the tensor
    axes. Data axes are not written here: they cut the batch."""
    marks: dict[str, LayoutText] = Field(default_factory=dict[str, LayoutText])
    """Name pattern of a parameter, a module (what it gives) or a result of the model -> how it lies over tensor axes.
    How all else lies, and what moves, is derived from these; `activations` are then left out."""
    sizes: dict[str, Positive] = Field(default_factory=dict[str, Positive])
    """Sizes of factors that the shapes do not tell, as head_dim in "(heads/tp head_dim) h"."""


class PipelinePlan(Table):
    """Which modules are computed on which rank of the pipeline axis, and in what order micro-batches pass them."""

    schedule: Literal["GPipe", "1F1B"] = "1F1B"
    """As torch.distributed.pipelining names them."""
    stages: tuple[tuple[str, ...], ...]
    """For each stage the modules whose parameters it has, by name, in the order in which they are computed. What has no
    parameters, as rotary embeddings, every stage computes."""

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
        if empty := [i for i, stage in enumerate(self.stages) if not stage]:
            raise ValueError(f"stage {empty[0]} has no modules: give each stage one at least")
        return self


class Plan(Job):
    """A job with its strategy."""

    mesh: MeshText
    axes: AxesPlan
    layouts: LayoutsPlan
    pipeline: PipelinePlan | None = None
    """Where a pipeline axis cuts the model into stages."""

    @model_validator(mode="after")
    def _axes_are_the_meshs(self) -> Self:
        roles = [*self.axes.data, *self.axes.tensor, *self.axes.pipeline, *self.axes.expert]
        mesh = Mesh.parse(self.mesh)
        if len(mesh.views) > 1:
            raise Mistake("mesh", f'this version trains over a mesh of one view; the mesh is "{self.mesh}"')
        if unknown := [axis for axis in roles if axis not in mesh.axes]:
            raise Mistake("axes", f'"{unknown[0]}" is no axis of the mesh "{self.mesh}"')
        if bare := [axis for axis in mesh.axes if roles.count(axis) != 1]:
            raise Mistake(
                "axes",
                f'the axis "{bare[0]}" of the mesh has {roles.count(bare[0])} roles: name it once, under data, tensor, '
                "pipeline or expert",
            )
        if self.axes.expert:
            raise Mistake("axes.expert", "this version does not run it: take data, tensor and pipeline axes")
        if self.run.compile and self.axes.tensor and not self.layouts.marks:
            raise Mistake(
                "run.compile",
                "blocks that layouts.activations cut over a tensor axis cannot be compiled, those of layouts.marks "
                "can: give marks, or run.compile = false",
            )
        return self

    @model_validator(mode="after")
    def _layouts_name_axes(self) -> Self:
        mesh = Mesh.parse(self.mesh)
        for pattern, text in self.layouts.parameters.items():
            if unknown := Layout.parse(text).axes - set(mesh.axes):
                raise Mistake(
                    f"layouts.parameters.{pattern}", f'"{text}" names {min(unknown)}, no axis of the mesh "{self.mesh}"'
                )
        if self.layouts.marks and self.layouts.activations:
            raise Mistake(
                "layouts.activations", "give layouts.marks, of which all else follows, or activations, not both"
            )
        for pattern, text in self.layouts.marks.items():
            if foreign := Layout.parse(text).axes - set(self.axes.tensor):
                raise Mistake(
                    f"layouts.marks.{pattern}",
                    f'"{text}" names {min(foreign)}, but marks say how tensors lie over tensor axes (axes.tensor)',
                )
        for pattern, text in self.layouts.activations.items():
            into, out = flow(text)
            if foreign := (into.axes | out.axes) - set(self.axes.tensor):
                raise Mistake(
                    f"layouts.activations.{pattern}",
                    f'"{text}" names {min(foreign)}, but activations are cut by tensor axes only (axes.tensor)',
                )
        if self.data.global_batch < self.data_ranks:
            raise Mistake(
                "data.global_batch",
                f"{self.data.global_batch} samples cannot be cut over the {self.data_ranks} ranks of the data axes",
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if len(self.axes.pipeline) > 1:
            raise Mistake("axes.pipeline", f"the pipeline axes are {', '.join(self.axes.pipeline)}: give one")
        if bool(self.axes.pipeline) != (self.pipeline is not None):
            has, lacks = ("axes.pipeline", "pipeline") if self.axes.pipeline else ("[pipeline]", "axes.pipeline")
            raise Mistake(lacks, f"there is {has}, but no {lacks}: the axis and the stages go together")
        for pattern, text in self.layouts.parameters.items():
            if Layout.parse(text).at:
                raise Mistake(
                    f"layouts.parameters.{pattern}", f'"{text}" names ranks: who has a parameter is said by [pipeline]'
                )
        if self.pipeline is None:
            return self
        stages, ranks = len(self.pipeline.stages), self.stage_ranks
        if stages != ranks:
            raise Mistake(
                "pipeline.stages",
                f"{stages} stages for the {ranks} ranks of the pipeline axis: with the schedule "
                f'"{self.pipeline.schedule}" each has one',
            )
        if self.pipeline.schedule == "1F1B" and self.micro_steps < stages:
            raise Mistake(
                "data.micro_batch",
                f"a step has {self.micro_steps} micro-batches for {stages} stages: lower data.micro_batch, so that "
                "there is one for each stage at least",
            )
        return self

    @property
    def stage_ranks(self) -> int:
        """How many ranks the pipeline axis has; 1 without one."""
        return Mesh.parse(self.mesh).axes[self.axes.pipeline[0]][0] if self.axes.pipeline else 1

    @property
    def tensor_ranks(self) -> int:
        """How many ranks share one part of the batch within a stage."""
        return self.ranks // (self.data_ranks * self.stage_ranks)

    def stage_of(self, name: str) -> int:
        """The stage that has a parameter or a buffer. Raises UserError where none has; 0 without a pipeline."""
        if self.pipeline is None:
            return 0
        for number, stage in enumerate(self.pipeline.stages):
            if any(name.startswith(f"{module}.") for module in stage):
                return number
        raise UserError(f"{name} is in no stage of the pipeline: name its module in pipeline.stages")

    def held_at(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Where on the pipeline axis a parameter or a buffer is, as the `at` of a layout; empty: everywhere."""
        return ((self.axes.pipeline[0], (self.stage_of(name),)),) if self.pipeline is not None else ()

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return Mesh.parse(self.mesh).size

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the batch is cut."""
        sizes = dict(axis for view in Mesh.parse(self.mesh).views for axis in view)
        count = 1
        for axis in self.axes.data:
            count *= sizes[axis]
        return count

    @property
    def micro_steps(self) -> int:
        """How many micro-batches each rank takes in a step (gradient accumulation); the last may be part empty."""
        return -(-self.data.global_batch // (self.data.micro_batch * self.data_ranks))

    def layout_of(self, name: str) -> str:
        """The layout text of a parameter, by the first rule that matches its name."""
        return first_match(
            self.layouts.parameters,
            name,
            "layouts.parameters",
            f'"*" = "_/{self.axes.data[0]} ..."' if self.axes.data else '"*" = "..."',
        )


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a name fits one of some patterns (`*` any text, `?` one letter, `[ab]` one of these)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_match(rules: dict[str, str], name: str, table: str, example: str) -> str:
    """What the first rule that matches a name says. Raises UserError when none does."""
    for pattern, text in rules.items():
        if fnmatchcase(name, pattern):
            return text
    raise UserError(f'no rule in [{table}] matches the parameter "{name}": add one, for instance {example}')
