"""The optimiser's part of a step: parameter groups, the learning rate, the norm of the whole gradient.

The norm is summed by hand over the local shards, each divided by the number of ranks that hold a copy of it: parameters
of one model lie over different meshes, which torch's own `clip_grad_norm_` does not add up. Its one sum travels in the
all-reduce that a step makes anyway.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from tangram.errors import UserError
from tangram.models.capturing.reasons import layer_drops
from tangram.schema.optimiser import SHARED_UPDATES, OptimiserPlan, RuleName
from tangram.training.mesh.local_parts import NO_PARTS, PlainParts, local
from tangram.training.parallel.model import ParallelModel
from tangram.training.parallel.precision import dtype_of
from tangram.training.step.weight_decay import rules_of, why_not
from tangram.training.updates.ruled_optimiser import RuledOptimiser
from tangram.training.updates.update_rules import ParameterShards, shards_of

NONE_USED: Mapping[str, "LocalGradient"] = MappingProxyType({})


def make_optimiser(model: ParallelModel) -> Optimizer:
    """The optimiser of a model's plan, over the parameters that are trained. Collective where ranks share updates."""
    plan = model.plan
    return _made(model.module, plan.optimiser, plan.precision.masters, model.plain, partial(shards_of, model))


def make_adamw(
    model: nn.Module, plan: OptimiserPlan, masters: str = "float32", plain: PlainParts = NO_PARTS
) -> Optimizer:
    """AdamW for a loop of one's own: `make_optimiser` has all. Raises UserError for a plan with another optimiser."""
    if plan.name != "adamw":
        raise UserError(f'make_adamw makes AdamW, and the plan has "{plan.name}": take make_optimiser(model)')
    return _made(model, plan, masters, plain)


def _made(
    model: nn.Module,
    plan: OptimiserPlan,
    masters: str,
    plain: PlainParts,
    shards: Callable[[], Mapping[Tensor, ParameterShards]] | None = None,
) -> Optimizer:
    """With weight decay on those parameters that `weight_decay.why_not` says it is for.

    Parameters of other rules, rates or decays stand in groups of their own, and those that lie over other meshes: one
    fused update takes one mesh. Where all are AdamW's in float32, torch's fused update takes all parameters of a group
    at once; else the rules of `update_rules` do, with masters and states in the type `masters`.
    """
    groups: dict[tuple[RuleName, float, float, tuple[str, ...]], list[nn.Parameter]] = {}
    shapes = {name: part.shape for name, part in plain.items()}
    whys, rules = why_not(model, plan, shapes), rules_of(model, plan, shapes)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
            decay = 0.0 if whys[name] else plan.weight_decay
            groups.setdefault((rules[name], decay, plan.peak_lr(name), mesh), []).append(parameter)
    tables: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, **({"peak_lr": peak} if plan.lr_of else {})}
        for (_, decay, peak, _), parameters in groups.items()
    ]
    keys: dict[str, Any] = {"lr": plan.lr, "betas": plan.betas, "eps": plan.eps}
    in_float32 = all(one.dtype == torch.float32 for some in groups.values() for one in some)
    if in_float32 and {*rules.values()} == {"adamw"}:
        return AdamW(tables, **keys, fused=True)
    ruled = [{**table, "rule": rule} for table, (rule, *_) in zip(tables, groups, strict=True)]
    drawn = plan.rounding == "stochastic"
    if drawn and shards is None:
        raise UserError("make_adamw rounds to the nearest: take make_optimiser(model), which knows parts and names")
    own = None if shards is None or (SHARED_UPDATES.isdisjoint(rules.values()) and not drawn) else shards()
    keys |= {"momentum": plan.momentum_used, "adjust_lr": plan.adjust_lr}
    return RuledOptimiser(ruled, dtype_of(masters), own, plan.rounding, **keys)


def round_for(optimiser: Optimizer, seed: int, first_row: int) -> None:
    """Name the step to an optimiser that may round stochastically, by its first row of the job."""
    if isinstance(optimiser, RuledOptimiser):
        optimiser.round_for(f"{seed}:{first_row}")


def lr_at(step: int, steps: int, plan: OptimiserPlan) -> float:
    """The learning rate of step number `step` (from 0) of `steps`: linear warm-up, then the plan's schedule.

    cosine: half a cosine that reaches `final_lr` x `lr` at the last step. linear: to the same at the step that would
    follow the last, as transformers has it. wsd (warm-up, stable, decay): constant, then linear to the same over the
    last `decay_steps`. constant: as it says.
    """
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    if plan.schedule == "cosine":
        done = (step - plan.warmup_steps) / max(1, steps - 1 - plan.warmup_steps)
        high = 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))
    elif plan.schedule == "linear":
        high = (steps - step) / (steps - plan.warmup_steps)
    elif plan.schedule == "wsd" and plan.decay_steps:
        high = min(1.0, (steps - 1 - step) / plan.decay_steps)
    else:
        return plan.lr
    return plan.lr * (plan.final_lr + (1 - plan.final_lr) * max(0.0, high))


