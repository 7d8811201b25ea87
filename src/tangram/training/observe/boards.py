"""The scalars of a run as a team's own boards show them, written while it runs: `run.boards`.

    events -> scalars, worked out once -> each board that the job names, by its own library

A board is a class with `write` and `close`, and a row of `BOARDS`.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Generator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tangram.errors import UserError, sentence
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.training.observe.events import CheckpointSaved, Evaluated, Note, StepDone, StepSkipped
from tangram.training.observe.summary import duration

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BOARD_FOLDER = "tensorboard"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


class Board(Protocol):
    """Shows scalars."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Of a step."""
        ...

    def close(self) -> None:
        """Write what is pending. A second close does nothing."""
        ...


class Boards:
    """Takes in the events of a run; those that are no figures are passed over. A board that cannot be written, as on a
    full disk, stops no run: that is said, and it is left out."""

    def __init__(
        self, folder: Path, plan: Plan, tell: Callable[[object], None] = lambda event: None, after: int = 0
    ) -> None:
        """`folder`: of the run; `after`: the step that it goes on from. Raises UserError where a library is
        missing, or a board cannot be reached.

        Here, before the run trains, that of the report at its end is looked for, too.
        """
        need(("plotly", *(name for name in plan.run.boards if name == "tensorboard")), "report")
        self._boards: list[Board] = []
        self._tell = tell
        try:
            for name in plan.run.boards:
                self._boards.append(BOARDS[name](folder, plan, after))
        except BaseException:
            self.close()
            raise
        self._before: StepDone | None = None
        self._evaluated: Evaluated | None = None

    def __call__(self, event: object) -> None:
        match event:
            case StepDone():
                self._write(event.step, self._of_step(event))
                self._before, self._evaluated = event, None
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
        for board in [*self._boards]:
            with self._left_out(board):
                board.close()

    @contextlib.contextmanager
    def _left_out(self, board: Board) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self._boards.remove(board)
            self._tell(
                Note(f"{type(board).__name__} lacks what comes now, for it cannot be written: {sentence(error)}")
            )

    def _of_step(self, event: StepDone) -> dict[str, float]:
        scalars = {"train/loss": event.loss, "train/gradient_norm": event.gradient_norm, "train/lr": event.lr}
        took = duration(event, self._before, self._evaluated)
        if took is not None:
            scalars["train/tokens_per_s"] = event.tokens / took
        if event.scale != 1:
            scalars["train/loss_scale"] = event.scale
        more = {"memory/rss_mb": event.rss_mb, "train/router_loss": event.router_loss, "train/dropped": event.dropped}
        return scalars | {name: x for name, x in more.items() if x} | _under("train", event.figures)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for board in [*self._boards]:
            with self._left_out(board):
                board.write(step, scalars)


class WeightsAndBiases:
    """A run of W&B, which a job that is resumed goes on with; where to and how is said by wandb's own variables, as
    WANDB_PROJECT and WANDB_MODE=offline."""

    def __init__(self, folder: Path, plan: Plan, after: int) -> None:
        """Raises UserError where wandb begins no run, as without a login."""
        need(("wandb",), "boards")
        import wandb  # loads slowly

        own = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        known: dict[str, Any] = {"dir": str(folder), "config": plan.model_dump(mode="json"), "id": own}
        known |= {"name": folder.name, "resume": "allow", "settings": wandb.Settings(silent=True, console="off")}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(**known)
        except wandb.Error as error:
            why = str(error).strip().partition("\n")[0]
            raise UserError(f"wandb begins no run ({why}): wandb login, or WANDB_MODE=offline") from None
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Its own count of steps only rises, and that of a resumed job may not: so the step is a number beside."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


class OpenTelemetry:
    """Gauges `tangram.train.loss` and so on, sent to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names, as often as
    OTEL_METRIC_EXPORT_INTERVAL says and at the end."""

    def __init__(self, folder: Path, plan: Plan, after: int) -> None:
        """Raises UserError where nobody says where the collector is."""
        need(("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"), "boards")
        if not any(os.environ.get(name) for name in ENDPOINTS):
            raise UserError(f'run.boards has "opentelemetry": set {ENDPOINTS[0]} to the address of a collector')
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource

        of_run = {"tangram.run": str(folder), "tangram.mesh": plan.mesh}
        of_run |= {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "tangram"}
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], Resource.create(of_run), shutdown_on_exit=False)
        self._meter, self._gauges, self._open = self._provider.get_meter("tangram"), dict[str, Any](), True

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The newest of each, with the step as a gauge of its own."""
        for name, value in {**scalars, "step": step}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"tangram.{name.replace('/', '.')}")
            self._gauges[name].set(value)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._provider.shutdown()


def _under(name: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/{key}": x for key, x in figures.items()}


FLUSH_SECONDS = 10  # a board that somebody watches is no older than this


class TensorBoard:
    """Writes scalars into a folder; nothing is written before the first of them.

    A run that was resumed goes on in the same folder: what the earlier one wrote beyond the checkpoint is marked as
    gone, as TensorBoard has it, so that a curve does not run twice over the same steps.
    """

    def __init__(self, folder: Path, plan: Plan, after: int) -> None:
        """`folder`: of the run."""
        self._folder, self._plan, self._after = folder / BOARD_FOLDER, plan, after
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer: SummaryWriter | None = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open()
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # loads slowly, and fails without the extra

        gone = self._after + 1 if self._after or any(self._folder.iterdir()) else None
        writer = SummaryWriter(str(self._folder), purge_step=gone, flush_secs=FLUSH_SECONDS)
        # What its thread raises comes again from the next call; the interpreter would print a stack trace, too.
        before = threading.excepthook
        threading.excepthook = lambda of: before(of) if type(of.thread).__name__ != "_AsyncWriterThread" else None
        # Indented by four, TensorBoard's Markdown shows it as it is written.
        text = "".join(f"    {line}" for line in dumps(self._plan).splitlines(keepends=True))
        writer.add_text("plan", text, self._after)
        return writer


BOARDS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "opentelemetry": OpenTelemetry}


def need(libraries: tuple[str, ...], extra: str) -> None:
    """Raise UserError, with the extra to install, unless the libraries are there."""
    missing = [library for library in libraries if not _there(library)]
    if missing:
        what = f"a run's report and boards need {' and '.join(missing)}"
        raise UserError(f'{what}: install with pip install "tangram-train[{extra}]"')


def _there(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
