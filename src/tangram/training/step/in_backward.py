"""Updates in the backward: each parameter by its gradient as soon as that is whole, which is freed then.

So at most one gradient is there at a time, of FSDP those of a unit. A gradient that ranks of model axes have still to
add up, or to compare, waits for the end of the backward (`Plan.updates_early`), and is used as without this.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tangram.training.parallel.model import ParallelModel
from tangram.training.step.optimiser_step import LocalGradient, local_gradient, norms_of, round_for


@contextmanager
def early_updates(model: ParallelModel, optimiser: Optimizer, first_row: int) -> Generator[dict[str, LocalGradient]]:
    """Within, a backward updates what the plan says is updated early; by name what of each gradient is left.

    `first_row`: of the step. The learning rate is that which the optimiser has.
    """
    used: dict[str, LocalGradient] = {}
    if not model.plan.optimiser.in_backward:
        yield used
        return
    names = {p: name for name, p in model.module.named_parameters() if p.requires_grad}

    def update(group: dict[str, Any], parameter: Tensor) -> None:
        name = names[parameter]  # pyright: ignore[reportArgumentType]  it is a Parameter
        if name in used:
            raise RuntimeError(f"{name} got its gradient twice in one backward")
        own = local_gradient(name, parameter, model.plain)
        used[name] = LocalGradient(own.part.new_empty(0), own.cut, norms_of([own])[0])
        round_for(optimiser, model.plan.seed, first_row)
        every = optimiser.param_groups
        optimiser.param_groups = [{**group, "params": [parameter]}]
        try:
            optimiser.step()
        finally:
            optimiser.param_groups = every
        parameter.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(partial(update, group))
        for group in optimiser.param_groups
        for p in group["params"]
        if model.plan.updates_early(names[p])
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()
