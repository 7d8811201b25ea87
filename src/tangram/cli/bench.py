"""`tangram bench`: run a bench of a checkout and print its figures beside peers, limits and targets."""

from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.output import figure, note, print_json, print_table
from tangram.hardware.measuring.benches import Report, find_checkout, run, summaries


def bench(
    name: Annotated[str | None, typer.Argument(help="Which bench to run; without a name they are listed.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, smaller sizes: to see that it works.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this group of figures; may be repeated.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Turns that each figure is the median of.")] = None,
    size: Annotated[float | None, typer.Option(help="Gigabytes of what is measured.")] = None,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk that is measured, or of results.")] = None,
    device: Annotated[str | None, typer.Option(help="Of op-accuracy: where operators run, as cpu.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Of a queue: begin nothing that ends later.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Of the planner: published runs, a CSV file.")] = None,
    sets: Annotated[Path | None, typer.Option(help="Of the planner: sets of runs to be ordered.")] = None,
    members: Annotated[Path | None, typer.Option(help="Of the planner: which runs are in which set.")] = None,
) -> None:
    """Measure Tangram beside its peers; a target that is missed is printed as such and is no error.

    Those after --quick are for the benches that have them; what each means there is at the head of its script.
    """
    checkout = find_checkout(Path.cwd())
    if name is None:
        known = summaries(checkout)
        if json:
            print_json(known)
        else:
            print_table("Benches", ("name", "what it measures"), list(known.items()))
        return
    options: dict[str, object] = {"only": tuple(only) if only else None, "repeats": repeats, "size": size}
    options |= {"folder": folder, "device": device, "seconds": seconds, "runs": runs, "sets": sets, "members": members}
    given = {key: value for key, value in options.items() if value is not None}
    report = run(checkout, name, quick, done=lambda row: note(f"{name}: {row.figure} done"), options=given)
    if json:
        print_json(report.as_json())
    else:
        _print(report)


def _print(report: Report) -> None:
    headers = ("figure", "unit", "ours", "peers", "limit", "ratio", "target", "met")
    rows = [
        (
            row.figure,
            row.unit,
            figure(row.ours),
            ", ".join(f"{peer} {figure(number)}" for peer, number in row.peers.items()),
            figure(row.limit),
            figure(row.ratio),
            figure(row.aim),
            {True: "yes", False: "no", None: ""}[row.met],
        )
        for row in report.rows
    ]
    print_table(f"Bench {report.bench}", headers, rows)
