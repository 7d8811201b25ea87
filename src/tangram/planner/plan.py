"""The plan: everything that a run needs to know, as one versioned artefact.

A `Job` says what to train: model, data, optimiser, precision, when to save and to stop. A `Plan` is a job with its
strategy: the mesh, what each of its axes is for, and how parameters and activations lie over it. `tangram plan` makes
plans of a job; `tangram train` runs them. `tangram.planner.read` reads and writes the files.

Layout rules are `name pattern -> layout`, in the one notation; the first pattern that matches a name decides. All
tables are frozen and refuse unknown keys. Loads neither torch nor transformers, so that a mistake shows at once.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tangram.checkpoint.rules import parse as parse_retention
from tangram.errors import UserError
from tangram.layout import Layout, Mesh

VERSION = 2


class Mistake(ValueError):
    """What is wrong between several keys, and the dotted key that is best changed (its line is shown)."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(why)
        self.key = key


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
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
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


class ModelPlan(Table):
    """Which model: a preset of `tangram.models`, or a Hugging Face directory or configuration file.

    Neither is given where a training loop of one's own makes the model.
    """

    preset: str | None = None
    path: PathText | None = None
    """A Hugging Face directory (its safetensors weights are read when there) or a config.json, relative to the file."""
    change: dict[str, bool | int | float | str] = {}
    """Fields of the model's configuration to change."""
    freeze: tuple[str, ...] = ()
    """Name patterns of parameters that are not trained."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.preset is not None and self.path is not None:
            raise ValueError("give the model by preset or by path, not both")
        return self


class SourcePlan(Table):
    """One source of documents."""

    path: PathText
    """A file or folder, relative to the plan file; "stdlib" is the sources of the Python that runs."""
    pattern: str | None = None
    """For a folder: which files under it, as in "**/*.py". The default takes every file of a known kind."""
    field: str = "text"
    """For JSONL, parquet and `datasets` directories: the column that holds the text."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """How many samples come from this source, in proportion to the other weights."""


class DataPlan(Table):
    """Which text, cut into which samples, and how many of them make a step."""

    sources: Annotated[tuple[SourcePlan, ...], Field(min_length=1)]
    tokenizer: PathText = "model"
    """"bytes", "model" (the tokenizer beside the model; bytes for a preset), or a Hugging Face directory."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The share of documents, chosen by the hash of their content, that is never trained on."""
    held_out_samples: Positive = 64
    sequence: Annotated[int, Field(gt=1)]
    global_batch: Positive
    """Samples in one step over all ranks and micro-batches."""
    micro_batch: Positive = 1
    """Samples that one rank takes through the model at once; the rest of its share follows, gradients add up."""
    packing: Literal["auto", "packed", "single"] = "auto"
    """Which documents a sample holds: "packed" as many as fit, which the model has to keep apart; "single" one, and the
    rest of the window counts nothing; "auto" asks the model before training and takes "packed" where it can."""
    cache: PathText | None = None
    """Where tokens are kept between runs; the default is the user's cache folder."""


class OptimiserPlan(Table):
    """AdamW with a linear warm-up."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: Share = 0.0
    no_decay: tuple[str, ...] = ("*norm*", "*.bias", "bias")
    """Name patterns of parameters without weight decay; those of fewer than two dims have none either."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """The largest norm of the whole gradient that is applied unscaled; inf applies every one."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine; or constant and then (wsd) linear over the last `decay_steps`."""
    warmup_steps: Count = 0
    decay_steps: Count = 0
    """Of "wsd": the steps at the end in which the rate falls."""
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The rate at the last step, as a share of `lr`."""
    states: Literal["as parameters"] = "as parameters"
    """How the optimiser's states lie: cut like their parameters."""


class PrecisionPlan(Table):
    """In which numbers: parameters and optimiser states are float32."""

    compute: Literal["float32", "bfloat16"] = "float32"
    reduce: Literal["float32", "bfloat16"] = "float32"


