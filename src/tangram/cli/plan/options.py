"""Options that several commands of `tangram plan` have: each is named, explained and typed here once.

A command takes groups of them as objects (`Common`, `Costs`, `Strategy`), by `cli.grouped.with_options`.

Names typed for `tangram plan`, looked up before anything heavy is loaded: a misspelt one answers at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.errors import UserError
from tangram.models.outlines.catalogue import configured, in_catalogue, no_model, presets_named

if TYPE_CHECKING:  # what plans is loaded where it is used: a misspelt name need not wait for it
    from tangram.cli.plan.exports import Typed
    from tangram.models.outlines.outline import Outline
    from tangram.planner.search.strategy import Ask


@dataclass(frozen=True)
class TrainingOptions:
    """Ways to train in less memory that may be taken, and what may not be used, how experts are used and how often is
    saved; as typed."""

    optimiser: str = ""
    """"": as the job has it, or adamw."""
    lora: int = 0
    base: str = ""
    """"": as the model's configuration says, beside adapters."""
    offload: str = ""
    imbalance: float = 0.0
    """Of experts' loads the standard deviation over the mean."""
    checkpoint_every: int = 0
    without: str = ""
    """Names of `planner.legality.exclusions`, with commas between."""
    loss: str = ""
    """Of `planner.space.framework_profiles`; "": the framework's."""
    documents: str = ""
    """Mean length and 99th percentile of what samples are packed of."""
    image_tokens: int = 0
    """Of a sample; 0: one image of the usual size."""
    train_embeddings: bool = False
    memory_share: float = 1.0
    """Of what a device has, where no GB are typed."""
    compiled: bool = False
    in_backward: bool = False
    task: str = ""
    """Of `planner.space.tasks`; "": the next token."""
    teacher: str = ""
    """A model's name; "": none."""
    lora_targets: str = ""
    """Linear layers that have adapters, by the ends of their names, with commas between; "": all."""

    def outline(self, outline: Outline) -> Outline:
        """A model with its adapters. Raises UserError."""
        from tangram.models.lora.outline import ALL, adapted

        if self.train_embeddings and not self.lora:
            raise UserError("--train-embeddings is beside adapters: give --lora, their rank, or leave it out")
        targets = tuple(one.strip() for one in self.lora_targets.split(",") if one.strip())
        if targets and not self.lora:
            raise UserError("--lora-targets names layers that have adapters: give --lora, their rank, or leave it out")
        return replace(adapted(outline, self.lora, targets or ALL), trained_ends=self.train_embeddings)

    def samples(self, outline: Outline, sequence: int) -> Outline:
        """With what its samples are of, as typed. Raises UserError."""
        from tangram.models.outlines.images import with_images
        from tangram.planner.space.setting import documents_of, packed

        return packed(with_images(outline, self.image_tokens, sequence), documents_of(self.documents, sequence))

    def of(self, asked: Ask, outline: Outline, usual: str = "adamw") -> Ask:
        """With what is asked of a model. `usual`: the kind of optimiser where none is typed. Raises UserError."""
        from tangram.planner.legality.exclusions import left_out
        from tangram.planner.space import optimisers_and_offload as ways
        from tangram.planner.space.framework_profiles import loss_of
        from tangram.planner.space.setting import documents_of

        base = ways.base_of(self.base) if self.base else ways.kept_base(outline)
        if base is not ways.FULL and not outline.adapted:
            raise UserError(f"--base {self.base} is of frozen weights: give --lora, the rank of what is trained")
        if not 0 <= self.imbalance <= 10:
            raise UserError(
                "--imbalance is a number from 0 to 10: of experts' loads the standard deviation over the mean"
            )
        if self.imbalance and not any(block.experts for block, _ in outline.kinds):
            raise UserError(f"{outline.name} has no experts, whose loads --imbalance is of: leave it out")
        if self.checkpoint_every < 0:
            raise UserError("--checkpoint-every is a number of steps from 0, which is never")
        documents = documents_of(self.documents, asked.sequence, outline.name)
        full = documents.full if documents is not None and asked.filled == 1.0 else asked.filled
        return replace(
            asked, base=base, optimisers=ways.optimisers_of(self.optimiser or usual),
            offloads=ways.offloads_of(self.offload), away_share=ways.away_share_of(self.offload),
            loss=loss_of(self.loss) if self.loss else asked.loss,
            unlike=self.imbalance, save_every=self.checkpoint_every,
            documents=documents, filled=full, memory_share=self.memory_share,
            compiled=self.compiled or asked.compiled, in_backward=self.in_backward or asked.in_backward,
            without=left_out(self.without),
        )  # fmt: skip


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

