"""How a job runs: for how long, on what, and by which means."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tangram.schema.tables import Count, Kind, Positive, Recomputed, Share, TomlTable


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
    """Whether parameters and optimiser states lie in files that are mapped to memory, of which a layer's parameters are
    copied to be computed with and then dropped: for a model that memory has no room for."""
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
