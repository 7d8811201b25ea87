"""Tensor parallelism as derived: a model's own code on plain local tensors, what moves between ranks by a program.

    cut          parameters become DTensors over the tensor axis; a module's forward sees its local parts
    first call   of each size of the inputs and mode (`training.mesh.modes`): capture, derive, rehearse; the program
                 says what moves, and where
    each call    collectives at the borders of modules, their duals in the backward
    each step    gradients of parameters that all ranks have whole, and use for something of their own, are summed, or
                 in each backward (`parallel`)

Whatever holds the model outside of its forward (FSDP2, the optimiser, a checkpoint) sees DTensors. Trade-off: inputs of
another size are derived anew, which takes longer the more layers there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.building.masks import as_captured, has_windows
from tangram.models.building.twin import without_memory
from tangram.models.capturing.answers import still_right
from tangram.models.capturing.opened import without_fast_path
from tangram.planner.local.own_rules import rules_of
from tangram.schema.plan import Plan
from tangram.sharding.derive.derive import ConflictError
from tangram.sharding.derive.layouts import layout_of, used
from tangram.sharding.derive.marking.marks import Mark, names_any, noted
from tangram.sharding.derive.of_model import (
    States,
    derive_model,
    graph_of,
    marks_or_known,
    off_results,
    parameter_states,
    refuse_idle_axes,
    too_small,
)
from tangram.sharding.derive.problem.states import SAME
from tangram.sharding.derive.transitions import Change
from tangram.sharding.discover.own_rules import OwnRules
from tangram.sharding.eager.api import marks_in
from tangram.sharding.local_ops import random_numbers
from tangram.sharding.local_ops.samples import places_of
from tangram.sharding.runtime.apply_change import RankRoutes, brought
from tangram.sharding.runtime.dry_check import rehearsed
from tangram.sharding.runtime.install import Now, Runtime, bound
from tangram.sharding.runtime.lower import refuse_cut_buffers, refuse_cut_inputs
from tangram.sharding.runtime.operators import Linked, Operators
from tangram.sharding.runtime.program import Program
from tangram.sharding.runtime.ring_attention import NAME as RING
from tangram.sharding.runtime.ring_attention import RingMark, Rings
from tangram.sharding.runtime.writes import read_late
from tangram.training.mesh import modes
from tangram.training.mesh.gradient_sums import GradientSums
from tangram.training.mesh.groups import (
    Devices,
    devices_of,
    proved_rules,
    refuse_unlike_inputs,
    refuse_unlike_weights,
)
from tangram.training.mesh.layout_to_torch import ParameterCuts
from tangram.training.mesh.local_parts import (
    CUT_ALONE,
    AsTorch,
    Handle,
    LocalParts,
    PlainParts,
    ResultPlacement,
    as_dtensors,
    own_part,
    written_parameters,
)
from tangram.training.mesh.world import World, dim_of
from tangram.training.mesh.written_parameters import keep_written

MOST_COMPARED = 1 << 12
Sizes = tuple[tuple[str, Any], ...]
"""Of the inputs."""


def install(model: nn.Module, plan: Plan, cuts: Mapping[nn.Parameter, ParameterCuts], world: World) -> DerivedModel:
    """Cut the parameters over the model axes as the plan's layouts say, and have the model run as its marks say."""
    axes = world.axes.model
    mesh = Mesh((tuple((axis, world.mesh.axes[axis][0]) for axis in axes),))
    own = {name: cuts[p] for name, p in model.named_parameters(remove_duplicate=False)}
    lies = {name: {axis: dict(cut.model).get(axis, SAME) for axis in axes} for name, cut in own.items()}
    plain = [name for name, cut in own.items() if cut.plain]
    devices = Devices(world.over, {axis: world.devices.get_group(dim_of(axis)) for axis in axes})
    dtype = getattr(torch, plan.precision.compute)
    marks = [Mark.parse(f"{pattern}: {layout}") for pattern, layout in plan.layouts.marks.items()]
    derived = DerivedModel(model, marks, mesh, devices, lies, dtype, rules_of(plan), AsTorch(plain))
    derived.gradients_seen = plan.pipeline is None
    derived.rings = plan.axes.context if plan.context.keys == "ring" else ()
    return derived


