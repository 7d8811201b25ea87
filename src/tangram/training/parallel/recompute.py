"""Recompute: activations that are not kept are computed again in the backward, by module and by operator.

    by module   `run.recompute` names modules; nothing of what they compute is kept but what goes in
    by operator `run.recompute_keep` names kinds of operators whose results are kept all the same, so that those do not
                run again: "matmuls", "attention"; both are most of the time and not most of the memory

What moves between ranks in a module is moved again with it, in the same order on every rank: which operators are kept
does not depend on the rank.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,  # pyright: ignore[reportUnknownVariableType]  typed in part
    create_selective_checkpoint_contexts,  # pyright: ignore[reportUnknownVariableType]
)

from tangram.errors import UserError
from tangram.kernels.attention import ATTEND
from tangram.kernels.flash.operator import FLASH
from tangram.schema.plan import Plan, matches
from tangram.training.mesh.buffers import refuse_counted_twice
from tangram.training.mesh.layout_to_torch import named_modules

_aten = torch.ops.aten
KEPT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "matmuls": (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm, _aten._scaled_mm),
        "attention": (
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
            _aten._scaled_dot_product_fused_attention_overrideable,
            ATTEND,
            FLASH,
        ),
    }
)
"""The operators of each kind."""


def recompute(parts: Mapping[nn.Module, Sequence[nn.Module]], plan: Plan) -> None:
    """Keep no activations of the modules that the plan names: their forward runs again in the backward.

    What is inside of one that is named is recomputed with it, whether or not a pattern names it, too. `parts`: what
    runs on this rank, and its blocks. Raises UserError for patterns that fit nothing, and for what cannot be computed
    again in parts.
    """
    if not plan.run.recompute:
        return
    found = [_recompute_of(part, plan, blocks) for part, blocks in parts.items()]
    if not any(found):
        raise UserError(f"run.recompute = {list(plan.run.recompute)} fits no module of the model")


def _recompute_of(part: nn.Module, plan: Plan, blocks: Sequence[nn.Module]) -> bool:
    """Whether the plan names anything of it."""
    chosen: dict[str, nn.Module] = {}
    for name, module in named_modules(part):
        if matches(plan.run.recompute, name) and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = module
    for name, module in chosen.items():
        if plan.run.compile and plan.model_axes and any(module is not b and module in b.modules() for b in blocks):
            raise UserError(
                f"run.recompute names {name}, a part of a compiled block: over a tensor axis, compute whole blocks "
                "again or compile nothing (run.compile = false)"
            )
        refuse_counted_twice(name, module)
        module.forward = _checkpointed(module.forward, plan.run.recompute_keep)
    return bool(chosen)


def _checkpointed(forward: Callable[..., Any], keep: Sequence[str]) -> Callable[..., Any]:
    told: dict[str, Any] = {}
    if keep:
        kept = {operator for kind in keep for operator in KEPT[kind]}
        told["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))

    def run(*args: Any, **kwargs: Any) -> Any:
        return cast(Any, checkpoint(forward, *args, use_reentrant=False, **told, **kwargs))

    return run


def _policy(kept: set[Any], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    found = getattr(operator, "overloadpacket", None) in kept
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE
