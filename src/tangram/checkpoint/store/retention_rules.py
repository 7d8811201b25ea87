"""Rules of which checkpoints stay, as data: `last=3`, `every=1000`, `best=eval.loss:min:2`, `younger=7d`.

Apart from `retention`, which carries them out, because plans are read without torch.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tangram.errors import UserError

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class KeepBest:
    """Keep some by a number that was saved with them."""

    metric: str
    """Its name among the objects: `eval.loss`."""
    count: int = 1
    largest: bool = False


@dataclass(frozen=True)
class Policy:
    """What stays; each rule adds to the others."""

    last: int = 0
    every: int = 0
    """Steps; 0 keeps none."""
    best: tuple[KeepBest, ...] = ()
    younger: datetime.timedelta | None = None


def parse(rules: Sequence[str]) -> Policy:
    """The policy that rules as `last=3` say. Raises UserError for what is no rule, and where there is none."""
    if not rules:
        raise UserError("say what stays: --keep last=3, every=1000, best=eval.loss:min or younger=7d")
    policy: dict[str, Any] = {}
    best: list[KeepBest] = []
    for rule in rules:
        key, _, value = rule.partition("=")
        if key in policy:
            raise UserError(f"--keep {key} is there twice: give it once")
        if key in ("last", "every"):
            policy[key] = _count(value, rule)
        elif key == "best":
            best.append(_best(value, rule))
        elif key == "younger":
            policy[key] = _age(value, rule)
        else:
            raise UserError(f"--keep {rule}: give last=N, every=STEPS, best=NAME:min:N, best=NAME:max:N or younger=7d")
    return Policy(**policy, best=tuple(best))


def _count(text: str, rule: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or not int(text):
        raise UserError(f"--keep {rule}: give a number of 1 or more")
    return int(text)


def _best(value: str, rule: str) -> KeepBest:
    name, _, rest = value.partition(":")
    order, _, number = rest.partition(":")
    if not name or order not in ("", "min", "max"):
        raise UserError(f"--keep {rule}: give best=NAME, best=NAME:max or best=NAME:min:N")
    return KeepBest(name, _count(number, rule) if number else 1, order == "max")


def _age(value: str, rule: str) -> datetime.timedelta:
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", value)
    if match is None:
        raise UserError(f"--keep {rule}: give an age as 30m, 12h, 7d or 4w")
    return datetime.timedelta(seconds=int(match[1]) * _AGES[match[2]])
