"""What a run came to, as the one document `summary.json`. What is not known is null, and nothing is made up.

A step's time is that of training alone: what the evaluation or the save before it took is not in it. The clock of the
events goes on during both, so it is taken off where an event tells how long it was.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from tangram.schema.plan import Plan
from tangram.text import write_file
from tangram.training.observe.events import Evaluated, Record, StepDone

FIRST_FEW = (
    3  # steps in which caches fill and kernels are compiled; a median over the others says what a run settles at
)


def duration(
    step: StepDone, before: StepDone | None, evaluated: Evaluated | None = None, blocked: float = 0.0
) -> float | None:
    """How long a step took; None where that cannot be told.

    `before` is the step that came just before it in this process group, `evaluated` what was measured between the two
    and `blocked` how long training stood still there for a checkpoint.
    """
    if before is None:
        return step.seconds if step.step == step.first and step.seconds > 0 else None
    if before.step != step.step - 1:
        return None
    if evaluated is not None and before.seconds <= evaluated.seconds < step.seconds:
        return step.seconds - evaluated.seconds  # a save comes before the evaluation, so it is taken off too
    whole = step.seconds - before.seconds
    return (whole - blocked if blocked < whole else whole) if whole > 0 else None


def durations(record: Record) -> list[float | None]:
    """How long each step of the record took."""
    evaluated = {event.step: event for event in record.evaluations}
    blocked = {event.step: event.blocked_seconds for event in record.saves}
    after = [
        duration(step, before, evaluated.get(before.step), blocked.get(before.step, 0.0))
        for before, step in pairwise(record.steps)
    ]
    return [*(duration(step, None) for step in record.steps[:1]), *after]


def step_seconds(record: Record) -> float | None:
    """The median time of a step, the first few left out."""
    return _settled(record, lambda _, took: took)


def tokens_per_s(record: Record) -> float | None:
    """The median rate over the steps, the first few left out."""
    return _settled(record, lambda step, took: step.tokens / took)


def tflops(record: Record) -> float | None:
    """The median of what the model computed in a second, over all ranks, in 10^12 FLOPs; None where that is unknown."""
    return _settled(record, lambda step, took: step.flops / took / 1e12 if step.flops else None)


def mfu(record: Record) -> float | None:
    """Model FLOPs utilisation: the median share of what the devices can do; None where either is unknown."""
    return _settled(record, share_of_peak)


def share_of_peak(step: StepDone, took: float) -> float | None:
    """The model FLOPs utilisation of one step that took so many seconds."""
    return step.flops / took / step.peak_flops if step.flops and step.peak_flops else None


def _settled(record: Record, figure: Callable[[StepDone, float], float | None]) -> float | None:
    """The median of a figure over the steps, the first few left out where there are as many again."""
    timed = [(step, took) for step, took in zip(record.steps, durations(record), strict=True) if took]
    if len(timed) >= 2 * FIRST_FEW:
        timed = timed[FIRST_FEW:]
    known = [value for step, took in timed if (value := figure(step, took)) is not None and math.isfinite(value)]
    return median(known) if known else None


LAST_STEPS = 10  # whose mean is the training loss of a run: one step's is noisy


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The content of `summary.json`. Losses are in nats per token, rates over all ranks; None: not known."""

    model: str
    parameters: int
    ranks: int
    mesh: str
    steps: int
    """The last step that was done; a run that was resumed goes on counting."""
    tokens: int
    """Trained on since training began or was resumed."""
    wall_s: float
    """The whole job: reading, training, saving, proving."""
    resumed_from: int | None = None
    """The step of the checkpoint that training went on from."""
    stopped_early: str | None = None
    """Why it ended before the last step: "time", "signal" or "patience"."""
    packing: str | None = None
    """Which documents a sample held: "packed" as many as fit, "single" one."""
    padding: float | None = None
    """The share of the places of samples that held none."""
    text: Mapping[str, Any] | None = None
    """What was taken of each source, what was left out and why, and how many times the planned steps see its text."""

    skipped_steps: int = 0
    """Steps of this run that were not applied: `steps` counts them."""
    step_seconds: float | None = None
    slow_ranks_share: float | None = None
    """Of a step, what ranks cost that were slower than their peers; None: not traced."""
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    train_loss: float | None = None
    """The mean of the last ten steps."""
    eval_loss: float | None = None
    """The held-out loss at the end, on the ranks that trained."""
    unigram_entropy: float | None = None
    """Of the held-out text: no model that ignores the context gets below it."""

    eval_loss_relayout: float | None = None
    """The same from the checkpoint, loaded in one process."""
    relayout_relative_difference: float | None = None
    relayout_logits_max_diff: float | None = None
    export_logits_max_diff: float | None = None
    """Between the trained model and what transformers loads from its export."""

    checkpoint_blocked_s: float | None = None
    """How long training stood still for all checkpoints together."""
    peak_rss_mb: float | None = None
    """The most memory of a rank."""
    predicted: Mapping[str, Any] | None = None
    """By the planner: `step_seconds`, `tokens_per_s`, and `memory_mb` of a rank; null without a prediction."""

    checkpoint: str | None = None
    export: str | None = None
    report: str | None = None
    tensorboard: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them: what is no finite number is null."""
        return {field.name: _finite(getattr(self, field.name)) for field in fields(self)}

    @property
    def step_without_slow_ranks(self) -> float:
        """Seconds of a step, had no rank been slower than its peers: what the planner learns from, as a rank that was
        slow says nothing of the plan."""
        return (self.step_seconds or 0.0) * (1 - (self.slow_ranks_share or 0.0))

    def write(self, path: Path) -> None:
        """Write the document; under its name there is the whole of it or what was there before."""
        write_file(
            path, json.dumps(self.as_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n", "the summary"
        )


def summarise(*, plan: Plan, record: Record, stopped: str | None = None, **known: Any) -> Summary:
    """The summary of a run. `known`: fields that do not follow from the plan and the record."""
    worked_out: dict[str, Any] = {
        "ranks": plan.ranks,
        "mesh": plan.mesh,
        "steps": record.steps[-1].step if record.steps else known.get("resumed_from") or 0,
        "skipped_steps": len(record.skips),
        "tokens": sum(step.tokens for step in record.steps),
        "step_seconds": step_seconds(record),
        "tokens_per_s": tokens_per_s(record),
        "tflops": tflops(record),
        "mfu": mfu(record),
        "train_loss": train_loss(record),
        "checkpoint_blocked_s": blocked_seconds(record),
        "peak_rss_mb": peak_rss_mb(record),
    }
    everything: dict[str, Any] = {**worked_out, "stopped_early": stopped, **known}
    return Summary(**everything)


def train_loss(record: Record) -> float | None:
    """The mean training loss of the last ten steps."""
    return fmean(step.loss for step in record.steps[-LAST_STEPS:]) if record.steps else None


def blocked_seconds(record: Record) -> float:
    """How long training stood still for all checkpoints together."""
    return math.fsum(save.blocked_seconds for save in record.saves)


def peak_rss_mb(record: Record) -> float | None:
    """The most memory of rank 0 at the end of a step; between the steps it may have had more."""
    return max((step.rss_mb for step in record.steps), default=0.0) or None


def _finite(value: Any) -> Any:
    """The value with null for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(inner) for inner in cast(Sequence[Any], value)]
    return value
