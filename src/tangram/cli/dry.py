"""`tangram train PLAN --dry-run`: what a step of the plan needs of a rank, found without its machines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tangram.cli.output import print_json, print_table, progress, size
from tangram.errors import UserError
from tangram.schema.job import Job
from tangram.schema.plan import Plan

if TYPE_CHECKING:
    from tangram.training.trials.dry_run import Needs

HEADERS = ("rank", "stage", "keeps", "parameters", "gradients", "optimiser", "gathered", "activations", "at the peak")


def dry(plan: Job, *, json: bool) -> int:
    """Print memory by what it is, and collectives with their bytes. Raises UserError where the plan cannot start."""
    if not isinstance(plan, Plan):
        raise UserError("--dry-run takes a plan, and this is a job: `tangram plan JOB --out plan.toml` makes one of it")
    from tangram.training.trials.dry_run import dry_run  # loads torch: only for a sound plan

    begun = time.monotonic()
    with progress("reading") as line:
        found = dry_run(plan, line.update)
    seconds = time.monotonic() - begun
    if json:
        print_json({"ranks": plan.ranks, "seconds": seconds, "needs": [_as_json(one) for one in found]})
        return 0

    def row(one: Needs) -> tuple[str, ...]:
        kinds = (size(nbytes) for nbytes in one.memory.values())
        return str(one.rank), str(one.place), f"{one.kept:g}", *kinds, size(one.peak)

    fullest = max(found, key=lambda one: one.peak)
    titled = f"Memory of a rank of {plan.ranks:,}" + (" (the first of each stage)" if len(found) > 1 else "")
    print_table(titled, HEADERS, [row(one) for one in found])
    moved = [(one.axis, one.kind, f"{one.times:,}", size(one.nbytes)) for one in fullest.traffic]
    print_table(
        f"What rank {fullest.rank} sends and receives in a step", ("axis", "collective", "times", "bytes"), moved
    )
    print(f"dry run of one step in {seconds:.1f} s: nothing was computed, sent or written")
    return 0


def _as_json(one: Needs) -> dict[str, object]:
    return {
        "rank": one.rank,
        "stage": one.place,
        "kept_micro_batches": one.kept,
        "memory_bytes": {kind: round(nbytes) for kind, nbytes in one.memory.items()},
        "peak_bytes": round(one.peak),
        "traffic": [
            {"axis": x.axis, "collective": x.kind, "times": x.times, "received_bytes": round(x.nbytes)}
            for x in one.traffic
        ],
    }
