"""An optimiser whose groups each name a rule (`training.updates.update_rules`), over masters where there are some.

What an update adds to a weight is a thousandth of it or less, and bfloat16 tells apart numbers that differ by a 256th.
So of a parameter that is kept in a low type the optimiser keeps a master in its state, updates that, and rounds it to
the parameter. A checkpoint holds the masters beside the other states, so a run goes on bit for bit; the parameters are
there as ever, and load without them. A master begins as its parameter's value; the cost is the memory of the copy.

With `rounding = "stochastic"` there is none: a bfloat16 parameter, and its states in that type, are updated in float32
one parameter at a time, and rounded as `stochastic_rounding` does.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.errors import UserError
from tangram.relayout.mapping.states import SAME, States, StateSpec
from tangram.schema.optimiser import Rounding
from tangram.training.mesh.local_parts import local
from tangram.training.updates.parameter_shards import ParameterShards
from tangram.training.updates.stochastic_rounding import round_into
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
        rounding: Rounding = "nearest",
        **settings: Any,
    ) -> None:
        self.masters = masters
        self.rounding = rounding
        self._shards = shards or {}
        self._step: str | None = None
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

    def round_for(self, step: str) -> None:
        """Name the next step, by the run's seed and its first sample: what is rounded stochastically in it is drawn by
        that name. A loop of one's own calls it before each `step`."""
        self._step = step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the masters by the gradients, and round them to the parameters. Takes no closure."""
        if closure is not None:
            raise ValueError("a step with rules takes no closure: call backward before it")
        name, self._step = self._step, None
        if name is None and self.rounding == "stochastic":
            raise UserError(
                "stochastic rounding is drawn anew in each step: call round_for(NAME OF THE STEP) before it"
            )
        for group in self.param_groups:
            parameters = [p for p in cast("list[nn.Parameter]", group["params"]) if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.make_state(parameter)
            if name is not None and self.rounding == "stochastic":
                for parameter in parameters:
                    self._update_rounded(parameter, group, name)
            elif parameters:
                RULES[group["rule"]].update([self._part(p) for p in parameters], group)
            for parameter in parameters:
                if (master := self.state[parameter].get(MASTER)) is not None:
                    local(parameter).copy_(local(master))

    def _update_rounded(self, parameter: nn.Parameter, group: Mapping[str, Any], step: str) -> None:
        """Of one parameter: all at once would be in float32 all at once."""
        part, states = self._part(parameter), self.states_of(parameter)
        low = {name: x for name, x in {**part.state, MASTER: part.master}.items() if x.dtype == torch.bfloat16}
        high = {name: x.float() for name, x in low.items()}
        master = high.get(MASTER, part.master)
        state = {**part.state, **{name: x for name, x in high.items() if name != MASTER}}
        RULES[group["rule"]].update([UpdatedPart(master, part.gradient, state, part.shards)], group)
        for name, x in low.items():
            reduced = [dim % x.ndim for dim in states[name].dims] if name in states else ()
            round_into(x, high[name], f"{step}:{part.shards.name}:{name}", part.shards, reduced)

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
