"""The report of a plan: one HTML file for a person, with everything in it, that never asks the network for anything.

What matters most comes first: what was asked, the strategy, what it is predicted to need. Then the ranking, why the
first wins, its memory and its step action by action, what could be traded, and what would be otherwise. The page is
`planner.report.html_parts`'s; what charts show is `planner.report.charts`'s, and the tables are those of the command
(`planner.report.answer_tables`). All text goes through `escape`: the name of a model may contain markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import tangram
from tangram.hardware.catalogue.cluster import Cluster
from tangram.planner.cost.calibration import published
from tangram.planner.cost.memory_timeline import footprints
from tangram.planner.cost.timeline import MOST, Play, play
from tangram.planner.report import bottlenecks, charts, cost_tables
from tangram.planner.report.answer_tables import (
    BINDS,
    FITS,
    again_words,
    explained_tables,
    front_tables,
    interruptions,
    lean_words,
    losses,
    lost_by,
    near_words,
    otherwise,
    ranking,
    shares,
    too_small,
)
from tangram.planner.report.charts import Picture
from tangram.planner.report.figures import three
from tangram.planner.report.html_parts import figures, page, section, table
from tangram.planner.search.explain import Explained
from tangram.planner.search.pareto import Fronts
from tangram.planner.search.query import Answer
from tangram.planner.search.strategy import Ask, Choice, setting_of
from tangram.planner.space.setting import Setting
from tangram.text import packaged, write_file

MOST_ACTIONS = 5000
"""That a chart of a step has: more cannot be told from each other."""
DIVIDED = (
    "nothing sharded over DP ranks", "optimiser's states sharded over DP ranks",
    "gradients and optimiser's states sharded over DP ranks", "parameters and all states sharded over DP ranks",
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """What a report is of."""

    answer: Answer
    cluster: Cluster
    explained: Explained | None = None
    """Where one strategy is explained; `answer` is then the best beside it."""
    fronts: Fronts | None = None

    @property
    def ask(self) -> Ask:
        """What was asked."""
        return self.answer.ask

    @property
    def where(self) -> str:
        """The cluster, by the name of its file where it is one."""
        name = self.cluster.name
        return Path(name).stem if name.endswith(".toml") else name

    @property
    def chosen(self) -> Choice:
        """What is shown in full: the explained strategy, else the first, else what comes near to one."""
        if self.explained is not None and self.explained.choice is not None:
            return self.explained.choice
        return self.answer.choices[0] if self.answer.choices else self.answer.quickest or self.answer.smallest

    def setting(self) -> Setting:
        """What is computed with."""
        return setting_of(self.cluster, self.ask.of(self.chosen))

    def played(self) -> Play:
        """The step of what is shown, with as many micro-batches as can be told from each other."""
        one, setting = self.chosen, self.setting()
        scales = published().scales(setting.device.name, setting)
        each = 3 * int(one.at["pipeline"]) * one.virtual
        return play(self.answer.outline, one.grid(), setting, scales, min(MOST, max(8, MOST_ACTIONS // each)))

    def rows(self) -> tuple[list[Choice], list[str]]:
        """What is compared, and its names."""
        found = list(self.answer.choices[: charts.MOST_ROWS])
        if self.explained is not None:
            given = [] if self.explained.choice is None else [self.explained.choice]
            return [*given, *found[:1]], [*(["given"] if given else []), *(["best"] if found else [])]
        if not found:
            return [self.chosen], ["quickest" if self.answer.quickest else "the least"]
        return found, [f"row {i}" for i in range(1, len(found) + 1)]


def write_report(path: Path, shown: Shown) -> None:
    """Write the page. Raises UserError where it cannot be written, or plotly is not there."""
    write_file(path, as_html(shown), "the report")


def write_step(path: Path, shown: Shown) -> None:
    """Write a page with the timeline alone. Raises UserError likewise."""
    write_file(path, step_as_html(shown), "the timeline")


def step_as_html(shown: Shown) -> str:
    """The timeline of the chosen strategy."""
    picture = charts.step(shown.played(), shown.chosen)
    body = _head(shown, f"A step of {shown.answer.outline.name} on {shown.where}") + figures([picture])
    return _page(shown, [body, _foot()], [picture])


def as_html(shown: Shown) -> str:
    """The whole page."""
    answer, found = shown.answer, shown.played()
    why, memory, trade, instead = _why_drawn(shown), _memory_drawn(shown, found), _trade(shown), _instead_drawn(answer)
    step = charts.step(found, shown.chosen)
    body = [
        _head(shown, f"{answer.outline.name} on {shown.where}"),
        _refused(shown),
        _cards(shown),
        _ranking(shown),
        section(_why_title(shown), figures(why), _why(shown)),
        section("Memory", figures(memory)),
        section("A step, action by action", figures([step])),
        section("What could be traded", figures(trade), _fronts(shown)) if trade else "",
        section("If it were otherwise", figures(instead), _otherwise(answer)) if answer.otherwise else "",
        _assumed(answer),
        _question_table(shown),
        _foot(),
    ]
    return _page(shown, body, [*why, *memory, step, *trade, *instead])


def pictures_of(shown: Shown) -> list[Picture]:
    """All charts of the page, in their order."""
    found = shown.played()
    memory, step = _memory_drawn(shown, found), charts.step(found, shown.chosen)
    return [*_why_drawn(shown), *memory, step, *_trade(shown), *_instead_drawn(shown.answer)]


def _why_drawn(shown: Shown) -> list[Picture]:
    choices, names = shown.rows()
    several = shown.answer.aim is not None and shown.answer.aim.objective.sizes
    return [
        charts.time_of_rows(choices, names, shown.ask.tokens, sizes=several),
        charts.memory_of_rows(choices, names, shown.answer.limit),
    ]


def _memory_drawn(shown: Shown, found: Play) -> list[Picture]:
    one, limit = shown.chosen, shown.answer.limit
    held = footprints(shown.answer.outline, one.grid(), shown.setting(), found)
    return [
        charts.memory_of_ranks(held, limit),
        charts.memory_over_time(held, limit, charts.cut(found, one.micros)),
        charts.memory_of_fullest(held),
    ]


def _instead_drawn(answer: Answer) -> list[Picture]:
    known = {name: other for name, other in answer.otherwise.items() if other is not None}
    return [charts.otherwise(answer.choices[0], known)] if known and answer.choices else []


def _page(shown: Shown, body: Sequence[str], pictures: Sequence[Picture]) -> str:
    title = f"{shown.answer.outline.name} on {shown.where}: plan"
    css, script = packaged("tangram.planner.report", "report.css"), packaged("tangram.planner.report", "report.js")
    return page(title, css, "\n".join(text for text in body if text), [one.as_json() for one in pictures], script)


def _trade(shown: Shown) -> list[Picture]:
    found, (choices, names) = shown.fronts, shown.rows()
    if found is None or not found.memory:
        return []
    devices = found.memory[0].devices
    here = [(one, name) for one, name in zip(choices, names, strict=True) if one.devices == devices]
    near = [(one, name) for one, name in here if one.step <= 1.05 * found.memory[-1].step]
    first = charts.tradeoff(
        found, [one for one, _ in near], [name.removeprefix("row ") for _, name in near], shown.answer.limit
    )
    return [first, charts.sizes(found)] if len(found.sizes) > 1 else [first]


# ------------------------------------------------------------------------------------------------------------- sections
def _head(shown: Shown, title: str) -> str:
    ask, aim, one = shown.ask, shown.answer.aim, shown.chosen
    words = [
        f"{shown.answer.outline.numbers / 1e9:,.3g} B parameters",
        f"{one.devices:,} devices",
        one.mesh,
        f"{ask.tokens:,} tokens a step",
        f"samples of {ask.sequence:,}",
        one.precision,
        ask.framework,
    ]
    if aim is not None:
        words.append(f"best by {aim.objective.title}" if aim.objective.sizes else "best by step time")
    return (
        f'<header><p class="over">Plan, predicted</p><h1>{escape(title)}</h1>'
        f'<p class="under">{escape(" · ".join(words))}</p></header>'
    )


def _cards(shown: Shown) -> str:
    answer, one = shown.answer, shown.chosen
    state, sign, fits = ("good", "✓", "fits") if one.fits >= FITS else ("bad", "✗", "does not fit")
    if shown.explained is not None and not shown.explained.refused:
        state, sign = (state, sign) if one.fits >= FITS else ("fair", "–")
    who = "The strategy that is explained" if shown.explained and shown.explained.choice else "The best strategy"
    if not answer.choices and not (shown.explained and shown.explained.choice):
        who = "The quickest" if answer.quickest else "What needs least memory"
    experts = f"experts {one.expert} x {one.expert_tensor}" if one.expert > 1 else ""
    told = [
        f"{one.micros:,} micro-batches of {one.micro}", one.stages, experts, DIVIDED[one.zero] + near_words(one),
        again_words(one.again), *lean_words(one),
    ]  # fmt: skip
    mesh = (
        f'<div class="card verdict"><div class="head"><h3>{who}</h3></div><p class="big mesh">{escape(one.mesh)}</p>'
        f"<p>{escape(', '.join(word for word in told if word))}</p></div>"
    )
    time = (
        f'<div class="card verdict"><div class="head"><h3>Step</h3></div><p class="big">{three(one.step)} s</p>'
        f'<p class="soft">90 % of runs like it: {three(one.low)} to {three(one.high)} s</p>'
        f"<p>{one.tokens_per_device:,.0f} tokens/s and device, MFU {one.utilisation:.1%}</p></div>"
    )
    room = (
        f'<div class="card verdict {state}"><div class="head"><h3>Memory</h3>'
        f'<span class="state">{sign} {fits}</span></div>'
        f'<p class="big">{one.memory / 1e9:.1f} GB</p>'
        f'<p class="soft">of {answer.limit / 1e9:.0f} GB, of the fullest rank</p>'
        f"<p>Fits in {'more than 99%' if one.fits > 0.995 else f'{one.fits:.0%}'} of such runs.</p></div>"
    )
    return f'<section class="verdicts">{mesh}{time}{room}</section>'


def _refused(shown: Shown) -> str:
    notes = [shown.answer.missed] if shown.answer.missed else []
    if shown.explained is not None and shown.explained.refused:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in shown.explained.refused)
        return section(
            "The strategy that was given cannot run", f'<div class="card"><ul class="plain">{reasons}</ul></div>'
        )
    if not shown.answer.choices and not notes:
        return section("Nothing fits", table("", ("what", "how"), too_small(shown.answer)))
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _ranking(shown: Shown) -> str:
    if shown.explained is not None:
        *_, (_, headers, rows) = [one for one in explained_tables(shown.explained) if "mesh" in one[1]]
        title = "The best instead" if shown.explained.refused else "Beside the best"
        return section(title, table("", headers, rows, "rank"))
    if not shown.answer.choices:
        return ""
    headers, rows = ranking(shown.answer)
    said = f"{shown.answer.looked:,} configurations were looked at. The fastest of all that fit come first."
    if shown.answer.several:
        said = f"{shown.answer.looked:,} configurations were looked at, of all sizes of the cluster."
    return section("Ranking", f'<p class="soft lead">{said}</p>', table("", headers, rows, "rank"))


def _why_title(shown: Shown) -> str:
    if shown.explained is not None and shown.explained.choice is not None:
        return "What it needs, and what it loses to the best"
    if shown.explained is not None:
        return "What the best needs"
    return "Why the first wins" if shown.answer.choices else "What it would need"


def _why(shown: Shown) -> str:
    one = shown.chosen
    time, memory = shares(one)
    tables = [
        table("Of its step", ("", "seconds", "share"), time),
        table("Of its memory", ("", "GB", "share"), memory),
    ]
    found = f'<div class="two">{"".join(tables)}</div>' + table(*BINDS, bottlenecks.rows(shown.answer, one))
    if shown.explained is None and shown.answer.aim is not None:
        found += "".join(table(*told) for told in cost_tables.tables(one, shown.answer.aim.terms))
    if shown.explained is not None:
        beside = [one for one in explained_tables(shown.explained) if one[0].startswith("Beside the best")]
        return found + "".join(table(*one) for one in beside)
    if len(shown.answer.choices) < 2:
        return found
    return found + table("What the others lose", ("row", *lost_by(shown.answer)), losses(shown.answer))


def _fronts(shown: Shown) -> str:
    assert shown.fronts is not None
    return "".join(
        f'<details class="card"><summary>{escape(title)}</summary>'
        f"{table('', headers, rows, 'rank', card=False)}</details>"
        for title, headers, rows in front_tables(shown.fronts)
    )


def _otherwise(answer: Answer) -> str:
    return table("", ("", "best step", "than now", "by"), otherwise(answer))


def _assumed(answer: Answer) -> str:
    if not answer.assumed:
        return ""
    rows = "".join(f"<li>{escape(one)}</li>" for one in answer.assumed)
    return section("Not in the catalogue, and assumed", f'<div class="card"><ul class="plain">{rows}</ul></div>')


def _question_table(shown: Shown) -> str:
    ask, aim, answer = shown.ask, shown.answer.aim, shown.answer
    rows = [
        (
            "model",
            f"{answer.outline.description}, {answer.outline.numbers:,} parameters, {answer.outline.layers} layers",
        ),
        ("cluster", f"{shown.cluster.name}, {shown.cluster.ranks:,} x {shown.cluster.device.name}"),
        ("links", ", ".join(f"{one.name}: {one.rate / 1e9:g} GB/s among {one.ranks:,}" for one in shown.cluster.links)),
        ("devices", f"{f'{ask.fewest:,} to ' if ask.fewest else ''}{ask.devices or shown.cluster.ranks:,}"),
        ("tokens of a step", f"{ask.tokens:,}"),
        ("tokens of a sample", f"{ask.sequence:,}"),
        ("matmuls computed in", " or ".join((ask.precision, *ask.others))),
        ("run by", ask.framework),
        *([("without", ", ".join(ask.without))] if ask.without else []),
        ("memory of a rank", f"{answer.limit / 1e9:g} GB"),
    ]
    if aim is not None:
        terms = aim.terms
        rows.append(("best by", aim.objective.title if aim.objective.sizes else "the shortest step"))
        rows += [("price of a device's hour", f"{terms.price:g}")] if terms.price is not None else []
        rows += [("tokens to train on", f"{terms.training:,}")] if terms.training is not None else []
        rows += [("deadline", f"{terms.hours:g} hours")] if terms.hours is not None else []
        rows += interruptions(aim, shown.chosen.devices) if terms.goodput is not None else []
    body = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return section(
        "What was asked", f'<div class="card scroll"><table class="pairs"><tbody>{body}</tbody></table></div>'
    )


def _foot() -> str:
    return f"<footer>Made by Tangram {escape(tangram.__version__)}. It needs no network: all is in this file.</footer>"
