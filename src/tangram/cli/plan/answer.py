"""`tangram plan MODEL --cluster C`: what it prints. Loads transformers, so only that way of the command imports it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

from tangram.cli.output import print_json, print_table, progress
from tangram.cli.plan.exports import (
    ExportRequest,
    Typed,
    checked,
    read_strategy,
    read_table,
    strategy_json,
    typed_or_read,
    write,
)
from tangram.cli.plan.inputs import TANGRAM, Taking, own, read_job, read_outline, search_request
from tangram.cli.plan.options import Common, Failures
from tangram.errors import UserError
from tangram.hardware.catalogue import cluster as clusters
from tangram.hardware.catalogue.cluster import Cluster
from tangram.models.outlines.catalogue import active_numbers
from tangram.models.outlines.outline import Outline
from tangram.planner.cost.calibration import published
from tangram.planner.cost.goodput import PRIOR, Goodput, Snapshots, seen_failures
from tangram.planner.cost.timeline import as_trace, timeline
from tangram.planner.exports.numbers import strategy_request
from tangram.planner.exports.targets import able_of
from tangram.planner.imports.words import ReadStrategy
from tangram.planner.legality.enumerate import ALL
from tangram.planner.legality.trainer_support import RUNS
from tangram.planner.local.ranking_table import Titled
from tangram.planner.report import cost_tables
from tangram.planner.report.answer_tables import (
    as_json,
    explained_json,
    explained_tables,
    front_json,
    front_tables,
    tables,
)
from tangram.planner.report.cost_tables import duration_json, duration_tables
from tangram.planner.report.heterogeneous_tables import OverParts
from tangram.planner.report.html_parts import need_plotly
from tangram.planner.report.report import Shown, write_report, write_step
from tangram.planner.search.by_device_count import Budget, best, durations, fewest
from tangram.planner.search.explain import Explained, StrategyRequest, explain
from tangram.planner.search.heterogeneous import alone, enough, over_parts, parts_of
from tangram.planner.search.objectives import Terms, aim_of, hour_price
from tangram.planner.search.pareto import Fronts, fronts
from tangram.planner.search.query import Answer, ask_of, count_of, devices_of
from tangram.planner.search.strategy import Ask, Choice, safe
from tangram.planner.space.framework_profiles import framework
from tangram.text import refuse_unwritable, write_file

PAGES = (".html", ".htm")
THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Of tokens to train on, as papers count them."""


Strategy = tuple[str, int, int, str, int, str, str, str]
"""Mesh, micro-batch, virtual stages, schedule, what is divided, what is recomputed, experts, fewer layers."""


@dataclass(frozen=True)
class Look:
    """What is best, and what is to be shown; as typed."""

    objective: str
    """By name; "": step time, and with `train_tokens` how long they take."""
    pareto: bool
    train_tokens: str | None
    hours: float | None
    price: tuple[float | None, float | None, float | None]
    """Of a device's hour, watts of a device, and of a kWh."""
    failures: Failures
    """Hours between two of one device, seconds of a checkpoint, seconds until training runs again, snapshots, runs that
    have seen some."""
    timeline: Path | None
    report: Path | None

    def goodput(self) -> Goodput | None:
        """Of failures. Raises UserError where one of the three is missing."""
        mtbf, checkpoint, restart, snapshots, runs = self.failures
        if mtbf is None and checkpoint is None and restart is None and snapshots is None and not runs:
            return None
        known = ""
        if runs and (mtbf is None or 0 < mtbf < math.inf):
            found, prior = seen_failures(runs), mtbf or PRIOR
            mtbf, low, high = found.hours(prior)
            restart = statistics.median(found.restarts) if restart is None and found.restarts else restart
            known = (
                f"{mtbf:,.0f} hours (90 % interval {low:,.0f} to {high:,.0f}): {found.failures} failures in "
                f"{found.device_hours:,.1f} device-hours, and one in {prior:,.0f} beforehand"
            )
        if mtbf is None or checkpoint is None or restart is None:
            raise UserError("failures need all of --mtbf, --checkpoint-s and --restart-s")
        return Goodput(1 / mtbf if mtbf else 0.0, checkpoint, restart, _snapshots(snapshots), known)

    def terms(self, asked: Ask) -> Terms:
        """What values are made of. Raises UserError."""
        if self.hours is not None and self.train_tokens is None and not self.objective:
            raise UserError("--hours is the deadline of --train-tokens: give both")
        training = None if self.train_tokens is None else count_of(self.train_tokens, THOUSANDS)
        return Terms(asked.tokens_met, hour_price(*self.price), training, self.hours, self.goodput(), self.price[1])


def _snapshots(typed: str | None) -> Snapshots | None:
    """As typed: three numbers with commas. Raises UserError."""
    if typed is None:
        return None
    try:
        pause, restart, covers = map(float, typed.split(","))
    except ValueError:
        pause = restart = covers = 0.0  # which are none, and are told
    return Snapshots(pause, restart, covers)