class CheckpointPlan(Table):
    """When to save while training; a last checkpoint is always written at the end."""

    every_steps: Count = 0
    """0 saves at the end only."""
    keep: Positive = 2
    """How many of the newest are kept."""
    also: tuple[str, ...] = ()
    """Rules by which others are kept, too: "every=1000" steps, "best=metrics.held_out_loss:min:2", "younger=2d"."""
    asynchronous: bool = True
    """Go on training while the copy is written."""

    @model_validator(mode="after")
    def _rules_can_be_read(self) -> Self:
        try:
            parse_retention((f"last={self.keep}", *self.also))
        except UserError as error:
            raise ValueError(str(error).removeprefix("--keep ")) from None
        return self


class RunPlan(Table):
    """When to stop, and on what to run."""

    steps: Positive
    max_seconds: Annotated[float, Field(gt=0)] = float("inf")
    """Training stops after the step in which this time has passed, if that is before `steps`."""
    evaluate_every: Count = 0
    """Steps between two measurements of the held-out loss; 0 measures at the end only."""
    device: Literal["auto", "cpu"] = "auto"
    deterministic: bool = False
    compile: bool = False
    """torch.compile each block."""
    recompute: tuple[str, ...] = ()
    """Name patterns of modules whose activations are computed again in the backward instead of being kept."""


class Job(Table):
    """What to train, without a strategy."""

    version: Literal[2] = VERSION
    seed: Count = 0
    model: ModelPlan = ModelPlan()
    data: DataPlan
    optimiser: OptimiserPlan
    precision: PrecisionPlan = PrecisionPlan()
    checkpoint: CheckpointPlan = CheckpointPlan()
    run: RunPlan

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        optimiser, steps = self.optimiser, self.run.steps
        if optimiser.warmup_steps >= steps:
            raise Mistake(
                "optimiser.warmup_steps",
                f"warming up takes {optimiser.warmup_steps} steps of the {steps} in run.steps: take fewer than {steps}",
            )
        if optimiser.schedule == "wsd" and not optimiser.decay_steps:
            raise Mistake("optimiser.schedule", 'the schedule "wsd" needs decay_steps, the steps at the end that decay')
        if optimiser.schedule != "wsd" and optimiser.decay_steps:
            raise Mistake(
                "optimiser.decay_steps", f'only the schedule "wsd" has decay_steps; this is "{optimiser.schedule}"'
            )
        if optimiser.warmup_steps + optimiser.decay_steps > steps:
            raise Mistake(
                "optimiser.decay_steps",
                f"warming up and decaying take {optimiser.warmup_steps} + {optimiser.decay_steps} steps, more than the "
                f"{steps} in run.steps",
            )
        if self.precision.reduce != "float32" and self.precision.compute == "float32":
            raise Mistake(
                "precision.reduce",
                "gradients of a float32 computation are summed in float32: leave precision.reduce out",
            )
        if self.run.evaluate_every and not self.data.held_out:
            raise Mistake("run.evaluate_every", "data.held_out = 0 leaves nothing to measure the held-out loss on")
        return self


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
    activations: dict[str, FlowText] = {}
    """Module name pattern -> "input -> output": how what goes into the module and what comes out lie over the tensor
    axes. Data axes are not written here: they cut the batch."""
    marks: dict[str, LayoutText] = {}
    """Name pattern of a parameter, a module (what it gives) or a result of the model -> how it lies over tensor axes.
    How all else lies, and what moves, is derived from these; `activations` are then left out."""
    sizes: dict[str, Positive] = {}
    """Sizes of factors that the shapes do not tell, as head_dim in "(heads/tp head_dim) h"."""


class Plan(Job):
    """A job with its strategy."""

    mesh: MeshText
    axes: AxesPlan
    layouts: LayoutsPlan

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
        for kind in ("pipeline", "expert"):
            if getattr(self.axes, kind):
                raise Mistake(f"axes.{kind}", "this version does not run it: take data and tensor axes")
        if self.run.compile and self.axes.tensor and not self.layouts.marks:
            raise Mistake(
                "run.compile",
                "blocks that layouts.activations cut over a tensor axis cannot be compiled, those of layouts.marks can: "
                "give marks, or run.compile = false",
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
