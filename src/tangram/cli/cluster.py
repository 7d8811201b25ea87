"""`tangram plan MODEL --cluster C`: what it prints. Loads transformers, so only that way of the command imports it."""

from __future__ import annotations

from tangram.cli.output import print_json, print_table, progress
from tangram.hardware import cluster as clusters
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
from tangram.planner.choice import safe
from tangram.planner.explain import Given, explain
from tangram.planner.table import Titled

__all__ = ["answered"]

Typed = tuple[str, int, str, str, int, float, int]
"""Tokens of a step, tokens of a sample, precision, framework, devices, memory in GB, how many strategies."""
THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Of tokens to train on, as papers count them."""


Strategy = tuple[str, int, int, int, str, str]
"""Mesh, micro-batch, chunks, what is divided, what is made again, experts."""
Training = tuple[str, float | None, float | None]
"""Tokens, hours, price."""


def answered(model: str, cluster: str, typed: Typed, one: Strategy | None, long: Training | None, *, json: bool) -> int:
    """One strategy explained, or how long a training takes, or the ranking."""
    if one is not None:
        return explained(model, cluster, typed, one, json=json)
    if long is not None:
        return budgeted(model, cluster, typed, long, json=json)
    return ranked(model, cluster, typed, json=json)


def ranked(model: str, cluster: str, typed: Typed, *, json: bool) -> int:
    """The ranking; exit code 1 where nothing fits."""
    asked, where = asked_of(*typed), clusters.load(cluster)
    with progress("laying the model out, searching"):
        answer = plan(outlined(model), where, asked)
    _print(as_json(answer), tables(answer), json=json)
    return 0 if answer.choices else 1


def explained(model: str, cluster: str, typed: Typed, given: Strategy, *, json: bool) -> int:
    """One strategy; exit code 1 where it cannot run or is not safe to fit."""
    asked, where = asked_of(*typed), clusters.load(cluster)
    with progress("laying the model out, searching"):
        found = explain(outlined(model), where, asked, Given(*given))
    _print(explained_json(found), explained_tables(found), json=json)
    return 0 if found.choice is not None and found.choice.memory <= safe(found.best.limit) else 1


def budgeted(model: str, cluster: str, typed: Typed, said: Training, *, json: bool) -> int:
    """How long a training takes; exit code 1 where nothing fits, or nothing keeps the deadline."""
    asked, where = asked_of(*typed), clusters.load(cluster)
    tokens, hours, price = said
    budget = Budget(count_of(tokens, THOUSANDS), hours, price)
    with progress("laying the model out, searching"):
        found = durations(outlined(model), where, asked, budget)
    _print(duration_json(found, budget), duration_tables(found, budget), json=json)
    kept = fewest(found, budget) if hours is not None else next((one for one in found if one.choice), None)
    return 0 if kept else 1


def _print(document: dict[str, object], shown: list[Titled], *, json: bool) -> None:
    if json:
        print_json(document)
        return
    for title, headers, rows in shown:
        print_table(title, headers, rows)
