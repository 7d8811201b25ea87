"""AdamW for parameters that are kept in a low type: the update is made to a copy in a higher one, their master.

What an update adds to a weight is a thousandth of it or less, and bfloat16 tells apart numbers that differ by a 256th.
So the optimiser keeps of each parameter a master in its state, updates that, and rounds it to the parameter. A
checkpoint holds the masters beside the moments, so a run goes on bit for bit; the parameters are there as ever, and
load without them. A master begins as its parameter's value; the cost is the memory of the copy.

Arithmetic is torch's own (`torch.optim.adamw.adamw`), on masters, moments and gradients of the masters' type.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw  # pyright: ignore[reportUnknownVariableType]  typed in part

MASTER = "master"
"""The name of the state."""


class MasterAdamW(AdamW):
    """AdamW whose moments, and masters where parameters have another type, are of the type `masters`."""

    def __init__(self, params: Iterable[Any], masters: torch.dtype, **keys: Any) -> None:
        self.masters = masters
        super().__init__(params, **keys)

    def make_state(self, parameter: nn.Parameter) -> None:
        """Give a parameter the states that it has before its first update."""
        state = self.state[parameter]
        zeros = torch.zeros_like(parameter, dtype=self.masters, requires_grad=False)
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = zeros, zeros.clone()
        if parameter.dtype != self.masters:
            state[MASTER] = parameter.detach().to(self.masters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the masters by the gradients, and round them to the parameters. Takes no closure."""
        if closure is not None:
            raise ValueError("a step with masters takes no closure: call backward before it")
        for group in self.param_groups:
            parameters = [p for p in cast("list[nn.Parameter]", group["params"]) if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.make_state(parameter)
        states = [cast("dict[str, Tensor]", self.state[p]) for p in parameters]
        own = [_local(p) for p in parameters]
        masters = [_local(state.get(MASTER, p)) for state, p in zip(states, parameters, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            [_local(cast(Tensor, p.grad)).to(self.masters) for p in parameters],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            fused=has_no_values(states[0]["step"]),  # which reads no step
        )
        for parameter, master in zip(own, masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)


def has_no_values(x: Tensor) -> bool:
    """Whether it is of a run without memory, so that nothing can be read of it."""
    return isinstance(x, FakeTensor)


def _local(x: Tensor) -> Tensor:
    """This rank's part, without a history."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()
