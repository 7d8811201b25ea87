"""Tensor parallelism as a plan says: a module's weights are cut over the tensor axis, and so is what flows through it.

Each module with an activation rule "input -> output" computes on DTensors: its input comes as a plain local tensor that
lies as `input` says, and what it returns is brought to `output` and handed on as a plain local tensor. So everything
between such modules is a model's own code on local tensors, and needs no rule of its own: attention sees fewer heads.

What goes wrong when a rule is missing: a weight that every rank holds whole, as a norm over the heads, gets on each
rank the gradient of that rank's part only. `refuse_unlike_gradients` compares them after the first backward.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.planner.plan import Plan, flow
from tangram.relayout.dtensor import placements_of
from tangram.training.cuts import Cuts, named_modules
from tangram.training.world import World

UNLIKE = 1e-3  # relative: replicated arithmetic gives the same gradient but for the order of sums


def cut_modules(model: nn.Module, plan: Plan, cuts: Mapping[nn.Parameter, Cuts], world: World) -> None:
    """Put the weights and hooks of tensor parallelism on every module that has a rule.

    Raises UserError for a parameter that is cut over a tensor axis while its module has no rule.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in named_modules(model):
        rule = _rule(plan, name)
        own = list(module.named_parameters(recurse=False))
        if rule is None:
            for key, parameter in own:
                if parameter in cuts and cuts[parameter].tensor is not None:
                    raise UserError(
                        f"{name}.{key} is cut over {world.axes.tensor[0]}, but no rule of [layouts.activations] fits "
                        f'its module: add one, as in "{name}" = "b s h -> b s h"'
                    )
            continue
        for key, parameter in own:
            if parameter not in made:
                made[parameter] = _cut(parameter, cuts[parameter].tensor, world)
            module.register_parameter(key, made[parameter])
        _hook(module, name, rule, plan, world)


def _rule(plan: Plan, name: str) -> tuple[Layout, Layout] | None:
    for pattern, text in plan.layouts.activations.items():
        if fnmatchcase(name, pattern):
            return flow(text)
    return None


def _cut(parameter: nn.Parameter, dim: int | None, world: World) -> nn.Parameter:
    """Every rank has the same whole tensor (or none, on meta), so nothing needs to be sent."""
    where: Placement = Replicate() if dim is None else Shard(dim)
    part = distribute_tensor(parameter.data, world.devices["tensor"], [where], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _hook(module: nn.Module, name: str, rule: tuple[Layout, Layout], plan: Plan, world: World) -> None:
    mesh = world.devices["tensor"]
    into, out = (_placer(layout, name, plan, world) for layout in rule)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def enter(x: Tensor) -> DTensor:
            given = DTensor.from_local(x, mesh, [into(x, True)], run_check=False)
            return given.redistribute(mesh, [_needed(module, given.placements[0], x.ndim)])

        if args and isinstance(args[0], Tensor):
            return (enter(args[0]), *args[1:]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, {**kwargs, key: enter(value)}
        raise UserError(f'the rule of "{name}" in [layouts.activations] has nothing to work on: it was given no tensor')

    def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> Tensor:
        if not isinstance(result, DTensor):
            raise UserError(
                f'the module "{name}" has a rule in [layouts.activations] but returns a {type(result).__name__}: '
                "give rules to modules that take one tensor and return one"
            )
        return cast(Tensor, _NoView.apply(result.redistribute(mesh, [out(result, False)]).to_local()))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


class _NoView(torch.autograd.Function):
    """The same tensor, but to autograd no view: FSDP2 warns of a root that returns one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def _needed(module: nn.Module, given: Placement, ndim: int) -> Placement:
    """How the input must lie for a module to compute without moving its weights."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, DTensor) or not isinstance(module, nn.Linear | nn.Embedding):
        return given
    where = weight.placements[0]
    if isinstance(module, nn.Linear) and where.is_shard(1):
        return Shard(ndim - 1)
    return Replicate() if where.is_shard() else given


def _placer(layout: Layout, name: str, plan: Plan, world: World) -> Callable[[Tensor, bool], Placement]:
    """A function from a tensor (this rank's part, or a DTensor) to the placement that a rule's side means for it."""
    axis = world.axes.tensor[0]
    mesh = Mesh.parse(f"{axis}={world.tensor_size}")
    if foreign := layout.axes - {axis}:
        raise UserError(f'the rule of "{name}" names {min(foreign)}: rules of activations name tensor axes only')
    known: dict[tuple[int, ...], Placement] = {}

    def place(x: Tensor, local: bool) -> Placement:
        shape = tuple(x.shape)
        if shape not in known:
            known[shape] = _placement(layout, shape, local, name, plan, mesh)
        return known[shape]

    return place


def _placement(layout: Layout, shape: tuple[int, ...], local: bool, name: str, plan: Plan, mesh: Mesh) -> Placement:
    if local and len(shape) == len(layout.dims):
        shape = tuple(n * (mesh.size if dim.axes else 1) for n, dim in zip(shape, layout.dims, strict=True))
    try:
        (placement,) = placements_of(layout.bind(shape, **plan.layouts.sizes), mesh)
    except UserError as error:
        raise UserError(
            f'the activation layout "{layout}" of "{name}" does not fit the shape {shape}: {error}'
        ) from None
    return placement


def refuse_unlike_gradients(model: nn.Module, world: World) -> None:
    """Raise UserError where ranks of the tensor axis have other gradients of a weight that they all hold whole.

    Collective over all ranks; call it after a backward. Weights under a rule are DTensors, whose gradients are summed.
    """
    group = world.devices.get_group("tensor")
    names: list[str] = []
    marks: list[Tensor] = []
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if parameter.grad is None or (mesh is not None and "tensor" in (mesh.mesh_dim_names or ())):
            continue
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        names.append(name)
        marks += [grad.double().sum(), grad.double().square().sum().sqrt()]
    if not marks:
        return
    mine = torch.stack(marks)
    highest, lowest = mine.clone(), mine.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    size = torch.maximum(highest[1::2], torch.tensor(1e-30, dtype=torch.float64, device=mine.device))
    apart = torch.maximum(highest[1::2] - lowest[1::2], highest[0::2] - lowest[0::2])
    worst = int((apart / size).argmax())
    if float(apart[worst] / size[worst]) > UNLIKE:
        raise UserError(
            f'the ranks of the axis {world.axes.tensor[0]} have different gradients of "{names[worst]}", which each '
            "holds whole: its module works on a part of the activations, so give it a rule in [layouts.activations]"
        )
