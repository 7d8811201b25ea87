"""`tangram plan MODEL --cluster C`: what it prints. Loads transformers, so only that way of the command imports it."""

from __future__ import annotations

from json import dumps
from pathlib import Path

from tangram.cli.output import print_json, print_table, progress
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
from tangram.planner.grid import grid
from tangram.planner.learn import published
from tangram.planner.table import Titled
from tangram.planner.timeline import as_trace, timeline

__all__ = ["answered"]

Typed = tuple[str, int, str, str, int, float, int]
"""Tokens of a step, tokens of a sample, precision, framework, devices, memory in GB, how many strategies."""
THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Of tokens to train on, as papers count them."""


Strategy = tuple[str, int, int, str, int, str, str]
"""Mesh, micro-batch, chunks, schedule, what is divided, what is made again, experts."""
Training = tuple[str, float | None, float | None]
"""Tokens, hours, price."""


def answered(
    model: str, cluster: str, typed: Typed, one: Strategy | None, long: Training | None, trace: Path | None, *,
    json: bool,
) -> int:  # fmt: skip
    """One strategy explained, or how long a training takes, or the ranking; exit code 1 where nothing fits."""
    asked, where = asked_of(*typed), clusters.load(cluster)
    outline = outlined(model)
    if long is not None:
        return _budgeted(outline, where, asked, long, json=json)
    with progress("laying the model out, searching"):
        if one is not None:
            found = explain(outline, where, asked, Given(*one))
            document, shown, chosen = explained_json(found), explained_tables(found), found.choice
            fits = chosen is not None and chosen.memory <= safe(found.best.limit)
        else:
            answer = plan(outline, where, asked)
            document, shown = as_json(answer), tables(answer)
            chosen = answer.choices[0] if answer.choices else None
            fits = chosen is not None
    if trace is not None and chosen is not None:
        _draw(outline, where, asked, chosen, trace)
    _print(document, shown, json=json)
    if trace is not None and chosen is not None and not json:
        print(f"wrote {trace}: open it at ui.perfetto.dev")
    return 0 if fits else 1


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
