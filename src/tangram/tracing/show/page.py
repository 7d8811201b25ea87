"""A trace as one HTML page: what is wrong, every rank in every step, and the last steps of some ranks call by call.

Levels of detail make it serve 16,384 ranks: a value of a rank and a step is one byte of the page, and the page draws as
many rows as it has pixels, each the slowest of the ranks that it stands for, until one looks closer. Of long runs a
column is several steps, again the slowest. What was called when is there for the ranks that findings name and some of
their peers, as far back as their rings go.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tangram.planner.report.html_parts import page, part, section, table
from tangram.text import write_file
from tangram.tracing.files.format import Kind, Phase
from tangram.tracing.reading import RankTrace
from tangram.tracing.show.report import TraceReport, axes_of, read_report
from tangram.tracing.slow import mesh_axes, own_times, waits_over

MOST_COLUMNS = 512
"""Of steps; of more steps some share a column."""
LANES, LANE_STEPS, LANE_SPANS = 24, 3, 3000
"""Ranks that are shown call by call, steps of each, and spans at most."""
CLIPPED = 4.0
"""Times the median: what is longer has the same colour."""


DRAWN = """\
<section><h2>Ranks and steps</h2><div class="card">
<div class="picker"><label>what <select id="layer"></select></label><button id="all">all ranks</button>
<span class="soft" id="range"></span></div>
<canvas id="ranks" role="img" aria-label="A row for each rank, a column for each step"></canvas>
<p class="soft" id="cell">Point at a place; drag or use the wheel to look closer.</p></div></section>
<section><h2>The last steps, call by call</h2><div class="card"><ul class="legend" id="kinds"></ul>
<canvas id="lanes" role="img" aria-label="A lane for each rank"></canvas>
<p class="soft" id="span">Point at a span; drag to move, use the wheel to look closer.</p></div></section>
"""
"""The places of what is drawn."""


def write_page(path: Path, folder: Path) -> TraceReport:
    """Write the page of a run's trace; its report. Raises UserError for what is no trace, or no place."""
    found, traces = read_report(folder)
    css, drawn = part("tangram.tracing.show", "page.css"), part("tangram.tracing.show", "page.js")
    write_file(
        path, page(f"Trace {found.folder}", css, body(found), data(found, traces), drawn, plotly=False), "the page"
    )
    return found


def body(found: TraceReport) -> str:
    """The page without what is drawn."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in found.notes)
    head = (
        f'<header><p class="over">Trace</p><h1>{escape(found.folder.parent.name or str(found.folder))}</h1>'
        f'<p class="under">{escape(found.state)}</p>{notes}</header>'
    )
    wrong, ranks = section("What is wrong", findings_as_html(found)), section("Ranks", ranks_as_html(found))
    return f'{head}{wrong}{DRAWN}{ranks}<footer class="soft">{escape(found.basis)}</footer>'


def findings_as_html(found: TraceReport) -> str:
    cards = [
        f'<div class="card finding"><h3>{escape(one.kind)}</h3><p>{escape(one.text)}</p>{_more(one.details)}</div>'
        for one in found.findings
    ]
    return "".join(cards) or '<p class="lead">Nothing wrong was found.</p>'


def _more(details: Sequence[str]) -> str:
    text = escape("\n".join(details))
    return f"<details><summary>more</summary><pre>{text}</pre></details>" if details else ""


def ranks_as_html(found: TraceReport) -> str:
    return table("", found.headers, found.rows)


def data(found: TraceReport, traces: Sequence[RankTrace]) -> dict[str, Any]:
    blamed = sorted({rank for one in found.findings for rank in one.ranks})
    steps = np.unique(np.concatenate([trace.rows["step"] for trace in traces]))
    return {
        "ranks": [trace.rank for trace in traces],
        "mesh": [[axis, size] for axis, size in mesh_axes(traces[0])],
        "steps": steps.tolist(),
        "columns": _columns(steps).tolist(),
        "layers": [_layer(name, of, traces, steps) for name, of in _layers(traces)],
        "blamed": blamed,
        "lanes": lanes(traces, blamed),
    }


Values = Callable[[RankTrace], npt.NDArray[np.float64]]


def _layers(traces: Sequence[RankTrace]) -> list[tuple[str, Values]]:
    """What may be shown of each rank and step, in microseconds."""

    def wait(axes: str) -> Values:
        return lambda trace: waits_over(trace, axes)

    return [
        ("own time", lambda trace: own_times(trace).sum(1)),
        ("step time", lambda trace: trace.rows["nanoseconds"] / 1e3),
        *((f"wait over {axes}", wait(axes)) for axes in axes_of(traces)),
    ]


def _columns(steps: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
    """The place of each column's first step."""
    return np.unique(np.linspace(0, len(steps), min(len(steps), MOST_COLUMNS), endpoint=False).astype(np.intp))


