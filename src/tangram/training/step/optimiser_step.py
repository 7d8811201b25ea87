"""The optimiser's part of a step: parameter groups, the learning rate, the norm of the whole gradient.

The norm is summed by hand over the local shards, each divided by the number of ranks that hold a copy of it: parameters
of one model lie over different meshes, which torch's own `clip_grad_norm_` does not add up. Its one sum travels in the
all-reduce that a step makes anyway.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from tangram.errors import UserError
from tangram.schema.job import OptimiserPlan
from tangram.training.mesh.local_parts import NO_PARTS, PlainParts
from tangram.training.parallel.eight_bit_adamw import EightBitAdamW
from tangram.training.parallel.master_weights import MasterAdamW
from tangram.training.parallel.precision import dtype_of
from tangram.training.step.weight_decay import why_not


def make_adamw(model: nn.Module, plan: OptimiserPlan, masters: str = "float32", plain: PlainParts = NO_PARTS) -> AdamW:
    """AdamW over the parameters that are trained, with weight decay on those that `decay.why_not` says it is for.

    Parameters that lie over different meshes stand in groups of their own: one fused update takes one mesh. Where some
    are of a lower type than float32, the optimiser keeps moments and masters in the type `masters`. Else torch's fused
    update takes all parameters of a group at once, unless moments are codes (`parallel.eight_bit_adamw`).
    """
    groups: dict[tuple[bool, tuple[str, ...]], list[nn.Parameter]] = {}
    coded: list[nn.Parameter] = []
    whys = why_not(model, plan, {name: part.shape for name, part in plain.items()})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = not whys[name]
            mesh = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
            groups.setdefault((decays, mesh), []).append(parameter)
            if plan.has_codes(name, plain[name].shape if name in plain else parameter.shape):
                coded.append(parameter)
    tables = [
        {"params": parameters, "weight_decay": plan.weight_decay if decays else 0.0}
        for (decays, _), parameters in groups.items()
    ]
    if coded:
        return EightBitAdamW(tables, dtype_of(masters), coded, lr=plan.lr, betas=plan.betas, eps=plan.eps)
    if all(parameter.dtype == torch.float32 for parameters in groups.values() for parameter in parameters):
        return AdamW(tables, lr=plan.lr, betas=plan.betas, eps=plan.eps, fused=True)
    return MasterAdamW(tables, dtype_of(masters), lr=plan.lr, betas=plan.betas, eps=plan.eps)


def lr_at(step: int, steps: int, plan: OptimiserPlan) -> float:
    """The learning rate of step number `step` (from 0) of `steps`: linear warm-up, then the plan's schedule.

    cosine: half a cosine that reaches `final_lr` x `lr` at the last step. wsd (warm-up, stable, decay): constant, then
    linear to the same over the last `decay_steps`. constant: as it says.
    """
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    if plan.schedule == "cosine":
        done = (step - plan.warmup_steps) / max(1, steps - 1 - plan.warmup_steps)
        high = 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))
    elif plan.schedule == "wsd" and plan.decay_steps:
        high = min(1.0, (steps - 1 - step) / plan.decay_steps)
    else:
        return plan.lr
    return plan.lr * (plan.final_lr + (1 - plan.final_lr) * max(0.0, high))


def set_lr(optimiser: AdamW, lr: float) -> None:
    """Use this learning rate from now on."""
    for group in optimiser.param_groups:
        group["lr"] = lr


def local_gradients(model: nn.Module, plain: PlainParts) -> list[tuple[Tensor, int]]:
    """This rank's part of every gradient, and over how many ranks it is cut (1 where it is whole here).

    `plain`: as of the `ParallelModel`.

    Raises UserError for a trained parameter without gradient: the loss does not depend on it, or it was lost.
    """
    found: list[tuple[Tensor, int]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        if grad is None:
            raise UserError(
                f'the parameter "{name}" got no gradient: name it in model.freeze if the loss does not depend on it'
            )
        parts = plain[name].count if name in plain else 1
        if isinstance(grad, DTensor):
            sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
            parts *= math.prod(int(n) for placement, n in sizes if not placement.is_replicate())
            found.append((grad.to_local(), parts))
        else:
            found.append((grad, parts))
    return found


def norms_of(gradients: list[tuple[Tensor, int]]) -> Tensor:
    """Of this rank's part of each gradient the norm: float32 (gradients,)."""
    found = torch._foreach_norm([grad for grad, _ in gradients], 2, torch.float32)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return torch.stack(found)


def square_sum(norms: Tensor, gradients: list[tuple[Tensor, int]], ranks: int) -> Tensor:
    """This rank's share of the squared norm of the whole gradient: a float64 scalar that the ranks add up."""
    shares = torch.tensor([parts / ranks for _, parts in gradients], dtype=torch.float64, device=norms.device)
    return norms.double().square() @ shares


@torch.no_grad()
def clip(gradients: list[tuple[Tensor, int]], norm: float, limit: float, scale: float = 1.0) -> None:
    """Scale every gradient so that the norm of the whole is at most `limit`.

    The gradients are `scale` times what they should be, and `norm` is that of what they should be.
    """
    factor = (limit / (norm + 1e-6) if norm > limit else 1.0) / scale
    if factor != 1:
        torch._foreach_mul_([grad for grad, _ in gradients], factor)  # pyright: ignore[reportPrivateUsage]
