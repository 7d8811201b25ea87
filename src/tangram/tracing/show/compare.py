"""Two traces beside each other: where a step takes longer, and which collectives are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tangram.tracing.files.format import COUNTED
from tangram.tracing.reading import RankTrace, read
from tangram.tracing.show.report import axes_of
from tangram.tracing.sites import size_words
from tangram.tracing.slow import shared_steps, waits_over

WARM = 2
"""First steps, which are left out."""
NOISE = 1.5
"""Half-widths of the middle half of the steps of both: what is apart by less is taken for noise."""


@dataclass(frozen=True)
class Comparison:
    """Of two traces."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    calls: tuple[str, ...]
    """What the second calls in a step more often, or less, than the first; rank by rank."""

    def as_json(self) -> dict[str, object]:
        rows = [dict(zip(self.headers, row, strict=True)) for row in self.rows]
        return {"figures": rows, "calls": [*self.calls]}


def compare(first: Path, second: Path) -> Comparison:
    """Of two runs. Raises UserError for what is no trace."""
    one, other = read(first), read(second)
    rows: list[tuple[str, ...]] = []
    for name, of in _figures([*one, *other]):
        a, b = _by_step(one, of), _by_step(other, of)
        if (len(a) or len(b)) and (a.any() or b.any()):
            rows.append((name, *_beside(a, b)))
    return Comparison(("figure", "first ms", "second ms", "change", "more than noise"), tuple(rows), _calls(one, other))


Of = Callable[[RankTrace], npt.NDArray[np.float64]]


def _figures(traces: Sequence[RankTrace]) -> list[tuple[str, Of]]:
    """Names, and milliseconds of each step."""

    def own(phase: int) -> Of:
        return lambda trace: trace.rows["own_us"][:, phase] / 1e3

    def wait(axes: str) -> Of:
        return lambda trace: waits_over(trace, axes) / 1e3

    phases = [(f"own time in {phase.word}", own(phase)) for phase in COUNTED]
    waits = [(f"wait over {axes}", wait(axes)) for axes in axes_of(traces)]
    return [("step", lambda trace: trace.rows["nanoseconds"] / 1e6), *phases, *waits]


def _by_step(traces: Sequence[RankTrace], of: Of) -> npt.NDArray[np.float64]:
    """The median over ranks of each step that all have, but the first ones."""
    shared = shared_steps(traces)
    shared = shared[:-1] if len(shared) > 1 else shared  # the last has what comes after it, as the end of the run
    shared = shared[min(WARM, len(shared) - 1) :] if len(shared) else shared
    every = [of(trace)[np.searchsorted(trace.rows["step"], shared)] for trace in traces]
    return np.median(np.stack(every), 0) if len(shared) else np.zeros(0)


def _beside(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> tuple[str, str, str, str]:
    if not len(a) or not len(b):
        return ("" if not len(a) else f"{np.median(a):.2f}", "" if not len(b) else f"{np.median(b):.2f}", "", "")
    one, other = float(np.median(a)), float(np.median(b))
    spread = sum(float(np.subtract(*np.percentile(some, [75, 25]))) / 2 for some in (a, b))
    more = abs(other - one) > NOISE * spread
    change = f"{100 * (other / one - 1):+.1f} %" if one else ""
    return f"{one:.2f}", f"{other:.2f}", change, ("longer" if other > one else "shorter") if more else ""


def _calls(one: Sequence[RankTrace], other: Sequence[RankTrace]) -> tuple[str, ...]:
    """Of ranks that both have, those whose calls of a step are others; equal words once."""
    by_rank = {trace.rank: trace for trace in other}
    found: dict[str, list[int]] = {}
    for trace in one:
        if trace.rank in by_rank:
            a, b = _kinds(trace), _kinds(by_rank[trace.rank])
            for (op, axes, nbytes, dtype), count in [*(b - a).items(), *((k, -n) for k, n in (a - b).items())]:
                text = f"{count:+d} {op} over {axes} of {size_words(nbytes, dtype)}"
                found.setdefault(text, []).append(trace.rank)
    every = len([trace for trace in one if trace.rank in by_rank])

    def where(ranks: list[int]) -> str:
        return "all ranks" if len(ranks) == every else f"{len(ranks)} of {every} ranks, as rank {ranks[0]}"

    return tuple(f"{text} a step on {where(ranks)}" for text, ranks in found.items())


def _kinds(trace: RankTrace) -> Counter[tuple[str, str, int, str]]:
    """The calls of the last step that it has learned from."""
    sites = [trace.sites.get(number, {}) for number in trace.sequences[max(trace.sequences)]] if trace.sequences else []
    groups = {number: str(group["axes"]) for number, group in trace.groups.items()}
    return Counter((s["op"], groups.get(s["group"], ""), int(s["bytes"]), s["dtype"]) for s in sites if s)
