"""An optimiser whose groups each name a rule (`training.updates.update_rules`), over masters where there are some.

What an update adds to a weight is a thousandth of it or less, and bfloat16 tells apart numbers that differ by a 256th.
So of a parameter that is kept in a low type the optimiser keeps a master in its state, updates that, and rounds it to
the parameter. A checkpoint holds the masters beside the other states, so a run goes on bit for bit; the parameters are
there as ever, and load without them. A master begins as its parameter's value; the cost is the memory of the copy.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.relayout.mapping.states import SAME, States, StateSpec
from tangram.training.mesh.local_parts import local
from tangram.training.updates.parameter_shards import ParameterShards
from tangram.training.updates.update_rules import RULES, UpdatedPart, UpdateRule

MASTER = "master"
"""The name of the state."""


class RuledOptimiser(Optimizer):
    """Groups have a `rule` by name, beside its settings; states, and masters where parameters have another type, are of
    the type `masters` unless the rule says otherwise."""

    def __init__(
        self,
        params: Iterable[Any],
        masters: torch.dtype,
        shards: Mapping[Tensor, ParameterShards] | None = None,
        **settings: Any,
    ) -> None:
        self.masters = masters
        self._shards = shards or {}
        super().__init__(params, settings)
        self._rules = {p: RULES[group["rule"]] for group in self.param_groups for p in group["params"]}

    def rule_of(self, parameter: Tensor) -> UpdateRule:
        """How a parameter is updated."""
        return self._rules[parameter]

    def states_of(self, parameter: Tensor) -> States:
        """The states that are kept of a parameter."""
        own = self._rules[parameter].states(parameter.ndim)
        return own if parameter.dtype == self.masters else {**own, MASTER: SAME}

    def make_state(self, parameter: nn.Parameter) -> None:
        """Give a parameter the states that it has before its first update: zeros."""
        state, dtypes = self.state[parameter], self._rules[parameter].dtypes
        for name, spec in self.states_of(parameter).items():
            if name == MASTER:
                state[name] = parameter.detach().to(self.masters)
            else:
                state[name] = _MADE[spec.kind](parameter, spec, dtypes.get(name, self.masters))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the masters by the gradients, and round them to the parameters. Takes no closure."""
        if closure is not None:
            raise ValueError("a step with rules takes no closure: call backward before it")
        for group in self.param_groups:
            parameters = [p for p in cast("list[nn.Parameter]", group["params"]) if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.make_state(parameter)
            if parameters:
                RULES[group["rule"]].update([self._part(p) for p in parameters], group)
            for parameter in parameters:
                if (master := self.state[parameter].get(MASTER)) is not None:
                    local(parameter).copy_(local(master))

    def _part(self, parameter: nn.Parameter) -> UpdatedPart:
        state = {name: local(one).detach() for name, one in cast("dict[str, Tensor]", self.state[parameter]).items()}
        shards = self._shards.get(parameter) or ParameterShards(tuple(parameter.shape))
        master = state.get(MASTER, local(parameter).detach())
        return UpdatedPart(master, local(cast(Tensor, parameter.grad)).detach(), state, shards)


def _like(parameter: Tensor, spec: StateSpec, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:  # codes follow one another as numbers do
        return torch.zeros_like(local(parameter), dtype=dtype, memory_format=torch.contiguous_format)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _reduced(parameter: Tensor, spec: StateSpec, dtype: torch.dtype) -> Tensor:
    shape = list(local(parameter).shape)
    for dim in spec.dims:
        shape[dim] = 1
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _of_blocks(parameter: Tensor, spec: StateSpec, dtype: torch.dtype) -> Tensor:
    return torch.zeros(-(-local(parameter).numel() // spec.block), dtype=dtype, device=parameter.device)


def _scalar(parameter: Tensor, spec: StateSpec, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=torch.float32)  # on the host, which reads it


_MADE: Mapping[str, Callable[[Tensor, StateSpec, torch.dtype], Tensor]] = MappingProxyType(
    {"same": _like, "reduced": _reduced, "blocks": _of_blocks, "shared": _scalar}
)
"""This rank's part of a state by how it is made of its parameter."""
