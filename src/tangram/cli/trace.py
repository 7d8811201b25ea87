"""`tangram trace`: what ranks did, and which of them is to blame; `tangram top`: what they do now."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from tangram.cli.output import print_json, print_table

Attempt = Annotated[
    int,
    typer.Option(min=0, help="Which of the times that the run was begun or went on, from 1; 0: the last."),
]
trace = typer.Typer(help="Say what the ranks of a run did, and which is to blame for what went wrong.")


@trace.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of its trace; the run may still go on.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Say, too, what the other ranks did, and stacks.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at, too: every rank, step and call.")] = None,
    attempt: Attempt = 0,
) -> None:
    """Say of each rank what it did and how long it waited, and who died, stands still, strayed or is slow."""
    from tangram.tracing.reading import trace_folder
    from tangram.tracing.show.page import write_page
    from tangram.tracing.show.report import report as made  # loads torch

    folder = trace_folder(folder, attempt)
    found = made(folder) if html is None else write_page(html, folder)
    if json:
        print_json(found.as_json())
        return
    print_table(f"Trace {found.folder}: {found.state}", found.headers, found.rows)
    for one in found.findings:
        print(f"{one.kind}: {one.text}")
        for line in one.details if details else ():
            print(f"  {line}")
    if not found.findings:
        print("nothing wrong was found")
    for note in found.notes:
        print(f"note: {note}")
    print(found.basis)


@trace.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of its trace.")],
    perfetto: Annotated[Path, typer.Option(help="Write a file for ui.perfetto.dev and chrome://tracing.")],
    ranks: Annotated[str, typer.Option(help="Only these ranks, as 0,3,8.")] = "",
    attempt: Attempt = 0,
) -> None:
    """Write a trace for another program to show."""
    from tangram.tracing.reading import trace_folder
    from tangram.tracing.show.perfetto import export as made

    print(f"{made(trace_folder(folder, attempt), perfetto, ranks):,} events in {perfetto}: open it in ui.perfetto.dev")


@trace.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run, or of its trace.")],
    second: Annotated[Path, typer.Argument(help="That of another.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Say what takes longer in one run than in another, and which collectives are others."""
    from tangram.tracing.show.compare import compare as made

    found = made(first, second)
    if json:
        print_json(found.as_json())
        return
    print_table(f"{first} and {second}: medians over ranks and steps", found.headers, found.rows)
    for line in found.calls:
        print(f"calls: {line}")
    if not found.calls:
        print("both call the same collectives in a step")


def top(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of its trace.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, also on a terminal.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Look once, and print one JSON document on stdout.")] = False,
) -> None:
    """Show what each rank does now, the slowest first, until the run is over."""
    from tangram.tracing.show.report import HEADERS, looks  # loads torch
    from tangram.tracing.show.report import top as look
    from tangram.training.observe.text_tables import drawn

    found = look(folder)
    if json:
        print_json(found.as_json())
        return
    if once or not sys.stdout.isatty():
        print_table(found.title, HEADERS, found.rows)
        print("".join(f"{line}\n" for line in found.lines), end="")
        return
    with Live(console=Console(), auto_refresh=False) as live:
        for found in looks(folder, seconds):
            live.update(Group(drawn(found.title, HEADERS, found.rows), *found.lines), refresh=True)
