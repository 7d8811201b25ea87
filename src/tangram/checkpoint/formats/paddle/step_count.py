"""How many steps Paddle's AdamW has taken: it keeps no count, but the powers of its betas.

After t steps a power is b^(t+1), multiplied in float32 step by step from b. Without the betas no count follows from
that, so the powers are states of their own (`beta1_pow`, `beta2_pow`), which a mapping moves like a count. Where the
betas are known the count is the one t that gives exactly the bits that are there, or the checkpoint is refused; and
a count is written as exactly the bits that Paddle would have.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.errors import UserError
from tangram.layout import Region
from tangram.relayout import Piece, TensorSpec
from tangram.relayout.mapping.states import SHARED

POWERS = ("beta1_pow", "beta2_pow")


def betas_of(objects: Mapping[str, Any]) -> tuple[float, float] | None:
    """The betas that a checkpoint says, None where it does not say the same for all parameters."""
    groups = objects.get("param_groups")
    every: list[Any] = [objects["settings"]] if isinstance(objects.get("settings"), dict) else []
    every += cast("list[Any]", groups) if isinstance(groups, list) else []
    tables = [cast("dict[str, Any]", group) for group in every if isinstance(group, dict)]
    found = {(float(a), float(b)) for a, b in (group["betas"] for group in tables if "betas" in group)}
    return found.pop() if len(found) == 1 else None


def with_betas(source: OpenCheckpoint, betas: Sequence[float]) -> OpenCheckpoint:
    """A checkpoint of which somebody says the betas: with counts of steps where it had powers."""
    settings: Any = source.objects.get("settings", {})
    known = replace(source, objects={**source.objects, "settings": {**settings, "betas": tuple(betas)}})
    return with_steps(known, betas)


@dataclass(frozen=True)
class _Count:
    """The place of a step count, which follows from powers."""

    param: str


def with_steps(source: OpenCheckpoint, betas: Sequence[float]) -> OpenCheckpoint:
    """The same with the number of steps that each parameter has taken, instead of the powers of the betas.

    Raises UserError, where one is looked at, for powers that are none of these betas', or that say the count no more.
    """
    powers: dict[str, list[tuple[str, float]]] = {}
    for state, beta in zip(POWERS, betas, strict=True):
        for name in source.specs:
            param = name.removesuffix(f".{state}")
            if param != name and param in source.specs and state in source.states:
                powers.setdefault(param, []).append((name, beta))
    if not powers:
        return source
    gone = {name for some in powers.values() for name, _ in some}
    holders = {name: [piece for piece in source.pieces if piece.tensor == name] for name in gone}

    def read(place: Hashable, name: str) -> Tensor:
        if not isinstance(place, _Count):
            return source.read(place, name)
        some: list[tuple[float, float]] = []
        for one, beta in powers[place.param]:
            value = source.read(holders[one][0].place, one)
            if value.numel() != 1 or value.dtype != torch.float32:
                raise UserError(f'{one} in "{source.path}" is no power of a beta, which is one float32')
            some.append((float(value), beta))
        return torch.tensor(float(step_of(some, f'{place.param} in "{source.path}"')))

    counts = [f"{param}.step" for param in powers]
    return replace(
        source,
        specs={
            **{name: spec for name, spec in source.specs.items() if name not in gone},
            **dict.fromkeys(counts, TensorSpec((), "float32")),
        },
        pieces=(
            *(piece for piece in source.pieces if piece.tensor not in gone),
            *(Piece(_Count(param), name, Region.full(())) for param, name in zip(powers, counts, strict=True)),
        ),
        read=read,
        states={**{k: v for k, v in source.states.items() if k not in POWERS}, "step": SHARED},
    )


def step_of(powers: Iterable[tuple[float, float]], what: str) -> int:
    """The number of steps after which all powers `(value, beta)` have exactly their bits."""
    steps: set[int] = set()
    for value, beta in powers:
        table = _powers(beta)
        if value < float(np.finfo(np.float32).smallest_normal):
            continue  # too small to be told from its neighbours
        at = int(np.searchsorted(-table, -np.float32(value)))
        if at == len(table) or float(table[at]) != value:
            raise UserError(f"{what}: {value:g} is no power of the beta {beta:g}: give the run's own --betas")
        steps.add(at)
    if not steps:
        raise UserError(f"{what}: its powers of the betas have run to 0, so they say no more how many steps there were")
    if len(steps) > 1:
        raise UserError(f"{what}: by one beta it is at step {min(steps)}, by the other at {max(steps)}: give --betas")
    return steps.pop()


@lru_cache(maxsize=8)
def _powers(beta: float) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """A beta's powers as Paddle multiplies them: the one after t steps at t, as long as one is less than before."""
    if not 0 < beta < 1:
        raise UserError(f"--betas: {beta:g} does not lie between 0 and 1, so its powers say no step")
    most = min(int(110 / -math.log(beta)) + 64, 1 << 26)
    table = np.multiply.accumulate(np.full(most, beta, np.float32))
    still = np.flatnonzero(table[1:] == table[:-1])
    return table[: int(still[0]) + 1] if len(still) else table


def power(beta: float, step: float, what: str) -> float:
    """A beta's power after so many steps. Raises UserError for what is no number of steps."""
    if step < 0 or step != int(step):
        raise UserError(f"{what} is {step:g}, which is no number of steps")
    table = _powers(beta)
    return float(table[min(int(step), len(table) - 1)])
