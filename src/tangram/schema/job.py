"""The job: what to train, without a strategy. Model, data, optimiser, precision, when to save and to stop.

All tables are frozen and refuse unknown keys. Loads neither torch nor transformers, so that a mistake shows at once.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tangram.checkpoint.store.retention_rules import parse as parse_retention
from tangram.errors import UserError
from tangram.schema.optimiser import OptimiserPlan
from tangram.schema.precision import PrecisionPlan
from tangram.schema.tables import Count, Day, Kind, Mistake, PathText, Positive, Recomputed, Share, TomlTable
from tangram.schema.tuning import (
    ALONE,
    ROWS,
    DistillPlan,
    LoraPlan,
    PreferencePlan,
    TaskName,
    mistake_of_distillation,
    mistake_of_preferences,
)

VERSION = 3


class ModelPlan(TomlTable):
    """Which model: a preset of `tangram.models`, or a Hugging Face directory or configuration file.

    Neither is given where a training loop of one's own makes the model.
    """

    preset: str | None = None
    path: PathText | None = None
    """A Hugging Face directory (its safetensors weights are read when there) or a config.json, relative to the file."""
    change: dict[str, bool | int | float | str] = Field(default_factory=dict[str, bool | int | float | str])
    """Fields of the model's configuration to change."""
    freeze: tuple[str, ...] = ()
    """Name patterns of parameters that are not trained."""
    code: PathText | None = None
    """A Python file that runs before the model is built, as one that defines operators of one's own; "FILE.py:function"
    where the function gives calls of them, to prove rules with."""
    rules: PathText | None = None
    """A file of op rules for such operators, as `tangram shard discover` writes it."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.preset is not None and self.path is not None:
            raise ValueError("give the model by preset or by path, not both")
        return self


class SourcePlan(TomlTable):
    """One source of documents."""

    path: PathText
    """A file or folder, relative to the plan file; "stdlib" is the sources of the Python that runs."""
    pattern: str | None = None
    """For a folder: which files under it, as in "**/*.py". The default takes every file of a known kind."""
    field: str = "text"
    """For JSONL, parquet and `datasets` directories: the column that holds the text."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """How many samples come from this source, in proportion to the other weights."""


Special = Literal["refuse", "parse", "text"]
"""Of special tokens in text."""


Packing = Literal["packed", "best-fit", "single"]
"""Of documents into samples."""


class DataPlan(TomlTable):
    """Which text, cut into which samples, and how many of them make a step."""

    sources: Annotated[tuple[SourcePlan, ...], Field(min_length=1)]
    tokenizer: PathText = "model"
    """"bytes", "model" (the tokenizer beside the model; bytes for a preset), or a Hugging Face directory."""
    special_tokens: Special = "refuse"
    """The text of a special token in a document, as "</s>": "refuse" stops; "parse" makes it that token, for text
    rendered by a template; "text" makes it characters like any other, so that nothing in a document can end it."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The share of documents, chosen by the hash of their content, that is never trained on."""
    evaluation: tuple[SourcePlan, ...] | None = Field(default=None, min_length=1)
    """Sources of what the held-out loss is measured on, in the place of a share of `sources`."""
    held_out_samples: Positive = 64
    sequence: Annotated[int, Field(gt=1)]
    global_batch: Positive
    """Samples in one step over all ranks and micro-batches."""
    micro_batch: Positive = 1
    """Samples that one rank takes through the model at once; the rest of its share follows, gradients add up."""
    packing: Literal[Packing, "auto"] = "auto"
    """Which documents a sample holds: "packed" as many as fit, cut where it ends, which the model has to keep apart;
    "best-fit" the same, but whole; "single" one, and the rest of the window counts nothing; "auto" asks the model
    before training and takes "packed" where it can."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    """Of conversations of more than `sequence` tokens: what is over is left out, or all of it; or it is refused."""
    date: Day | None = None
    """What a chat template that asks for the date writes; never the clock's, by which each day had other tokens."""
    cache: PathText | None = None
    """Where tokens are kept between runs; the default is the user's cache folder."""

    @property
    def share(self) -> float:
        """Of the documents of `sources`, how many are held out."""
        return 0.0 if self.evaluation else self.held_out

    @property
    def measured(self) -> tuple[SourcePlan, ...]:
        """What the held-out loss is measured on documents of, if there is one."""
        return self.evaluation or (self.sources if self.held_out else ())


class CheckpointPlan(TomlTable):
    """When to save while training; a last checkpoint is always written at the end."""

    every_steps: Count = 0
    """0 saves at the end only."""
    keep: Positive = 2
    """How many of the newest are kept."""
    also: tuple[str, ...] = ()
    """Rules by which others are kept, too: "every=1000" steps, "best=metrics.held_out_loss:min:2", "younger=2d"."""
    store: Annotated[str, Field(pattern=r"^([a-z0-9]+://.+)?$")] = ""
    """The address in an object store, as "s3://bucket/run", to which checkpoints are sent while training goes on."""
    asynchronous: bool = True
    """Go on training while the copy is written."""

    @model_validator(mode="after")
    def _rules_can_be_read(self) -> Self:
        try:
            parse_retention((f"last={self.keep}", *self.also))
        except UserError as error:
            raise ValueError(str(error).removeprefix("--keep ")) from None
        return self


