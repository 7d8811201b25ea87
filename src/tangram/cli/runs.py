"""`tangram runs compare`: runs side by side; `tangram experts`: how evenly a run's tokens went to its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.output import print_json, print_table
from tangram.errors import UserError

runs = typer.Typer(no_args_is_help=True, help="Put runs side by side.")


@runs.callback()
def _runs() -> None:
    """Put runs side by side."""


@runs.command("compare")
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of runs; they may still go on.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document, with all steps, instead.")] = False,
) -> int:
    """Print what came of runs, the keys in which their plans differ, and where their losses part."""
    from tangram.training.observe.compared_runs import compare_runs

    found = compare_runs(folders)
    if json:
        tables = {"results": found.results, "keys": found.keys}
        each = {
            name: {table: {row[0]: row[at] for row in rows} for table, rows in tables.items()}
            for at, name in enumerate(found.names, 1)
        }
        print_json({"runs": each, "steps": dict(zip(found.names, found.steps, strict=True)), "note": found.note})
        return 0
    print_table("Runs", ("", *found.names), found.results)
    if found.keys:
        print_table("Keys that differ", ("key", *found.names), found.keys)
    if found.losses:
        print_table("Loss", ("step", *found.names), found.losses)
    print(found.note)
    return 0


def experts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that counted, or its experts.jsonl.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="That experts lie on.")],
    slots: Annotated[int, typer.Option(help="For experts on all ranks together; 0: one for each.")] = 0,
    nodes: Annotated[int, typer.Option(help="That the ranks are on: groups of experts keep to one.")] = 1,
    groups: Annotated[int, typer.Option(help="Of experts, as routers of some models have them.")] = 1,
    last: Annotated[int, typer.Option(help="How many counts, from the last back; 0: all.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> int:
    """Print by layer the balance of ranks in the experts' own order and as placed, and the experts of each slot."""
    if min(slots, last) < 0 or min(ranks, nodes, groups) < 1:
        raise UserError("--slots and --last are 0 or more, --ranks, --nodes and --groups 1 or more")
    from tangram.planner.expert_placement import balance, in_order, place
    from tangram.training.objective.expert_loads import read, together

    counts = read(run)
    found: dict[str, dict[str, object]] = {}
    rows: list[tuple[str, ...]] = []
    for name, loads in together(counts[-last:] if last else counts).items():
        room = slots or len(loads)
        placed = place(loads, ranks, room, nodes=nodes, groups=groups)
        before, after = balance(loads, in_order(len(loads), ranks, len(loads))), balance(loads, placed)
        found[name] = {"tokens": loads, "balance": before, "placed": after, "placement": placed}
        slots_said = " | ".join(" ".join(map(str, own)) for own in placed)
        rows.append((name, f"{before:.3f}", f"{after:.3f}", slots_said))
    if json:
        print_json({"ranks": ranks, "steps": [one.step for one in counts], "layers": found})
    else:
        print_table("Balance of ranks: mean over most", ("layer", "in order", "placed", "experts of each rank"), rows)
    return 0
