"""The types of numbers that a plan names, made true on a model: how parameters are kept, and gradients added up.

FSDP2 has two of the five types of `[precision]` as its own: it computes with parameters cast to `compute`, and reduces
gradients in `reduce`. What it then adds to a rank's part of the gradient it rounds to the type of the parameters, once
for each micro-batch. Where parameters are kept in a low type, that loses what is small beside the sum; so there the
gradient has a type of its own (`Tensor.grad_dtype`), and FSDP2 is made to leave its sums in that (`unrounded`).

Where gradients of micro-batches are added before ranks reduce them (`Plan.adds_before_reducing`), FSDP2 adds them in
the type in which it reduces; a plan that says anything else is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tangram.schema.job import Job
from tangram.schema.plan import Plan
from tangram.training.mesh.written_parameters import fsdp_groups


def dtype_of(name: str) -> torch.dtype:
    """The type of this name, as in "bfloat16"."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def keep_parameters(model: nn.Module, plan: Job) -> None:
    """Keep the floating-point parameters in the type that the plan says; buffers stay as they are."""
    dtype = dtype_of(plan.precision.parameters)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def of_one_type(plan: Plan) -> bool:
    """Whether parameters are computed with as they are kept, and have gradients of that type."""
    return plan.precision.parameters == plan.precision.compute == plan.gradients


def policy_of(plan: Plan) -> MixedPrecisionPolicy:
    """What FSDP2 has to know: in which type it computes, and in which it reduces."""
    precision = plan.precision
    if precision.compute == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype_of(precision.compute), reduce_dtype=dtype_of(precision.reduce))


def keep_gradients(model: nn.Module, plan: Plan) -> None:
    """Have the gradients of parameters, which are FSDP2's, lie in the type that the plan adds them up in."""
    if plan.gradients == plan.precision.parameters:
        return
    for group in fsdp_groups(model):
        leave_sums_in(group, dtype_of(plan.gradients))


# ----------------------------------------------------------------
# Have FSDP2 leave a rank's sums of gradients in another type than the parameters'.
# FSDP2 rounds a reduced gradient to the type of the parameter, and has no setting for it (`foreach_reduce`
# casts to `_orig_dtype`: https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
# So over many micro-batches small gradients are lost beside the sum of those before.
#
# A shim: the type is set on each group as soon as it has looked at its parameters. When torch takes it as a setting, or
# `tests/training/test_precision.py` finds the sums right without this, it can go.


def leave_sums_in(group: Any, dtype: torch.dtype) -> None:
    """Set what an FSDP2 parameter group casts reduced gradients to, when it looks at the types of its parameters.

    They have memory by then; before, a parameter may still be exchanged for another.
    """
    look = group._init_mp_dtypes

    def looked() -> None:
        look()
        if group._orig_dtype is not None:  # a group of which something is trained
            group._orig_dtype = dtype
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                parameter.sharded_param.grad_dtype = dtype

    group._init_mp_dtypes = looked