def answered(common: Common, one: Strategy | None, look: Look, wanted: ExportRequest | None, taking: Taking) -> int:
    """One strategy explained, or how long a training takes, or the ranking; exit code 1 where nothing fits."""
    model, typed, training, json = common.model, common.typed(), common.training(), common.json
    if wanted is not None and wanted.export == TANGRAM:
        wanted, taking = None, own(wanted, model)
    if wanted is not None:
        checked(wanted)
    _files(look, wanted, taking)
    where, job = clusters.load(common.cluster), read_job(common, taking)
    outline = training.outline(read_outline(model)) if job is None else job.outline
    read = None if one is None else read_strategy(one[0], outline, devices_of(typed[4])[1], where)
    asked = _ask(outline, typed if job is None else job.typed(typed), read, wanted if one is None else None, taking)
    outline = training.samples(outline, asked.sequence)
    asked = search_request(job, asked, training, outline)
    terms = look.terms(asked)
    if look.train_tokens is not None and not look.objective:
        if look.report is not None:
            raise UserError("--report is of a ranking: give --objective devices with --train-tokens and --hours")
        return _budgeted(outline, where, asked, terms, json=json)
    given = (
        None
        if one is None
        else StrategyRequest(*one[:7], uneven=one[7])
        if read is None
        else strategy_request(read.numbers)
    )
    with progress("laying the model out, searching"):
        found = _answer(outline, where, asked, given, look, terms)
    document, shown, choices = found.document(), found.tables(), found.choices
    document = {"parameters": outline.numbers, "active_parameters": active_numbers(outline), **document}
    shown.insert(0 if choices else 1, _size_table(outline))  # where nothing fits that is said first
    found.write(look, where)
    if job is not None:
        shown = [*shown, *job.take(choices, taking, document)]
    if wanted is not None and choices:
        write(wanted, choices, outline, asked, where)
    if wanted is None or wanted.out is not None or not choices:
        if read is not None and one is not None:
            document["read"] = strategy_json(read)
            shown = [read_table(one[0], read), *shown]
        _print(document, shown, json=json)
    if not json:
        _wrote(look, wanted, taking, some=bool(choices))
    return 0 if found.fits else 1


def _size_table(outline: Outline) -> Titled:
    active = active_numbers(outline)
    met = [("of them active for a token", f"{active:,} ({active / 1e9:.3g}B)")] if active < outline.numbers else []
    whole = ("parameters", f"{outline.numbers:,} ({outline.numbers / 1e9:.3g}B)")
    return outline.description, ("", "numbers"), [whole, *met]


@dataclass(frozen=True)
class _AnswerShown:
    """The answer, as a ranking or beside a strategy that is explained."""

    answer: Answer
    explained: Explained | None
    fronts: Fronts | None
    pareto: bool
    """Whether fronts are printed, too."""
    terms: Terms

    @property
    def choices(self) -> tuple[Choice, ...]:
        if self.explained is None:
            return self.answer.choices
        return () if self.explained.choice is None else (self.explained.choice,)

    @property
    def fits(self) -> bool:
        """Whether the first can be run."""
        return bool(self.choices) and self.choices[0].memory <= safe(self.answer.limit)

    def write(self, look: Look, where: Cluster) -> None:
        """The pages that are wanted, and the timeline."""
        shown = Shown(self.answer, where, self.explained, self.fronts)
        if look.report is not None:
            write_report(look.report, shown)
        if look.timeline is not None and self.choices:
            _draw(shown, look.timeline)

    def document(self) -> dict[str, object]:
        """For programs."""
        found = as_json(self.answer) if self.explained is None else explained_json(self.explained)
        found["spent"] = cost_tables.document(self.choices[0], self.terms) if self.choices else None
        return found if self.fronts is None or not self.pareto else {**found, "pareto": front_json(self.fronts)}

    def tables(self) -> list[Titled]:
        """For people."""
        found = tables(self.answer) if self.explained is None else explained_tables(self.explained)
        found = [*found, *(table for one in self.choices[:1] for table in cost_tables.tables(one, self.terms))]
        return found if self.fronts is None or not self.pareto else [*found, *front_tables(self.fronts)]


def _answer(
    outline: Outline, where: Cluster, asked: Ask, given: StrategyRequest | None, look: Look, terms: Terms
) -> _AnswerShown:
    if given is not None and look.objective:
        raise UserError("--objective ranks strategies, and explain looks at one: give one of the two")
    aim = aim_of(look.objective or "time", terms)
    explained = None if given is None else explain(outline, where, asked, given)
    answer = best(outline, where, asked, aim) if explained is None else explained.best
    first = answer.choices[0] if answer.choices else None
    seen = fronts(outline, where, asked, terms, first) if look.pareto or look.report is not None else None
    return _AnswerShown(answer, explained, seen, look.pareto, terms)


