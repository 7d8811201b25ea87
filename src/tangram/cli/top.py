"""`tangram top`: the ranks of a run as they are now."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from tangram.cli.output import print_json, print_table

__all__ = ["top"]


def top(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of its trace.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, also on a terminal.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Look once, and print one JSON document on stdout.")] = False,
) -> None:
    """Show what each rank does now, the slowest first, until the run is over."""
    from tangram.tracing.top import HEADERS  # loads torch
    from tangram.tracing.top import top as look
    from tangram.training.observe.text_tables import drawn

    found = look(folder)
    if json:
        print_json(found.as_json())
        return
    if once or found.over or not sys.stdout.isatty():
        print_table(found.title, HEADERS, found.rows)
        return
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            live.update(drawn(found.title, HEADERS, found.rows), refresh=True)
            if found.over:
                return
            time.sleep(seconds)
            found = look(folder)