class DivergencePlan(TomlTable):
    """When a loss has diverged."""

    above: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A multiple of the median of the last losses; 0 never asks."""
    steps: Positive = 3
    """How many steps in a row are above it."""
    window: Annotated[int, Field(ge=3)] = 50
    """How many losses the median is taken of; until there are so many nothing is said."""

    @model_validator(mode="after")
    def _above_the_median(self) -> Self:
        if 0 < self.above <= 1:
            raise ValueError(f"losses above {self.above:g} times their median are usual: give a multiple above 1")
        return self


class RunPlan(TomlTable):
    """When to stop, and on what to run."""

    steps: Positive
    max_seconds: Annotated[float, Field(gt=0)] = float("inf")
    """Training stops after the step in which this time has passed, if that is before `steps`."""
    evaluate_every: Count = 0
    """Steps between two measurements of the held-out loss; 0 measures at the end only."""
    patience: Count = 0
    """After so many of these in a row without a lower loss training stops (early stopping); 0: never."""
    count_experts: Count = 0
    """Steps between two counts of how many tokens went to each expert (`experts.jsonl`); 0 counts none."""
    router_loss: Share = 0.0
    """What the load-balancing loss of a mixture's routers is multiplied by, before it is added."""
    expert_capacity: Share = 0.0
    """How many times its even share of a global micro-batch's choices an expert takes at most; 0 drops none."""
    drop_by: Literal["probs", "position"] = "probs"
    """Which choices an expert keeps: those of the largest weights, or of the first tokens."""
    device: Literal["auto", "cpu"] = "auto"
    deterministic: bool = False
    attention: Literal[
        "model", "sdpa", "tokens",
        "bf16", "fp8-fwd", "fp8", "nvfp4-emulated", "fp8-e5m2-emulated", "nvfp4-dropin-emulated",
    ] = "model"  # fmt: skip
    """"model": as the model's class has it. "sdpa": torch's. "tokens": by documents and places of tokens, in blocks of
    which those that are hidden are not computed; no mask of sequence x sequence is made (`kernels.attention`). The
    others: so, too, by the kernels of a mode of `kernels.flash`."""
    compile: bool = False
    """torch.compile each block."""
    recompute: Recomputed = ()
    """Name patterns of modules whose activations are recomputed in the backward, not kept; "full": of all layers."""
    recompute_keep: tuple[Kind, ...] = ()
    """Kinds of operators whose results are kept within these modules, so that they do not run again."""
    stream_layers: bool = False
    """Whether parameters and optimiser states lie in files; a layer's parameters are copied when it computes."""
    reshard: Literal["after forward", "after backward", "after step"] = "after forward"
    """Until when a rank keeps gathered parameters of FSDP: the longer, the fewer gathers, and the more memory."""
    reduce_every: Literal["micro-batch", "step"] = "micro-batch"
    """When ranks add up their gradients; until then a rank keeps those of all parameters whole."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens to a step whose loss or gradient is not finite, or whose loss has diverged: the run ends, or the
    step is not applied. Its samples are written to the folder of the run."""
    boards: tuple[Literal["tensorboard", "wandb", "opentelemetry"], ...] = ("tensorboard",)
    """Where the scalars of the run are shown (`training.observe.boards`)."""
    trace: bool = True
    """Whether each rank records its collectives and steps in the folder of the run (`tangram.tracing`)."""
    hang_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Of a traced run: after so many in which no rank moves, though some wait, it ends and says for whom; 0: never."""
    skips_in_a_row: Positive = 10
    """Of steps that have gone astray; one more stops the run. Overflows that lower the loss scale are none of them."""
    diverged: DivergencePlan = DivergencePlan()

    @property
    def by_tokens(self) -> bool:
        """Whether attention is told each token's document and place."""
        return self.attention not in ("model", "sdpa")


