"""What the charts of a report show, as plain values; `report.js` draws them.

A chart is lines over steps, levels (horizontal lines with a name) and marks (steps at which something happened). No
colour and no size is said here: a line has a role, and the style sheet says how that role looks in light and dark.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from tangram.planner.report import figures
from tangram.training.observe.events import Record
from tangram.training.observe.summary import Summary, durations, mfu, share_of_peak

MOST_POINTS = 2000  # of one line: more than a screen has columns
_HIGHEST = 700.0  # of a loss whose exponential is a number
SMOOTH_FROM = 50  # steps; a shorter curve is read as it is
LOSS = "%{y:.4f}"


@dataclass(frozen=True)
class ChartLine:
    """One quantity over steps."""

    name: str
    role: str
    """How it looks: "train", "smooth", "points", "plain"."""
    x: Sequence[int]
    y: Sequence[float]
    hover: str
    """What is said of a point, as plotly writes numbers; `%{customdata}` is what `more` has for it."""
    more: Sequence[float | None] = ()


@dataclass(frozen=True)
class ChartLevel:
    """One value that holds for all steps, to compare with."""

    name: str
    y: float


@dataclass(frozen=True)
class ChartMark:
    """Something that happened after a step."""

    x: int
    text: str


@dataclass(frozen=True)
class Chart:
    """One chart; `caption` is what it shows, for those who do not see it."""

    key: str
    title: str
    unit: str
    caption: str
    lines: Sequence[ChartLine]
    levels: Sequence[ChartLevel] = ()
    marks: Sequence[ChartMark] = ()
    from_zero: bool = True
    ticks: str = "~s"
    """How the numbers of the upright axis are written, in d3's notation."""
    log: bool = False
    """Whether the upright axis is logarithmic."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def charts(record: Record, summary: Summary, *, by_token: bool = True) -> list[Chart]:
    """The charts of a run, the most important first; what was not measured has none. `by_token`: whether the loss is
    the cross-entropy of the next token, so that there is a perplexity."""
    if not record.steps:
        return []
    loss = _loss(record, summary)
    made = [
        loss,
        _perplexity(loss) if loss is not None and by_token else None,
        _throughput(record, summary),
        _utilisation(record),
        _memory(record, summary),
        _gradients(record),
        _learning_rate(record),
    ]
    return [chart for chart in made if chart is not None]


def axes(record: Record, drawn: Sequence[Chart], since: int | None) -> dict[str, Any]:
    """What else stands for the steps of the charts: tokens, and time in the largest unit that fits, each as a title and
    a number for each of `steps`. `since`: the step of the checkpoint that the run went on from."""
    used = sorted(
        {x for chart in drawn for line in chart.lines for x in line.x}
        | {mark.x for chart in drawn for mark in chart.marks}
    )
    steps, tokens = [step.step for step in record.steps], [*accumulate(step.tokens for step in record.steps)]
    at = [bisect_right(steps, x) - 1 for x in used]
    ends = [0.0, *(step.seconds for step in record.steps)]
    unit, seconds = next((unit for unit in _UNITS if ends[-1] >= 2 * unit[1]), _UNITS[-1])
    after = "" if since is None else f" since step {since:,}"
    return {
        "steps": used,
        "tokens": {"title": f"tokens{after}", "at": [tokens[i] if i >= 0 else 0 for i in at]},
        "time": {"title": f"{unit} of training{after}", "at": [_short(ends[i + 1] / seconds) for i in at]},
    }


_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def predicted(summary: Summary, key: str) -> float | None:
    """A predicted figure; None where there is none that is a positive finite number."""
    value = (summary.predicted or {}).get(key)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)


def thinned(x: Sequence[int], y: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """The places of at most so many points that look like all of them: of each stretch its lowest and its highest.

    The first and the last point stay, and no spike is lost, which taking every n-th point would do.
    """
    if len(x) <= most:
        return list(range(len(x)))
    stretches = (most - 2) // 2
    kept = {0, len(x) - 1}
    for number in range(stretches):
        stretch = range(number * len(x) // stretches, (number + 1) * len(x) // stretches)
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    return sorted(kept)


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of so many values around each; fewer at both ends, so that the curve is not shifted."""
    half = width // 2
    ways = (min(half, at, len(values) - 1 - at) for at in range(len(values)))
    return [fmean(values[at - way : at + way + 1]) for at, way in enumerate(ways)]


def _line(
    name: str, role: str, points: Mapping[int, float | None], hover: str, more: Mapping[int, float] | None = None
) -> ChartLine:
    """A line through the points that are finite numbers, thinned."""
    known = [(step, value) for step, value in points.items() if value is not None and math.isfinite(value)]
    x, y = [step for step, _ in known], [value for _, value in known]
    kept = thinned(x, y)
    told = [more[x[at]] for at in kept] if more else []
    return ChartLine(
        name, role, [x[at] for at in kept], [_short(y[at]) for at in kept], hover, [_short(one) for one in told]
    )


def _short(value: float) -> float:
    """Seven digits: more cannot be seen, and the page is smaller."""
    return float(f"{value:.7g}")


