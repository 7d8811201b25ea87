"""What of the joint space may be left out, by name: a row for each of its axes.

A row turns what may be looked at (`space.Able`) into the same without an axis, so that the search never lays it out and
its bounds stay bounds. Kinds of optimisers, what is offloaded to the host and types of matmuls are not here: of these
nothing is looked at but what is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace

from tangram.errors import UserError
from tangram.planner.legality.engine import Rule
from tangram.planner.legality.enumerate import Able
from tangram.planner.space.recompute import NOTHING, SETS, WHOLE
from tangram.planner.space.schedule_formulas import SCHEDULES

NO_DATA = Rule("no DP ranks", lambda f, g: g.data == 1, lambda f, at: f"{at['data']} DP ranks are not to be used")
NO_RING = Rule(
    "no rings",
    lambda f, g: g.ulysses == g.context,
    lambda f, at: f"{at['context']} CP ranks send keys around, which is not to be used",
)

IN_BACKWARD = Rule(
    "one micro-batch",
    lambda f, g: g.micros == 1,
    lambda f, at: "parameters that are updated in the backward take one micro-batch a step: a larger one or more ranks",
)
"""Of updates in the backward."""


def required(able: Able, in_backward: bool, rows: int) -> Able:
    """What may be looked at, with what the training asks for."""
    return replace(able, rules=(*able.rules, *training_rules(in_backward, rows)))


def training_rules(in_backward: bool, rows: int) -> tuple[Rule, ...]:
    """Of updates in the backward, and of samples of several rows, which stay together."""
    together = Rule(
        "rows of a sample",
        lambda f, g: g.micro % rows == 0,
        lambda f, at: f"a sample is {rows} rows, which {at['micro']} rows of a micro-batch do not hold together",
    )
    return (*((IN_BACKWARD,) if in_backward else ()), *((together,) if rows > 1 else ()))


def _level(one: int) -> Callable[[Able], Able]:
    """Without what DP ranks divide by a level of ZeRO."""
    return lambda able: replace(
        able,
        zero=tuple(other for other in able.zero if other != one) or (0,),
        staged=tuple(other for other in able.staged if other != one) or (0,),
    )


def _again(names: Sequence[str]) -> Callable[[Able], Able]:
    """With these of what may be recomputed, and nothing."""
    return lambda able: replace(able, again=(NOTHING, *(one for one in able.again if one in names)))


def _schedule(name: str) -> Callable[[Able], Able]:
    return lambda able: replace(able, schedules=tuple(one for one in able.schedules if one != name))


AXES: dict[str, Callable[[Able], Able]] = {
    "data": lambda able: replace(able, rules=(*able.rules, NO_DATA)),
    "tensor": lambda able: replace(able, tensor=1),
    "context": lambda able: replace(able, context=1),
    "ring": lambda able: replace(able, rules=(*able.rules, NO_RING)),
    "ulysses": lambda able: replace(able, ulysses=1),
    "pipeline": lambda able: replace(able, pipeline=1),
    "expert": lambda able: replace(able, expert=1),
    "zero1": _level(1),
    "zero2": _level(2),
    "zero3": _level(3),
    "hsdp": lambda able: replace(able, near=False),
    "recompute": _again(()),
    "recompute-blocks": _again(tuple(SETS)),
    "recompute-norms": _again(WHOLE[1:]),
    "uneven": lambda able: replace(able, uneven=0),
    "inner": lambda able: replace(able, inner=False),
    **{one.name: _schedule(one.name) for one in SCHEDULES},
}
"""By name, what leaves it out."""


def left_out(typed: str) -> tuple[str, ...]:
    """Names of axes, typed with commas between. Raises UserError for one that is none, with the nearest."""
    names = tuple(one.strip() for one in typed.split(",") if one.strip())
    without(Able(), names)
    return names


def without(able: Able, names: Sequence[str]) -> Able:
    """What may be looked at, without some axes. Raises UserError for a name that is none, with the nearest."""
    known = {name.lower(): change for name, change in AXES.items()}
    for name in names:
        if (change := known.get(name.lower())) is None:
            near = difflib.get_close_matches(name.lower(), known, 2, 0.5)
            nearest = " or ".join(one for one in AXES if one.lower() in near)
            raise UserError(
                f'nothing of the search is called "{name}"{f" (did you mean {nearest}?)" if nearest else ""}: what may '
                f"be left out is {', '.join(AXES)}"
            )
        able = change(able)
    return able
