"""Have FSDP2 leave a rank's sums of gradients in another type than the parameters'.

FSDP2 rounds a reduced gradient to the type in which the parameter is kept, and has no setting for it (`foreach_reduce`
casts to `_orig_dtype`: https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
So over many micro-batches small gradients are lost beside the sum of those before.

A shim: the type is set on each group as soon as it has looked at its parameters. When torch takes it as a setting, or
`tests/training/test_precision.py` finds the sums right without this, it can go.
"""

from __future__ import annotations

from typing import Any

import torch


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