class Job(TomlTable):
    """What to train, without a strategy."""

    version: Literal[3] = VERSION
    task: TaskName = "pretrain"
    seed: Count = 0
    model: ModelPlan = ModelPlan()
    lora: LoraPlan | None = None
    """None: the model's own parameters are trained."""
    preference: PreferencePlan | None = None
    """Of the tasks "dpo" and "kto"."""
    distill: DistillPlan | None = None
    """Of the task "distill"."""
    data: DataPlan
    optimiser: OptimiserPlan
    precision: PrecisionPlan = PrecisionPlan()
    checkpoint: CheckpointPlan = CheckpointPlan()
    run: RunPlan

    @property
    def rows_per_sample(self) -> int:
        """How many rows of `data.sequence` tokens a sample is: of a pair of answers, two."""
        return ROWS[self.task]

    @property
    def has_reference(self) -> bool:
        """Whether what is trained is compared with the model as it began."""
        return self.preference is not None and self.preference.loss_type not in ALONE

    @property
    def other_forwards(self) -> int:
        """Forwards beside those of training: of the reference, and of others' answers by both models."""
        return 3 if self.task == "kto" else 1 if self.has_reference else 0

    @property
    def by_token(self) -> bool:
        """Whether the loss is the cross-entropy of the next token."""
        return self.preference is None and self.distill is None

    @property
    def runs_teacher(self) -> bool:
        """Whether a teacher is part of a step."""
        return self.distill is not None and self.distill.cache is None

    def of_teacher(self) -> Self:
        """What the teacher is asked for: a forward only, with parameters in the type in which it computes."""
        assert self.distill is not None  # the task says so
        off = {"recompute": (), "recompute_keep": (), "router_loss": 0.0, "expert_capacity": 0.0, "count_experts": 0}
        return self.model_copy(
            update={
                "task": "pretrain",
                "model": ModelPlan(path=self.distill.teacher, code=self.model.code, rules=self.model.rules),
                "lora": None,
                "distill": None,
                "optimiser": self.optimiser.model_copy(update={"lr_of": {}}),
                "precision": self.precision.model_copy(update={"parameters": self.precision.compute}),
                "run": self.run.model_copy(update={**off, "reshard": "after forward", "reduce_every": "micro-batch"}),
            }
        )

    def _mistake_of_streaming(self) -> Mistake | None:
        """What makes no sense together with `run.stream_layers`."""
        precision, on, off = self.precision, "run.stream_layers", "or leave out run.stream_layers"
        alike = precision.parameters == precision.compute == (precision.accumulate or "float32")
        types, base = "precision.parameters, compute and accumulate", self.lora is not None and self.lora.base
        asked = (
            (not self.optimiser.in_backward, on, "all gradients would be kept: set optimiser.in_backward = true"),
            (not self.run.recompute, on, 'what a layer keeps would hold its parameters: set run.recompute = "full"'),
            (self.run.compile, "run.compile", "compiled layers hold on to their parameters: set it to false"),
            (base not in (False, "parameters"), "lora.base", "a quantised base is not streamed: leave out lora.base"),
            (self.has_reference or self.distill, on, "a reference or a teacher is not streamed: take another task"),
            (not alike, "precision", f"streamed parameters are computed with as they are: set {types} alike"),
            (self.checkpoint.asynchronous, "checkpoint.asynchronous", "it copies all to memory: set it to false"),
        )
        wrong = (Mistake(key, f"{why}, {off}") for is_so, key, why in asked if is_so)
        return next(wrong, None) if self.run.stream_layers else None

    @model_validator(mode="after")
    def _base_fits(self) -> Self:
        if self.lora is None or self.lora.base == "parameters":
            return self
        if self.lora.dora:
            raise Mistake("lora.dora", "lora.dora reads a base's weights outside of its layers: leave out one of both")
        if self.run.compile:
            raise Mistake("run.compile", "compiled blocks would keep the weights that lora.base makes: set it to false")
        return self

    @model_validator(mode="after")
    def _task_fits(self) -> Self:
        data = self.data
        mistake = mistake_of_preferences(self.task, self.preference, data.packing, data.global_batch)
        if mistake := mistake or mistake_of_distillation(self.task, self.distill, data.packing):
            raise mistake
        if data.date is not None and self.task == "pretrain":
            raise Mistake("data.date", "no chat template writes what this task trains on: leave it out")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if mistake := self.optimiser.mistake(self.run.steps):
            raise mistake
        if self.run.recompute_keep and not self.run.recompute:
            raise Mistake("run.recompute_keep", "no module is recomputed: name some in run.recompute, or leave it out")
        if self.run.recompute_keep and self.run.compile:
            raise Mistake(
                "run.recompute_keep",
                "what runs inside of a compiled block cannot be kept by kind: take run.compile = false, or compute "
                "whole modules again",
            )
        if mistake := self.precision.mistake():
            raise mistake
        early = self.optimiser.mistake_in_backward(self.run.on_nonfinite, self.precision.compute)
        if mistake := early or self._mistake_of_streaming():
            raise mistake
        if self.optimiser.rounding == "stochastic" and self.precision.masters != "bfloat16":
            raise Mistake(
                "optimiser.rounding",
                "float32 masters lose no update, so nothing is rounded stochastically: make precision.masters "
                '"bfloat16", with precision.compute and precision.parameters, or leave it out',
            )
        if self.lora is not None and self.model.path is None:
            raise Mistake("lora", "adapters stand beside weights that were trained: give their directory as model.path")
        if self.run.evaluate_every and not self.data.measured:
            raise Mistake("run.evaluate_every", "data.held_out = 0 leaves nothing to measure the held-out loss on")
        if self.run.patience and not self.run.evaluate_every:
            raise Mistake("run.patience", "the held-out loss is measured at the end only: give run.evaluate_every, too")
        return self
