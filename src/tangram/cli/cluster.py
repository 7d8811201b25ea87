"""`tangram plan MODEL --cluster C`: what it prints. Loads transformers, so only that way of the command imports it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

from tangram.cli.exports import Typed, Wanted, asked_typed, checked, given_in, read_table, said_json, write
from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.hardware import cluster as clusters
from tangram.hardware.cluster import Cluster
from tangram.models.outline import Outline
from tangram.models.outlined import outlined
from tangram.planner.across import best
from tangram.planner.answer import (
    as_json,
    duration_json,
    duration_tables,
    explained_json,
    explained_tables,
    front_json,
    front_tables,
    tables,
)
from tangram.planner.ask import Answer, asked_of, count_of
from tangram.planner.budget import Budget, durations, fewest
from tangram.planner.choice import Ask, Choice, safe, setting_of
from tangram.planner.explain import Explained, Given, explain
from tangram.planner.exports.numbers import given_of
from tangram.planner.front import fronts
from tangram.planner.goodput import Goodput
from tangram.planner.grid import grid
from tangram.planner.learn import published
from tangram.planner.objectives import Terms, aim_of
from tangram.planner.table import Titled
from tangram.planner.timeline import as_trace, timeline

__all__ = ["Look", "answered"]

THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Of tokens to train on, as papers count them."""


Strategy = tuple[str, int, int, str, int, str, str]
"""Mesh, micro-batch, chunks, schedule, what is divided, what is made again, experts."""


@dataclass(frozen=True)
class Look:
    """What is best, and what is to be shown; as typed."""

    objective: str
    """By name; "": step time, and with `train_tokens` how long they take."""
    pareto: bool
    train_tokens: str | None
    hours: float | None
    price: float | None
    failures: tuple[float | None, float | None, float | None]
    """Hours between two of one device, seconds of a checkpoint, seconds until training runs again."""
    timeline: Path | None

    def goodput(self) -> Goodput | None:
        """Of failures. Raises UserError where one of the three is missing."""
        mtbf, checkpoint, restart = self.failures
        if mtbf is None and checkpoint is None and restart is None:
            return None
        if mtbf is None or checkpoint is None or restart is None:
            raise UserError("failures need all of --mtbf, --checkpoint-s and --restart-s")
        return Goodput(1 / mtbf if mtbf else 0.0, checkpoint, restart)

    def terms(self, asked: Ask) -> Terms:
        """What values are made of. Raises UserError."""
        training = None if self.train_tokens is None else count_of(self.train_tokens, THOUSANDS)
        return Terms(asked.tokens, self.price, training, self.hours, self.goodput())


def answered(
    model: str, cluster: str, typed: Typed, one: Strategy | None, look: Look, wanted: Wanted | None, *, json: bool
) -> int:
    """One strategy explained, or how long a training takes, or the ranking; exit code 1 where nothing fits."""
    if wanted is not None:
        checked(wanted)
    where, outline = clusters.load(cluster), outlined(model)
    read = None if one is None else given_in(one[0], outline, typed[4], where)
    asked = asked_of(*asked_typed(typed, read, wanted))
    if wanted is not None and one is None:
        asked = replace(asked, able=wanted.able(outline))
    terms = look.terms(asked)
    if look.train_tokens is not None and not look.objective:
        return _budgeted(outline, where, asked, terms, json=json)
    if one is not None and look.objective:
        raise UserError("--objective ranks strategies, and --explain looks at one: give one of the two")
    aim = aim_of(look.objective or "time", terms)
    with progress("laying the model out, searching"):
        given = None if one is None else Given(*one) if read is None else given_of(read.numbers)
        explained = None if given is None else explain(outline, where, asked, given)
        answer = best(outline, where, asked, aim) if explained is None else explained.best
        document, shown, choices, fits = _said(answer, explained)
        if look.pareto:
            found = fronts(outline, where, asked, terms)
            document["pareto"] = front_json(found)
            shown = [*shown, *front_tables(found)]
    if look.timeline is not None and choices:
        _draw(outline, where, asked, choices[0], look.timeline)
    if wanted is not None and choices:
        write(wanted, choices, outline, asked, where)
    if wanted is None or wanted.out is not None or not choices:
        if read is not None and one is not None:
            document["read"] = said_json(read)
            shown = [read_table(one[0], read), *shown]
        _print(document, shown, json=json)
    if choices and not json:
        _wrote(look, wanted)
    return 0 if fits else 1


def _wrote(look: Look, wanted: Wanted | None) -> None:
    files = [(look.timeline, "open it at ui.perfetto.dev")]
    if wanted is not None:
        files.append((wanted.out, wanted.export or wanted.emit))
    for path, what in files:
        if path is not None:
            print(f"wrote {path}: {what}")


def _said(
    answer: Answer, explained: Explained | None
) -> tuple[dict[str, object], list[Titled], tuple[Choice, ...], bool]:
    """For programs, for people, the strategies of it, and whether the first can be run."""
    if explained is None:
        return as_json(answer), tables(answer), answer.choices, bool(answer.choices)
    choices = () if explained.choice is None else (explained.choice,)
    fits = bool(choices) and choices[0].memory <= safe(answer.limit)
    return explained_json(explained), explained_tables(explained), choices, fits


def _draw(outline: Outline, where: Cluster, asked: Ask, chosen: Choice, path: Path) -> None:
    setting = setting_of(where, asked)
    scales = published().scales(setting.device.name, setting)
    g = grid(**{name: int(value) if name == "recompute" else value for name, value in chosen.at.items()})
    try:
        path.write_text(dumps(as_trace(timeline(outline, g, setting, scales))), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the timeline cannot be written to {path}: {error.strerror}") from None


def _budgeted(outline: Outline, where: Cluster, asked: Ask, terms: Terms, *, json: bool) -> int:
    budget = Budget(terms.training or 0, terms.hours, terms.price, terms.goodput)
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