def parallel(
    model: nn.Module,
    marks: Sequence[Mark],
    devices: DeviceMesh,
    inputs: Mapping[str, Any],
    rules: Path | str | OwnRules | None = None,
) -> DerivedModel:
    """Make a model (whole, with the same values on all ranks, or on meta) parallel in place as marks say.

    Marks in the model's own code (`tangram.sharding.eager`) count, too. `devices` names the axes; `inputs` are keyword
    arguments of the model, of which only the sizes count: where its parameters lie is derived with them, and stays so
    for all that follow. Each rank gives the model all of its inputs, and gets its results whole, or its part of those
    that are marked, where `marks` or its code has any. Gradients are those of one process when the backward has ended.
    Training and evaluation are captured apart. What is drawn, as by dropout, is what one process draws within
    `sharding.local_ops.random_ops.DrawMode`, by the state of torch's generator; ranks take that of the first. `rules`:
    a file of op rules for operators of one's own, each proved first, or what `sharding.discover.own_rules.own_rules`
    gives. Collective. Raises UserError.
    """
    names = devices.mesh_dim_names or ()
    mesh = Mesh.parse(" ".join(f"{name}={n}" for name, n in zip(names, devices.shape, strict=True)))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    refuse_unlike_weights(model, devices.get_all_groups())
    inputs = modes.without_cache(inputs, model)
    text, template = proved_rules(rules, devices), without_memory(model)
    graph = graph_of(template, inputs, dtype, rules=text)
    own = [*marks_in(model), *marks]
    marks = marks_or_known(graph, own, mesh, model)
    found = derive_model(graph, marks, mesh)
    refuse_idle_axes(found, template)
    if found.folded.graph.changed:  # parameters beside buffers that steps change lie as these, whole
        found = rehearsed(found, template, {name: modes.without_values(x) for name, x in inputs.items()}, dtype).derived
    states = parameter_states(found)
    over_all = AsTorch(over_all=states.keys() - read_late(found))
    derived = DerivedModel(model, marks, mesh, devices_of(devices), states, dtype, text, over_all)
    derived.compared, derived.reads_values, derived.sums.in_backward = set(), True, True
    derived.whole_results = not own and not noted(graph)
    return derived


