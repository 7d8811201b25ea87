"""What happens in a job, as values: ranks emit them, the progress line, the logs and the report take them in."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True)
class Note:
    """A milestone worth a line of its own."""

    text: str


class StopRequested(Note):
    """Somebody wants the run to stop after its step."""


@dataclass(frozen=True)
class Doing:
    """What goes on for some seconds now; of interest only while it does."""

    text: str


@dataclass(frozen=True)
class TableEvent:
    """A short table for a person: a title, headers, rows of text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Working:
    """How far a long piece of work that is no training step has come, as tokenising: `done` of `total` in `unit`."""

    what: str
    done: int
    total: int
    unit: str


@dataclass(frozen=True)
class StepDone:
    """One finished training step: its loss is the mean over the counted tokens of the global batch, in nats."""

    step: int
    """From 1; of a run that was resumed it goes on counting."""
    steps: int
    loss: float
    gradient_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Counted in this step, over all ranks."""
    seconds: float
    """Since this process group began to train, this step included."""
    first: int = 1
    """The first step of this process group: 1, or the one after the checkpoint that it resumed from."""
    limit: float = math.inf
    """The seconds after which training stops, if that is before the last step."""
    flops: float = 0.0
    """Of the model in this step, forward and backward over all ranks; recomputation is not counted. 0: unknown."""
    peak_flops: float = 0.0
    """What the devices of all ranks can do in a second. 0: unknown."""
    rss_mb: float = 0.0
    """Resident memory of rank 0 now."""
    skipped: int = 0
    """Steps of the whole run that were not applied."""
    scale: float = 1.0
    """What the loss is multiplied by in the next step."""
    router_loss: float = 0.0
    """What the loss of routers adds to what is trained on; `loss` is without it."""
    dropped: float = 0.0
    """The share of tokens' choices that experts had no room for."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the task tells beside the loss, as the rewards of preferences."""


@dataclass(frozen=True)
class StepSkipped:
    """A step that was not applied."""

    step: int
    reason: str
    skipped: int
    """Steps of the whole run that were not applied, this one included."""
    samples: str = ""
    """The file that says what it was trained on; of an overflow that lowers the loss scale there is none."""


@dataclass(frozen=True)
class Evaluated:
    """The held-out loss after `step` steps, in nats per token, or of preferences in nats per pair."""

    step: int
    loss: float
    seconds: float
    """Since training began."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the task tells beside it."""


@dataclass(frozen=True)
class ExpertLoads:
    """How many times each expert of each layer was chosen since the last such event, over all ranks."""

    step: int
    tokens: int
    """That were routed, padding included."""
    layers: Mapping[str, tuple[int, ...]]
    """By the path of the module of experts, for each expert."""

    @property
    def evenness(self) -> dict[str, float]:
        """By layer, the mean over the experts as a part of the most: 1 where all are chosen as often."""
        return {name: fmean(own) / max(own) for name, own in self.layers.items() if any(own)}


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that is committed: complete on disk under its final name."""

    step: int
    path: str
    blocked_seconds: float
    """How long training stood still for it."""
    seconds: float
    """From the begin of the save to the commit."""
    asynchronous: bool


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint that could not be written; training goes on and the last good one is untouched."""

    step: int
    reason: str


@dataclass
class Record:
    """Everything that happened in a run, in the order in which it came."""

    steps: list[StepDone] = field(default_factory=list[StepDone])
    skips: list[StepSkipped] = field(default_factory=list[StepSkipped])
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    loads: list[ExpertLoads] = field(default_factory=list[ExpertLoads])
    saves: list[CheckpointSaved] = field(default_factory=list[CheckpointSaved])
    failures: list[SaveFailed] = field(default_factory=list[SaveFailed])

    def __call__(self, event: object) -> None:
        """Keep an event; those that are only for the eye are passed over."""
        for kind, kept in (
            (StepDone, self.steps),
            (StepSkipped, self.skips),
            (Evaluated, self.evaluations),
            (ExpertLoads, self.loads),
            (CheckpointSaved, self.saves),
            (SaveFailed, self.failures),
        ):
            if isinstance(event, kind):
                kept.append(event)  # pyright: ignore[reportArgumentType]  the list of this kind
