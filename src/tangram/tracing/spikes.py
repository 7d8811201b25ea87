"""Losses and gradients that jump, held against the steps before; of numbers that a step has anyway.

    loss        of the global batch; a rank whose own part has jumped with it says so, with its samples
    gradient    of one layer's weights, on this rank, after its sum over ranks: which layer it begins in
    experts     how often the expert of a layer is chosen that is chosen most, beside the mean, where a run counts that
    peaks       the largest activation and the largest attention logit of each layer, in those steps that are looked at

A jump is one of logarithms, beside the median of the last `LEVEL` steps: more than a floor, and than `SIGMAS` times
what steps differ by from one to the next. So a loss that falls fast, a learning rate that changes and a noisy task are
no jumps. Nothing is said before `WINDOW` steps of this process have been seen. What is written is a ratio.
Attention logits mostly grow without a jump, until training diverges: the first above `LOGIT_MOST`, which is where Kimi
K2's QK-clip begins (2025), is told, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tangram.tracing.files.stacks import rank_words
from tangram.tracing.finding import Finding
from tangram.tracing.reading import RankTrace

WINDOW, LEVEL = 24, 9
LOSS_RISE, GRADIENT_RISE, LOAD_RISE = math.log(1.3), math.log(10.0), math.log(1.5)
ACTIVATION_RISE, LOGIT_RISE, LOGIT_MOST = math.log(3.0), math.log(2.0), 100.0
SIGMAS = 8.0
OWN, WHOLE, LAYERS = 1, 2, 3
"""After the loss: this rank's part of it, the norm of all that it has of the gradient, and that of each layer."""
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


class _Jumps:
    """Which of some numbers jump, from one time to the next; of their logarithms."""

    def __init__(self, rises: Sequence[float]) -> None:
        """`rises`: of each what it has to rise by, at least."""
        self._rises = np.array(rises)
        self._logs = np.full((WINDOW, len(rises)), np.nan)
        self._quiet = np.zeros(len(rises), dtype=np.int64)  # times for which one that jumped says nothing more

    def fresh(self, now: npt.NDArray[np.float64]) -> dict[int, float]:
        """By the place of a number its rise; nothing of those that have jumped a moment ago."""
        with np.errstate(invalid="ignore"):
            candidates = np.flatnonzero(now > self._logs.mean(0) + self._rises)
        over = {int(at): over for at in candidates if (over := self._over(int(at), now[at])) > 0}
        fresh = {at: rise for at, rise in over.items() if not self._quiet[at]}
        self._quiet = np.maximum(self._quiet - 1, 0)
        self._quiet[[*over]] = LEVEL
        return fresh

    def level(self, at: int) -> float:
        """What a number was of late."""
        return float(np.median(self._logs[-LEVEL:, at]))

    def add(self, now: npt.NDArray[np.float64]) -> None:
        """They are a part of what is to come after."""
        self._logs[:-1] = self._logs[1:]
        self._logs[-1] = now

    def _over(self, at: int, now: float) -> float:
        """By how much one has jumped; 0: it has not."""
        rise = float(now) - self.level(at)
        sigma = TO_SIGMA * float(np.median(np.abs(np.diff(self._logs[:, at]))))
        return rise if rise > max(self._rises[at], SIGMAS * sigma) else 0.0


