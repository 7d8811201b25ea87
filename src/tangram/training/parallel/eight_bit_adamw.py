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
from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tangram.models.lora.dynamic_codes import places, shares, table
from tangram.relayout.mapping.states import ADAM_8BIT, States
from tangram.training.mesh.local_parts import local
from tangram.training.parallel.master_weights import MASTER, MasterAdamW, has_no_values

BLOCK = ADAM_8BIT["absmax1"].block
CODED: States = {name: ADAM_8BIT[name] for name in ("state1", "absmax1", "state2", "absmax2", "step")}
"""Of a parameter whose moments are codes, beside its master."""
AT_ONCE = 1 << 20
"""Numbers that are decoded at a time; whole blocks."""


class EightBitAdamW(MasterAdamW):
    """AdamW that keeps the moments of some parameters as codes."""

    def __init__(
        self, params: Iterable[Any], masters: torch.dtype, coded: Collection[nn.Parameter], **keys: Any
    ) -> None:
        self._coded = frozenset(map(id, coded))
        super().__init__(params, masters, **keys)

    def has_codes(self, parameter: Tensor) -> bool:
        """Whether the moments of a parameter are codes."""
        return id(parameter) in self._coded

    def make_state(self, parameter: nn.Parameter) -> None:
        """Give a parameter the states that it has before its first update: codes of 0."""
        super().make_state(parameter)
        if not self.has_codes(parameter):
            return
        state, own = self.state[parameter], local(parameter)
        del state["exp_avg"], state["exp_avg_sq"]
        for moment in ("1", "2"):
            state[f"state{moment}"] = torch.zeros_like(own, dtype=torch.uint8, memory_format=torch.contiguous_format)
            state[f"absmax{moment}"] = torch.zeros(-(-own.numel() // BLOCK), device=own.device)

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if plain := [p for p in parameters if not self.has_codes(p)]:
            super()._update(group, plain)
        for parameter in parameters:
            if self.has_codes(parameter):
                if not self.state[parameter]:
                    self.make_state(parameter)
                self._update_codes(group, parameter, cast("dict[str, Tensor]", self.state[parameter]))

    def _update_codes(self, group: dict[str, Any], parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        state["step"] += 1
        own, steps = local(parameter), 1.0 if has_no_values(state["step"]) else state["step"].item()
        master = local(state.get(MASTER, parameter))
        numbers, gradient = (x.contiguous().view(-1) for x in (master, local(cast(Tensor, parameter.grad))))
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        first_of, second_of = (_Moment(state[f"state{i}"], state[f"absmax{i}"], signed=i == 1) for i in (1, 2))
        root = math.sqrt(1 - beta2**steps)
        for begin in range(0, numbers.numel(), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            g, p = gradient[some].float(), numbers[some].float()
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
        if own is not master:
            own.copy_(master)


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
