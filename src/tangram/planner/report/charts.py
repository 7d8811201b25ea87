"""What the charts of a plan's report show, as plain values; `report.js` draws them.

A picture is traces (bars, lines, areas or points) over two axes, and levels to compare with. No colour and no size is
said here: a trace has a role, and the style sheet says how that looks in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tangram.planner.cost.memory_timeline import PARTS as KEPT
from tangram.planner.cost.memory_timeline import Footprint
from tangram.planner.cost.timeline import KINDS, Play, events_of
from tangram.planner.report.answer_tables import HELD, PARTS, again_words
from tangram.planner.report.figures import three
from tangram.planner.search.pareto import Fronts
from tangram.planner.search.strategy import Choice, safe

GB = 1e-9
AFTER = {"data": "gradients and parameters over DP ranks"}
"""Of kinds of actions whose own names say little."""
MOST_ROWS = 16
"""Strategies that are drawn beside each other."""
MOST_LINES = 12
"""Stages whose memory is drawn over time."""
KEPT_WORDS = {
    "parameters": "parameters", "gradients": "gradients", "optimiser": "optimiser's states",
    "activations": "kept for the backward", "logits": "logits and their gradient",
    "again": "layers recomputed, widest gradient", "gathered": "gathered parameters", "workspace": "workspaces",
    "reserve": "allocator's reserve", "context": "context",
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """One series of a picture."""

    name: str
    role: str
    """Its colour, by a name of the style sheet."""
    kind: str
    """"bars", "area", "steps" (lines that hold until the next point), "line", "points" or "intervals"."""
    x: Sequence[Any]
    y: Sequence[Any]
    text: Sequence[str] = ()
    """What is said of each point."""
    base: Sequence[float] = ()
    """Where bars begin."""
    label: Sequence[str] = ()
    """What is written at each point."""
    low: Sequence[float] = ()
    """Where intervals begin, along x."""
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Level:
    """One value to compare with."""

    name: str
    value: float
    upright: bool = False
    """Whether it is one of the x axis."""


@dataclass(frozen=True)
class Picture:
    """One chart; `said` is what it shows, for those who do not see it."""

    key: str
    title: str
    unit: str
    alt_text: str
    x_title: str
    y_title: str
    traces: Sequence[Trace]
    levels: Sequence[Level] = ()
    across: bool = False
    """Whether bars lie, and the y axis has their names, the first on top."""
    rows: int = 0
    """How many bars lie under each other."""
    names: Sequence[str] = ()
    """Of bars, in their order."""
    wide: bool = False
    from_zero: bool = True
    x_from_zero: bool = False

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)


def time_of_rows(choices: Sequence[Choice], names: Sequence[str], tokens: int, *, sizes: bool) -> Picture:
    """Where the steps of strategies go; over several sizes in seconds of devices for a million tokens."""
    each = [1e6 * one.devices / tokens if sizes else 1.0 for one in choices]
    unit = "device-seconds for 1M tokens" if sizes else "seconds"
    traces = [
        Trace(
            PARTS[name], f"part-{name}", "bars", [one.parts[name] * by for one, by in _with(choices, each)], names,
            [f"{PARTS[name]}: {one.parts[name]:.3g} s, {one.parts[name] / one.step:.1%}" for one in choices],
        )
        for name in PARTS
        if any(one.parts[name] / one.step >= 0.002 for one in choices)
    ]  # fmt: skip
    low, middle, high = ([end * by for end, by in zip(ends, each, strict=True)] for ends in zip(
        *((one.low, one.step, one.high) for one in choices), strict=True
    ))  # fmt: skip
    text = [f"90 % of runs like it: {one.low:.3g} to {one.high:.3g} s" for one in choices]
    traces.append(Trace("90 % of runs like it", "ink", "intervals", middle, names, text, low=low, high=high))
    said = f"{three(choices[0].step)} s in {names[0]}, {_most(choices[0].parts, PARTS)}."
    return Picture(
        "time",
        "Where the time goes",
        unit,
        said,
        unit,
        "",
        traces,
        across=True,
        rows=len(choices),
        wide=True,
        names=names,
    )


def memory_of_rows(choices: Sequence[Choice], names: Sequence[str], limit: float) -> Picture:
    """What the fullest ranks of strategies hold at their peaks."""
    traces = [
        Trace(
            HELD[name], f"held-{name}", "bars", [one.held[name] * GB for one in choices], names,
            [f"{HELD[name]}: {one.held[name] * GB:.2f} GB, {one.held[name] / one.memory:.1%}" for one in choices],
        )
        for name in HELD
        if any(one.held[name] / one.memory >= 0.002 for one in choices)
    ]  # fmt: skip
    said = f"{choices[0].memory * GB:.1f} GB in {names[0]}, {_most(choices[0].held, HELD)}."
    return Picture(
        "memory", "Where the memory goes", "GB of the fullest rank at its peak", said, "GB", "", traces,
        _limits(limit, upright=True), across=True, rows=len(choices), names=names, wide=True,
    )  # fmt: skip


def fullest(found: Sequence[Footprint]) -> Footprint:
    """The stage whose ranks need most."""
    return max(found, key=lambda one: one.peak)


def memory_of_ranks(found: Sequence[Footprint], limit: float) -> Picture:
    """At its peak, of the ranks of each stage."""
    names = [f"{one.rank}" if len(found) > 1 else "every rank" for one in found]
    peaks = [one.at_peak for one in found]
    traces = [
        Trace(
            KEPT_WORDS[part], f"held-{part}", "bars", names, [peak[part] * GB for peak in peaks],
            [f"{KEPT_WORDS[part]}: {peak[part] * GB:.2f} GB" for peak in peaks],
        )
        for part in KEPT
        if any(peak[part] > 0.002 * one.peak for peak, one in zip(peaks, found, strict=True))
    ]  # fmt: skip
    most = fullest(found)
    said = f"Stage {most.rank} needs most: {most.peak * GB:.1f} GB." if len(found) > 1 else f"{most.peak * GB:.1f} GB."
    return Picture(
        "ranks", "Memory by rank", "GB at the peak, of the ranks of each stage", said,
        "stage" if len(found) > 1 else "", "GB", traces, _limits(limit), names=names,
    )  # fmt: skip


def memory_over_time(found: Sequence[Footprint], limit: float, also: str) -> Picture:
    """Of the ranks of each stage, at most of some; `also` is said, too."""
    places: list[int] = np.unique(np.linspace(0, len(found) - 1, min(len(found), MOST_LINES)).astype(int)).tolist()
    shown = [found[place] for place in places]
    traces: list[Trace] = []
    for i, one in enumerate(shown):
        at, (total,) = thinned(one.at, [one.total])
        name = f"stage {one.rank}" if len(found) > 1 else "every rank"
        values = [_short(value * GB) for value in total.tolist()]
        said = [f"{name}: {value:.2f} GB" for value in values]
        traces.append(Trace(name, f"line-{i}", "steps", [_short(x) for x in at.tolist()], values, said))
    some = "" if len(shown) == len(found) else f" Lines are {len(shown)} of the {len(found)} stages."
    return Picture(
        "over", "Memory over the step", "GB", f"As the schedule is played.{also}{some}", "seconds", "GB", traces,
        _limits(limit), x_from_zero=True,
    )  # fmt: skip


def memory_of_fullest(found: Sequence[Footprint]) -> Picture:
    """What its ranks hold over the step."""
    one = fullest(found)
    at, parts = thinned(one.at, [one.parts[part] for part in KEPT])
    x = [_short(value) for value in at.tolist()]
    traces = [
        Trace(KEPT_WORDS[part], f"held-{part}", "area", x, [_short(value * GB) for value in values.tolist()])
        for part, values in zip(KEPT, parts, strict=True)
        if values.max(initial=0) > 0.002 * one.peak
    ]
    where = f"a rank of stage {one.rank}" if len(found) > 1 else "a rank"
    said = f"{one.peak * GB:.1f} GB at the most."
    title = f"What {where} holds over the step"
    return Picture("peak", title, "GB", said, "seconds", "GB", traces, wide=True, x_from_zero=True)


def cut(found: Play, micros: int) -> str:
    """Of so many micro-batches of a step how many have been played, where that is not all; a sentence or nothing."""
    shown = sum(action.kind == "F" for row in found.rows for *_, action in row) // len(found.blocks)
    return f" The first {shown:,} of {micros:,} micro-batches are shown." if shown < micros else ""


def step(found: Play, one: Choice) -> Picture:
    """Every action of the ranks of every stage that has been played."""
    events = events_of(found)

    def name_of(rank: int) -> str:
        return f"stage {rank}" if len(found.rows) > 1 else "every rank"

    kinds = [*KINDS.values(), *(kind for kind, _ in found.after)]
    traces: list[Trace] = []
    for kind in kinds:
        its = [event for event in events if event.kind == kind and event.seconds > 0]
        if its:
            traces.append(Trace(
                AFTER.get(kind, kind), f"kind-{kind.replace(' ', '-')}", "bars",
                [_short(event.seconds) for event in its],
                [name_of(event.rank) for event in its],
                [f"{event.name}: {three(event.seconds * 1e3)} ms from {event.start:.4g} s" for event in its],
                [_short(event.start) for event in its],
            ))  # fmt: skip
    waits = f"{one.parts['idle'] / one.step:.1%} of the whole step is waiting for other stages."
    said = (waits if len(found.rows) > 1 else "Nothing waits for other stages.") + cut(found, one.micros)
    return Picture(
        "step", "Timeline of the stages", "seconds", said, "seconds", "", traces, across=True, rows=len(found.rows),
        names=[name_of(rank) for rank in range(len(found.rows))], wide=True, x_from_zero=True,
    )  # fmt: skip


def tradeoff(found: Fronts, choices: Sequence[Choice], names: Sequence[str], limit: float) -> Picture:
    """Steps against memory: the front, and the strategies of the ranking."""
    front = found.memory
    traces = [
        Trace(
            "front: none is as quick and needs less", "front", "line", [one.step for one in front],
            [one.memory * GB for one in front], [_words(one) for one in front],
        ),
        Trace(
            "strategies named above", "named", "points", [one.step for one in choices],
            [one.memory * GB for one in choices],
            [f"{name}: {_words(one)}" for name, one in zip(names, choices, strict=True)],
        ),
    ]  # fmt: skip
    least = front[-1]
    ends = [f"{three(one.step)} s with {one.memory * GB:.1f} GB" for one in (front[0], least)]
    said = f"From {ends[0]} to {ends[1]}."
    return Picture(
        "front", "Time against memory", "GB of the fullest rank", said, "step, seconds", "GB",
        [one for one in traces if one.x], _limits(limit), from_zero=True,
    )  # fmt: skip


def sizes(found: Fronts) -> Picture:
    """Tokens a second against devices, or what a million tokens cost."""
    places = sorted(found.sizes, key=lambda one: one.devices)
    priced = places[0].cost is not None
    traces: list[Trace] = []
    for name, role, kind, on in (("front", "front", "line", True), ("not on the front", "off", "points", False)):
        its = [one for one in places if one.on_front == on]
        costs = ["" if one.cost is None else f", {one.cost:.4g} for 1M tokens" for one in its]
        said = [
            f"{one.devices:,} devices, {one.rate:,.0f} tokens/s{cost}" for one, cost in zip(its, costs, strict=True)
        ]
        rows = sorted(zip([one.devices if one.cost is None else one.cost for one in its], its, said, strict=True),
                      key=lambda row: row[0])  # fmt: skip
        traces.append(Trace(
            name, role, kind, [x for x, *_ in rows], [one.rate for _, one, _ in rows], [text for *_, text in rows], (),
            [f"{one.devices:,}" if priced else "" for _, one, _ in rows],
        ))  # fmt: skip
    title = "Speed against cost" if priced else "Speed against devices"
    whole = f"{places[-1].rate:,.0f} tokens/s on {places[-1].devices:,} devices."
    x_title = "cost of 1M tokens (numbers at points: devices)" if priced else "devices"
    shown = [one for one in traces if one.x]
    return Picture("sizes", title, "tokens/s", whole, x_title, "tokens/s", shown, x_from_zero=not priced)


def otherwise(now: Choice, found: dict[str, Choice]) -> Picture:
    """By how much the step changes if something were otherwise."""
    changes = [(one.step / now.step - 1) * 100 for one in found.values()]
    names = list(found)
    text = [
        f"{name}: {three(one.step)} s, {change:+.1f} %"
        for (name, one), change in zip(found.items(), changes, strict=True)
    ]
    traces = [
        Trace(kind, role, "bars", [changes[i] for i in at], [names[i] for i in at], [text[i] for i in at], (),
              [f"{changes[i]:+.1f} %" for i in at])
        for kind, role, at in (
            ("longer", "worse", [i for i, change in enumerate(changes) if change > 0]),
            ("as long or shorter", "better", [i for i, change in enumerate(changes) if change <= 0]),
        )
        if at
    ]  # fmt: skip
    return Picture(
        "otherwise", "Change of the best step", "%", f"Now {three(now.step)} s.", "%", "", traces,
        across=True, rows=len(names), names=names, wide=True,
    )  # fmt: skip


MOST_POINTS = 1500


def thinned(at: NDArray[Any], values: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Of series that hold until the next point at most some, with the largest sum of each stretch left in.

    What holds for no time is left out.
    """
    holds = np.append(np.diff(at) > 1e-9 * at[-1], True)
    at, values = at[holds], [one[holds] for one in values]
    if len(at) <= MOST_POINTS:
        return at, list(values)
    total = np.sum(values, axis=0)
    kept = {0, len(at) - 1}
    for part in np.array_split(np.arange(len(at)), MOST_POINTS // 2):
        kept |= {int(part[np.argmax(total[part])]), int(part[np.argmin(total[part])])}
    places = np.array(sorted(kept))
    return at[places], [one[places] for one in values]


def _with(choices: Sequence[Choice], each: Sequence[float]) -> list[tuple[Choice, float]]:
    return list(zip(choices, each, strict=True))


def _limits(limit: float, *, upright: bool = False) -> list[Level]:
    return [
        Level(f"what a device has, {limit * GB:.0f} GB", limit * GB, upright),
        Level(f"what fits in nine of ten runs, {safe(limit) * GB:.1f} GB", safe(limit) * GB, upright),
    ]


def _words(one: Choice) -> str:
    again = again_words(one.again)
    return f"{one.mesh}, micro-batches of {one.micro}, {again}: {three(one.step)} s, {one.memory * GB:.1f} GB"


def _most(parts: Any, names: dict[str, str]) -> str:
    name = max(parts, key=parts.__getitem__)
    return f"{parts[name] / sum(parts.values()):.0%} of it {names[name]}"


def _short(value: float) -> float:
    """Six digits: more cannot be seen, and the page is smaller."""
    return float(f"{value:.6g}")
