"""`tangram data`: samples of a job as it trains on them; what a teacher says of them, kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tangram.cli.errors import say
from tangram.cli.output import print_json
from tangram.errors import UserError
from tangram.schema.files import changes_of, load
from tangram.training.observe.progress import ProgressLine

data = typer.Typer(no_args_is_help=True, help="Show what a job trains on, token by token; keep what a teacher says.")


@data.callback()
def _data() -> None:
    """Show what a job trains on, token by token; keep what a teacher says."""


@data.command("show")
def show(
    job: Annotated[Path, typer.Argument(help="A job or a plan.")],
    count: Annotated[int, typer.Option("--samples", "-k", min=1, help="How many samples.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="Number of the first, in the order of training.")] = 0,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a key, as in data.sequence=512.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> int:
    """Print decoded samples; what is in the loss is green, and without colours stands in [[ ]]."""
    plan = load(job, changes_of(change or []))
    from tangram.training.data import measured_and_trained, open_corpus, prepare, shown_samples, tokens_of

    if plan.data.packing == "auto":
        raise UserError('which documents share a sample is asked of the model: add --set data.packing="single"')
    tokens = tokens_of(plan)
    prepare(plan.data, tokens, lambda event: None)
    corpus = open_corpus(plan.data, tokens)
    samples = list(shown_samples(plan, tokens, corpus, first, count))
    if json:
        print_json({"read": corpus.read, "samples": [one._asdict() for one in samples]})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for line in filter(None, (*corpus.read, measured_and_trained(plan.data, corpus))):
        console.print(Text(line))
    for one in samples:
        what = f"sample {one.number} of {one.source}{one.side and ', '}{one.side}"
        console.print(Text(f"\n{what}: {one.counted} of {one.tokens} tokens are in the loss"))
        text = Text()
        for counts, run in one.runs:
            text.append(run if console.color_system or not counts else f"[[{run}]]", "bold green" if counts else "dim")
        console.print(text)
    return 0


@data.command("teach")
def teach(
    job: Annotated[Path, typer.Argument(help='A job of the task "distill".')],
    out: Annotated[Path, typer.Option(help="An empty or new folder, for distill.cache.")],
    top: Annotated[int, typer.Option("--top", "-k", min=1, help="How many classes are kept of a token.")] = 64,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Over how many the teacher is cut.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Over how many of them each layer is cut, by TP.")] = 1,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a key, as in run.steps=512.")] = None,
) -> int:
    """Write the likeliest classes of a job's teacher for each token, so that it trains without one."""
    plan = load(job, changes_of(change or []))
    from tangram.schema.plan import Plan
    from tangram.training.run.launch import RankError
    from tangram.training.trials.teach import teach as write

    if isinstance(plan, Plan):
        raise UserError(f"{job} is a plan, and what a teacher says has no mesh: give the job that it was made for")
    try:
        with ProgressLine(Console(stderr=True)) as line:
            write(plan, out, top, processes, line, tp)
    except RankError as failure:
        say(str(failure))
        return 1
    return 0
