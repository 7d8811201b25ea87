"""What code may be called from that a session cannot be in: said in one sentence, as torch itself ends in a traceback.

`torch.utils.checkpoint` calls a function again in the backward, where parts that were moved once are there already;
the transforms of `torch.func` hand on tensors of their own; operators that take functions, as `scan`, are captured.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch
from torch._ops import HigherOrderOperator
from torch.utils import checkpoint

from tangram.errors import UserError

_CHECKPOINT = checkpoint.__file__
_HIGHER_ORDER = str(Path(torch.__file__).parent / "_higher_order_ops")
_INSTEAD = "leave it out, or run the model by `tangram.training.mesh.tensor_parallel.parallel`"
_OF_FUNCTIONS = (
    "operators that take functions (scan, associative_scan, cond, while_loop, flex_attention, ...) are not derived as "
    f"they run: {_INSTEAD}"
)


def refuse_surroundings(func: object, frame: FrameType | None) -> None:
    """Raise UserError where `func` takes functions, or is called from within checkpointing, a transform or a scan."""
    if isinstance(func, HigherOrderOperator):
        raise UserError(_OF_FUNCTIONS)
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        raise UserError(
            "transforms of torch.func (vmap, grad, jvp, hessian, ...) hand on tensors of their own, of which no layout "
            f"is known as operators run: {_INSTEAD}"
        )
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            raise UserError(
                "torch.utils.checkpoint computes this again in the backward, which parts that were moved once do not "
                f"repeat: {_INSTEAD}"
            )
        if frame.f_code.co_filename.startswith(_HIGHER_ORDER):
            raise UserError(_OF_FUNCTIONS)
        frame = frame.f_back


# ----------------------------------------------------------------
# Functions and attributes of tensors that are no matter of operators alone, by name.


VALUES = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"}
    | {"is_nonzero", "__contains__", "equal", "allclose"}
)
"""Functions that read what a tensor holds."""


REFUSED = frozenset(
    {"__set__", "data_ptr", "storage", "untyped_storage", "share_memory_", "register_hook", "retain_grad", "grad"}
    | {"register_post_accumulate_grad_hook", "__deepcopy__", "__reduce_ex__", "set_", "resize_", "as_subclass"}
)
"""Functions that need a tensor with memory and a history of its own."""


MADE = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes that operators make; others are read as they are."""


OWN = frozenset({"requires_grad", "grad_fn", "is_leaf", "output_nr", "_version"})
"""Attributes of a rank's part."""


VIEWS = frozenset({"view", "_unsafe_view"})
