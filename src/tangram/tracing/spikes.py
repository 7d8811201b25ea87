"""Losses and gradients that jump, held against the steps before; of numbers that a step has anyway.

    loss        of the global batch; a rank whose own part has jumped with it says so, with its samples
    gradient    of one layer's weights, on this rank, after its sum over ranks: which layer it begins in

A jump is one of logarithms, beside the median of the last `LEVEL` steps: more than a floor, and than `SIGMAS` times
what steps differ by from one to the next. So a loss that falls fast, a learning rate that changes and a noisy task are
no jumps. Nothing is said before `WINDOW` steps of this process have been seen. What is written is a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tangram.tracing.finding import Finding
from tangram.tracing.reading import RankTrace
from tangram.tracing.stacks import rank_words

WINDOW, LEVEL = 24, 9
LOSS_RISE, GRADIENT_RISE = math.log(1.3), math.log(10.0)
SIGMAS = 8.0
TO_SIGMA = 1.4826 / math.sqrt(2)
"""Of the median of what neighbours differ by, where noise is normal."""


@dataclass(frozen=True)
class StepNumbers:
    """What a rank knows of a step before its update."""

    loss: float
    """Of the global batch."""
    own: float
    """This rank's part of it."""
    norms: Sequence[float]
    """Of this rank's part of each trained parameter's gradient, in the order of `Spikes`' layers."""
    samples: Callable[[], str]
    """What this rank was trained on, in words; asked for after a jump alone."""


class Spikes:
    """Looks at the steps of one rank, one after the other."""

    def __init__(self, layers: Sequence[str]) -> None:
        """`layers`: of each trained parameter that it is in."""
        self._layers = [*dict.fromkeys(layers)]
        self._of = np.array([self._layers.index(one) for one in layers], dtype=np.intp)
        columns = 2 + len(self._layers)
        self._logs = np.full((WINDOW, columns), np.nan)
        self._rises = np.array([LOSS_RISE, LOSS_RISE, *[GRADIENT_RISE] * len(self._layers)])
        self._quiet = np.zeros(columns, dtype=np.int64)  # steps for which a column that jumped says nothing more

    def judge(self, step: int, numbers: StepNumbers) -> list[dict[str, Any]]:
        """What jumps in a step, as lines for the names file."""
        squares = np.bincount(self._of, np.square(numbers.norms), len(self._layers))
        with np.errstate(divide="ignore", invalid="ignore"):
            now = np.log(np.concatenate([(numbers.loss, numbers.own), np.sqrt(squares)]))
            now[~np.isfinite(now)] = np.nan  # nothing is said of numbers that are 0 or less until they have left
            candidates = np.flatnonzero(now > self._logs.mean(0) + self._rises)
        over = {int(at): over for at in candidates if at != 1 and (over := self._over(int(at), now[at])) > 0}
        fresh = {at: rise for at, rise in over.items() if not self._quiet[at]}
        self._quiet = np.maximum(self._quiet - 1, 0)
        self._quiet[[*over]] = LEVEL
        found = self._in_words(step, numbers, fresh, now)
        self._logs[:-1] = self._logs[1:]
        self._logs[-1] = now
        return found

    def _over(self, at: int, now: float) -> float:
        """By how much a column has jumped, as a logarithm; 0: it has not."""
        past = self._logs[:, at]
        rise = float(now - np.median(past[-LEVEL:]))
        sigma = TO_SIGMA * float(np.median(np.abs(np.diff(past))))
        return rise if rise > max(self._rises[at], SIGMAS * sigma) else 0.0

    def _in_words(
        self, step: int, numbers: StepNumbers, fresh: dict[int, float], now: npt.NDArray[np.float64]
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if 0 in fresh:
            # The loss is the sum of the ranks' parts: at least one of them has risen as much.
            own = float(now[1] - np.median(self._logs[-LEVEL:, 1]))
            if math.expm1(own) >= 0.5 * math.expm1(fresh[0]):
                words = {"times": round(math.exp(fresh[0]), 1), "samples": numbers.samples()}
                found.append({"spike": "loss", "step": step, **words})
        layers = sorted((at for at in fresh if at > 1), key=lambda at: -fresh[at])
        if layers:
            words = {"times": round(math.exp(fresh[layers[0]]), 1), "parts": [self._layers[at - 2] for at in layers]}
            found.append({"spike": "gradient", "step": step, **words})
        return found


def spike_findings(traces: Sequence[RankTrace]) -> list[Finding]:
    """Jumps of losses, and of gradients in steps whose loss did not jump, in order of steps."""
    found: dict[tuple[int, str], list[tuple[int, dict[str, Any]]]] = {}
    for trace in traces:
        for one in trace.spikes:
            found.setdefault((int(one["step"]), str(one["spike"])), []).append((trace.rank, dict(one)))
    result: list[Finding] = []
    for (step, kind), said in sorted(found.items()):
        ranks = tuple(rank for rank, _ in said)
        most = max((one for _, one in said), key=lambda one: one["times"])
        if kind == "loss":
            text = f"the loss of step {step} is {most['times']:g} times that of the steps before"
            whose = f", by the part of {rank_words(ranks)}" if len(ranks) < traces[0].world else ""
            details = tuple(f"rank {rank} was trained on {one['samples']}" for rank, one in said)
            result.append(Finding("loss spike", ranks, text + whose, step, details=details))
        elif (step, "loss") not in found:
            first, *more = most["parts"]
            others = f", and that of {len(more)} more has jumped, too" if more else ""
            text = f"the gradient of {first} in step {step} is {most['times']:g} times that of the steps before{others}"
            result.append(Finding("gradient spike", ranks, text, step, layer=first))
    return result
