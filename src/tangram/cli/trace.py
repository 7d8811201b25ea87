"""`tangram trace`: what ranks did, and which of them is to blame."""

from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.output import print_json, print_table

__all__ = ["trace"]

trace = typer.Typer(help="Say what the ranks of a run did, and which is to blame for what went wrong.")


@trace.callback()
def _commands() -> None:
    """With one command alone typer would leave out its name."""


@trace.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of its trace; the run may still go on.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Say, too, what the other ranks did, and stacks.")] = False,
) -> None:
    """Say of each rank what it did and how long it waited, and who died, stands still, strayed or is slow."""
    from tangram.tracing.report import report as made  # loads torch

    found = made(folder)
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
