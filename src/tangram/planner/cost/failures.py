"""How often devices fail: from what is known beforehand and from what runs have seen.

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
