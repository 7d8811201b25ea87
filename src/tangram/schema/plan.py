"""The plan: everything that a run needs to know, as one versioned artefact.

A `Plan` is a job (`schema.job`) with its strategy: the mesh, what each of its axes is for, how parameters lie over it
and marks of what flows, and the stages of a pipeline (`schema.parallelism`). `tangram plan` makes plans of a job;
`tangram train` runs them. `tangram.schema.files` reads and writes the files.

Layout rules are `name pattern -> layout`, in the one notation; the first pattern that matches a name decides. Loads
neither torch nor transformers, so that a mistake shows at once.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Self

from pydantic import model_validator

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.schema.job import Job
from tangram.schema.optimiser import SHARED_UPDATES
from tangram.schema.parallelism import AxesPlan, ContextPlan, LayoutsPlan, MeshText, PipelinePlan, marked
from tangram.schema.precision import Type
from tangram.schema.schedule_table import Schedule
from tangram.schema.schedules import MAKERS, micros_unlike, nearest_micro_batch, read_table, schedule, stages_unlike
from tangram.schema.tables import Mistake
from tangram.schema.tuning import base_of, layout_beside


class Plan(Job):
    """A job with its strategy."""

    mesh: MeshText
    axes: AxesPlan
    layouts: LayoutsPlan
    pipeline: PipelinePlan | None = None
    """Where a pipeline axis cuts the model into stages."""
    context: ContextPlan = ContextPlan()

    @model_validator(mode="after")
    def _axes_are_the_meshs(self) -> Self:
        roles = [*self.axes.data, *self.axes.model, *self.axes.pipeline]
        mesh = Mesh.parse(self.mesh)
        if len(mesh.views) > 1:
            raise Mistake("mesh", f'this version trains over a mesh of one view; the mesh is "{self.mesh}"')
        if unknown := [axis for axis in roles if axis not in mesh.axes]:
            raise Mistake("axes", f'"{unknown[0]}" is no axis of the mesh "{self.mesh}"')
        if bare := [axis for axis in mesh.axes if roles.count(axis) != 1]:
            raise Mistake(
                "axes",
                f'the axis "{bare[0]}" of the mesh has {roles.count(bare[0])} roles: name it once, under data, tensor, '
                "context, expert or pipeline",
            )
        return self

    def _model_axes_cut(self) -> None:
        roles = {axis: role for role in ("tensor", "context", "expert") for axis in getattr(self.axes, role)}
        named = {axis for text in self.layouts.marks.values() for axis in marked(text).axes}
        named |= {axis for text in self.layouts.parameters.values() for axis in Layout.parse(text).axes}
        sizes = dict(Mesh.parse(self.mesh).views[0])
        if idle := [axis for axis in self.model_axes if axis not in named and sizes[axis] > 1]:
            raise Mistake(
                f"axes.{roles[idle[0]]}",
                f'no mark and no layout of a parameter names "{idle[0]}", so its ranks would all compute the same: add '
                "a mark that cuts over it, or make it a data axis",
            )

    @model_validator(mode="after")
    def _layouts_name_axes(self) -> Self:
        mesh = Mesh.parse(self.mesh)
        for pattern, text in self.layouts.parameters.items():
            if unknown := Layout.parse(text).axes - set(mesh.axes):
                raise Mistake(
                    f"layouts.parameters.{pattern}", f'"{text}" names {min(unknown)}, no axis of the mesh "{self.mesh}"'
                )
        for pattern, text in self.layouts.marks.items():
            if foreign := marked(text).axes - set(self.axes.model):
                raise Mistake(
                    f"layouts.marks.{pattern}",
                    f'"{text}" names {min(foreign)}, but marks say how tensors lie over tensor, context and expert '
                    "axes",
                )
        self._model_axes_cut()
        if self.data.global_batch < self.data_ranks:
            raise Mistake(
                "data.global_batch",
                f"{self.data.global_batch} samples cannot be cut over the {self.data_ranks} ranks of the data axes",
            )
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> Self:
        for key, value in (("keys", self.context.keys), ("order", self.context.order)):
            if value == ContextPlan.model_fields[key].default:
                continue
            if not self.axes.context:
                raise Mistake(f"context.{key}", f'"{value}" is of ranks of a context axis, and axes.context names none')
            if self.run.attention != "tokens" and (value == "ring" or not self.run.by_tokens):
                raise Mistake(f"context.{key}", f'"{value}" needs attention by tokens: set run.attention = "tokens"')
        pieces = 2 * self.context_ranks
        if self.context.order == "balanced" and self.data.sequence % pieces:
            near = -(-self.data.sequence // pieces) * pieces
            raise Mistake(
                "data.sequence",
                f"{self.data.sequence} tokens are no {pieces} equal pieces, of which each of the {self.context_ranks} "
                f"ranks of the context axes gets two: take {near}",
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
        if self.pipeline.schedule == "table":  # its file is read when the plan's is
            return self
        name, stages, ranks = self.pipeline.schedule, len(self.pipeline.stages), self.stage_ranks
        if why := stages_unlike(name, ranks, stages):
            raise Mistake("pipeline.stages", f"{stages} stages for the {ranks} ranks of the pipeline axis: {why}")
        if self.pipeline.tied and (together := self._tied_on_one_rank(self.rank_of_stage)):
            raise Mistake(*together)
        if why := micros_unlike(name, ranks, self.micro_steps):
            share = -(-self.data.global_batch // self.data_ranks)
            other = nearest_micro_batch(name, ranks, self.data.micro_batch, share)
            raise Mistake(
                "data.micro_batch",
                f"a step has {self.micro_steps} micro-batches, and {why}: "
                + (f"set data.micro_batch = {other}" if other else "set another data.global_batch"),
            )
        if MAKERS[name].splits and (whole := self._undivided_backwards()):
            raise Mistake(*whole)
        return self

    def _tied_on_one_rank(self, rank_of: Sequence[int]) -> tuple[str, str] | None:
        """The key by which stages with one tensor come to one rank, which cuts it once for each; None where none do."""
        assert self.pipeline is not None
        if on_one := [name for name in self.pipeline.tied if rank_of[self.stage_of(f"{name}.")] == rank_of[-1]]:
            return "pipeline.schedule", (
                f"{self.pipeline.schedule} puts {on_one[0]} and the head that is tied to it on one rank, as parts of "
                "two stages: take a schedule that puts them on two, as 1F1B, or set "
                "model.change.tie_word_embeddings = false"
            )
        return None

    def _undivided_backwards(self) -> tuple[str, str] | None:
        """The key by which backwards cannot be done in two parts, and why; None where they can."""
        other = 'or take pipeline.schedule = "Interleaved1F1B" or "LoopedBFS"'
        if self.run.compile:
            why = "the schedule does backwards in two parts, which those of compiled blocks are not"
            return "run.compile", f"{why}: set it to false, {other}"
        if self.run.recompute:
            why = "the schedule does backwards in two parts, and would recompute a block for each of its weights"
            return "run.recompute", f"{why}: leave it out, {other}"
        return None

    @model_validator(mode="after")
    def _gradients_add_up(self) -> Self:
        """In the type that is said, whichever way they are added."""
        if mistake := self.precision.mistake_of_sums(
            self.run.reshard, self.run.reduce_every, self.pipeline is not None
        ):
            raise mistake
        return self

    @model_validator(mode="after")
    def _updates_in_backward(self) -> Self:
        """Where gradients are whole as soon as the backward has made them, and each once."""
        if self.run.stream_layers and self.ranks > 1 and self.shard_ranks == 1:
            why = "of several ranks only those that FSDP cuts parameters over stream layers"
            raise Mistake("mesh", f"{why}: use FSDP, or leave out run.stream_layers")
        if self.run.stream_layers and self.run.reshard != "after forward":
            raise Mistake("run.reshard", 'streamed layers are not kept whole: set "after forward"')
        if not self.optimiser.in_backward:
            return self
        where, key = "leave out optimiser.in_backward", "optimiser.in_backward"
        if self.pipeline is not None:
            raise Mistake(key, f"stages of a pipeline add up the gradients of micro-batches: {where}")
        if self.micro_steps > 1:
            raise Mistake(
                "data.micro_batch",
                f"a step has {self.micro_steps} micro-batches, and optimiser.in_backward adds up no gradients: set "
                f"data.micro_batch = {-(-self.data.global_batch // self.data_ranks)}, or {where}",
            )
        if self.context_ranks > 1:
            raise Mistake(key, f"CP ranks add up their gradients after the backward: {where}")
        if self.data_ranks > 1 and self.shard_ranks == 1:
            raise Mistake(key, f"DDP adds up gradients in buckets, which keep all: use FSDP, or {where}")
        if self.model_ranks > 1 and self.optimiser.kind in SHARED_UPDATES:
            raise Mistake(key, f"TP and EP ranks update parameters together with {self.optimiser.name}: {where}")
        return self

    @property
    def shard_ranks(self) -> int:
        """Over how many ranks FSDP cuts parameters."""
        cutting = {axis for text in self.layouts.parameters.values() for axis in Layout.parse(text).axes}
        return prod(Mesh.parse(self.mesh).axes[axis][0] for axis in self.axes.data if axis in cutting)

    def updates_early(self, name: str) -> bool:
        """Whether a parameter is updated in the backward: by a gradient that no model axis has to add up after it."""
        if not self.optimiser.in_backward:
            return False
        cutting, mesh = Layout.parse(self.layout_of(name)).axes, Mesh.parse(self.mesh)
        return all(axis in cutting or mesh.axes[axis][0] == 1 for axis in self.model_axes)

    @property
    def adds_before_reducing(self) -> bool:
        """Whether a rank adds up the gradients of its micro-batches before ranks reduce them, once a step."""
        return self.pipeline is not None or self.run.reduce_every == "step"

    @property
    def accumulates(self) -> Type:
        """The type in which gradients of micro-batches are added up."""
        return self.precision.accumulate or (self.precision.reduce if self.adds_before_reducing else "float32")

    @property
    def gradients(self) -> Type:
        """The type in which a rank's part of the gradient lies when it is whole."""
        return "float32" if self.precision.parameters == "float32" else self.accumulates

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed one after the other, as by zero-bubble schedules."""
        return self.pipeline is not None and self.actions().splits

    @property
    def stage_ranks(self) -> int:
        """How many ranks the pipeline axis has; 1 without one."""
        return Mesh.parse(self.mesh).axes[self.axes.pipeline[0]][0] if self.axes.pipeline else 1

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes whose ranks share one part of the batch (`axes.model`), in the order of the mesh."""
        return tuple(axis for axis, _ in Mesh.parse(self.mesh).views[0] if axis in self.axes.model)

    @property
    def model_ranks(self) -> int:
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

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The place on the pipeline axis of each stage. Raises UserError for a table that cannot be read."""
        if self.pipeline is None:
            return (0,)
        if self.pipeline.table is not None:
            return self.actions().rank_of
        return MAKERS[self.pipeline.schedule].rank_of(self.stage_ranks, len(self.pipeline.stages))

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages of the rank at this place on the pipeline axis."""
        return tuple(stage for stage, rank in enumerate(self.rank_of_stage) if rank == place)

    def actions(self, micros: int | None = None) -> Schedule:
        """What each rank of the pipeline axis does in a step of so many micro-batches, None: of `micro_steps`.

        Raises UserError where the schedule takes no such number, or its file cannot be read or does not fit.
        """
        micros = self.micro_steps if micros is None else micros
        if self.pipeline is None:
            return schedule("1F1B", 1, 1, micros)
        stages, ranks = len(self.pipeline.stages), self.stage_ranks
        if self.pipeline.table is None:
            return schedule(self.pipeline.schedule, ranks, stages, micros)
        found = read_table(self.pipeline.table)
        for what, wanted, has in (
            ("ranks", ranks, found.ranks),
            ("stages", stages, found.stages),
            ("micro-batches", micros, found.micros),
        ):
            if wanted != has:
                raise UserError(f"{self.pipeline.table} is for {has} {what}, but the plan has {wanted}: change one")
        if found.splits and (whole := self._undivided_backwards()):
            raise UserError(f"{whole[0]}: {whole[1]}")
        if together := self._tied_on_one_rank(found.rank_of):
            raise UserError(f"{together[0]}: {together[1]}")
        return found

    def is_tied(self, name: str) -> bool:
        """Whether the last stage has a parameter or a buffer of an earlier one, too."""
        return self.pipeline is not None and any(name.startswith(f"{module}.") for module in self.pipeline.tied)

    def places_of(self, name: str) -> tuple[int, ...]:
        """The places on the pipeline axis of the ranks that have a parameter or a buffer, that of its own stage first.

        Raises UserError where none has.
        """
        ranks = self.rank_of_stage
        return tuple(dict.fromkeys((ranks[self.stage_of(name)], *(ranks[-1:] if self.is_tied(name) else ()))))

    def stages_of(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Where on the pipeline axis a parameter or a buffer is, as the `at` of a layout; empty: everywhere."""
        return ((self.axes.pipeline[0], tuple(sorted(self.places_of(name)))),) if self.pipeline is not None else ()

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
    def context_ranks(self) -> int:
        """Over how many ranks context axes cut a sequence."""
        return prod(Mesh.parse(self.mesh).axes[axis][0] for axis in self.axes.context)

    @property
    def micro_steps(self) -> int:
        """How many micro-batches each rank takes in a step (gradient accumulation); the last may be part empty."""
        return -(-self.data.global_batch // (self.data.micro_batch * self.data_ranks))

    def layout_of(self, name: str) -> str:
        """The layout text of a parameter, by the first rule that matches its name; an adapter follows its weight, but
        for rules of adapters themselves (`*.lora_A.*`), as beside weights whose inputs are their first dim."""
        base, part = base_of(name) if self.lora is not None else (name, "")
        own = (
            text
            for pattern, text in self.layouts.parameters.items()
            if ".lora_" in pattern and matches((pattern,), name)
        )
        if part and (text := next(own, None)) is not None:
            return text
        text = first_match(
            self.layouts.parameters,
            base,
            "layouts.parameters",
            f'"*" = "_/{self.axes.data[0]} ..."' if self.axes.data else '"*" = "..."',
        )
        return layout_beside(text, part, self.axes.data) if part else text


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a name fits one of some patterns (`*` any text, `?` one letter, `[ab]` one of these)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_match(rules: dict[str, str], name: str, table: str, example: str) -> str:
    """What the first rule that matches a name says. Raises UserError when none does."""
    for pattern, text in rules.items():
        if fnmatchcase(name, pattern):
            return text
    raise UserError(f'no rule in [{table}] matches the parameter "{name}": add one, for instance {example}')