def _logarithms(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Nothing is said of numbers that are 0 or less until they have left."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values)
    logs[~np.isfinite(logs)] = np.nan
    return logs


_PEAKS = {
    "activation": (
        "activation outlier",
        "the largest activation of {layer} in step {step} is {times} times what it was",
    ),
    "logit": ("attention logits", "the largest attention logit of {layer} in step {step} is {times} times what it was"),
    "high logit": (
        "attention logits",
        f"the largest attention logit of {{layer}} is above {LOGIT_MOST:g} in step {{step}}: its softmax saturates, as "
        "before training diverges; QK norm, QK-clip or a lower learning rate keep logits small",
    ),
}
"""By a line's kind the finding's, and its text."""


def _load_words(one: Mapping[str, Any], step: int) -> str:
    return (
        f"expert {one['expert']} of {one['layer']} is given {one['times']:g} times as much as the mean in step {step}, "
        f"where before the most was {one['before']:g}"
    )


class Spikes:
    """Looks at the steps of one rank, one after the other."""

    def __init__(self, layers: Sequence[str]) -> None:
        """`layers`: of each trained parameter that it is in."""
        self._layers = [*dict.fromkeys(layers)]
        self._of = np.array([self._layers.index(one) for one in layers], dtype=np.intp)
        self._jumps = _Jumps([LOSS_RISE, math.inf, math.inf, *[GRADIENT_RISE] * len(self._layers)])
        self._experts: tuple[tuple[str, ...], _Jumps] = (), _Jumps(())
        self._peaks: tuple[tuple[str, ...], _Jumps] = (), _Jumps(())
        self._high: set[str] = set()  # layers whose logits have been above the most

    def judge(self, step: int, numbers: StepNumbers) -> list[dict[str, Any]]:
        """What jumps in a step, as lines for the names file."""
        squares = np.bincount(self._of, np.square(numbers.norms), len(self._layers))
        now = _logarithms(np.concatenate([(numbers.loss, numbers.own, math.sqrt(squares.sum())), np.sqrt(squares)]))
        found = self._in_words(step, numbers, self._jumps.fresh(now), now)
        self._jumps.add(now)
        return found

    def experts(self, step: int, loads: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        """The same of how often each layer's experts were chosen: of each the most, beside the mean."""
        names, jumps = self._experts
        if names != (*loads,):
            names, jumps = self._experts = (*loads,), _Jumps([LOAD_RISE] * len(loads))
        most = np.array([max(own, default=0) * len(own) / max(sum(own), 1) for own in loads.values()], dtype=float)
        now = _logarithms(most)
        found: list[dict[str, Any]] = []
        for at in jumps.fresh(now):
            layer, before = names[at], round(math.exp(jumps.level(at)), 1)
            words = {"expert": int(np.argmax(loads[layer])), "times": round(float(most[at]), 1), "before": before}
            found.append({"spike": "experts", "step": step, "layer": layer, **words})
        jumps.add(now)
        return found

    def peaks(self, step: int, peaks: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
        """The same of each layer's largest activation and attention logit; nothing of none."""
        names, jumps = self._peaks
        if peaks and names != (*peaks,):
            rises = [ACTIVATION_RISE] * len(peaks) + [LOGIT_RISE] * len(peaks)
            names, jumps = self._peaks = (*peaks,), _Jumps(rises)
        if not peaks:
            return []
        now = _logarithms(np.array([*peaks.values()], dtype=float).T.ravel())
        found: list[dict[str, Any]] = []
        for at, rise in jumps.fresh(now).items():
            kind = ("activation", "logit")[at // len(names)]
            words = {"layer": names[at % len(names)], "times": round(math.exp(rise), 1)}
            found.append({"spike": kind, "step": step, **words})
        jumps.add(now)
        high = {layer for layer, (_, logit) in peaks.items() if logit > LOGIT_MOST} - self._high
        self._high |= high
        high -= {one["layer"] for one in found if one["spike"] == "logit"}  # that it has jumped says more
        return found + [{"spike": "high logit", "step": step, "layer": one, "times": 1.0} for one in sorted(high)]

    def _in_words(
        self, step: int, numbers: StepNumbers, fresh: dict[int, float], now: npt.NDArray[np.float64]
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if 0 in fresh:
            # The loss is the sum of the ranks' parts: at least one of them has risen as much.
            own = float(now[OWN]) - self._jumps.level(OWN)
            if math.expm1(own) >= 0.5 * math.expm1(fresh[0]):
                words = {"times": round(math.exp(fresh[0]), 1), "samples": numbers.samples()}
                found.append({"spike": "loss", "step": step, **words})
        # A layer with next to no gradient may have some once, which the whole one does not feel.
        felt = (at for at in fresh if at >= LAYERS and now[at] > self._jumps.level(WHOLE))
        layers = sorted(felt, key=lambda at: -fresh[at])
        if layers:
            words = {
                "times": round(math.exp(fresh[layers[0]]), 1),
                "parts": [self._layers[at - LAYERS] for at in layers],
            }
            found.append({"spike": "gradient", "step": step, **words})
        return found


def spike_findings(traces: Sequence[RankTrace]) -> list[Finding]:
    """Jumps of losses, of gradients in steps whose loss did not jump, and of what layers compute, in order of steps."""
    found: dict[tuple[int, str], list[tuple[int, dict[str, Any]]]] = {}
    for trace in traces:
        for one in trace.spikes:
            found.setdefault((int(one["step"]), str(one["spike"])), []).append((trace.rank, dict(one)))
    result: list[Finding] = []
    for (step, kind), by_rank in sorted(found.items()):
        ranks = tuple(dict.fromkeys(rank for rank, _ in by_rank))
        most = max((one for _, one in by_rank), key=lambda one: one["times"])
        if kind == "loss":
            text = f"the loss of step {step} is {most['times']:g} times that of the steps before"
            whose = f", by the part of {rank_words(ranks)}" if len(ranks) < traces[0].world else ""
            details = tuple(f"rank {rank} was trained on {one['samples']}" for rank, one in by_rank)
            result.append(Finding("loss spike", ranks, text + whose, step, details=details))
        elif kind == "experts":
            layers = {str(one["layer"]): one for _, one in by_rank}
            result += [
                Finding("expert load", ranks, _load_words(one, step), step, layer=at) for at, one in layers.items()
            ]
        elif kind in _PEAKS:
            name, words = _PEAKS[kind]
            first = str(
                by_rank[0][1]["layer"]
            )  # each rank tells of layers in their order, and a jump goes on through them
            times = max(one["times"] for _, one in by_rank if one["layer"] == first)
            more = len({one["layer"] for _, one in by_rank}) - 1
            others = f", and that of {more} more layer{'s' * (more > 1)}, too" if more else ""
            text = words.format(layer=first, step=step, times=f"{times:g}") + others
            result.append(Finding(name, ranks, text, step, layer=first))
        elif (step, "loss") not in found:
            first, *more = most["parts"]
            others = f", and that of {len(more)} more has jumped, too" if more else ""
            text = f"the gradient of {first} in step {step} is {most['times']:g} times that of the steps before{others}"
            result.append(Finding("gradient spike", ranks, text, step, layer=first))
    return result
