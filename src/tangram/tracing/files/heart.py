"""The heart of a rank: a thread that beats while its process runs, and notes afterwards when that did not run.

It sleeps on where its process is stopped, but on a busy machine, too, or while another thread has the interpreter: for
as long as the rank's own thread ran, or either of them was ready and others had the CPU, it is no stop.
"""

import os
import threading
import time
from contextlib import suppress

from tangram.tracing.files.format import BEAT, BEAT_AT
from tangram.tracing.files.ring import Processor, TraceFiles

BEAT_SECONDS = 0.25
STOOD_SECONDS = 1.0
"""Of so many between two beats, beside those that are accounted for, the process has not run."""


class Heart:
    """Of the process that makes it, on the thread whose steps are timed."""

    def __init__(self, files: TraceFiles) -> None:
        self._files, self._over = files, threading.Event()
        # Within what is left of a beat other threads may have run on all cores before the process was stopped.
        self._burst = BEAT_SECONDS * 1e9 * (os.cpu_count() or 1)
        self._timed = Processor()
        threading.Thread(target=self._beats, args=(self._beat(),), daemon=True, name="tangram-heartbeat").start()

    def stop(self) -> None:
        """Beat for the last time: then the process has run, whatever becomes of it."""
        self._over.set()
        self._beat()

    def _beat(self) -> tuple[int, int]:
        now = time.monotonic_ns(), time.process_time_ns()
        BEAT.pack_into(self._files.memory, BEAT_AT, *now)
        return now

    def _beats(self, last: tuple[int, int]) -> None:
        with suppress(ValueError):  # the memory has been given back
            own = Processor()
            while not self._over.wait(BEAT_SECONDS):
                now = self._beat()
                gap, ran = now[0] - last[0], now[1] - last[1]
                used = max(self._timed.spent(), own.spent(), ran - self._burst)
                if gap - used > STOOD_SECONDS * 1e9:
                    self._files.name({"stood": gap, "until": now[0]})
                last = now