Model = Annotated[
    str, typer.Argument(metavar="MODEL|JOB", help="A name (Qwen/Qwen3-30B-A3B), a folder or config.json, or a job.")
]
Explained = Annotated[
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
Memory = Annotated[str, typer.Option(help="What a device may use: GB, also more than it has, or a share, as 60%.")]
Optimiser = Annotated[str | None, typer.Option(help="Optimisers that may be used, as adamw,adamw-8bit.")]
Offload = Annotated[
    str | None,
    typer.Option(help="CPU offload that may be used: optimiser (or a share: optimiser:0.5), parameters, activations."),
]
Loss = Annotated[
    str | None, typer.Option(help="Of the logits: eager, compiled, fused, chunked, parallel; default: the framework's.")
]
Compile = Annotated[bool, typer.Option("--compile", help="The framework compiles blocks and loss (torch.compile).")]
InBackward = Annotated[
    bool, typer.Option("--in-backward", help="Parameters are updated in the backward: one micro-batch a step.")
]
Task = Annotated[
    str, typer.Option(help="What is learned: dpo, orpo (pairs of answers: two rows a sample), kto; default: sft.")
]
Teacher = Annotated[str, typer.Option(help="Of distillation: the model that is asked beside the trained one.")]
Lora = Annotated[int, typer.Option(help="Train LoRA adapters of this rank, beside frozen weights.")]
LoraTargets = Annotated[
    str, typer.Option("--lora-targets", help="Of --lora: which linear layers, as q_proj,v_proj; default: all.")
]
TrainEmbeddings = Annotated[
    bool, typer.Option("--train-embeddings", help="Of --lora: embedding and head whole, as peft's modules_to_save.")
]
Base = Annotated[str | None, typer.Option(help="Of --lora: precision of the frozen weights: bf16, int8, nf4.")]
ImageTokens = Annotated[str, typer.Option(help="Of a sample's tokens those of images, as 2k; default: one image.")]
DocumentLengths = Annotated[
    str, typer.Option("--documents", help="Of packed samples: mean length and 99th percentile, as 600,4k.")
]
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
SnapshotsOption = Annotated[
    str | None,
    typer.Option(
        "--snapshots", rich_help_panel=COST, metavar="PAUSE,RESTART,SHARE",
        help="Of --mtbf: seconds of a snapshot in memory, until training runs again from one, share of failures "
        "that leave them.",
    ),
]  # fmt: skip
Timeline = Annotated[
    Path | None,
    typer.Option(rich_help_panel=OUTPUT, help="Write the step as a timeline: .html a page, else a Perfetto trace."),
]
Report = Annotated[
    Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write everything as one HTML page, as plan.html.")
]
Schedule = Annotated[str, typer.Option(help="Of the pipeline, as 1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV.")]
Pareto = Annotated[bool, typer.Option("--pareto", help="Also the fronts of time and memory, and of sizes.")]


@dataclass(frozen=True)
class Common:
    """What is planned, on what, and how it may be trained; as typed."""

    model: Model
    cluster: Cluster
    seq: Seq = None
    tokens_per_batch: TokensPerBatch = None
    gpus: Gpus = ""
    precision: PrecisionOf = None
    framework: Framework = None
    memory: Memory = "100%"
    optimiser: Optimiser = None
    offload: Offload = None
    loss: Loss = None
    compiled: Compile = False
    in_backward: InBackward = False
    task: Task = ""
    teacher: Teacher = ""
    lora: Lora = 0
    lora_targets: LoraTargets = ""
    train_embeddings: TrainEmbeddings = False
    base: Base = None
    documents: DocumentLengths = ""
    image_tokens: ImageTokens = "0"
    imbalance: Imbalance = 0.0
    checkpoint_every: CheckpointEvery = 0
    without: Without = ""
    top: Top = 8
    report: Report = None
    timeline: Timeline = None
    change: Set = None
    json: Json = False

    def typed(self) -> Typed:
        """What is asked of a search. Raises UserError for a length that is none."""
        return (
            self.tokens_per_batch, length(self.seq), self.precision, self.framework, self.gpus,
            memory_of(self.memory)[0], self.top,
        )  # fmt: skip

    def training(self) -> TrainingOptions:
        """Ways to train."""

        return TrainingOptions(
            self.optimiser or "", self.lora, self.base or "", self.offload or "", self.imbalance,
            self.checkpoint_every, self.without, self.loss or "", self.documents,
            length(self.image_tokens, "--image-tokens") or 0,
            self.train_embeddings, memory_of(self.memory)[1], self.compiled, self.in_backward,
            self.task, self.teacher, self.lora_targets,
        )  # fmt: skip


Failures = tuple[float | None, float | None, float | None, str | None, tuple[Path, ...]]


@dataclass(frozen=True)
class Costs:
    """Fronts, prices and failures; as typed."""

    pareto: Pareto = False
    price: Price = None
    watts: Watts = None
    kwh: Kwh = None
    mtbf: Mtbf = None
    checkpoint_s: CheckpointS = None
    restart_s: RestartS = None
    snapshots: SnapshotsOption = None
    failed: Annotated[
        list[Path] | None,
        typer.Option(
            "--failures", rich_help_panel=COST, metavar="RUN",
            help="A run by tangram launch, whose failures --mtbf is corrected by; may be repeated.",
        ),
    ] = None  # fmt: skip

    def prices(self) -> tuple[float | None, float | None, float | None]:
        """Of a device's hour, watts of a device, of a kWh."""
        return self.price, self.watts, self.kwh

    def failures(self) -> Failures:
        """As `answer.Look` has them."""
        return self.mtbf, self.checkpoint_s, self.restart_s, self.snapshots, tuple(self.failed or ())


@dataclass(frozen=True)
class Strategy:
    """What a mesh does not say of a strategy; as typed."""

    micro_batch: Annotated[int, typer.Option(min=1, help="Of a mesh: samples of a micro-batch.")] = 1
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage: 1 optimiser states, 2 gradients, 3 FSDP.")] = 1
    recompute: Annotated[str, typer.Option(help='full, selective, none, or as "3 of 8 layers".')] = "none"
    schedule: Schedule = "1F1B"
    virtual_stages: Annotated[int, typer.Option(min=1, help="Of each PP rank.")] = 1
    fewer_layers: Annotated[str, typer.Option(help='Of the first and the last virtual stage, as "1 1".')] = "0 0"
    experts: Annotated[str, typer.Option(hidden=True, help="The mesh says it: ep=8 etp=1.")] = "1 x 1"

    def of(self, mesh: str) -> tuple[str, int, int, str, int, str, str, str]:
        """With a mesh, or the file of a strategy."""
        return (
            mesh, self.micro_batch, self.virtual_stages, self.schedule, self.zero, self.recompute, self.experts,
            self.fewer_layers,
        )  # fmt: skip


def length(typed: str | None, option: str = "--seq") -> int | None:
    """A sequence length as people write it: 8192, 8k, 128K, 1M. Raises UserError."""
    if typed is None:
        return None
    found = re.fullmatch(r"(\d+)([kKmM]?)", typed.strip())
    if found is None:
        raise UserError(f"{option} {typed}: write a number of tokens, as 8192 or 8k")
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


def memory_of(typed: str) -> tuple[float, float]:
    """GB, 0: a share of what the device has; and that share. Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|gb|)", typed.strip().lower())
    number = float(found[1]) if found is not None else -1.0
    if found is None or (found[2] == "%" and not 0 < number <= 100):
        raise UserError(f'--memory "{typed}": write GB from 0, which is all that a device has, or a share, as 60%')
    if not found[2] and 0 < number < 1:
        raise UserError(f'--memory "{typed}" is less than a GB: a share is written as {100 * number:g}%')
    return (0.0, number / 100) if found[2] == "%" else (number, 1.0)


@dataclass(frozen=True)
class Taking:
    """What is written of a ranking."""

    out: Path | None
    pick: int
    runs: bool
    """Whether only what `tangram train` runs is searched."""


def check(common: Common) -> None:
    """Raise UserError for a model, cluster, framework, loss, task or way to train in less memory that is none."""
    if Path(common.model).suffix == ".toml":
        from tangram.schema.files import changes_of, load

        load(Path(common.model), changes_of(common.change or []))
    for model in filter(None, (common.model, common.teacher)):
        elsewhere = Path(model).exists() or Path(model).suffix == ".toml" or model in presets_named()
        if not elsewhere and in_catalogue(model) is None and configured(model) is None:
            raise no_model(model)
    from tangram.hardware.catalogue import cluster as clusters
    from tangram.planner.space.framework_profiles import framework, loss_of

    cluster = common.cluster
    for part in [cluster] if Path(cluster).exists() else filter(None, (one.strip() for one in cluster.split(","))):
        clusters.load(part)
    for name, known in ((common.framework, framework), (common.loss, loss_of)):
        if name:
            known(name)
    from tangram.planner.legality.exclusions import left_out  # loads numpy
    from tangram.planner.space import optimisers_and_offload as ways
    from tangram.planner.space.setting import precisions_of
    from tangram.planner.space.tasks import task_of

    rest = (
        (common.optimiser, ways.optimisers_of), (common.offload, ways.offloads_of), (common.base, ways.base_of),
        (common.precision, precisions_of), (common.without, left_out), (common.task, task_of),
    )  # fmt: skip
    for name, read in rest:
        if name:
            read(name)
