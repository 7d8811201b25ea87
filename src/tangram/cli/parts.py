"""`tangram plan MODEL --cluster A.toml,B.toml --between 25`: a cluster whose devices are not alike."""

from __future__ import annotations

from dataclasses import replace

from tangram.cli.exports import Typed, asked_typed
from tangram.cli.lean import Lean
from tangram.cli.output import print_json, print_table, progress
from tangram.errors import UserError
from tangram.hardware import cluster as clusters
from tangram.models.adapted import adapted
from tangram.models.outlined import outlined
from tangram.planner.ask import asked_of
from tangram.planner.mixed import alone, enough, over_parts, parts_of
from tangram.planner.mixed_tables import OverParts

__all__ = ["answered_over_parts"]


def answered_over_parts(model: str, names: str, between: float | None, typed: Typed, lean: Lean, *, json: bool) -> int:
    """The ranking, the stages of the first, and each part alone; exit code 1 where nothing fits. Raises UserError."""
    where = [clusters.load(name.strip()) for name in names.split(",")]
    if between is None:
        raise UserError("what a device gets from another part is not said: give --between in GB/s")
    outline = adapted(outlined(model), lean.lora)
    asked = lean.of(asked_of(*asked_typed(typed, None, None)))
    parts, rate = parts_of(where, asked), between * 1e9
    with progress("laying the model out, searching"):
        found = over_parts(outline, parts, asked, rate)
        beside = tuple(alone(outline, part, replace(asked, most=1)) for part in parts)
        times = 0 if found else enough(outline, parts, asked, rate)
    said = OverParts(outline, parts, asked, rate, found, beside, times)
    if json:
        print_json(said.document())
    else:
        for title, headers, rows in said.tables():
            print_table(title, headers, rows)
    return 0 if found else 1
