"""The scalars of a run as TensorBoard shows them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.schema.files import dumps
from tangram.schema.plan import Plan

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10  # a board that somebody watches is no older than this


class TensorBoard:
    """Writes scalars into a folder; nothing is written before the first of them.

    A run that was resumed goes on in the same folder: what the earlier one wrote beyond the checkpoint is marked as
    gone, as TensorBoard has it, so that a curve does not run twice over the same steps.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._plan = plan
        self._writer: SummaryWriter | None = None

    def write(self, step: int, scalars: Mapping[str, float], first: int) -> None:
        """Of a step. `first`: the first step of this process group."""
        if self._writer is None:
            self._writer = self._open(first)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is pending. A second close does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, first: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # loads slowly, and fails without the extra

        resumed = first if first > 1 else None
        writer = SummaryWriter(str(self._folder), purge_step=resumed, flush_secs=FLUSH_SECONDS)
        # Indented by four, TensorBoard's Markdown shows it as it is written.
        text = "".join(f"    {line}" for line in dumps(self._plan).splitlines(keepends=True))
        writer.add_text("plan", text, first - 1)
        return writer