def set_lr(optimiser: Optimizer, lr: float, peak: float) -> None:
    """Use this learning rate from now on, of which `peak` is the highest; of groups with another one their share."""
    for group in optimiser.param_groups:
        own = group.get("peak_lr", peak)
        group["lr"] = lr if own == peak else lr * (own / peak)


class LocalGradient(NamedTuple):
    """This rank's part of a gradient."""

    part: Tensor
    """Empty of one that was used in the backward already."""
    cut: int
    """Over how many ranks it is cut; 1 where it is whole here, 0 where the norm has it of other ranks."""
    norm: Tensor | None = None
    """Of one that was used: a float32 scalar."""


def local_gradients(
    model: nn.Module,
    plain: PlainParts,
    used: Mapping[str, LocalGradient] = NONE_USED,
    elsewhere: Collection[str] = (),
) -> list[LocalGradient]:
    """This rank's part of every gradient. `plain`: as of the `ParallelModel`; `used`: in the backward, by name;
    `elsewhere`: its `counted_elsewhere`.

    Raises UserError for a trained parameter without gradient: the loss does not depend on it, or it was lost.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if missing := [name for name, p in trained if p.grad is None and name not in used]:
        others = [name for name, p in trained if p.grad is not None or name in used]
        raise UserError(f'the parameter "{missing[0]}" got no gradient: {_why_none(model, missing, others)}')
    found = [(name, used[name] if name in used else local_gradient(name, p, plain)) for name, p in trained]
    return [one._replace(cut=0) if name in elsewhere else one for name, one in found]


def _why_none(model: nn.Module, missing: Sequence[str], others: Sequence[str]) -> str:
    """`others`: trained parameters that got one."""
    layer, beside, _ = missing[0].partition(".lora_")
    if beside:
        own = layer.rpartition(".")[2]
        return f'the model uses the weight of {layer} without calling it, past its adapters: lora.exclude = ["{own}"]'
    drops = layer_drops(model)
    if not drops:
        more = len(missing) - 1
        it, them = (f"it and {more} other{'s' * (more > 1)}", "them") if more else ("it", "it")
        rules = ", ".join(f'"{one}"' for one in _patterns(missing, others))
        return f"name {it} in model.freeze if the loss does not depend on {them}: {rules}"
    none = ", ".join(f"model.change.{key} = 0" for key in drops)
    return f"layers are left out at random, and this version trains all of them in each step: set {none}"


def _patterns(missing: Sequence[str], others: Sequence[str]) -> list[str]:
    """The shortest that fit the missing and none of the others: of modules, of all layers at once."""
    found: list[str] = []
    for name in missing:
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        heads = [".".join([*parts[:n], "*"]) for n in range(1, len(parts))]
        if not any(fnmatchcase(name, pattern) for pattern in found):
            own = (pattern for pattern in heads if not any(fnmatchcase(other, pattern) for other in others))
            found.append(next(own, name))
    return found


def local_gradient(name: str, parameter: Tensor, plain: PlainParts) -> LocalGradient:
    """The same of one parameter."""
    grad = parameter.grad
    assert grad is not None
    parts = plain[name].count if name in plain else 1
    if isinstance(grad, DTensor):
        sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
        parts *= math.prod(int(n) for placement, n in sizes if not placement.is_replicate())
    return LocalGradient(local(grad), parts)


def norms_of(gradients: Sequence[LocalGradient]) -> Tensor:
    """Of this rank's part of each gradient the norm: float32 (gradients,)."""
    found = torch._foreach_norm([one.part for one in gradients], 2, torch.float32)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return torch.stack([norm if one.norm is None else one.norm for norm, one in zip(found, gradients, strict=True)])


def square_sum(norms: Tensor, gradients: Sequence[LocalGradient], ranks: int) -> Tensor:
    """This rank's share of the squared norm of the whole gradient: a float64 scalar that the ranks add up."""
    shares = torch.tensor([one.cut / ranks for one in gradients], dtype=torch.float64, device=norms.device)
    return norms.double().square() @ shares


@torch.no_grad()
def clip(gradients: Sequence[LocalGradient], norm: float, limit: float, scale: float = 1.0) -> None:
    """Scale every gradient so that the norm of the whole is at most `limit`.

    The gradients are `scale` times what they should be, and `norm` is that of what they should be.
    """
    factor = (limit / (norm + 1e-6) if norm > limit else 1.0) / scale
    if factor != 1:
        torch._foreach_mul_([one.part for one in gradients], factor)  # pyright: ignore[reportPrivateUsage]
