"""The scalars of a run as TensorBoard shows them, written while it runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.training.observe.events import CheckpointSaved, Evaluated, StepDone, StepSkipped
from tangram.training.observe.optional_libraries import need_report
from tangram.training.observe.throughput import duration

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10  # a board that somebody watches is no older than this


class TensorBoard:
    """Writes the events that it is called with as scalars in a folder; nothing is written before the first of them.

    A run that was resumed goes on in the same folder: what the earlier one wrote beyond the checkpoint is marked as
    gone, as TensorBoard has it, so that a curve does not run twice over the same steps.
    """

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        """Raises UserError where tensorboard (or plotly, for the report at the end) is not installed."""
        need_report()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._plan = plan
        self._writer: SummaryWriter | None = None
        self._before: StepDone | None = None
        self._evaluated: Evaluated | None = None

    def __call__(self, event: object) -> None:
        """Take in one event; those that are no figures are passed over."""
        match event:
            case StepDone():
                self._step(event)
            case Evaluated():
                self._evaluated = event
                self._write(event.step, {"eval/loss": event.loss, **_under("eval", event.figures)})
            case StepSkipped():
                self._write(event.step, {"train/skipped": event.skipped})
            case CheckpointSaved():
                self._write(event.step, {"checkpoint/blocked_s": event.blocked_seconds})
            case _:
                pass

    def close(self) -> None:
        """Write what is pending. A second close does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _step(self, event: StepDone) -> None:
        scalars = {"train/loss": event.loss, "train/gradient_norm": event.gradient_norm, "train/lr": event.lr}
        took = duration(event, self._before, self._evaluated)
        if took is not None:
            scalars["train/tokens_per_s"] = event.tokens / took
        if event.rss_mb:
            scalars["memory/rss_mb"] = event.rss_mb
        if event.scale != 1:
            scalars["train/loss_scale"] = event.scale
        if event.router_loss:
            scalars["train/router_loss"] = event.router_loss
        if event.dropped:
            scalars["train/dropped"] = event.dropped
        scalars |= _under("train", event.figures)
        self._before, self._evaluated = event, None
        self._write(event.step, scalars, first=event.first)

    def _write(self, step: int, scalars: dict[str, float], first: int = 1) -> None:
        if self._writer is None:
            self._writer = self._open(first)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def _open(self, first: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # loads slowly, and fails without the extra

        resumed = first if first > 1 else None
        writer = SummaryWriter(str(self._folder), purge_step=resumed, flush_secs=FLUSH_SECONDS)
        if self._plan is not None:
            # Indented by four, TensorBoard's Markdown shows it as it is written.
            text = "".join(f"    {line}" for line in dumps(self._plan).splitlines(keepends=True))
            writer.add_text("plan", text, first - 1)
        return writer


def _under(name: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/{key}": x for key, x in figures.items()}
