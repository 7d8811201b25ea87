"""The report of a run: one HTML file for a person, with everything in it, that never asks the network for anything.

What matters most comes first: did it learn, is what was saved what was trained, does the export load. Then the curves,
then what was predicted beside what was measured, then what was run and where. The page is
`planner.report.html_parts`'s.

All text goes through `escape`: a plan and what a model writes are free to contain markup.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import tangram
from tangram.planner.report import figures
from tangram.planner.report.html_parts import page, section
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.text import packaged, write_file
from tangram.tracing.show.page import findings_as_html, ranks_as_html
from tangram.tracing.show.report import TraceReport
from tangram.training.observe.boards import need
from tangram.training.observe.events import Record
from tangram.training.observe.summary import Summary
from tangram.training.run.charts import Chart, axes, charts, predicted
from tangram.training.run.end_proofs import SAME_LOGITS, SAME_LOSS

STOPPED = {
    "time": "Training stopped when its time limit (run.max_seconds) had passed",
    "signal": "Training stopped when it was asked to",
    "failure": "Training ended with an error",
    "patience": "Training stopped as the held-out loss fell no further (run.patience)",
}


def write_report(
    path: Path,
    *,
    plan: Plan,
    record: Record,
    summary: Summary,
    machine: Mapping[str, str],
    sample: str | None,
    trace: TraceReport | None = None,
    again: float = 0.0,
) -> None:
    """Write the report. `machine`: what and how much there is, in words; `sample`: what the model writes; `again`: of a
    run that goes on, after how many seconds the page is read anew."""
    need(("plotly",), "report")
    drawn = charts(record, summary, by_token=plan.by_token)
    body = [
        _head(plan, record, summary, again),
        "" if again else _verdicts(plan, summary),
        _facts(summary),
        _curves(drawn),
        _beside(summary),
        _checkpoints(record),
        _trace(trace),
        _sample(sample),
        _plan(plan),
        _table("Text", summary.text or {}),
        _table("Machine", machine),
        _table("Files", _places(summary)),
        f"<footer>Made by Tangram {escape(tangram.__version__)}. It needs no network: all is in this file.</footer>",
    ]
    places = axes(record, drawn, summary.resumed_from) if drawn else {}
    charted = {"charts": [chart.as_json() for chart in drawn], "axes": places, "again": again}
    script = packaged("tangram.training.run", "report.js")
    name = f"{summary.model}: training run"
    write_file(path, page(name, "", "\n".join(text for text in body if text), charted, script), "the report")


def _head(plan: Plan, record: Record, summary: Summary, again: float) -> str:
    ranks = f"{summary.ranks} ranks" if summary.ranks != 1 else "1 rank"
    words = (
        f"{figures.count(summary.parameters)} parameters",
        f"{ranks}, mesh {summary.mesh}",
        f"{summary.steps:,} of {plan.run.steps:,} steps",
        f"{figures.count(summary.tokens)} tokens",
        figures.seconds(summary.wall_s),
    )
    notes: list[str] = []
    if again:
        notes.append(f"Training goes on: as of {time.strftime('%H:%M:%S')}, read anew every {again:.0f} s.")
    if summary.resumed_from is not None:
        notes.append(
            f"Resumed from the checkpoint of step {summary.resumed_from:,}; curves and figures begin after it."
        )
    if summary.stopped_early is not None:
        why = STOPPED.get(summary.stopped_early, f"Training stopped early ({summary.stopped_early})")
        notes.append(f"{why}, after step {summary.steps:,} of {plan.run.steps:,}.")
    if not record.steps:
        notes.append("No step was trained, so there are no curves.")
    return (
        f'<header><p class="over">Training run</p><h1>{escape(summary.model)}</h1>'
        f'<p class="under">{escape(" · ".join(words))}</p>'
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        + "</header>"
    )


def _verdicts(plan: Plan, summary: Summary) -> str:
    return f'<section class="verdicts">{_learnt(summary)}{_reloaded(plan, summary)}{_exported(summary)}</section>'


def _learnt(summary: Summary) -> str:
    loss, entropy = summary.eval_loss, summary.unigram_entropy
    if loss is None:
        return _verdict("unknown", "Held-out loss", None, "", "No held-out text was measured.")
    if entropy is None:
        return _verdict("unknown", "Held-out loss", f"{loss:.4f}", "a mean over samples", "Nothing to compare it with.")
    beside = f"nats per token; unigram entropy {entropy:.4f}"
    if loss < entropy:
        told = f"{figures.percent(1 - loss / entropy)} below what a model that ignores the context can reach."
        return _verdict("good", "Held-out loss", f"{loss:.4f}", beside, told, "learnt")
    told = "Not below what a model that ignores the context can reach: it has not yet learnt from it."
    return _verdict("fair", "Held-out loss", f"{loss:.4f}", beside, told, "not yet")


def _reloaded(plan: Plan, summary: Summary) -> str:
    relative, limit = summary.relayout_relative_difference, SAME_LOSS[plan.precision.compute]
    if relative is None or summary.eval_loss_relayout is None:
        return _verdict("unknown", "Reload proof", None, "", "The checkpoint was not loaded again.")
    told = f"The last checkpoint, loaded whole in one process, gives {summary.eval_loss_relayout:.6f}"
    if summary.relayout_logits_max_diff is not None:
        told += f"; logits of a fixed batch differ by {summary.relayout_logits_max_diff:.1e}"
    beside = f"relative difference of loss (limit {limit:.0e})"
    return _proof("Reload proof", relative, limit, beside, f"{told}.")


def _exported(summary: Summary) -> str:
    difference, limit = summary.export_logits_max_diff, SAME_LOGITS["float32"]
    if difference is None:
        return _verdict("unknown", "Export proof", None, "", "No export was loaded again.")
    beside = f"largest difference of logits (limit {limit:.0e})"
    return _proof("Export proof", difference, limit, beside, "The export, loaded by transformers, is the same model.")


def _proof(name: str, value: float, limit: float, beside: str, proof: str) -> str:
    number = "0" if value == 0 else f"{value:.1e}"
    if value <= limit:  # not so for what is no number
        return _verdict("good", name, number, beside, proof, "holds")
    proof = "This is more than rounding: it is not the same model."
    return _verdict("bad", name, number, beside, proof, "does not hold")


_SIGNS = {"good": "✓ ", "fair": "– ", "bad": "✗ ", "unknown": ""}


def _verdict(kind: str, name: str, number: str | None, beside: str, proof: str, state: str = "not measured") -> str:
    return (
        f'<div class="card verdict {kind}"><div class="head"><h3>{escape(name)}</h3>'
        f'<span class="state">{_SIGNS[kind]}{escape(state)}</span></div>'
        f'<p class="big">{escape(number or "—")}</p><p class="soft">{_unbroken(beside)}</p>'
        f"<p>{_unbroken(proof)}</p></div>"
    )


def _unbroken(text: str) -> str:
    """The text, escaped, with numbers as 2.1e-06 kept on one line: their hyphen is a place to break."""
    return re.sub(r"[\d.]+e-\d+", r'<span class="whole">\g<0></span>', escape(text))


def _facts(summary: Summary) -> str:
    facts: tuple[tuple[str, float | None, Callable[[float], str]], ...] = (
        ("Throughput", summary.tokens_per_s, _tokens),
        ("Computed", summary.tflops, lambda value: figures.flops(value * 1e12)),
        ("MFU", summary.mfu, figures.percent),
        ("Loss of the last ten steps", summary.train_loss, "{:.4f}".format),
        ("Peak memory of a rank", summary.peak_rss_mb, figures.megabytes),
        ("Stood still for checkpoints", summary.checkpoint_blocked_s, figures.seconds),
    )
    cells = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(words(value))}</dd></div>"
        for name, value, words in facts
        if value is not None and math.isfinite(value)
    ]
    return f'<dl class="facts">{"".join(cells)}</dl>' if cells else ""


def _tokens(value: float) -> str:
    return figures.rate(value, "tokens/s")


def _curves(drawn: Sequence[Chart]) -> str:
    if not drawn:
        return ""
    # The first is wide; so is the second where else a place in the two columns stayed empty.
    wide = 2 if len(drawn) % 2 == 0 else 1
    shown = "".join(_figure(chart, at < wide) for at, chart in enumerate(drawn))
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" if name == "step" else ""}> {name}</label>'
        for name in ("step", "tokens", "time")
    )
    return (
        f'<section><h2>Curves</h2><div class="axes" role="radiogroup" aria-label="Over what">{choices}</div>'
        f'<div class="charts">{shown}</div>'
        "<noscript>The charts need JavaScript; nothing else on this page does.</noscript></section>"
    )


def _figure(chart: Chart, wide: bool) -> str:
    keys = [(line.role, line.name) for line in chart.lines]
    keys += [("level", f"{level.name} {_level(chart, level.y)}") for level in chart.levels]
    keys += [("mark", "checkpoint committed")] if chart.marks else []
    legend = "".join(f'<li><span class="key {role}"></span>{escape(name)}</li>' for role, name in keys)
    alone = "" if any(line.role == "smooth" for line in chart.lines) else " alone"
    return (
        f'<figure class="card chart{" wide" if wide else ""}{alone}"><figcaption><h3>{escape(chart.title)}'
        f' <span class="soft">{escape(chart.unit)}</span></h3><p class="soft">{escape(chart.caption)}</p>'
        + (f'<ul class="legend">{legend}</ul>' if len(keys) > 1 else "")
        + f'</figcaption><div class="plot" id="plot-{chart.key}" role="img" '
        f'aria-label="{escape(f"{chart.title}. {chart.caption}")}"></div></figure>'
    )


def _level(chart: Chart, value: float) -> str:
    return f"{value:.4f}" if chart.key == "loss" else f"{value:,.0f} {chart.unit}"


def _beside(summary: Summary) -> str:
    compared: tuple[tuple[str, str, float | None, Callable[[float], str]], ...] = (
        ("Step time", "step_seconds", summary.step_seconds, figures.seconds),
        ("Throughput", "tokens_per_s", summary.tokens_per_s, _tokens),
        ("Memory of a rank", "memory_mb", summary.peak_rss_mb, figures.megabytes),
    )
    if summary.predicted is None:
        return "<section><h2>Predicted and measured</h2><p>Nothing was predicted for this run.</p></section>"
    rows: list[str] = []
    for name, key, measured, words in compared:
        before = predicted(summary, key)
        ratio = f"{measured / before:.2f}" if measured is not None and before else "—"
        cells = (words(before) if before else "—", words(measured) if measured is not None else "—", ratio)
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        rows.append(f"<tr><th scope=row>{name}</th>{numbers}</tr>")
    heads = "".join(f'<th scope=col class="number">{name}</th>' for name in ("predicted", "measured", "ratio"))
    return (
        '<section><h2>Predicted and measured</h2><p class="soft lead">Measured are medians over the steps, the first '
        "few left out, and the highest memory of a rank. The ratio is measured over predicted.</p>"
        f'<div class="card scroll"><table><thead><tr><td></td>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div></section>"
    )


def _checkpoints(record: Record) -> str:
    if not record.saves and not record.failures:
        return "<section><h2>Checkpoints</h2><p>None was written.</p></section>"
    rows = {
        (save.step, 1): (
            f'<tr><th scope=row>{save.step:,}</th><td class="number">{figures.seconds(save.blocked_seconds)}</td>'
            f'<td class="number">{figures.seconds(save.seconds)}</td>'
            f"<td>{'while training went on' if save.asynchronous else 'with training halted'}</td></tr>"
        )
        for save in record.saves
    } | {
        (failure.step, 0): (
            f'<tr class="failed"><th scope=row>{failure.step:,}</th><td class="number">—</td><td class="number">—</td>'
            f"<td>not written: {escape(failure.reason)}</td></tr>"
        )
        for failure in record.failures
    }
    heads = '<th scope=col>after step</th><th scope=col class="number">stood still</th>'
    heads += '<th scope=col class="number">until committed</th><th scope=col>written</th>'
    return (
        f'<section><h2>Checkpoints</h2><div class="card scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows[key] for key in sorted(rows))}</tbody></table></div></section>"
    )


def _trace(trace: TraceReport | None) -> str:
    """What the ranks did, and what was wrong."""
    if trace is None:
        return ""
    words = (
        "Medians over steps, the first left out. <code>tangram trace report --html</code> shows every step and call."
    )
    lead = f'<p class="soft lead">{words} {escape(trace.basis[:1].upper() + trace.basis[1:])}.</p>'
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in trace.notes)
    return section("Ranks", lead, findings_as_html(trace), notes, ranks_as_html(trace))


def _sample(sample: str | None) -> str:
    if sample is None:
        return ""
    return f'<section><h2>What the model writes</h2><div class="card"><pre>{escape(sample)}</pre></div></section>'


def _plan(plan: Plan) -> str:
    table = _rows(plan_in_words(plan))
    return (
        f'<section><h2>Plan</h2><div class="card scroll">{table}</div>'
        f'<details class="card"><summary>As a file</summary><pre class="toml">{escape(dumps(plan))}</pre></details>'
        "</section>"
    )


def plan_in_words(plan: Plan) -> dict[str, str]:
    data, optimiser, axes, kind = plan.data, plan.optimiser, plan.axes, plan.precision
    roles = {role: getattr(axes, role) for role in ("data", "tensor", "context", "expert", "pipeline")}
    schedule = f"{optimiser.schedule}, warm-up {optimiser.warmup_steps:,}"
    every = f"every {plan.checkpoint.every_steps:,} steps and " if plan.checkpoint.every_steps else ""
    kept = (f"the newest {plan.checkpoint.keep:,}", *plan.checkpoint.also)
    words = {
        "model": plan.model.preset or plan.model.path or "",
        "changed in it": ", ".join(f"{key} = {value}" for key, value in plan.model.change.items()),
        "not trained": ", ".join(plan.model.freeze),
        "text": ", ".join(" ".join(filter(None, (source.path, source.pattern))) for source in data.sources),
        "samples": f"{data.sequence:,} tokens, {data.global_batch:,} in a step, {data.micro_batch:,} at once on a rank",
        "optimiser": optimiser.words,
        "learning rate": f"{optimiser.lr:g}, {schedule}",
        "other learning rates": ", ".join(f"{rate:g} of {pattern}" for pattern, rate in optimiser.lr_of.items()),
        "weight decay": f"{optimiser.weight_decay:g}",
        "precision": f"{kind.compute}, gradients summed in {kind.reduce}, parameters in {kind.parameters}",
        "checkpoints": f"{every}at the end; kept: {', '.join(kept)}",
        "mesh": plan.mesh,
        "axes": ", ".join(f"{' '.join(names)} for {role}" for role, names in roles.items() if names),
        "recomputed": ", ".join(plan.run.recompute),
        "seed": str(plan.seed),
    }
    words |= {f"layout of {pattern}": text for pattern, text in plan.layouts.parameters.items()}
    words |= {f"mark of {pattern}": text for pattern, text in plan.layouts.marks.items()}
    return {name: text for name, text in words.items() if text}


def _places(summary: Summary) -> dict[str, str]:
    places = {
        "last checkpoint": summary.checkpoint,
        "export": summary.export,
        "TensorBoard log": summary.tensorboard,
    }
    return {name: place for name, place in places.items() if place is not None}


def _table(title: str, words: Mapping[str, str]) -> str:
    if not words:
        return ""
    return f'<section><h2>{escape(title)}</h2><div class="card scroll">{_rows(words)}</div></section>'


def _rows(words: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in words.items())
    return f'<table class="pairs"><tbody>{rows}</tbody></table>'
