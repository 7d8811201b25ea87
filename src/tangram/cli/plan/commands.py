"""The commands of `tangram plan`: what is typed, put together for those that answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.output import print_json, print_table
from tangram.cli.plan import options as o
from tangram.errors import UserError
from tangram.schema.files import changes_of, load

__all__ = ["cluster", "explain", "export", "history", "local", "show"]

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
    from tangram.cli.plan.local_answer import Wish, check, planned_here

    wish = Wish(processes, stages, schedule, anew, measure, limit, out, pick)
    return planned_here(check(file, load(file, changes_of(change or [])), wish), file.stem, wish, json=json)


def cluster(
    model: o.Model,
    cluster: o.Cluster,
    seq: o.Seq = None,
    tokens_per_batch: o.TokensPerBatch = None,
    gpus: o.Gpus = "",
    precision: o.PrecisionOf = None,
    framework: o.Framework = None,
    memory: o.Memory = 0.0,
    optimiser: o.Optimiser = None,
    offload: o.Offload = None,
    lora: o.Lora = 0,
    base: o.Base = None,
    imbalance: o.Imbalance = 0.0,
    checkpoint_every: o.CheckpointEvery = 0,
    without: o.Without = "",
    between: Annotated[float | None, typer.Option(help="Of several clusters: GB/s between their devices.")] = None,
    runs: Annotated[bool, typer.Option("--runs", help="Of a job: search only what tangram train runs.")] = False,
    top: o.Top = 8,
    objective: Annotated[
        str | None, typer.Option(help="What is best: time (default), per-device, cost, devices (fewest for --hours).")
    ] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="Also the fronts of time and memory, and of sizes.")] = False,
    train_tokens: o.TrainTokens = None,
    hours: o.Hours = None,
    price: o.Price = None,
    watts: o.Watts = None,
    kwh: o.Kwh = None,
    mtbf: o.Mtbf = None,
    checkpoint_s: o.CheckpointS = None,
    restart_s: o.RestartS = None,
    report: o.Report = None,
    timeline: o.Timeline = None,
    out: o.Out = None,
    pick: o.Pick = 1,
    change: o.Set = None,
    json: o.Json = False,
) -> int:
    """Rank the parallel strategies of a model on a cluster; exit code 1 where nothing fits."""
    from tangram.cli.plan.answer import Look, answered
    from tangram.cli.plan.heterogeneous import answered_over_parts, names_of_parts
    from tangram.cli.plan.plan_files import Taking
    from tangram.cli.plan.training_options import TrainingOptions

    typed = (tokens_per_batch, length(seq), precision, framework, gpus, memory, top)
    training = TrainingOptions(
        optimiser or "adamw", lora, base or "", offload or "", imbalance, checkpoint_every, without
    )
    look = Look(
        objective or "", pareto, train_tokens, hours, (price, watts, kwh), (mtbf, checkpoint_s, restart_s), timeline,
        report
    )  # fmt: skip
    changes = changes_of(change or [])
    if names := names_of_parts(cluster):
        unused = {
            "--objective": objective, "--pareto": pareto, "--train-tokens": train_tokens, "--hours": hours,
            "--price": price, "--watts": watts, "--kwh": kwh, "--mtbf": mtbf, "--checkpoint-s": checkpoint_s,
            "--restart-s": restart_s, "--report": report, "--timeline": timeline, "--runs": runs, "--out": out,
        }  # fmt: skip
        refuse(unused, "is of a cluster of one part: leave it out, or name one cluster")
        return answered_over_parts(model, names, between, typed, changes, training, json=json)
    refuse({"--between": between is not None}, "is of a cluster of several parts: name their files with commas")
    return answered(model, cluster, typed, None, look, None, Taking(out, pick, runs), changes, training, json=json)


def explain(
    model: o.Model,
    strategy: o.Strategy,
    cluster: o.Cluster,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage: 1 optimiser states, 2 gradients, 3 FSDP.")] = 1,
    recompute: Annotated[str, typer.Option(help='full, selective, none, or as "3 of 8 layers".')] = "none",
    schedule: o.Schedule = "1F1B",
    virtual_stages: Annotated[int, typer.Option(min=1, help="Of each PP rank.")] = 1,
    fewer_layers: Annotated[str, typer.Option(help='Of the first and the last virtual stage, as "1 1".')] = "0 0",
    experts: Annotated[str, typer.Option(hidden=True, help="The mesh says it: ep=8 etp=1.")] = "1 x 1",
    seq: o.Seq = None,
    tokens_per_batch: o.TokensPerBatch = None,
    gpus: o.Gpus = "",
    precision: o.PrecisionOf = None,
    framework: o.Framework = None,
    memory: o.Memory = 0.0,
    optimiser: o.Optimiser = None,
    offload: o.Offload = None,
    lora: o.Lora = 0,
    base: o.Base = None,
    imbalance: o.Imbalance = 0.0,
    checkpoint_every: o.CheckpointEvery = 0,
    without: o.Without = "",
    top: o.Top = 8,
    pareto: Annotated[bool, typer.Option("--pareto", help="Also the fronts of time and memory, and of sizes.")] = False,
    price: o.Price = None,
    watts: o.Watts = None,
    kwh: o.Kwh = None,
    mtbf: o.Mtbf = None,
    checkpoint_s: o.CheckpointS = None,
    restart_s: o.RestartS = None,
    report: o.Report = None,
    timeline: o.Timeline = None,
    change: o.Set = None,
    json: o.Json = False,
) -> int:
    """Explain one strategy on a cluster: is it legal, does it fit, where do its step and its memory go."""
    from tangram.cli.plan.answer import Look, answered
    from tangram.cli.plan.plan_files import Taking
    from tangram.cli.plan.training_options import TrainingOptions

    typed = (tokens_per_batch, length(seq), precision, framework, gpus, memory, top)
    training = TrainingOptions(
        optimiser or "adamw", lora, base or "", offload or "", imbalance, checkpoint_every, without
    )
    look = Look("", pareto, None, None, (price, watts, kwh), (mtbf, checkpoint_s, restart_s), timeline, report)
    one = (strategy, micro_batch, virtual_stages, schedule, zero, recompute, experts, fewer_layers)
    taking = Taking(None, 1, runs=False)
    return answered(model, cluster, typed, one, look, None, taking, changes_of(change or []), training, json=json)


def export(
    model: o.Model,
    cluster: o.Cluster,
    to: Annotated[
        str | None,
        typer.Option(help="torchtitan, megatron-lm, deepspeed, accelerate, paddleformers, ..., or tangram: a plan."),
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(help="Instead a job file: slurm, k8s (k8s-trainjob), k8s-pytorchjob, volcano, skypilot."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="Instead of the best: a mesh, or a file.")] = None,
    micro_batch: Annotated[int, typer.Option(min=1, help="Of --strategy: samples of a micro-batch.")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="Of --strategy: ZeRO stage.")] = 1,
    recompute: Annotated[str, typer.Option(help="Of --strategy, as of `tangram plan explain`.")] = "none",
    schedule: o.Schedule = "1F1B",
    virtual_stages: Annotated[int, typer.Option(min=1, help="Of --strategy: of each PP rank.")] = 1,
    fewer_layers: Annotated[str, typer.Option(help="Of --strategy: of the first and last virtual stage.")] = "0 0",
    experts: Annotated[str, typer.Option(hidden=True)] = "1 x 1",
    seq: o.Seq = None,
    tokens_per_batch: o.TokensPerBatch = None,
    gpus: o.Gpus = "",
    precision: o.PrecisionOf = None,
    framework: o.Framework = None,
    memory: o.Memory = 0.0,
    optimiser: o.Optimiser = None,
    offload: o.Offload = None,
    lora: o.Lora = 0,
    base: o.Base = None,
    imbalance: o.Imbalance = 0.0,
    checkpoint_every: o.CheckpointEvery = 0,
    without: o.Without = "",
    top: o.Top = 8,
    report: o.Report = None,
    timeline: o.Timeline = None,
    out: o.Out = None,
    pick: o.Pick = 1,
    run: Annotated[str, typer.Option(help="Of --job-file: what torchrun starts.")] = "-m tangram train plan.toml",
    image: Annotated[str, typer.Option(help="Of --job-file: the container image.")] = "",
    submit: Annotated[bool, typer.Option("--submit", help="Of --job-file: submit the file, too.")] = False,
    runs: Annotated[bool, typer.Option("--runs", help="Of a job: search only what tangram train runs.")] = False,
    change: o.Set = None,
    json: o.Json = False,
) -> int:
    """Write the best strategy, or a given one, for another framework, or as the job file of a scheduler."""
    from tangram.cli.plan.answer import Look, answered
    from tangram.cli.plan.exports import Wanted
    from tangram.cli.plan.plan_files import Taking
    from tangram.cli.plan.training_options import TrainingOptions

    if to is None and job_file is None:
        raise UserError("say what is to be written: --to torchtitan, or another framework, or --job-file slurm")
    typed = (tokens_per_batch, length(seq), precision, framework, gpus, memory, top)
    training = TrainingOptions(
        optimiser or "adamw", lora, base or "", offload or "", imbalance, checkpoint_every, without
    )
    look = Look("", pareto=False, train_tokens=None, hours=None, price=(None, None, None), failures=(None, None, None),
                timeline=timeline, report=report)  # fmt: skip
    one = None
    if strategy is not None:
        one = (strategy, micro_batch, virtual_stages, schedule, zero, recompute, experts, fewer_layers)
    wanted = Wanted(to or "", job_file or "", out, pick, run, image, submit)
    taking = Taking(None, pick, runs)
    return answered(model, cluster, typed, one, look, wanted, taking, changes_of(change or []), training, json=json)


def show(file: File, change: o.Set = None, json: o.Json = False) -> int:
    """Explain a job or a plan in words: what each axis is for, the batch, the optimiser's groups."""
    from tangram.planner.local.show import rows

    job = load(file, changes_of(change or []))
    said = rows(job)
    if job.optimiser.weight_decay:
        from tangram.training.step import weight_decay  # loads torch

        said += weight_decay.rows(job)
    print_json(dict(said)) if json else print_table(str(file), ("what", "how"), said)
    return 0


def history(json: o.Json = False) -> int:
    """What was predicted and measured on this machine before; exit code 1 where there is nothing."""
    from tangram.cli.plan.trials import show_history

    return show_history(json=json)


def length(typed: str | None) -> int | None:
    """A sequence length as people write it: 8192, 8k, 128K, 1M. Raises UserError."""
    if typed is None:
        return None
    found = re.fullmatch(r"(\d+)([kKmM]?)", typed.strip())
    if found is None:
        raise UserError(f"--seq {typed}: write a number of tokens, as 8192 or 8k")
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise UserError where one of these is given."""
    if given := [name for name, value in options.items() if value]:
        raise UserError(f"{given[0]} {why}")