def _layer(name: str, of: Values, traces: Sequence[RankTrace], steps: npt.NDArray[np.uint32]) -> dict[str, Any]:
    """A byte for each rank and column: 0 where there is nothing, else 1 to 255 from `least` to `most` milliseconds."""
    columns = _columns(steps)
    values = np.full((len(traces), len(columns)), np.nan)
    for row, trace in enumerate(traces):
        if len(trace.rows):
            own = np.full(len(steps), -1.0)
            own[np.searchsorted(steps, trace.rows["step"])] = of(trace)
            reduced = np.maximum.reduceat(own, columns)
            values[row] = np.where(reduced < 0, np.nan, reduced)
    known = values[np.isfinite(values)]
    least, usual = (float(np.percentile(known, share)) for share in (5, 50)) if len(known) else (0.0, 0.0)
    # What differs from the usual by less than a half is pale, so that noise is.
    most = max(min(float(known.max(initial=0.0)), CLIPPED * usual), 1.5 * usual, least + 1.0)
    share = np.clip((np.nan_to_num(values) - least) / (most - least), 0, 1)
    scaled = np.where(np.isnan(values), 0, 1 + np.round(share * 254)).astype(np.uint8)
    return {
        "name": name,
        "least": least / 1e3,
        "most": most / 1e3,
        "bytes": base64.b64encode(scaled.tobytes()).decode(),
    }


# ------------------------------------------------------------ call by call


def shown_ranks(traces: Sequence[RankTrace], blamed: Sequence[int]) -> list[RankTrace]:
    """Those that findings name, their neighbours, and others from the first on."""
    known = {trace.rank: trace for trace in traces}
    near = [rank + d for rank in blamed[: LANES // 3] for d in (0, 1, -1)]
    chosen = dict.fromkeys(rank for rank in (*near, *known) if rank in known)
    return [known[rank] for rank in sorted([*chosen][:LANES])]


def lanes(traces: Sequence[RankTrace], blamed: Sequence[int]) -> dict[str, Any]:
    """Spans of some ranks in their last steps, in microseconds from the first of these steps, and what they are."""
    words: dict[str, int] = {}
    shown = shown_ranks(traces, blamed)
    first = max((int(trace.live.step) for trace in shown), default=0) - LANE_STEPS + 1
    hosts = {trace.host for trace in shown}
    found: list[dict[str, Any]] = []
    begins: list[int] = []
    for trace in shown:
        spans = spans_of(trace, first)[-LANE_SPANS:]
        if spans:
            begins.append(spans[0][0])
        found.append({"rank": trace.rank, "spans": spans, "blamed": trace.rank in {*blamed}})
    common = min(begins, default=0)
    for lane in found:
        # Clocks of several hosts agree on nothing: there each lane begins with its own first span.
        zero = common if len(hosts) == 1 else (lane["spans"][0][0] if lane["spans"] else 0)
        lane["spans"] = [
            [round((at - zero) / 1e3, 1), round(took / 1e3, 1), kind, words.setdefault(text, len(words))]
            for at, took, kind, text in lane["spans"]
        ]
    return {"ranks": found, "words": [*words], "kinds": [phase.word for phase in Phase] + ["wait"]}


WAIT = len(Phase)
"""The kind of a span that is no phase."""


def spans_of(trace: RankTrace, first: int) -> list[tuple[int, int, int, str]]:
    """Phases and waits of a rank from a step on, as far as its ring goes: begin and length in ns, kind, words."""
    events = trace.events
    events = events[events["step"] >= max(first, 0)]
    calls = {int(one["number"]) & 0xFFFFFFFF: one for one in events[events["kind"] == Kind.ENTER]}
    found: list[tuple[int, int, int, str]] = []
    open_phase: tuple[int, int, str] | None = None
    for event in events:
        kind, at = int(event["kind"]), int(event["time"])
        if kind == Kind.PHASE:
            if open_phase is not None:
                found.append((open_phase[0], at - open_phase[0], *open_phase[1:]))
            phase = int(event["op"])
            word = (Phase(phase) if phase < len(Phase) else Phase.OTHER).word
            open_phase = at, phase, f"{word} of step {event['step']}"
        elif kind == Kind.EXIT:
            call = calls.get(int(event["site"]))
            text = "a call" if call is None else str(trace.in_words(call))
            found.append((at - int(event["size"]), int(event["size"]), WAIT, text))
    end = max((int(events["time"][-1]) if len(events) else 0), trace.live.beat if trace.live.waiting else 0)
    if open_phase is not None:
        found.append((open_phase[0], max(0, end - open_phase[0]), *open_phase[1:]))
    event = trace.event(trace.live.waiting) if trace.live.waiting else None
    if event is not None and trace.waiting is not None:
        found.append(
            (int(event["time"]), max(0, end - int(event["time"])), WAIT, f"{trace.waiting}, which has not ended")
        )
    return sorted(found)
