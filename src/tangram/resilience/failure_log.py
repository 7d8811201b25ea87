"""What a run sees of failures, line by line in its folder, for `tangram plan --failures` (`planner.cost.failures`)."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from tangram.planner.cost.failures import FILE
from tangram.resilience.policy import Cause, Failure
from tangram.resilience.seen import Recovered


class FailureLog:
    """Of one launcher; None for a folder: of one that does not lead, which writes nothing."""

    def __init__(self, folder: Path | None, devices: int) -> None:
        self._file = None if folder is None else folder / FILE
        self._devices, self._begun = devices, time.monotonic()
        self._add({"what": "start", "devices": devices})

    def failed(self, failure: Failure) -> None:
        """The ranks have ended."""
        cause = "raised" if failure.cause is Cause.RAISED else "killed" if failure.cause is Cause.KILLED else "storage"
        self._add({"what": "failure", "cause": cause, "step": failure.step})

    def recovered(self, event: Recovered) -> None:
        """Training runs again."""
        where = "memory" if event.memory else "disk"
        self._add({"what": "recovered", "seconds": round(event.seconds, 2), "from": where, "again": event.lost_steps})

    def ended(self) -> None:
        """The run is over, or given up."""
        self._add({"what": "end"})

    def _add(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        row["device_hours"] = round((time.monotonic() - self._begun) * self._devices / 3600, 6)
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as stream:  # a disk that is full, say
            stream.write(json.dumps(row) + "\n")
