"""Tensor parallelism as derived: a model's own code on plain local tensors, what moves between ranks by a program.

    cut          parameters become DTensors over the tensor axis; a module's forward sees its local parts
    first call   of each size of the inputs: capture, derive, rehearse; the program says what moves, and where
    each call    collectives at the borders of modules, their duals in the backward
    each step    gradients of parameters that all ranks have whole, and use for something of their own, are summed

Whatever holds the model outside of its forward (FSDP2, the optimiser, a checkpoint) sees DTensors. Trade-off: inputs of
another size are derived anew, a second or less for a model of one kind of layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tangram.errors import UserError
from tangram.layout import Mesh
from tangram.models.capture import capture
from tangram.models.costs import block_names
from tangram.models.fold import folded
from tangram.planner.plan import Plan
from tangram.relayout.collectives import move
from tangram.sharding.derive.derive import derive
from tangram.sharding.derive.layouts import lying
from tangram.sharding.derive.marks import Mark
from tangram.sharding.runtime.install import Now, Runtime
from tangram.sharding.runtime.operators import Operators
from tangram.sharding.runtime.program import Change, Program
from tangram.sharding.runtime.rehearse import rehearsed
from tangram.training.cuts import Cuts, named_modules
from tangram.training.world import World

_HELD = "_tangram_derived"
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Signature = tuple[tuple[str, Any], ...]


def marks_of_plan(plan: Plan) -> list[Mark]:
    """The plan's marks."""
    return [Mark.parse(f"{pattern}: {layout}") for pattern, layout in plan.layouts.marks.items()]


def install(model: nn.Module, plan: Plan, cuts: Mapping[nn.Parameter, Cuts], world: World) -> None:
    """Cut the parameters over the tensor axis, and have the model run as its marks say."""
    held = DerivedModel(model, plan, cuts, world)
    model.__dict__[_HELD] = held


def derived_of(model: nn.Module) -> DerivedModel | None:
    """What `install` has put on a model; None for another one."""
    return cast("DerivedModel | None", model.__dict__.get(_HELD))


