"""`tangram runs compare`: runs side by side; `tangram experts`: how evenly a run's tokens went to its experts;
`tangram evaluate`: the scores of what a run leaves by lm-evaluation-harness."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.grouped import Json, with_options
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


@dataclass(frozen=True)
class Asking:
    """How questions are put."""

    samples: Annotated[int, typer.Option(min=0, help="Only the first so many of each task; 0: all.")] = 0
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question, not the task's own.")] = None
    batch: Annotated[int, typer.Option(min=1, help="Questions at a time.")] = 1
    chat: Annotated[bool, typer.Option("--chat", help="Put questions by the tokenizer's chat template.")] = False
    device: Annotated[str, typer.Option(help="Where the model computes, by torch's name.")] = "cpu"


@with_options(Asking)
def evaluate(
    asking: Asking,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory, adapters, a checkpoint, or a run.")
    ],
    tasks: Annotated[list[str], typer.Option("--task", "-t", help="By name, or a YAML file; may be repeated.")],
    include: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of tasks of your own.")] = None,
    base: Annotated[Path | None, typer.Option(metavar="DIR", help="Of adapters: the model that they are for.")] = None,
    json: Json = False,
) -> int:
    """Print every metric of every task; the harness asks, transformers computes, in one process."""
    from tangram.training.run.harness import HarnessRequest, rows_of, scores_of

    found = scores_of(HarnessRequest(model, tuple(tasks), include, base, **asdict(asking)))
    if json:
        print_json(
            {"scores": [{**asdict(one), "error": None if math.isnan(one.error) else one.error} for one in found]}
        )
        return 0
    print_table(str(model), ("task", "metric", "value", "standard error", "shots", "samples"), rows_of(found))
    return 0
