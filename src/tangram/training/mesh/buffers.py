"""Buffers that steps change, as the running statistics of batch norms: after each step alike on all ranks.

    running_mean, running_var     of norms: the mean over the ranks, so what one process has in the mean of its samples
    min_val, max_val              of torch's observers: the least and the largest of any rank
    num_batches_tracked           the largest: ranks may have other numbers of micro-batches
    others                        have to be alike by themselves, which is looked at after each step that changed them

Without this each rank would save its own as if it were that of all. DDP, too, leaves one rank's to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization.observer import HistogramObserver, ObserverBase
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from tangram.errors import UserError
from tangram.training.mesh.groups import unlike
from tangram.training.mesh.local_parts import PlainParts, local
from tangram.training.mesh.world import World, dim_of, of_stage

MEAN, LEAST, LARGEST = "mean", "least", "largest"
RULES: Mapping[type[nn.Module], Mapping[str, str]] = {
    _NormBase: {"running_mean": MEAN, "running_var": MEAN, "num_batches_tracked": LARGEST},
    ObserverBase: {"min_val": LEAST, "max_val": LARGEST},
}
"""How values of ranks become one, by the kind of module and the buffer."""
UNRULED: tuple[type[nn.Module], ...] = (HistogramObserver,)
"""Kinds that keep more than a rule speaks of."""


@dataclass(frozen=True)
class Before:
    """The buffers as they were before a step."""

    versions: Mapping[str, tuple[int, int]]
    """Of each: which tensor it was, and how often that had been written."""
    ruled: Mapping[str, str]
    """Those that a step may change by a rule."""
    values: Mapping[str, Tensor]
    """Of these, copied: what a step that is not applied leaves."""


def before_step(parts: Sequence[nn.Module]) -> Before:
    """To be taken before the first forward of a step; costs nothing where a model has no buffers."""
    ruled = {name: rule for name, _, rule in _ruled(parts)}
    own = dict(_buffers(parts))
    values = {name: own[name].detach().clone() for name in ruled}
    return Before({name: (id(one), _version(one)) for name, one in own.items()}, ruled, values)


@torch.no_grad()
def synchronise(parts: Sequence[nn.Module], before: Before, world: World) -> None:
    """Make the buffers that a step has changed alike on all ranks of a stage. Collective, where there are any.

    Raises UserError on all ranks where one is not, for which there is no rule.
    """
    own = dict(_buffers(parts))
    others = {
        name: one
        for name, one in own.items()
        if name not in before.ruled and before.versions.get(name) != (id(one), _version(one))
    }
    if world.size == world.stages or not (others or before.ruled):
        return
    group = of_stage(world)
    for rule in (MEAN, LEAST, LARGEST):
        _reduce([own[name] for name, its in before.ruled.items() if its == rule], rule, group)
    refuse_unlike(others, group)


@torch.no_grad()
def undo(parts: Sequence[nn.Module], before: Before) -> None:
    """Of a step that is not applied: what it has made of buffers by a rule, which may not be finite."""
    own = dict(_buffers(parts))
    for name, value in before.values.items():
        own[name].copy_(value)


def refuse_unlike(buffers: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise UserError, on all ranks of a group, where one has other values than another. Collective."""
    if names := unlike(buffers, [group]):
        raise UserError(
            f"{names[0]} is a buffer that steps change, and it is not alike on all ranks: make it of what all ranks "
            "have (torch.distributed.all_reduce in the model's forward), or have no data axes"
        )


def refuse_unlike_saved(model: nn.Module, world: World) -> None:
    """The same for what a checkpoint would hold of a model's buffers. Collective, where there are any."""
    if world.size == world.stages or not any(map(_has_saved, model.modules())):  # at once: every save asks
        return
    saved = model.state_dict(keep_vars=True).keys()
    own = {name: one for name, one in model.named_buffers() if name in saved}
    if own:
        refuse_unlike(own, of_stage(world))


def _has_saved(module: nn.Module) -> bool:
    own: Any = module
    return not own._buffers.keys() <= own._non_persistent_buffers_set


def refuse_counted_twice(path: str, module: nn.Module) -> None:
    """Raise UserError for a module that is recomputed in the backward, and counts what it sees in each forward."""
    for name, one in cast("Iterator[tuple[str, nn.Module]]", module.named_modules()):
        if any(True for _ in _rules_of(one)):
            raise UserError(
                f"run.recompute names {path}, and {f'{path}.{name}'.rstrip('.')} changes its buffers in each forward, "
                "so they would change twice: leave it out of run.recompute"
            )


def _ruled(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    for number, part in enumerate(parts):
        for path, module in cast("Iterator[tuple[str, nn.Module]]", part.named_modules()):
            if module.training:
                for buffer, rule in _rules_of(module):
                    yield _name(number, f"{path}.{buffer}".lstrip(".")), module, rule


def _rules_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    own: dict[str, Any] = module._buffers  # pyright: ignore[reportPrivateUsage]
    for kind, rules in RULES.items():
        if isinstance(module, kind) and not isinstance(module, UNRULED):
            yield from ((name, rule) for name, rule in rules.items() if own.get(name) is not None)


def _buffers(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for number, part in enumerate(parts):
        yield from ((_name(number, name), one) for name, one in part.named_buffers())


def _name(number: int, name: str) -> str:
    return name if number == 0 else f"{name} of this rank's stage {number}"


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _reduce(tensors: Sequence[Tensor], rule: str, group: dist.ProcessGroup) -> None:
    """One all-reduce for each type of numbers."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for one in tensors:
        by_type.setdefault(one.dtype, []).append(one)
    operation = {MEAN: dist.ReduceOp.SUM, LEAST: dist.ReduceOp.MIN, LARGEST: dist.ReduceOp.MAX}[rule]
    for some in by_type.values():
        flat = torch.cat([one.reshape(-1) for one in some])
        dist.all_reduce(flat, operation, group)
        if rule == MEAN:
            flat /= dist.get_world_size(group)
        parts = cast("Sequence[Tensor]", torch.split(flat, [one.numel() for one in some]))
        for one, part in zip(some, parts, strict=True):
            one.copy_(part.view_as(one))


# ----------------------------------------------------------------
# Whether ranks of a model axis agree on the gradients of what each of them holds whole.
# A derived program sums what it has to. That this was so is not believed but compared, once, after the first backward:
# a gradient of each rank's own part only would train on, without a word, into weights that differ from rank to rank.


UNLIKE = 1e-3  # relative: replicated arithmetic gives the same gradient but for the order of sums


def refuse_unlike_gradients(model: nn.Module, world: World, plain: PlainParts) -> None:
    """Raise UserError where ranks of a model axis have other gradients of a weight that they all hold whole.

    Collective over all ranks; call it after a backward. `plain`: as of the `ParallelModel`.
    """
    for axis in world.axes.model:
        _refuse_unlike(model, axis, world, {name for name, part in plain.items() if axis in part.axes})


def _refuse_unlike(model: nn.Module, axis: str, world: World, cut: Set[str]) -> None:
    group = world.devices.get_group(dim_of(axis))
    names: list[str] = []
    marks: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or name in cut or _cut_over(parameter, axis):
            continue
        grad = local(parameter.grad)
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
            f'the ranks of the axis {axis} have different gradients of "{names[worst]}", which each holds whole: '
            "what the model computes follows from more than was captured (values, random numbers, state of its own); "
            "make it a data axis"
        )


def _cut_over(parameter: Tensor, axis: str) -> bool:
    """Whether ranks of a model axis hold different parts."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return dim_of(axis) in names and not parameter.placements[names.index(dim_of(axis))].is_replicate()
