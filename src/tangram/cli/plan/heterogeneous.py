"""`tangram plan MODEL --cluster A.toml,B.toml --between 25`: a cluster whose devices are not alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tangram.cli.output import print_json, print_table, progress
from tangram.cli.plan.exports import typed_or_read
from tangram.cli.plan.inputs import Taking, read_job, read_outline, search_request
from tangram.cli.plan.options import Common
from tangram.errors import UserError
from tangram.hardware.catalogue import cluster as clusters
from tangram.planner.report.heterogeneous_tables import OverParts
from tangram.planner.search.heterogeneous import alone, enough, over_parts, parts_of
from tangram.planner.search.query import ask_of


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
