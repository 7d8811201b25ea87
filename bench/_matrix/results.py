"""What came of a cell, how it is judged, and the file in which results are kept from run to run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench._matrix.cells import Name
from bench._matrix.ranks import Found

SLOWER = 0.75
"""Of the throughput of the run before; what is below it twice is amber."""
State = Literal["same", "slower", "broken", "refused"]
"""same: as in one process (green); slower: the same, but slower than before (amber); broken: parity does not hold
(red); refused: the planner says in one sentence why there is no such plan (grey)."""


@dataclass(frozen=True)
class Result:
    """One cell."""

    model: str
    strategy: str
    ranks: int
    state: State
    why: str = ""
    """Of a refusal, or what broke."""
    apart: float = 0.0
    """The largest relative difference of a loss, or of a parameter's gradient or value (L2)."""
    steps: int = 0
    loss: float = 0.0
    """Of the last step."""
    tokens_per_s: float = 0.0
    predicted_tokens_per_s: float = 0.0
    before_tokens_per_s: float = 0.0
    """Of the run before on the same machine; 0: there was none."""
    memory: float = 0.0
    """Bytes of tensors at the highest moment of a step, on the rank that has most."""
    predicted_memory: float = 0.0
    commit: str = ""
    day: str = ""

    @property
    def name(self) -> Name:
        """Its place in the matrix."""
        return self.model, self.strategy


def wrong_of(found: Sequence[Found], trained: Iterable[str]) -> list[str]:
    """What the ranks of a cell found wrong, in time where they failed; gradients that none of them has compared."""
    in_time = sorted(found, key=lambda one: one.ended)
    wrong = list(dict.fromkeys(sentence for one in in_time for sentence in one.wrong))
    seen = frozenset[str]().union(*(one.gradients for one in found))
    if not wrong and (lacking := sorted(set(trained) - seen)):
        wrong.append(f"no rank has a gradient of {lacking[0]}")
    return wrong


def slower(now: Result, before: Result | None) -> bool:
    """Whether a cell is so much slower than it was that it is measured again."""
    return before is not None and now.state == "same" and 0 < now.tokens_per_s < SLOWER * before.tokens_per_s


def beside(now: Result, again: Result | None, before: Result | None) -> Result:
    """The result with what it was before beside it; `again`: measured once more, of which the better counts."""
    if before is None or not before.tokens_per_s:
        return now
    speed = max(now.tokens_per_s, again.tokens_per_s if again else 0.0)
    state = "slower" if again is not None and slower(replace(now, tokens_per_s=speed), before) else now.state
    return replace(now, state=state, tokens_per_s=speed, before_tokens_per_s=before.tokens_per_s)


@dataclass(frozen=True)
class Kept:
    """The results of runs, of which the newest of each cell counts, and the machine that they are of."""

    machine: str
    versions: Mapping[str, str | None]
    results: Mapping[Name, Result]

    def with_results(self, results: Iterable[Result]) -> Kept:
        """Newer ones in their place."""
        return replace(self, results={**self.results, **{one.name: one for one in results}})

    def write(self, path: Path) -> None:
        """As JSON, one cell a line so that changes show."""
        lines = ",\n".join(f"  {json.dumps(asdict(self.results[name]))}" for name in sorted(self.results))
        head = json.dumps({"machine": self.machine, "versions": self.versions})[1:-1]
        path.write_text(f'{{{head}, "cells": [\n{lines}\n]}}\n', encoding="utf-8")


def read(path: Path) -> Kept | None:
    """What was kept, if anything."""
    if not path.exists():
        return None
    page: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    cells = [Result(**cell) for cell in page["cells"]]
    return Kept(page["machine"], page["versions"], {cell.name: cell for cell in cells})
