"""What formats call the states that an optimiser keeps of a parameter: a table each, and a name for all of them here.

    here          w.exp_avg                       the parameter's name, then torch's name of the state
    Megatron      optimizer.state.exp_avg.w       a naming: "optimizer.state.{state}.{param}"

A step count is one tensor for each parameter here, as torch has it. A format that has one for all of them gives it as a
tensor for each (`steps`), and a writer of such a format asks for the one that all agree on (`common_step`).
"""

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec
from tangram.relayout.mapping.states import ADAFACTOR, ADAFACTOR_HF, ADAM_8BIT, ADAMW, MUON, SAME, SHARED, States

MASTER, STEP = "master", "step"
POWERS: States = {"beta1_pow": SHARED, "beta2_pow": SHARED}
"""What Paddle has instead of a step."""
KNOWN: States = {**ADAM_8BIT, **ADAFACTOR, **ADAFACTOR_HF, **MUON, **ADAMW, **POWERS, MASTER: SAME}
"""Every state that is known by its name: torch's, transformers' and bitsandbytes' optimisers, and float32 copies."""
_SCALAR = TensorSpec((), "float32")


@dataclass(frozen=True)
class Naming:
    """How a format names them."""

    pattern: str
    """With {param} and {state}."""
    words: Mapping[str, str] = field(default_factory=dict[str, str])
    """Words of the format's for states that are called otherwise here; of several for one the first is written."""
    front: str = ""
    """What is written before."""
    lead: str | None = None
    """What may stand before when it is read, as a regular expression; as it is written unless given."""

    @cached_property
    def _matcher(self) -> re.Pattern[str]:
        own = {state for state in KNOWN if state not in self.words.values()}
        words = "|".join(map(re.escape, sorted([*own, *self.words], key=len, reverse=True)))
        body = re.escape(self.pattern).replace(r"\{param\}", "(?P<param>.+)")
        body = body.replace(r"\{state\}", f"(?P<state>{words})")
        return re.compile((re.escape(self.front) if self.lead is None else self.lead) + body)

    def read(self, name: str) -> tuple[str, str] | None:
        """Parameter and state of a name of the format's; None of what is no state."""
        match = self._matcher.fullmatch(name)
        if match is None:
            return None
        return match["param"], self.words.get(match["state"], match["state"])

    def write(self, param: str, state: str) -> str:
        """The format's name of a parameter's state."""
        word = next((word for word, known in self.words.items() if known == state), state)
        return self.front + self.pattern.replace("{param}", param).replace("{state}", word)


def named_without(source: OpenCheckpoint, lead: str) -> OpenCheckpoint:
    """The same without what stands before all names."""
    return renamed(source, {name: name.removeprefix(lead) for name in source.specs})


def named(source: OpenCheckpoint, naming: Naming, prefix: str = "") -> OpenCheckpoint:
    """The same with states by the names that they have here, and without what stands before all parameters' names."""
    names: dict[str, str] = {}
    states: dict[str, None] = {}
    for raw in source.specs:
        found = naming.read(raw)
        if found is not None:
            names[raw] = f"{found[0]}.{found[1]}"
            states[found[1]] = None
        else:
            names[raw] = raw.removeprefix(prefix)
    found = renamed(source, names)
    return replace(found, states={**found.states, **{state: KNOWN[state] for state in states}})


def renamed(source: OpenCheckpoint, names: Mapping[str, str]) -> OpenCheckpoint:
    """The same with other names. Raises UserError where two become one."""
    raws: dict[str, str] = {}
    for raw, name in names.items():
        if raws.setdefault(name, raw) != raw:
            raise UserError(f'"{source.path}" has {name} under two names: {raws[name]} and {raw}')

    def read(place: Hashable, name: str) -> Tensor:
        return source.read(place, raws[name])

    return replace(
        source,
        specs={names[raw]: spec for raw, spec in source.specs.items()},
        pieces=tuple([Piece(piece.place, names[piece.tensor], piece.region) for piece in source.pieces]),
        read=read,
    )


@dataclass(frozen=True)
class Count:
    """The place of a step count that lies in no file."""

    value: float


def with_steps(source: OpenCheckpoint, step: float | None) -> OpenCheckpoint:
    """The same with the one step count that all parameters with states have. None: it is not known."""
    trained = {param for param, state in split(source.specs, source.states).values() if state}
    if step is None or not trained:
        return source
    place = Count(step)

    def read(at: Hashable, name: str) -> Tensor:
        return torch.tensor(at.value) if isinstance(at, Count) else source.read(at, name)

    more = [f"{param}.{STEP}" for param in source.specs if param in trained]
    return replace(
        source,
        specs={**source.specs, **dict.fromkeys(more, _SCALAR)},
        pieces=(*source.pieces, *(Piece(place, name, Region.full(())) for name in more)),
        read=read,
        states={**source.states, STEP: KNOWN[STEP]},
    )


def split(specs: Iterable[str], states: States) -> dict[str, tuple[str, str]]:
    """Of each tensor the parameter that it is, or belongs to, and which state of it; "" of the parameter itself."""
    there = set(specs)
    found: dict[str, tuple[str, str]] = {}
    for name in there:
        parts = ((name.removesuffix(f".{state}"), state) for state in states)
        found[name] = next(((param, state) for param, state in parts if param != name and param in there), (name, ""))
    return found


def common_step(counts: Mapping[str, float], whose: str) -> float:
    """The one step that all parameters have. Raises UserError where they differ: such a format has one for all."""
    first = next(iter(counts))
    for name, count in counts.items():
        if count != counts[first]:
            raise UserError(
                f"{name} is {count:g} and {first} is {counts[first]:g}: {whose} has one step for all parameters"
            )
    return counts[first]
