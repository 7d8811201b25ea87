"""The page of a run while it trains: the report as far as there is one, written again every few seconds.

By a thread of the process that hears what rank 0 tells, so no step waits for it, and under its name there is always a
whole page. Where a page takes long to write (a long run) it is written more seldom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tangram.errors import UserError
from tangram.schema.plan import Plan
from tangram.training.observe.events import Note, Record
from tangram.training.observe.summary import summarise
from tangram.training.run.report import write_report

EVERY = 10.0
"""Seconds, at least."""
SHARE = 0.01
"""Of the time, at most, in which a page is written."""


class LivePage:
    """Of a run whose events somebody else keeps; `close` ends it."""

    def __init__(
        self,
        path: Path,
        plan: Plan,
        record: Record,
        machine: Mapping[str, str],
        known: Mapping[str, Any],
        tell: Callable[[object], None],
        every: float = EVERY,
    ) -> None:
        """`known`: what `summarise` takes beside plan and record."""
        self._path, self._plan, self._record = path, plan, record
        self._machine, self._known, self._tell = machine, known, tell
        self._every, self._begun = every, time.monotonic()
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="live-page", daemon=True)
        self._thread.start()

    def close(self, stopped: str | None = None) -> None:
        """Write it a last time, of a run that ended, for this reason if before its last step. A report may follow."""
        self._ended.set()
        self._thread.join()
        if not self._failed:
            self._write(0.0, stopped)

    def _run(self) -> None:
        wait, steps = self._every, 0
        while not self._ended.wait(wait):
            if len(self._record.steps) == steps:
                continue
            begun, steps = time.thread_time(), len(self._record.steps)
            self._write(wait)
            if self._failed:
                return
            wait = max(self._every, (time.thread_time() - begun) / SHARE)

    def _write(self, again: float, stopped: str | None = None) -> None:
        record = Record(**{one.name: [*getattr(self._record, one.name)] for one in fields(Record)})  # which grows
        first, taken = record.steps[0].first - 1 if record.steps else 0, time.monotonic() - self._begun
        try:
            summary = summarise(
                plan=self._plan, record=record, stopped=stopped, wall_s=taken, resumed_from=first or None, **self._known
            )
            write_report(
                self._path, plan=self._plan, record=record, summary=summary, machine=self._machine, sample=None,
                again=again,
            )  # fmt: skip
        except UserError as error:
            self._failed = True
            self._tell(Note(f"the page of the run is not written while it trains: {error}"))