class DerivedModel:
    """The programs of a model, one for each size of its inputs."""

    def __init__(self, model: nn.Module, plan: Plan, cuts: Mapping[nn.Parameter, Cuts], world: World) -> None:
        self._axis = world.axes.tensor[0]
        self._mesh = Mesh.parse(f"{self._axis}={world.tensor_size}")
        self._group = world.devices.get_group("tensor")
        self._rank = dist.get_rank(self._group)
        self._marks = marks_of_plan(plan)
        self._dtype = _TYPES[plan.precision.compute]
        self._cut_dims = {name: cuts[p].tensor for name, p in model.named_parameters(remove_duplicate=False)}
        self._template = _without_memory(model)
        self._blocks = block_names(model)
        self._parameters = inspect.signature(model.forward).parameters
        self._programs: dict[Signature, Now] = {}
        self._runtime = Runtime()
        self._model = model
        _cut_parameters(model, cuts, world)
        _see_local_parts(model)
        self._runtime.wrap_root(model)
        model.forward = self._begun(model.forward)

    @property
    def programs(self) -> Sequence[Program]:
        """Those that were needed so far."""
        return [now.program for now in self._programs.values()]

    def _begun(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The whole model's forward, as the program of its inputs' sizes says."""

        def run(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            self._runtime.begin(self._now(given))
            return forward(**given)

        return run

    def prepare(self, inputs: Mapping[str, Any]) -> Program:
        """The program for inputs of these sizes, made where there is none. Raises UserError."""
        return self._now(inputs).program

    def _now(self, given: Mapping[str, Any]) -> Now:
        signature = tuple((name, _size(x)) for name, x in given.items())
        if signature not in self._programs:
            self._programs[signature] = self._planned(given)
        return self._programs[signature]

    def _planned(self, given: Mapping[str, Any]) -> Now:
        graph = folded(capture(self._template, given, dtype=self._dtype), self._blocks)
        outputs = [Mark.parse(f"{name}: ...") for name in graph.outputs]
        named = {mark.pattern for mark in self._marks}
        found = derive(graph, [*self._marks, *(m for m in outputs if m.pattern not in named)], self._mesh)
        self._refuse_other_cuts(found)
        program = rehearsed(found, self._template, given, self._dtype)
        if any(program.summed.keys() != other.summed.keys() for other in self.programs):
            raise UserError("inputs of another size would sum the gradients of other parameters: mark more tensors")
        self._runtime.wrap(self._model, program)
        operators = Operators(found, self._rank)
        return Now(program, self._bring, lambda action, leaves: operators.instead(action, leaves, self._bring))

    def _refuse_other_cuts(self, found: Any) -> None:
        """The plan's layouts say where each parameter lies; the marks have to come to the same."""
        graph = found.folded.graph
        for v, value in graph.of_kind("parameter"):
            state = lying(found, found.folded.classes[v]).get(self._axis)
            dim = state.dim if state is not None and state.kind == "cut" else None
            if dim != self._cut_dims[value.name] or (state is not None and state.outer > 1):
                what = "whole" if dim is None else f"cut in dim {dim}"
                raise UserError(
                    f"by the marks {value.name} is {what} over {self._axis}, by layouts.parameters it is not: let "
                    "`tangram plan` write the layouts of the marks"
                )

    def _bring(self, x: Tensor, change: Change) -> Tensor:
        for _, source, target in change:
            x = move(x, source, target, self._group)
        return x

    def sum_gradients(self) -> None:
        """Add up, once a step, what each rank has of the gradients that are sums. Collective over the tensor axis."""
        names = dict.fromkeys(name for program in self.programs for name in program.summed)
        own = [self._model.get_parameter(name).grad for name in names]
        grads = [g.to_local() if isinstance(g, DTensor) else g for g in own if g is not None]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for some in by_dtype.values():
            flat = torch.cat([g.reshape(-1) for g in some])
            dist.all_reduce(flat, group=self._group)
            parts = cast("Sequence[Tensor]", torch.split(flat, [g.numel() for g in some]))
            for g, part in zip(some, parts, strict=True):
                g.copy_(part.view_as(g))


def _size(x: Any) -> Any:
    """What of an argument the program depends on."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    return x if isinstance(x, bool | int | str | None) else id(x)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy on meta."""
    tensors = [*model.parameters(), *cast("Sequence[Tensor]", [*model.buffers()])]
    memo: dict[int, Any] = {}
    for t in tensors:
        empty = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(empty, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _cut_parameters(model: nn.Module, cuts: Mapping[nn.Parameter, Cuts], world: World) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module in named_modules(model):
        for key, parameter in [*module.named_parameters(recurse=False)]:
            dim = cuts[parameter].tensor
            if dim is None:
                continue
            if parameter not in made:
                # Every rank has the same whole tensor (or none, on meta), so nothing needs to be sent.
                where: Placement = Shard(dim)
                part = distribute_tensor(parameter.data, world.devices["tensor"], [where], src_data_rank=None)
                made[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.register_parameter(key, made[parameter])


def _see_local_parts(model: nn.Module) -> None:
    """Let the forward of each module that has cut parameters see plain tensors in their place."""
    for _, module in named_modules(model):
        own: dict[str, nn.Parameter | None] = module._parameters  # pyright: ignore[reportPrivateUsage]
        keys = [key for key, p in own.items() if isinstance(p, DTensor)]
        if keys:
            module.forward = _with_parts(module, keys, module.forward)


def _with_parts(module: nn.Module, keys: Sequence[str], forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
        before = {key: own[key] for key in keys}
        own.update({key: p.to_local() if isinstance(p, DTensor) else p for key, p in before.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            own.update(before)

    return run
