"""Outcomes of all operators with one torch on one device, as a file that is small and can be read by eye.

A line for each operator and type: cases in order, each `[case, class, worst, over, own, [NaN, signs, flushed], digest,
bins]`. Numbers are kept to three digits, bins without the zeros at their end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bench._accuracy.judge import CLASSES, Outcome
from bench._accuracy.ulps import EDGES
from tangram.errors import UserError

FORMAT = "tangram operator accuracy 1"
Key = tuple[str, str, str]
"""Operator, type, case."""


@dataclass(frozen=True)
class Sheet:
    """What was found, and with what."""

    about: Mapping[str, str]
    """The torch, the device, how it was set."""
    outcomes: Mapping[Key, Outcome]
    copies: Mapping[tuple[str, str], str]
    """Of operators that only move values, by name and type: whether they kept them."""
    missing: Mapping[tuple[str, str], str]
    """Operators that this torch cannot run on this device, by name and type, and what it says."""

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        words = ["torch", self.about["torch"].removesuffix("+cpu"), self.about["device"], self.about["setting"]]
        return re.sub(r"[^\w.]+", "-", " ".join(words)).strip("-").lower()


def write(sheet: Sheet, path: Path) -> None:
    """The same outcomes give the same bytes."""
    lines = [f"{json.dumps('format')}: {json.dumps(FORMAT)}", f"{json.dumps('about')}: {json.dumps(dict(sheet.about))}"]
    for part, table in (("moves", sheet.copies), ("missing", sheet.missing)):
        texts = {f"{name}|{kind}": how for (name, kind), how in table.items()}
        lines.append(f"{json.dumps(part)}: {json.dumps(texts)}")
    own: dict[str, list[Any]] = {}
    for (name, kind, case), outcome in sheet.outcomes.items():
        own.setdefault(f"{name}|{kind}", []).append([case, *_packed(outcome)])
    lines += [f"{json.dumps(key)}: {json.dumps(cases, separators=(',', ':'))}" for key, cases in own.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path) -> Sheet:
    """UserError where it is no such file."""
    try:
        found = cast("dict[str, Any]", json.loads(path.read_text()))
        if found.pop("format") != FORMAT:
            raise KeyError("format")
        about = found.pop("about")
        moves, missing = ({_key(key): how for key, how in found.pop(part).items()} for part in ("moves", "missing"))
        outcomes = {
            (*_key(key), str(case)): _unpacked(packed) for key, cases in found.items() for case, *packed in cases
        }
        return Sheet(about, outcomes, moves, missing)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'"{path}" is no file of operators\' accuracy, or a broken one: {error}') from error


def _key(text: str) -> tuple[str, str]:
    name, kind = text.split("|")
    return name, kind


def _packed(one: Outcome) -> list[Any]:
    bins = list(one.histogram[:-1])
    while bins and not bins[-1]:
        bins.pop()
    numbers = [float(f"{x:.3g}") for x in (one.worst, one.over, one.own)]
    return [CLASSES.index(one.verdict), *numbers, [one.special, one.signs, one.flushed], one.digest, bins]


def _unpacked(packed: list[Any]) -> Outcome:
    verdict: int
    verdict, worst, over, own, (special, signs, flushed), digest, bins = packed
    filled = (*bins, *[0] * (len(EDGES) - len(bins)), special)
    return Outcome(CLASSES[verdict], worst, over, own, special, signs, flushed, filled, digest)
