"""Optimisers while they are loaded: states that are not there yet, settings by group, what a state has beside tensors.

States are made by the optimiser itself, with a step of zero gradients, for any optimiser of torch; a few parameters at
a time, each put back afterwards bit for bit (a step of rate 0 may turn -0.0 into 0.0), so that memory stays bounded.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tangram.checkpoint.state.describe import parameter_names
from tangram.checkpoint.state.entries import Described, State
from tangram.checkpoint.state.optimiser_groups import matched_groups, settings_of
from tangram.errors import UserError

TOGETHER = 64 << 20
"""Bytes of parameters that get their states in one step."""


@dataclass(frozen=True)
class MadeStates:
    """The states that were made for a load."""

    states: list[tuple[Optimizer, nn.Parameter]] = field(default_factory=list[tuple[Optimizer, nn.Parameter]])

    def undo(self) -> None:
        for optimiser, parameter in self.states:
            optimiser.state.pop(parameter, None)


def prepare(state: State, stored: Iterable[str], made: MadeStates) -> None:
    """Give states to the parameters that have some under a stored name and none here."""
    names = parameter_names(state)
    having = {name.rpartition(".")[0] for name in stored}
    for section, content in state.items():
        if not isinstance(content, Optimizer):
            continue
        empty = [
            parameter
            for parameter in _parameters(content)
            if f"{section}.{names.get(id(parameter))}" in having and not content.state.get(parameter)
        ]
        made.states.extend((content, parameter) for parameter in empty)
        try:
            _make_states(content, empty)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"{section} cannot make its states by a step, so take one before you load ({what})"
            ) from error


def check(state: State, described: Described, objects: Mapping[str, Any]) -> None:
    """Refuse groups of parameters that are cut otherwise than those in the checkpoint's objects."""
    for section, content in state.items():
        key = f"{section}.param_groups"
        if isinstance(content, Optimizer) and key in objects:
            matched_groups(section, described.objects[key], objects[key])


def put_back(optimiser: Optimizer, objects: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Set the settings of all groups, and what the states have beside tensors. `objects`: without the section."""
    if "param_groups" in objects:
        own = [{"params": [names[id(p)] for p in group["params"]]} for group in optimiser.param_groups]
        matched = matched_groups("the optimiser", own, objects["param_groups"])
        for group, stored in zip(optimiser.param_groups, matched, strict=True):
            for key, value in stored.items():
                if key != "params":
                    group[key] = _like(group.get(key), value)
    for parameter in _parameters(optimiser):
        known = optimiser.state.get(parameter)
        prefix = f"{names[id(parameter)]}."
        for key in known or ():
            if prefix + key in objects and known is not None:
                known[key] = _like(known[key], objects[prefix + key])


def _parameters(optimiser: Optimizer) -> Iterator[nn.Parameter]:
    return itertools.chain.from_iterable(group["params"] for group in optimiser.param_groups)


def _like(now: Any, value: Any) -> Any:
    """A value from JSON as the one that is there."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    return tuple(cast("list[Any]", value)) if isinstance(now, tuple) and isinstance(value, list) else value


# ---------------------------------------------------------------- states that are not there yet


def _make_states(optimiser: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    for some in _batches(parameters):
        settings = [settings_of(group) for group in optimiser.param_groups]
        everything = list(_parameters(optimiser))
        gradients = [parameter.grad for parameter in everything]
        values = [parameter.detach().clone() for parameter in some]
        try:
            for parameter in everything:
                parameter.grad = None
            for parameter in some:
                parameter.grad = torch.zeros_like(parameter)
            for group in optimiser.param_groups:
                if "lr" in group:
                    group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            optimiser.step()
        finally:
            with torch.no_grad():
                for parameter, value in zip(some, values, strict=True):
                    parameter.copy_(value)
            for parameter, gradient in zip(everything, gradients, strict=True):
                parameter.grad = gradient
            for group, before in zip(optimiser.param_groups, settings, strict=True):
                group.update(before)


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    some: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if some and size + parameter.nbytes > TOGETHER:
            yield some
            some, size = [], 0
        some.append(parameter)
        size += parameter.nbytes
    if some:
        yield some
