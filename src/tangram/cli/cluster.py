"""`tangram plan MODEL --cluster C`: what it prints. Loads transformers, so only that way of the command imports it."""

from __future__ import annotations

from dataclasses import replace
from json import dumps
from pathlib import Path

from tangram.cli.exports import Typed, Wanted, asked_typed, checked, given_in, read_table, said_json, write
from tangram.cli.output import print_json, print_table, progress
from tangram.cli.taken import Taking, job_in
from tangram.errors import UserError
from tangram.hardware import cluster as clusters
from tangram.hardware.cluster import Cluster
from tangram.models.outline import Outline
from tangram.models.outlined import outlined
from tangram.planner.answer import (
    as_json,
    duration_json,
    duration_tables,
    explained_json,
    explained_tables,
    tables,
)
from tangram.planner.ask import asked_of, count_of, plan
from tangram.planner.budget import Budget, durations, fewest
from tangram.planner.choice import Ask, Choice, safe, setting_of
from tangram.planner.explain import Given, explain
from tangram.planner.exports.numbers import given_of
from tangram.planner.grid import grid
from tangram.planner.imports.found import Found
from tangram.planner.learn import published
from tangram.planner.table import Titled
from tangram.planner.timeline import as_trace, timeline
from tangram.planner.trainer import runs

__all__ = ["answered"]

THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Of tokens to train on, as papers count them."""


Strategy = tuple[str, int, int, str, int, str, str]
"""Mesh, micro-batch, chunks, schedule, what is divided, what is made again, experts."""
Training = tuple[str, float | None, float | None]
"""Tokens, hours, price."""


def answered(
    model: str, cluster: str, typed: Typed, one: Strategy | None, long: Training | None, trace: Path | None,
    wanted: Wanted | None, taking: Taking, *, json: bool,
) -> int:  # fmt: skip
    """One strategy explained, or how long a training takes, or the ranking; exit code 1 where nothing fits."""
    if wanted is not None:
        checked(wanted)
    where, job = clusters.load(cluster), job_in(model, taking, typed[:3])
    outline = outlined(model) if job is None else job.outline
    read = None if one is None else given_in(one[0], outline, typed[4], where)
    asked = _asked(outline, typed if job is None else job.typed(typed), read, wanted if one is None else None, taking)
    if long is not None:
        return _budgeted(outline, where, asked, long, json=json)
    with progress("laying the model out, searching"):
        if one is not None:
            found = explain(outline, where, asked, Given(*one) if read is None else given_of(read.numbers))
            document, shown = explained_json(found), explained_tables(found)
            choices = () if found.choice is None else (found.choice,)
            fits = bool(choices) and choices[0].memory <= safe(found.best.limit)
        else:
            answer = plan(outline, where, asked)
            document, shown, choices = as_json(answer), tables(answer), answer.choices
            fits = bool(choices)
    if trace is not None and choices:
        _draw(outline, where, asked, choices[0], trace)
    if job is not None:
        shown = [*shown, *job.take(choices, taking, document)]
    if wanted is not None and choices:
        write(wanted, choices, outline, asked, where)
    if wanted is None or wanted.out is not None or not choices:
        if read is not None and one is not None:
            document["read"] = said_json(read)
            shown = [read_table(one[0], read), *shown]
        _print(document, shown, json=json)
    files = [(trace, "open it at ui.perfetto.dev"), (taking.out, f"tangram train {taking.out}")]
    if wanted is not None:
        files.append((wanted.out, wanted.export or wanted.emit))
    for path, what in files:
        if path is not None and choices and not json:
            print(f"wrote {path}: {what}")
    return 0 if fits else 1


def _asked(outline: Outline, typed: Typed, read: Found | None, wanted: Wanted | None, taking: Taking) -> Ask:
    asked = asked_of(*asked_typed(typed, read, wanted))
    if wanted is not None:
        asked = replace(asked, able=wanted.able(outline))
    return replace(asked, able=runs(outline)) if taking.runs else asked


def _draw(outline: Outline, where: Cluster, asked: Ask, chosen: Choice, path: Path) -> None:
    setting = setting_of(where, asked)
    scales = published().scales(setting.device.name, setting)
    g = grid(**{name: int(value) if name == "recompute" else value for name, value in chosen.at.items()})
    try:
        path.write_text(dumps(as_trace(timeline(outline, g, setting, scales))), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the timeline cannot be written to {path}: {error.strerror}") from None


def _budgeted(outline: Outline, where: Cluster, asked: Ask, said: Training, *, json: bool) -> int:
    tokens, hours, price = said
    budget = Budget(count_of(tokens, THOUSANDS), hours, price)
    with progress("laying the model out, searching"):
        found = durations(outline, where, asked, budget)
    _print(duration_json(found, budget), duration_tables(found, budget), json=json)
    kept = fewest(found, budget) if hours is not None else next((one for one in found if one.choice), None)
    return 0 if kept else 1


def _print(document: dict[str, object], shown: list[Titled], *, json: bool) -> None:
    if json:
        print_json(document)
        return
    for title, headers, rows in shown:
        print_table(title, headers, rows)
