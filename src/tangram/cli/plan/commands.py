"""The commands of `tangram plan`: what is typed, put together for those that answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.grouped import with_options
from tangram.cli.output import print_json, print_table
from tangram.cli.plan import options as o
from tangram.errors import UserError

File = Annotated[Path, typer.Argument(metavar="FILE", help="A job, as examples/quickstart/job.toml, or a plan.")]


def local(
    file: File,
    processes: Annotated[int, typer.Option("--processes", "-n", help="For how many ranks on this machine.")] = 1,
    stages: Annotated[int, typer.Option(help="Pipeline stages: 1: no pipeline; 0: all numbers.")] = 1,
    schedule: o.Schedule = "1F1B",
    measure: Annotated[int, typer.Option(help="Run the best plans, so many at most, and rank again.")] = 0,
    limit: Annotated[float, typer.Option(help="Of --measure: seconds of a trial at most.")] = 120.0,
    anew: Annotated[bool, typer.Option("--anew", help="Measure the machine anew.")] = False,
    out: o.Out = None,
    pick: o.Pick = 1,
    change: o.Set = None,
    json: o.Json = False,
) -> int:
    """Rank the plans of a job for the processes of this machine; exit code 1 where none fits."""
    from tangram.schema.files import changes_of, load

    job = load(file, changes_of(change or []))  # before what plans is loaded
    from tangram.cli.plan.trials import Wish, check, planned_here

    wish = Wish(processes, stages, schedule, anew, measure, limit, out, pick)
    return planned_here(check(file, job, wish), file.stem, wish, json=json)


@with_options(o.Common, o.Costs)
def cluster(
    common: o.Common,
    costs: o.Costs,
    between: Annotated[float | None, typer.Option(help="Of several clusters: GB/s between their devices.")] = None,
    runs: Annotated[bool, typer.Option("--runs", help="Of a job: search only what tangram train runs.")] = False,
    objective: Annotated[
        str | None, typer.Option(help="What is best: time (default), per-device, cost, devices (fewest for --hours).")
    ] = None,
    train_tokens: o.TrainTokens = None,
    hours: o.Hours = None,
    out: o.Out = None,
    pick: o.Pick = 1,
) -> int:
    """Rank the parallel strategies of a model on a cluster; exit code 1 where nothing fits."""
    refuse_unknown(common)
    from tangram.cli.plan.answer import Look, answered, answered_over_parts, names_of_parts
    from tangram.cli.plan.inputs import Taking

    look = Look(
        objective or "", costs.pareto, train_tokens, hours, costs.prices(), costs.failures(), common.timeline,
        common.report,
    )  # fmt: skip
    if names := names_of_parts(common.cluster):
        unused = {
            "--objective": objective, "--pareto": costs.pareto, "--train-tokens": train_tokens, "--hours": hours,
            "--price": costs.price, "--watts": costs.watts, "--kwh": costs.kwh, "--mtbf": costs.mtbf,
            "--checkpoint-s": costs.checkpoint_s, "--restart-s": costs.restart_s, "--snapshots": costs.snapshots,
            "--failures": costs.failed, "--report": common.report, "--timeline": common.timeline, "--runs": runs,
            "--out": out,
        }  # fmt: skip
        refuse(unused, "is of a cluster of one part: leave it out, or name one cluster")
        return answered_over_parts(common, names, between)
    refuse({"--between": between is not None}, "is of a cluster of several parts: name their files with commas")
    return answered(common, None, look, None, Taking(out, pick, runs))


@with_options(o.Common, o.Strategy, o.Costs)
def explain(common: o.Common, how: o.Strategy, costs: o.Costs, strategy: o.Explained) -> int:
    """Explain one strategy on a cluster: is it legal, does it fit, where do its step and its memory go."""
    refuse_unknown(common)
    from tangram.cli.plan.answer import Look, answered
    from tangram.cli.plan.inputs import Taking

    look = Look("", costs.pareto, None, None, costs.prices(), costs.failures(), common.timeline, common.report)
    return answered(common, how.of(strategy), look, None, Taking(None, 1, runs=False))


@with_options(o.Common, o.Strategy)
def export(
    common: o.Common,
    how: o.Strategy,
    to: Annotated[
        str | None,
        typer.Option(help="torchtitan, megatron-lm, deepspeed, accelerate, paddleformers, ..., or tangram: a plan."),
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(help="Instead a job file: slurm, k8s (k8s-trainjob), k8s-pytorchjob, volcano, skypilot."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="Instead of the best: a mesh, or a file.")] = None,
    out: o.Out = None,
    pick: o.Pick = 1,
    run: Annotated[
        str, typer.Option(help="Of --job-file: what torchrun starts.")
    ] = "-m tangram launch plan.toml --resume",
    image: Annotated[str, typer.Option(help="Of --job-file: the container image.")] = "",
    submit: Annotated[bool, typer.Option("--submit", help="Of --job-file: submit the file, too.")] = False,
    runs: Annotated[bool, typer.Option("--runs", help="Of a job: search only what tangram train runs.")] = False,
) -> int:
    """Write the best strategy, or a given one, for another framework, or as the job file of a scheduler."""
    if to is None and job_file is None:
        raise UserError("say what is to be written: --to torchtitan, or another framework, or --job-file slurm")
    refuse_unknown(common)
    from tangram.cli.plan.answer import Look, answered
    from tangram.cli.plan.exports import ExportRequest
    from tangram.cli.plan.inputs import Taking

    nothing = (None, None, None)
    look = Look("", False, None, None, nothing, (*nothing, None, ()), common.timeline, common.report)
    wanted = ExportRequest(to or "", job_file or "", out, pick, run, image, submit)
    one = None if strategy is None else how.of(strategy)
    return answered(common, one, look, wanted, Taking(None, pick, runs))


def refuse_unknown(common: o.Common) -> None:
    """Raise UserError for names that are none, before what plans is loaded."""
    from tangram.cli.plan.options import check

    check(common)


def show(file: File, change: o.Set = None, json: o.Json = False) -> int:
    """Explain a job or a plan in words: what each axis is for, the batch, the optimiser's groups."""
    from tangram.planner.local.show import rows
    from tangram.schema.files import changes_of, load

    job = load(file, changes_of(change or []))
    said = rows(job)
    if job.optimiser.weight_decay or job.optimiser.lr_of or job.optimiser.name == "muon":
        from tangram.training.step import weight_decay  # loads torch

        said += weight_decay.rows(job)
    print_json(dict(said)) if json else print_table(str(file), ("what", "how"), said)
    return 0


def history(json: o.Json = False) -> int:
    """What was predicted and measured on this machine before; exit code 1 where there is nothing."""
    from tangram.cli.plan.trials import show_history

    return show_history(json=json)


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise UserError where one of these is given."""
    if given := [name for name, value in options.items() if value]:
        raise UserError(f"{given[0]} {why}")
