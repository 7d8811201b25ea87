"""An optimiser whose groups each name a rule (`training.updates.update_rules`), over masters where there are some.

What an update adds to a weight is a thousandth of it or less, and bfloat16 tells apart numbers that differ by a 256th.
So of a parameter that is kept in a low type the optimiser keeps a master in its state, updates that, and rounds it to
the parameter. A checkpoint holds the masters beside the other states, so a run goes on bit for bit; the parameters are
there as ever, and load without them. A master begins as its parameter's value; the cost is the memory of the copy.

With `rounding = "stochastic"` there is none: a bfloat16 parameter, and its states in that type, are updated in float32
one parameter at a time, and rounded as `round_into` does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.errors import UserError
from tangram.relayout.mapping.states import SAME, States, StateSpec
from tangram.schema.optimiser import Rounding
from tangram.training.mesh.local_parts import local
from tangram.training.updates.update_rules import RULES, ParameterShards, UpdatedPart, UpdateRule

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


_MADE: Mapping[str, Callable[[Tensor, StateSpec, torch.dtype], Tensor]] = MappingProxyType(
    {
        "same": _like,
        "reduced": _reduced,
        "blocks": lambda p, spec, dtype: torch.zeros(-(-local(p).numel() // spec.block), dtype=dtype, device=p.device),
        "shared": lambda p, spec, dtype: torch.zeros((), dtype=torch.float32),  # on the host, which reads it
    }
)
"""This rank's part of a state by how it is made of its parameter."""


# Stochastic rounding to bfloat16: up as often as a number lies near the neighbour above, so that sums of small
# updates are right on average (Gupta et al. 2015). What is drawn for a number is a function of a key (seed, step,
# parameter, state) and of its place in the whole tensor, a hash and no generator: any mesh, and a run that goes on,
# has its bits.
AT_ONCE = 1 << 18
"""Numbers that are drawn for at a time, in whole rows."""
COUNTER_BYTES = 32 * AT_ONCE
"""What the hashes of as many take."""


def round_into(low: Tensor, high: Tensor, key: str, shards: ParameterShards, reduced: Sequence[int] = ()) -> None:
    """Write float32 numbers to bfloat16 ones of the same shape, both local: a parameter's, cut as `shards` says, or of
    a state of it that has one number along its `reduced` dims."""
    if not low.numel():
        return
    first, *inner = _places(low, shards, reduced)
    low, high = (x[None] if x.ndim == 0 else x for x in (low, high))
    rest = sum(inner, torch.zeros(low.shape[1:], dtype=torch.int64, device=low.device))
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), signed=True)
    at_once = max(1, AT_ONCE // max(1, math.prod(low.shape[1:])))
    for begin in range(0, low.shape[0], at_once):
        some = slice(begin, begin + at_once)
        low[some] = _rounded(high[some], (first[some].view(-1, *[1] * rest.ndim) + rest).add_(number))


def _places(x: Tensor, shards: ParameterShards, reduced: Sequence[int]) -> list[Tensor]:
    """Of each dim what its indices add to the place in the whole; those of all but the first are shaped to be added."""
    found: list[Tensor] = []
    for dim, n in enumerate(x.shape):
        cut = shards.places[dim] if shards.places else torch.arange(0)
        own = torch.zeros(1, dtype=torch.int64) if dim in reduced else cut if cut.numel() else torch.arange(n)
        own = own.to(x.device) * math.prod(shards.shape[dim + 1 :])
        found.append(own.view(-1, *[1] * (x.ndim - 1 - dim)) if dim else own)
    return found or [torch.zeros(1, dtype=torch.int64, device=x.device)]


def _rounded(high: Tensor, counters: Tensor) -> Tensor:
    """By 16 bits of each counter's hash, added to those that are cut off; what is not finite as ever."""
    bits = high.contiguous().view(torch.int32) + (_hash(counters) & 0xFFFF).int()
    return torch.where(high.isfinite(), (bits & -0x10000).view(torch.float32), high).bfloat16()


def _hash(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, which torch's int64 wraps around as unsigned words do. In place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = x.bitwise_xor_(_shifted(x, shift)).mul_(factor - (1 << 64))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)
