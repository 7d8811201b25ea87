"""How optimiser states are made of their parameters, as data: one table per optimiser.

A new optimiser is a new table; nothing else has to know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class StateSpec:
    """How a state is made of the elements of its parameter.

    `same`: one value an element. `reduced`: one value for all elements along `dims` (negative: from the end), which are
    gone from the shape, or of size 1 with `keepdim`. `blocks`: one value for each `block` consecutive elements of the
    flattened parameter, one-dimensional. `shared`: one tensor, of whatever shape, that all parts of a parameter have
    equal: a step count, a quantisation table.
    """

    kind: Literal["same", "reduced", "blocks", "shared"]
    dims: tuple[int, ...] = ()
    keepdim: bool = False
    block: int = 1


SAME = StateSpec("same")
SHARED = StateSpec("shared")
ROW, COLUMN = StateSpec("reduced", (-1,)), StateSpec("reduced", (-2,))

States = Mapping[str, StateSpec]

ADAMW: States = {"exp_avg": SAME, "exp_avg_sq": SAME, "max_exp_avg_sq": SAME, "step": SHARED}
"""`torch.optim.AdamW`, with or without amsgrad."""

MUON: States = {"momentum_buffer": SAME}
"""`torch.optim.Muon`, and SGD with momentum. The state moves; the update of a fused matrix is still not its parts'."""

ADAFACTOR: States = {
    "row_var": replace(ROW, keepdim=True),
    "col_var": replace(COLUMN, keepdim=True),
    "variance": SAME,
    "step": SHARED,
}
"""`torch.optim.Adafactor`."""

ADAFACTOR_HF: States = {
    "exp_avg_sq_row": ROW,
    "exp_avg_sq_col": COLUMN,
    "exp_avg_sq": SAME,
    "exp_avg": SAME,
    "step": SHARED,
}
"""`transformers.Adafactor` without its `RMS`, a value of the whole parameter that the next step computes anew."""

ADAM_8BIT: States = {
    "state1": SAME,
    "state2": SAME,
    "absmax1": StateSpec("blocks", block=256),
    "absmax2": StateSpec("blocks", block=256),
    "qmap1": SHARED,
    "qmap2": SHARED,
    "step": SHARED,
}
"""bitsandbytes' blockwise 8-bit Adam."""

ADAM_4BIT: States = {
    f"{moment}.{name}": spec
    for moment in ("exp_avg", "exp_avg_sq")
    for name, spec in (
        ("codes", StateSpec("blocks", block=2)),
        ("scale", StateSpec("blocks", block=128)),
        ("qmap", SHARED),
    )
} | {"step": SHARED}
"""torchao's 4-bit Adam: two values a byte, a scale for every 128."""

ROWWISE_8BIT: States = {"codes": SAME, "scale": ROW}
"""A quantised tensor with one scale a row."""
