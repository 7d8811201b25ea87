"""`tangram plan`: which strategies a job has on this machine, what each is predicted to need, and the one to take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.jobs import Wish, check, planned_here
from tangram.cli.output import print_json, print_table
from tangram.errors import UserError
from tangram.schema.files import changes_of, load

__all__ = ["plan"]


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE|MODEL", help="A job; a plan to --show; or, with --cluster, a job or a model."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Plan a model for a cluster: its name, or its file.")] = None,
    between: Annotated[
        float | None, typer.Option(help="Of a cluster of several parts, as a.toml,b.toml: GB/s from one to another.")
    ] = None,
    tokens_per_batch: Annotated[
        str | None, typer.Option(help="Of a step over all devices, as in 4M (which is usual).")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sample, usually 8192.")] = None,
    gpus: Annotated[
        str, typer.Option(help="How many devices of the cluster, or a range, as 8-64; when not given all.")
    ] = "",
    without: Annotated[
        str, typer.Option(help="What is not to be used, as context,pipeline,recompute,ulysses,zero3.")
    ] = "",
    precision: Annotated[
        str | None, typer.Option(help="What products may be computed in: bf16 (usually), fp8, fp4, fp32, or several.")
    ] = None,
    framework: Annotated[str | None, typer.Option(help="What will run it, tangram or as in megatron-core.")] = None,
    memory: Annotated[
        float, typer.Option(help="GB that a device may use, also more than it has; 0: all that it has.")
    ] = 0.0,
    optimiser: Annotated[
        str | None, typer.Option(help="Of a model on a cluster: kinds that may be used, as adamw,adamw-8bit.")
    ] = None,
    offload: Annotated[
        str | None, typer.Option(help="What may be offloaded to the host: optimiser, parameters, activations.")
    ] = None,
    lora: Annotated[int, typer.Option(help="Train adapters of this rank alone, beside frozen weights.")] = 0,
    base: Annotated[str | None, typer.Option(help="Of --lora: what these are kept in: bf16, int8, nf4.")] = None,
    imbalance: Annotated[
        float, typer.Option(help="Of a mixture: how unlike experts' loads are, standard deviation over mean; 0: alike.")
    ] = 0.0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two checkpoints; 0: none.")] = 0,
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many strategies to name.")] = 8,
    explain: Annotated[
        str | None,
        typer.Option(help='Explain one mesh, as "pp=8 dp=2 tp=4", a plan, or a Megatron-LM or torchtitan file.'),
    ] = None,
    micro: Annotated[int, typer.Option(min=1, help="Of --explain: samples of a micro-batch.")] = 1,
    chunks: Annotated[int, typer.Option(min=1, help="Of --explain: interleaved chunks of a rank.")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="Of --explain: what DP ranks divide, 0 to 3.")] = 1,
    again: Annotated[str, typer.Option(help='Of --explain: what is recomputed, as "all blocks".')] = "nothing",
    experts: Annotated[str, typer.Option(help='Of --explain: EP ranks x their TP ranks, "8 x 1".')] = "1 x 1",
    uneven: Annotated[
        str, typer.Option(help='Of --explain: blocks fewer of the first and the last chunk, "1 1".')
    ] = "0 0",
    timeline: Annotated[
        Path | None, typer.Option(help="Write the best step's (or the explained one's): .html a page, else Perfetto's.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write all of it as one page to look at, as plan.html.")] = None,
    train_tokens: Annotated[
        str | None,
        typer.Option("--train-tokens", "--tokens", help="How long so many tokens take, as in 20B (thousand millions)."),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Of --train-tokens: the deadline.")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device's hour: what steps cost.")] = None,
    watts: Annotated[float | None, typer.Option(help="Of a device, with its part of the host and of cooling.")] = None,
    kwh: Annotated[float | None, typer.Option(help="Price of a kWh of --watts, which --price is without.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="What is best: time (usual), per-device, cost, devices (fewest for a deadline).")
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The fronts of time and memory, and of sizes of the cluster, too.")
    ] = False,
    mtbf: Annotated[float | None, typer.Option(help="Hours between two failures of one device.")] = None,
    checkpoint_s: Annotated[float | None, typer.Option(help="Of --mtbf: seconds of a checkpoint.")] = None,
    restart_s: Annotated[float | None, typer.Option(help="Of --mtbf: seconds until training runs again.")] = None,
    export: Annotated[
        str | None,
        typer.Option(help="Write the strategy for tangram, torchtitan, megatron-lm, ... to --out, else stdout."),
    ] = None,
    emit: Annotated[
        str | None, typer.Option(help="Write a job file: slurm, k8s (k8s-trainjob), k8s-pytorchjob, volcano, skypilot.")
    ] = None,
    run: Annotated[str, typer.Option(help="Of --emit: what torchrun starts.")] = "-m tangram train plan.toml",
    image: Annotated[str, typer.Option(help="Of --emit: the container's.")] = "",
    submit: Annotated[bool, typer.Option("--submit", help="Of --emit: submit the file, too.")] = False,
    runs: Annotated[
        bool, typer.Option("--runs", help="Of a job for a cluster: search only what tangram train runs.")
    ] = False,
    processes: Annotated[int, typer.Option("--processes", "-n", help="For how many ranks on this machine.")] = 1,
    stages: Annotated[int, typer.Option(help="Plans of pipelines with so many stages; 1: without; 0: all.")] = 1,
    schedule: Annotated[str, typer.Option(help="Of the pipelines, and of --explain.")] = "1F1B",
    show: Annotated[bool, typer.Option("--show", help="Explain the file and stop.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write the plan that is taken.")] = None,
    pick: Annotated[int, typer.Option(help="Which row of the table to write; 1 is the best.")] = 1,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a key, as in run.steps=300.")] = None,
    measure: Annotated[int, typer.Option(help="Really run the best plans, so many at most, and rank again.")] = 0,
    limit: Annotated[float, typer.Option(help="Of --measure: seconds of a trial at most.")] = 120.0,
    anew: Annotated[bool, typer.Option("--anew", help="Measure the machine anew.")] = False,
    history: Annotated[bool, typer.Option("--history", help="What was predicted and measured before, and stop.")] = (
        False
    ),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> int:
    """Rank the strategies of a job on this machine, or of a model on a cluster; exit code 1 when none fits."""
    if history:
        from tangram.cli.trials import show_history

        return show_history(json=json)
    if file is None:
        raise UserError("give a job, as in examples/quickstart/job.toml, or a model with --cluster")
    here = {
        "--measure": measure, "--processes": processes != 1, "--stages": stages != 1, "--anew": anew, "--show": show,
    }  # fmt: skip
    whole = {
        "--explain": explain, "--timeline": timeline, "--report": report, "--objective": objective,
        "--train-tokens": train_tokens, "--hours": hours, "--price": price, "--watts": watts, "--kwh": kwh,
        "--pareto": pareto, "--mtbf": mtbf, "--checkpoint-s": checkpoint_s, "--restart-s": restart_s,
        "--export": export, "--emit": emit, "--runs": runs,
    }  # fmt: skip
    lean_typed = {
        "--optimiser": optimiser, "--offload": offload, "--lora": lora, "--base": base, "--imbalance": imbalance,
        "--checkpoint-every": checkpoint_every,
    }  # fmt: skip
    asked = {
        "--tokens-per-batch": tokens_per_batch, "--seq": seq, "--precision": precision, "--framework": framework,
        "--gpus": gpus, "--memory": memory, "--without": without,
    }  # fmt: skip
    if cluster is not None:
        from tangram.cli.cluster import Look, answered
        from tangram.cli.exports import Wanted
        from tangram.cli.lean import Lean
        from tangram.cli.parts import answered_over_parts, names_of_parts
        from tangram.cli.taken import Taking

        _refuse(here, "is of a job on this machine: leave it or --cluster out")
        typed = (tokens_per_batch, seq, precision, framework, gpus, memory, top)
        changes = changes_of(change or [])
        lean = Lean(optimiser or "adamw", lora, base or "", offload or "", imbalance, checkpoint_every, without)
        if names := names_of_parts(cluster):
            _refuse({**whole, "--out": out}, "is of a cluster of one part: leave it out, or name one cluster")
            return answered_over_parts(str(file), names, between, typed, changes, lean, json=json)
        _refuse({"--between": between is not None}, "is of a cluster of several parts: name their files with commas")
        one = None if explain is None else (explain, micro, chunks, schedule, zero, again, experts, uneven)
        failures = (mtbf, checkpoint_s, restart_s)
        look = Look(objective or "", pareto, train_tokens, hours, (price, watts, kwh), failures, timeline, report)
        file_wanted = export is not None or emit is not None
        wanted = Wanted(export or "", emit or "", out, pick, run, image, submit) if file_wanted else None
        taking = Taking(None if file_wanted else out, pick, runs)
        return answered(str(file), cluster, typed, one, look, wanted, taking, changes, lean, json=json)
    elsewhere = {**whole, **lean_typed, **asked, "--between": between is not None}
    _refuse(elsewhere, "is of what is planned for a cluster: give one with --cluster, or leave it out")
    job = load(file, changes_of(change or []))
    if show:
        from tangram.planner.local.show import rows

        said = rows(job)
        if job.optimiser.weight_decay:
            from tangram.training.step import weight_decay  # loads torch

            said += weight_decay.rows(job)
        print_json(dict(said)) if json else print_table(str(file), ("what", "how"), said)
        return 0
    wish = Wish(processes, stages, schedule, anew, measure, limit, out, pick)
    return planned_here(check(file, job, wish), file.stem, wish, json=json)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise UserError where one of these is given."""
    if given := [name for name, value in options.items() if value]:
        raise UserError(f"{given[0]} {why}")