def _loss(record: Record, summary: Summary) -> Chart | None:
    losses = {step.step: step.loss for step in record.steps if math.isfinite(step.loss)}
    rates = {step.step: step.lr for step in record.steps}
    held_out: dict[int, float | None] = {event.step: event.loss for event in record.evaluations}
    if summary.eval_loss is not None:
        held_out.setdefault(record.steps[-1].step, summary.eval_loss)
    raw = _line("training, each step", "train", losses, f"{LOSS} at learning rate %{{customdata:.2e}}", rates)
    lines = [raw]
    if len(losses) >= SMOOTH_FROM:
        width = max(5, len(losses) // 30) | 1
        even = dict(zip(losses, smoothed(list(losses.values()), width), strict=True))
        lines.append(_line(f"training, mean of {width} steps", "smooth", even, LOSS))
    if any(value is not None and math.isfinite(value) for value in held_out.values()):
        lines.append(_line("held out", "points", dict(sorted(held_out.items())), LOSS))
    if not any(line.x for line in lines):
        return None
    entropy = summary.unigram_entropy
    levels = [ChartLevel("unigram entropy", entropy)] if entropy is not None and math.isfinite(entropy) else []
    marks = [
        ChartMark(save.step, f"committed, training stood still for {figures.seconds(save.blocked_seconds)}")
        for save in record.saves
    ]
    said = "No training loss is a finite number."
    if len(raw.x) == 1:
        said = f"Training loss {raw.y[0]:.2f} at step {raw.x[0]:,}."
    elif raw.x:
        said = f"Training loss from {raw.y[0]:.2f} to {raw.y[-1]:.2f} over steps {raw.x[0]:,} to {raw.x[-1]:,}."
    return Chart("loss", "Loss", "nats per token", said, lines, levels, marks, from_zero=False, ticks="")


def _perplexity(loss: Chart) -> Chart | None:
    """Of the training loss, smoothed where it is, and of the held-out one."""
    smooth = any(line.role == "smooth" for line in loss.lines)
    lines = [
        replace(line, y=[_short(math.exp(min(y, _HIGHEST))) for y in line.y], hover="%{y:,.2f}", more=())
        for line in loss.lines
        if not (smooth and line.role == "train")
    ]
    last = lines[-1]
    if not last.x:
        return None
    said = f"exp(loss), {last.name}: {last.y[-1]:,.2f} at step {last.x[-1]:,}."
    return Chart("perplexity", "Perplexity", "of a token", said, lines, from_zero=False, log=True)


def _throughput(record: Record, summary: Summary) -> Chart | None:
    rates = {
        step.step: step.tokens / took
        for step, took in zip(record.steps, durations(record), strict=True)
        if took is not None
    }
    if not rates or summary.tokens_per_s is None:
        return None
    said = f"Median {figures.rate(summary.tokens_per_s, 'tokens/s')}."
    line = _line("measured", "plain", rates, "%{y:,.0f} tokens/s")
    return Chart("throughput", "Throughput", "tokens/s", said, [line], _predicted(summary, "tokens_per_s"))


def _utilisation(record: Record) -> Chart | None:
    shares = {
        step.step: share_of_peak(step, took)
        for step, took in zip(record.steps, durations(record), strict=True)
        if took is not None
    }
    settled = mfu(record)
    if settled is None:
        return None
    said = f"Median {figures.percent(settled)} of what the devices can do."
    line = _line("measured", "plain", shares, "%{y:.1%}")
    return Chart("mfu", "Model FLOPs utilisation", "MFU", said, [line], ticks=".0%" if settled > 0.02 else ".1%")


def _memory(record: Record, summary: Summary) -> Chart | None:
    resident = {step.step: step.rss_mb for step in record.steps if step.rss_mb}
    if not resident:
        return None
    line = _line("measured on rank 0", "plain", resident, "%{y:,.0f} MB")
    said = f"Rank 0 at the end of a step: {figures.megabytes(max(resident.values()))} at most."
    return Chart("memory", "Memory", "MB", said, [line], _predicted(summary, "memory_mb"), ticks=",")


def _gradients(record: Record) -> Chart | None:
    line = _line("before clipping", "plain", {step.step: step.gradient_norm for step in record.steps}, "%{y:.3g}")
    if not line.x:
        return None
    return Chart("gradients", "Gradient norm", "L2", "Of the whole gradient, before clipping.", [line])


def _learning_rate(record: Record) -> Chart | None:
    rates = {step.step: step.lr for step in record.steps}
    line = _line("of each step", "plain", rates, "%{y:.3e}")
    if len({*rates.values()}) < 2:  # a constant one is among the keys of the plan
        return None
    said = f"From {line.y[0]:.2g} to {line.y[-1]:.2g}, {max(line.y):.2g} at most."
    return Chart("lr", "Learning rate", "", said, [line], ticks=".1e")


def _predicted(summary: Summary, key: str) -> list[ChartLevel]:
    value = predicted(summary, key)
    return [] if value is None else [ChartLevel("predicted", value)]
