"""Options that several commands of `tangram plan` have: each is named, explained and typed here once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COST, OUTPUT = "Cost and failures", "Output"

Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON document instead of tables.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a key of the job, as in run.steps=300.")]
Out = Annotated[
    Path | None, typer.Option(rich_help_panel=OUTPUT, help="Where to write the plan of the row that is taken.")
]
Pick = Annotated[int, typer.Option(rich_help_panel=OUTPUT, help="Which row of the table to write; 1 is the best.")]
Top = Annotated[int, typer.Option(min=1, max=1000, rich_help_panel=OUTPUT, help="How many strategies to name.")]

Model = Annotated[str, typer.Argument(metavar="MODEL|JOB", help="A preset, a folder with config.json, or a job.")]
Strategy = Annotated[
    str,
    typer.Argument(
        metavar="STRATEGY", help='As "pp=8 dp=2 tp=4 ep=2", or a file: a plan, or one of Megatron-LM or torchtitan.'
    ),
]
Cluster = Annotated[str, typer.Option(help="A name, as h100-8x8, or a file; or several files with commas between.")]
TokensPerBatch = Annotated[str | None, typer.Option(help="Tokens of a global batch, as 4M (the default).")]
Seq = Annotated[str | None, typer.Option(help="Sequence length, as 8k or 8192 (the default).")]
Gpus = Annotated[str, typer.Option(help="How many devices of the cluster, or a range, as 8-64; default all.")]
PrecisionOf = Annotated[
    str | None, typer.Option(help="Precision of matmuls: bf16 (default), fp8, fp4, fp32, or several.")
]
Framework = Annotated[str | None, typer.Option(help="What will run it: tangram, or megatron-core, torchtitan, ...")]
Memory = Annotated[float, typer.Option(help="GB that a device may use, also more than it has; 0: all.")]
Optimiser = Annotated[str | None, typer.Option(help="Optimisers that may be used, as adamw,adamw-8bit.")]
Offload = Annotated[str | None, typer.Option(help="CPU offload that may be used: optimiser, parameters, activations.")]
Lora = Annotated[int, typer.Option(help="Train LoRA adapters of this rank, beside frozen weights.")]
Base = Annotated[str | None, typer.Option(help="Of --lora: precision of the frozen weights: bf16, int8, nf4.")]
Imbalance = Annotated[float, typer.Option(help="Load imbalance of experts: standard deviation over mean; 0: balanced.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between two checkpoints; 0: none.")]
Without = Annotated[str, typer.Option(help="What may not be used, as context,pipeline,recompute,ulysses,zero3.")]
TrainTokens = Annotated[
    str | None,
    typer.Option("--train-tokens", "--tokens", rich_help_panel=COST, help="How long so many tokens take, as 20B."),
]
Hours = Annotated[float | None, typer.Option(rich_help_panel=COST, help="Of --train-tokens: the deadline.")]
Price = Annotated[float | None, typer.Option(rich_help_panel=COST, help="Price of a device's hour.")]
Watts = Annotated[
    float | None, typer.Option(rich_help_panel=COST, help="Of a device, with its part of the host and of cooling.")
]
Kwh = Annotated[
    float | None, typer.Option(rich_help_panel=COST, help="Price of a kWh of --watts, which --price is without.")
]
Mtbf = Annotated[
    float | None, typer.Option(rich_help_panel=COST, help="Mean hours between two failures of one device.")
]
CheckpointS = Annotated[float | None, typer.Option(rich_help_panel=COST, help="Of --mtbf: seconds of a checkpoint.")]
RestartS = Annotated[
    float | None, typer.Option(rich_help_panel=COST, help="Of --mtbf: seconds until training runs again.")
]
Timeline = Annotated[
    Path | None,
    typer.Option(rich_help_panel=OUTPUT, help="Write the step as a timeline: .html a page, else a Perfetto trace."),
]
Report = Annotated[
    Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write everything as one HTML page, as plan.html.")
]
Schedule = Annotated[str, typer.Option(help="Of the pipeline, as 1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV.")]
