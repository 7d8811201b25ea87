"""AdamW whose two moments are codes of 8 bits, with a float32 for each 256 consecutive numbers (Dettmers et al. 2022).

    state1, state2      uint8, of the parameter's shape: places in tables of signed and of unsigned numbers
                        (`models.lora.dynamic_codes`)
    absmax1, absmax2    float32, the largest of each block of the whole parameter, cut with it in whole blocks
                        (`layout.blocks`), so any mesh that cuts none apart has the states of one process
    step                as torch's AdamW has it

An update is made in float32 to moments that are decoded, some blocks at a time, and coded again afterwards; so it is
that of bitsandbytes to the bit, where that takes the nearest place in a table (its kernel for CPUs takes another one
for one number in a thousand of the first moment, and in thirty of the second). Which parameters have codes says
`OptimiserPlan.has_codes`; others have moments and masters as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tangram.models.lora.dynamic_codes import places, shares, table
from tangram.relayout.mapping.states import ADAM_8BIT, States

BLOCK = ADAM_8BIT["absmax1"].block
CODED: States = {name: ADAM_8BIT[name] for name in ("state1", "absmax1", "state2", "absmax2", "step")}
"""Of a parameter whose moments are codes, beside its master."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"state1": torch.uint8, "absmax1": torch.float32, "state2": torch.uint8, "absmax2": torch.float32}
)
"""Of them."""
AT_ONCE = 1 << 20
"""Numbers that are decoded at a time; whole blocks."""


def update(
    master: Tensor, gradient: Tensor, state: Mapping[str, Tensor], steps: float, group: Mapping[str, Any]
) -> None:
    """Update local numbers whose moments are codes. `steps`: how many there are with this one."""
    numbers, gradients = (x.contiguous().view(-1) for x in (master, gradient))
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    first_of, second_of = (_Moment(state[f"state{i}"], state[f"absmax{i}"], signed=i == 1) for i in (1, 2))
    root = math.sqrt(1 - beta2**steps)
    for begin in range(0, numbers.numel(), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        g, p = gradients[some].float(), numbers[some].float()
        first, second = first_of.read(some), second_of.read(some)
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if decay:
            p.mul_(1 - lr * decay)
        p.addcdiv_(first, (second.sqrt() / root).add_(group["eps"]), value=-lr / (1 - beta1**steps))
        numbers[some] = p
        first_of.write(some, first)
        second_of.write(some, second)
    if not master.is_contiguous():
        master.copy_(numbers.view(master.shape))


class _Moment:
    """One of the two, as it is kept of a rank's part."""

    def __init__(self, codes: Tensor, largest: Tensor, *, signed: bool) -> None:
        self._codes, self._largest = codes.view(-1), largest
        self._table = table(codes.device, signed=signed)

    def read(self, some: slice) -> Tensor:
        """Numbers of whole blocks, but for the last one of all."""
        found = self._table[self._codes[some].int()]
        return _blocks(found).mul_(self._largest[_of(some)][:, None]).view(-1)[: found.numel()]

    def write(self, some: slice, values: Tensor) -> None:
        """Keep such numbers."""
        blocks = _blocks(values)
        largest = self._largest[_of(some)] = blocks.abs().amax(dim=1)
        found = places(shares(blocks, largest), self._table).masked_fill_((largest == 0)[:, None], 0)
        self._codes[some] = found.view(-1)[: values.numel()]


def _blocks(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _of(some: slice) -> slice:
    """The blocks of some numbers."""
    return slice(some.start // BLOCK, -(-some.stop // BLOCK))
