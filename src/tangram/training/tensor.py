"""Tensor parallelism as a plan says: a module's weights are cut over the tensor axis, and so is what flows through it.

Each module with an activation rule "input -> output" computes on DTensors: its input comes as a plain local tensor that
lies as `input` says, and what it returns is brought to `output` and handed on as a plain local tensor. So everything
between such modules is a model's own code on local tensors, and needs no rule of its own: attention sees fewer heads.

A rule says how something lies, and tensors do not know whether that is so. What is said to be whole but is a part, or
the reverse, trains with wrong gradients while every shape fits. So `refuse_wrong_flow` compares one forward with the
shapes in the model that is not cut, and `refuse_unlike_gradients` the gradients after the first backward: a weight that
every rank holds whole, as a norm over the heads, would have on each rank the gradient of that rank's part only.
"""

# ruff: noqa: N806  a tensor carries its dims in its name

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]
from torch.utils.hooks import RemovableHandle

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.models.twin import Shapes
from tangram.planner.axes import flow
from tangram.planner.plan import Plan
from tangram.relayout.dtensor import placements_of
from tangram.training.cuts import Cuts, named_modules
from tangram.training.world import World, dim_of

PROBED = 16  # tokens of the sample by which the flow is compared
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
                if parameter in cuts and cuts[parameter].model:
                    raise UserError(
                        f"{name}.{key} is cut over {world.axes.model[0]}, but no rule of [layouts.activations] fits "
                        f'its module: add one, as in "{name}" = "b s h -> b s h"'
                    )
            continue
        for key, parameter in own:
            if parameter not in made:
                made[parameter] = _cut(parameter, cuts[parameter], world)
            module.register_parameter(key, made[parameter])
        _hook(module, name, rule, plan, world)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in made:
            raise UserError(
                f"{name} is tied to a parameter whose module has a rule in [layouts.activations], and its own has "
                "none, so they would be two: give a rule to both or to neither"
            )


def _pattern(plan: Plan, name: str) -> str | None:
    return next((pattern for pattern in plan.layouts.activations if fnmatchcase(name, pattern)), None)


def _rule(plan: Plan, name: str) -> tuple[Layout, Layout] | None:
    pattern = _pattern(plan, name)
    return None if pattern is None else flow(plan.layouts.activations[pattern])


def _cut(parameter: nn.Parameter, cuts: Cuts, world: World) -> nn.Parameter:
    """Every rank has the same whole tensor (or none, on meta), so nothing needs to be sent."""
    where: Placement = Shard(cuts.model[0][1]) if cuts.model else Replicate()
    part = distribute_tensor(parameter.data, world.over(world.axes.model), [where], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _hook(module: nn.Module, name: str, rule: tuple[Layout, Layout], plan: Plan, world: World) -> None:
    mesh = world.over(world.axes.model)
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
    axis = world.axes.model[0]
    mesh = Mesh.parse(f"{axis}={world.model_size}")
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
    """Raise UserError where ranks of a model axis have other gradients of a weight that they all hold whole.

    Collective over all ranks; call it after a backward.
    """
    for axis in world.axes.model:
        _refuse_unlike(model, axis, world)


def _refuse_unlike(model: nn.Module, axis: str, world: World) -> None:
    group = world.devices.get_group(dim_of(axis))
    names: list[str] = []
    marks: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or _cut_over(parameter, axis):
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
            f'the ranks of the axis {axis} have different gradients of "{names[worst]}", which each '
            "holds whole: its module works on a part of the activations, so give it the rule in [layouts.activations] "
            "that says so"
        )


def _cut_over(parameter: Tensor, axis: str) -> bool:
    """Whether ranks of a model axis hold different parts."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return dim_of(axis) in names and not parameter.placements[names.index(dim_of(axis))].is_replicate()


@torch.no_grad()
def refuse_wrong_flow(model: nn.Module, plan: Plan, world: World, whole: Shapes) -> None:
    """Raise UserError where an activation rule says of what flows another thing than is so in this model.

    `whole`: what `module_shapes` says of the same model, not cut, on one sample of `PROBED` tokens. Collective over all
    ranks; it costs one forward of that sample.
    """
    wrong: list[str] = []

    def compare(name: str, side: int, tensors: Any) -> None:
        lies: Any = next((x for x in tree_leaves(tensors) if isinstance(x, DTensor)), None)
        if name in whole and lies is not None and tuple(lies.shape) != whole[name][side]:
            what, words = ("takes", "gives")[side], plan.layouts.activations[_pattern(plan, name) or ""]
            wrong.append(
                f'by its rule "{words}" the module "{name}" {what} {tuple(lies.shape)} over all ranks, but in the '
                f"model that is not cut {whole[name][side]}"
            )

    def given(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        compare(name, 0, (args, kwargs))

    def made(name: str, _: nn.Module, args: Any, result: Any) -> None:
        compare(name, 1, result)

    handles: list[RemovableHandle] = []
    for name, module in named_modules(model):
        if _rule(plan, name) is not None:  # between the hooks that make DTensors of what flows and those that end it
            handles.append(module.register_forward_pre_hook(partial(given, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(made, name), prepend=True))
    was_training = model.training
    positions_BS = torch.arange(PROBED, device=world.device)[None]
    try:
        with torch.compiler.set_stance("force_eager"):
            logits_BSV: Tensor = model.eval()(
                input_ids=3 + positions_BS, position_ids=positions_BS, use_cache=False
            ).logits
    except RuntimeError as error:
        if not wrong:
            raise
        raise UserError(wrong[0]) from error
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if wrong:
        raise UserError(wrong[0])
    highest, lowest = logits_BSV.float().contiguous(), logits_BSV.float().clone()
    axis = world.axes.model[0]
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=world.devices.get_group(dim_of(axis)))
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=world.devices.get_group(dim_of(axis)))
    if float((highest - lowest).abs().max()) > UNLIKE * float(highest.abs().max()):
        raise UserError(
            f"the ranks of the axis {axis} have different logits: let the output of the last module "
            'with a rule in [layouts.activations] be whole, as in "lm_head" = "b s h -> b s v"'
        )