def _wrote(look: Look, wanted: ExportRequest | None, taking: Taking, *, some: bool) -> None:
    """`some`: whether there is a strategy to write; a report is written where there is none, too."""
    page = look.timeline is not None and look.timeline.suffix in PAGES
    files = [(look.timeline, "open it in a browser" if page else "open it at ui.perfetto.dev")]
    files.append((taking.out, f"tangram train {taking.out}"))
    if wanted is not None:
        files.append((wanted.out, wanted.export or wanted.emit))
    for path, what in [(look.report, "open it in a browser"), *(files if some else [])]:
        if path is not None:
            print(f"wrote {path}: {what}")


def _ask(
    outline: Outline, typed: Typed, read: ReadStrategy | None, wanted: ExportRequest | None, taking: Taking
) -> Ask:
    asked = ask_of(*typed_or_read(typed, read, wanted))
    if wanted is not None:
        asked = replace(asked, able=wanted.able(outline), loss=wanted.loss)
    elif asked.able == ALL and not taking.runs:
        asked = replace(asked, able=able_of(framework(asked.framework).name, outline))
    return replace(asked, able=RUNS) if taking.runs else asked


def _draw(shown: Shown, path: Path) -> None:
    """The timeline: a page where the file's name says so, else Perfetto's JSON."""
    if path.suffix in PAGES:
        write_step(path, shown)
        return
    setting, chosen = shown.setting(), shown.chosen
    scales = published().scales(setting.device.name, setting)
    trace = as_trace(timeline(shown.answer.outline, chosen.grid(), setting, scales))
    write_file(path, dumps(trace), "the timeline")


def _files(look: Look, wanted: ExportRequest | None, taking: Taking) -> None:
    """Raise UserError for files that cannot be written, before anything is searched."""
    if look.report is not None or (look.timeline is not None and look.timeline.suffix in PAGES):
        need_plotly()
    for name, path in (("report", look.report), ("timeline", look.timeline)):
        if path is not None:
            refuse_unwritable(path, f"the {name}")
    out = taking.out if wanted is None else wanted.out
    paths = [path.resolve() for path in (look.report, look.timeline, out) if path is not None]
    if len(set(paths)) < len(paths):
        raise UserError("the report, the timeline and what is written with --out are files of their own: name each")


def _budgeted(outline: Outline, where: Cluster, asked: Ask, terms: Terms, *, json: bool) -> int:
    budget = Budget(terms.training or 0, terms.hours, terms.price, terms.goodput, terms.watts)
    with progress("laying the model out, searching"):
        found = durations(outline, where, asked, budget)
    _print(duration_json(found, budget), duration_tables(found, budget), json=json)
    kept = fewest(found, budget) if terms.hours is not None else next((one for one in found if one.choice), None)
    return 0 if kept else 1


def _print(document: dict[str, object], shown: list[Titled], *, json: bool) -> None:
    if json:
        print_json(document)
        return
    for title, headers, rows in shown:
        print_table(title, headers, rows)


# ----------------------------------------------------------------
# `tangram plan MODEL --cluster A.toml,B.toml --between 25`: a cluster whose devices are not alike.


def names_of_parts(cluster: str) -> tuple[str, ...]:
    """The parts' names; none where one cluster is named. Raises UserError where one of several has no name."""
    if "," not in cluster or Path(cluster).exists():
        return ()
    names = tuple(name.strip() for name in cluster.split(","))
    if not all(names):
        raise UserError(f"--cluster {cluster}: a part between the commas has no name")
    return names


def answered_over_parts(common: Common, names: Sequence[str], between: float | None) -> int:
    """The ranking, the stages of the first, and each part alone; exit code 1 where nothing fits. Raises UserError."""
    typed, training = common.typed(), common.training()
    where = [clusters.load(name) for name in names]
    if between is None:
        raise UserError("what a device gets from another part is not said: give --between in GB/s")
    job = read_job(common, Taking(None, 1, runs=False))
    outline = training.outline(read_outline(common.model)) if job is None else job.outline
    asked = ask_of(*typed_or_read(typed if job is None else job.typed(typed), None, None))
    outline = training.samples(outline, asked.sequence)
    asked = search_request(job, asked, training, outline)
    parts, rate = parts_of(where, asked), between * 1e9
    with progress("laying the model out, searching"):
        found = over_parts(outline, parts, asked, rate)
        beside = tuple(alone(outline, part, replace(asked, most=1)) for part in parts)
        times = 0 if found else enough(outline, parts, asked, rate)
    said = OverParts(outline, parts, asked, rate, found, beside, times)
    if common.json:
        print_json(said.document())
    else:
        for title, headers, rows in said.tables():
            print_table(title, headers, rows)
    return 0 if found else 1
