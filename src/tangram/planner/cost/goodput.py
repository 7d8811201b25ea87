"""How much of the time of many devices is progress, when some of them fail now and then and all go back together.

Failures come at any time, equally likely (exponential gaps). With M the mean time between two failures of any device,
d the time that training stands still for a checkpoint, R the time until it runs again after a failure, and a checkpoint
every t seconds of progress, the expected time for each second of progress is (Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", FGCS 2006, equation 13, for many intervals)

    M exp(R / M) (exp((t + d) / M) - 1) / t

whose least is where (1 - t / M) exp((t + d) / M) = 1; for short d that is Young's sqrt(2 d M) (CACM 1974).

With snapshots in memory that a share p of the failures leaves (`Snapshots`), to first order, each tier by itself: of
snapshots every t1 and checkpoints every t2 seconds the time beside progress is

    d1 / t1 + d2 / t2 + (p (t1 / 2 + R1) + (1 - p) (t2 / 2 + R2)) / M

for each second of it, least where t1 = sqrt(2 d1 M / p) and t2 = sqrt(2 d2 M / (1 - p)). Two failures within one
restart are not in it: where a seventh of the time is lost it is a point too high.

The trade-off: one kind of failure, the same for all devices, and nothing that goes on with fewer of them.

How often devices fail: from what is known beforehand and from what runs have seen.

Failures come at any time, so of a rate r there are r T in T device-hours, by Poisson's law, and a gamma density of r
stays one: of one failure in H hours beforehand (shape 1: a mean alone is known), after n in T hours it has the shape
1 + n and the hours H + T, and its mean is (1 + n) / (H + T) (Gelman et al., Bayesian Data Analysis, section 2.6).

`tangram launch` leaves a file in a run's folder: a line for each start, failure, recovery and end, with the
device-hours by then. A failure is what killed a rank or had it stand still; an error that a program raised is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.errors import UserError


@dataclass(frozen=True)
class Snapshots:
    """A nearer place than that of checkpoints: memory that outlives most failures. Raises UserError for others."""

    pause: float
    """Seconds that training stands still for one."""
    restart: float
    """Seconds from a failure until training runs again from one."""
    covers: float
    """Of the failures that leave them, above 0 and below 1."""

    def __post_init__(self) -> None:
        """Look at the numbers."""
        if not (0 < self.pause < math.inf and 0 <= self.restart < math.inf and 0 < self.covers < 1):
            raise UserError(
                "--snapshots PAUSE,RESTART,SHARE: seconds above 0 that training stands still, seconds until it runs "
                "again, and the share of failures that leave them, above 0 and below 1, as in 0.5,60,0.8"
            )


@dataclass(frozen=True)
class Goodput:
    """What interrupts a training, and what that costs. Raises UserError where numbers cannot be."""

    failures: float
    """Of one device, in an hour."""
    checkpoint: float
    """Seconds that training stands still for a checkpoint."""
    restart: float
    """Seconds from a failure until training runs again, without what has to be done again."""
    snapshots: Snapshots | None = None
    known: str = ""
    """What the rate of failures is known from, where runs have seen some."""

    def __post_init__(self) -> None:
        """Look at the numbers."""
        if not 0 < self.failures < math.inf:
            raise UserError("--mtbf is a number of hours above 0, between two failures of one device")
        if not 0 < self.checkpoint < math.inf:
            raise UserError("--checkpoint-s is a number of seconds above 0: for how long training stands still")
        if not 0 <= self.restart < math.inf:
            raise UserError("--restart-s is a number of seconds from 0: until training runs again after a failure")

    def between(self, devices: float) -> float:
        """Seconds between two failures of any of them, in the mean."""
        return 3600 / self.failures / devices

    def interval(self, devices: float) -> float:
        """Seconds of progress between two checkpoints with which most of the time is progress."""
        mean = self.between(devices)
        if self.snapshots is not None:
            return math.sqrt(2 * self.checkpoint * mean / (1 - self.snapshots.covers))
        low, high, pause = 0.0, 1.0, self.checkpoint / mean
        for _ in range(100):  # (1 - x) exp(x + pause) falls from exp(pause) to 0
            middle = (low + high) / 2
            above = math.log1p(-middle) + middle + pause > 0 if middle < 1 else False
            low, high = (middle, high) if above else (low, middle)
        return mean * (low + high) / 2

    def between_snapshots(self, devices: float) -> float:
        """Seconds of progress between two snapshots; where there are some."""
        assert self.snapshots is not None
        return math.sqrt(2 * self.snapshots.pause * self.between(devices) / self.snapshots.covers)

    def share(self, devices: float, interval: float | None = None) -> float:
        """Of the time that is progress, 0 to 1, with checkpoints so far apart, or as far as is best."""
        mean = self.between(devices)
        apart = self.interval(devices) if interval is None else interval
        if (near := self.snapshots) is not None:
            often = self.between_snapshots(devices)
            lost = near.covers * (often / 2 + near.restart) + (1 - near.covers) * (apart / 2 + self.restart)
            return 1 / (1 + near.pause / often + self.checkpoint / apart + lost / mean)
        cycle = (apart + self.checkpoint) / mean
        # exp(-R/M) t/M / (exp(cycle) - 1), so written that nothing overflows
        return math.exp(-self.restart / mean - cycle) * apart / mean / -math.expm1(-cycle)


FILE = "failures.jsonl"
PRIOR = 50_000.0
"""Hours between two failures of one device where nobody says others: Llama 3's 419 in 54 days of 16,384."""


@dataclass(frozen=True)
class SeenFailures:
    """What some runs have seen."""

    device_hours: float
    failures: int
    restarts: tuple[float, ...]
    """Seconds from each until training ran again."""

    def hours(self, before: float) -> tuple[float, float, float]:
        """Between two failures of one device, with one in `before` hours known beforehand: of the mean rate, and the
        ends of 90 %."""
        shape, hours = 1 + self.failures, before + self.device_hours
        return hours / shape, hours / _quantile(shape, 0.95), hours / _quantile(shape, 0.05)


def seen_failures(folders: Iterable[Path]) -> SeenFailures:
    """What the runs in these folders have seen. Raises UserError where one has left nothing, or it cannot be read."""
    hours, failures, restarts = 0.0, 0, list[float]()
    for folder in folders:
        file = folder / FILE
        try:
            rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
            last = 0.0
            for row in rows:
                if row["what"] == "start":
                    hours, last = hours + last, 0.0
                last = max(last, float(row["device_hours"]))
                failures += row["what"] == "failure" and row["cause"] == "killed"
                restarts += [float(row["seconds"])] if row["what"] == "recovered" else []
            hours += last
        except OSError as error:
            raise UserError(f'there is no {FILE} in "{folder}" ({error.strerror}): tangram launch leaves one') from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'"{file}" is not what tangram launch leaves: {error!r}') from None
    return SeenFailures(hours, failures, tuple(restarts))


def _quantile(shape: int, share: float) -> float:
    """Of the gamma density of this shape and the scale 1, whose integral up to x is 1 less exp(-x) sum of x^i / i!."""

    def below(x: float) -> float:
        return -math.expm1(-x + math.log(sum(math.exp(i * math.log(x) - math.lgamma(i + 1)) for i in range(shape))))

    low, high = 0.0, 2.0 * shape + 20
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return (low + high) / 2