class DerivedModel(Handle):
    """The programs of a model, one for each size of its inputs. Wraps the model's forwards, and cuts its parameters."""

    def __init__(
        self,
        model: nn.Module,
        marks: Sequence[Mark],
        mesh: Mesh,
        devices: Devices,
        states: Mapping[str, States],
        dtype: torch.dtype,
        rules: str = "",
        as_torch: AsTorch = CUT_ALONE,
    ) -> None:
        self._model, self._mesh, self._lies, self._dtype, self._rules = model, mesh, states, dtype, rules
        shapes = {name: p.shape for name, p in model.named_parameters()}
        # Where parameters lie is settled, for inputs of every size.
        self._marks = [*marks, *(Mark(name, layout_of(shapes[name], states[name])) for name in shapes)]
        self._devices, self._groups, self._leaves = devices, devices.groups, False
        self._coords = {name: dist.get_rank(group) for name, group in self._groups.items()}
        self._rank = sum(at * mesh.axes[name][1] for name, at in self._coords.items())
        self._template = without_memory(model)
        self._parameters = [*inspect.signature(model.forward).parameters]
        self._programs: dict[tuple[Sizes, modes.Mode], Now] = {}
        self._read: dict[Sizes, tuple[str, ...]] = {}
        """By sizes, the inputs whose values code reads."""
        self.sums = GradientSums(model, self._groups, self._bring)
        self.numbers = random_numbers.DrawNumbers()
        """How elements are numbered that programs draw for."""
        self._places: dict[tuple[int, tuple[Sizes, modes.Mode]], Mapping[tuple[int, ...], int]] = {}
        self.gradients_seen = True
        """Whether a parameter has its gradient as soon as a backward has ended. Stages get theirs at the step's end."""
        self.compared: set[Sizes] | None = None
        """The sizes of which inputs were compared between ranks, at the first call of each; None: of none they are."""
        self.reads_values = False
        """Whether code may read the values of inputs, as sizes of images (new at each step in training), and hooks."""
        self.whole_results = False
        """Whether no result is left in parts by a mark, as where the marks are those of the model's type."""
        self.begins: Callable[[Program], None] = lambda program: None
        """Is told of each forward with gradients."""
        self.rings: Sequence[str] = ()
        """Axes over which keys of attention by tokens go round, and no rank has all."""
        self._runtime = Runtime()
        self._routes = RankRoutes(self._groups)
        self.plain = as_dtensors(model, states, mesh, self._coords, devices, as_torch)
        """Parameters of which a plain tensor is this rank's part."""
        cut = {name for name, own in states.items() if any(state.kind == "cut" for state in own.values())}
        replicated = {*as_torch.over_all} - cut
        self._local = LocalParts(model, cut.union(replicated), self._gathered, replicated)
        self._runtime.wrap(model)
        model.forward, self._modules = self._begun(model.forward), modes.modules_of(model)

    @property
    def programs(self) -> Sequence[Program]:
        """Those that were needed so far."""
        return [now.program for now in self._programs.values()]

    @property
    def together(self) -> Mapping[tuple[str, ...], dist.ProcessGroup]:
        """The groups over several axes that were needed so far."""
        return self._devices.made

    @contextmanager
    def leaving(self) -> Generator[None]:
        """Within, results that no mark names stay as they come to be, in whatever parts; `placement_of` tells."""
        before, self._leaves = self._leaves, True
        try:
            yield
        finally:
            self._leaves = before

    def placement_of(self, result: str | tuple[str, int]) -> ResultPlacement:
        """How what the last forward gave lies: by its name ("output0" of a tensor alone), or by module and leaf."""
        assert self._runtime.now is not None  # a forward has been
        found = self._runtime.now.program.derived
        graph = found.folded.graph
        if isinstance(result, str):
            value = graph.outputs[result]
        else:
            value = cast(int, next(run.gives for run in graph.runs if run.module == result[0])[result[1]])
        return ResultPlacement(used(found, found.folded.classes[value]), self._mesh, self._coords, self._groups)

    def prepare(self, inputs: Mapping[str, Any]) -> Program:
        """The program for inputs of these sizes (keyword arguments of the model), made where there is none.

        Raises UserError where it cannot be derived or run.
        """
        return self._now(modes.without_cache(inputs, self._model)).program

    def _begun(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The whole model's forward, as the program of its inputs' sizes says."""

        # What is derived at the first call of a compiled model is no part of what is compiled.
        begin = cast("Callable[..., tuple[dict[str, Any], bool]]", torch.compiler.disable(self._begin))
        end = cast("Callable[[], None]", torch.compiler.disable(self._local.leave))
        keep = cast("Callable[[Any], Any]", torch.compiler.disable(self._kept))

        def run(_: object, *args: Any, **kwargs: Any) -> Any:
            given, cuts_queries = begin(args, kwargs)
            try:
                with without_fast_path(), as_captured() if cuts_queries else nullcontext():
                    return keep(forward(**given))
            finally:
                end()

        return bound(run)

    def _begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The arguments of a forward by their names, and whether queries of attention are cut; its program begins."""
        given = modes.without_cache({**dict(zip(self._parameters, args, strict=False)), **kwargs}, self._model)
        modes.refuse_others(self._model, self._modules)
        if self.compared is not None and (sizes := self._key(given)[0]) not in self.compared:
            refuse_unlike_inputs(given, next(self._model.parameters()).device, [*self._groups.values()])
            if len(self.compared) >= MOST_COMPARED:  # of code that reads masks, each batch has values of its own
                self.compared.clear()
            self.compared.add(sizes)
        now = self._now(given)
        if torch.is_grad_enabled():
            self.sums.begin(now.program.summed, self._local.passing, self.gradients_seen)
            self.begins(now.program)
        if now.program.random:
            modes.agree_on_draws(self._groups, self._model)
            self._number(now.program, given)
        self._runtime.begin(now)
        self._local.begin(now.program.derived.folded.graph)
        self._local.enter()
        return given, now.program.cuts_queries

    def _kept(self, results: Any) -> Any:
        """The results of a forward, whose backward computes again by this forward's program, whatever ran since."""
        now, after = self._runtime.now, self.numbers.after

        def again(_: Tensor) -> None:
            if now is not None and self._runtime.now is not now:
                self._runtime.begin(now)
                self._local.begin(now.program.derived.folded.graph)
                self.numbers.after = after
                self.sums.again(now.program.summed)

        for x in pytree.tree_leaves(results):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(again)
        return results

    def _key(self, inputs: Mapping[str, Any]) -> tuple[Sizes, modes.Mode]:
        sizes = ("", self._leaves), *((name, modes.size_of(x)) for name, x in inputs.items())
        sizes = (*sizes, *modes.values_of(inputs, self._read.get(sizes, ())))
        return sizes, modes.mode_of(self._model, self.reads_values)

    def _now(self, inputs: Mapping[str, Any]) -> Now:
        sizes, mode = self._key(inputs)
        if (sizes, mode) not in self._programs:
            modes.refuse_tensors_in_containers(inputs)
            modes.refuse_ever_new([*(own for some, own in self._programs if some == sizes), mode])
            alike = sizes[: len(inputs) + 1]
            met = [now for (some, own), now in self._programs.items() if (some[: len(alike)], own) == (alike, mode)]
            read = self._read.get(alike, ())
            if read and (known := next((now for now in met if still_right(now.program.graph, inputs)), None)):
                return known
            modes.refuse_new_values(read, met)
            now = self._planned(inputs)
            self._read[alike] = tuple(dict.fromkeys((*read, *now.program.graph.read_inputs)))
            self._programs[self._key(inputs)] = now
            return now
        return self._programs[sizes, mode]

    def _number(self, program: Program, inputs: Mapping[str, Any]) -> None:
        """Have elements the numbers of the global batch, as far as it is known which are a sample's."""
        samples = self.numbers.samples
        if samples is None:
            return
        key = samples.rows, self._key(inputs)
        if key not in self._places:
            self._places[key] = self._placed(program, inputs, samples)
        self.numbers.after = self._places[key]
        if program.uncounted:  # what torch draws is then the micro-batch's, too
            seed = (random_numbers.fresh().seed + samples.first + 1) & ((1 << 63) - 1)
            modes.seed_generators(next(self._model.parameters()).device, seed)

    def _placed(
        self, program: Program, inputs: Mapping[str, Any], samples: random_numbers.Samples
    ) -> Mapping[tuple[int, ...], int]:
        """Where samples stand in what is drawn; nowhere where some of it has no number for each element."""
        unknown = f"{program.uncounted} draws no number for each element"
        after: Mapping[tuple[int, ...], int] = {}
        if not program.uncounted:
            modes.follow(self._template, self._model, self.reads_values)
            _, after, unknown = places_of(self._template, (), inputs, samples.rows, set())
        self.numbers.apart = unknown if samples.rows < samples.total else ""
        return after

    def _planned(self, inputs: Mapping[str, Any]) -> Now:
        modes.follow(self._template, self._model, self.reads_values)
        # Of a run without memory the template has its own; in inference mode operators come undecomposed.
        with _disable_current_modes(), modes.without_inference(), modes.steady(self._model):
            read = self.reads_values
            return self._planned_from({name: modes.without_values(x, integers=read) for name, x in inputs.items()})

    def _planned_from(self, inputs: Mapping[str, Any]) -> Now:
        graph = graph_of(self._template, inputs, self._dtype, grad=torch.is_grad_enabled(), rules=self._rules)
        marks = [mark for mark in self._marks if names_any(graph, mark)]
        marks += [RingMark.over([axis for axis in self._mesh.axes if axis in self.rings])] if self.rings else []
        marks = [mark for mark in marks if not too_small(graph, mark, self._mesh)]
        marks = off_results(graph, marks) if self.whole_results else marks
        try:
            found = derive_model(graph, marks, self._mesh, left=self._leaves)
        except ConflictError as error:
            raise UserError(
                f"{error}; where parameters lie has to be what follows from the marks, as `tangram plan` writes both"
            ) from None
        program = rehearsed(found, self._template, inputs, self._dtype)
        program.windows = has_windows(self._model)
        refuse_cut_inputs(program.derived)  # what was rehearsed, which may have more tensors whole than `found`
        refuse_cut_buffers(program.derived)
        keep_written(self._model, written_parameters(self._model, program.derived.folded.graph))
        operators = Operators(program.derived, self._rank, Linked(self._groups), self.numbers)
        rings = {RING: Rings(self._groups, self._bring).attend} if self.rings else {}
        return Now(
            program, self._bring, lambda action, leaves: operators.instead(action, leaves, self._bring), together=rings
        )

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """What a module uses of a parameter, of which a rank holds a part."""
        part = self.sums.through(name, part)
        change = self._runtime.now.program.gathered.get(name) if self._runtime.now is not None else None
        return self._bring(part, change) if change else part

    def _bring(self, x: Tensor, change: Change) -> Tensor:
        return brought(x, change, self._devices.together, self._routes)

    def part_of(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of what lies as a parameter. Of parts that torch has no word for, as heads that an axis does
        not divide, the parameter is a plain tensor, and no DTensor says so."""
        return own_part(full, self._lies[name], self._mesh, self._coords)

    def cut_beside(self, module: nn.Module, lies: Mapping[str, States]) -> PlainParts:
        """Cut more parameters of a module, which no program speaks of, over the model axes; those that are plain."""
        states = {key: {axis: own.get(axis, SAME) for axis in self._mesh.axes} for key, own in lies.items()}
        holder = nn.Module()
        for key in states:
            holder.register_parameter(key, module.get_parameter(key))
        found = as_dtensors(holder, states, self._mesh, self._coords, self._devices)
        for key in states:
            module.register_parameter(key, holder.get_parameter(key))
        return found

    def sum_gradients(self) -> None:
        """Add up, once a step, what each rank has of the gradients that are sums: none where a backward has done it.

        Collective over the axes.
        """
        self.sums.add_up()
