"""Fits the values of a curve (`hardware/catalogue/curves.py`) to measured seconds, and says how well they fit.

Times are fitted in logarithms with a soft loss, so single bad rows do not count; values stay above 0, weakly drawn to
where they start, so that what the rows do not show stays there. Half of the rows, by their place, are held out to say
what the error is on others. Needs scipy, which is loaded only here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError

Floats = NDArray[np.float64]
Values = Mapping[str, float]
Call = Callable[[Values, Any], Floats]
"""Seconds by given values of what the columns of a table say."""


@dataclass(frozen=True)
class Fit:
    """One curve and its errors: |fitted / measured - 1|."""

    kind: str
    device: str
    of: str
    values: Values
    rows: int
    median: float
    worst: float
    """The 90th percentile."""
    held_out: float
    spread: float
    """Standard deviation of the logarithm, robust."""


def fitted(start: Values, call: Call, x: Any, t: Floats) -> tuple[dict[str, float], Floats]:
    """The values, all above 0, that fit best from some start, and the logarithm of fitted over measured."""
    names = list(start)
    origin = np.log(list(start.values()))

    def off(p: Floats) -> Floats:
        return np.log(call(dict(zip(names, np.exp(p), strict=True)), x) / t)

    def left(p: Floats) -> Floats:
        return np.concatenate([off(p), 0.3 * (p - origin)])

    found: Floats = _optimize().least_squares(left, origin, loss="soft_l1", f_scale=0.1).x
    return dict(zip(names, np.exp(found).tolist(), strict=True)), off(found)


def fit(kind: str, key: str, of: str, start: Values, call: Call, x: Mapping[str, Floats], t: Floats) -> Fit:
    """One curve, and half of it from the other half."""
    values, off = fitted(start, call, x, t)
    even = np.arange(len(t)) % 2 == 0
    half, _ = fitted(start, call, {name: part[even] for name, part in x.items()}, t[even])
    out = np.abs(call(half, {name: part[~even] for name, part in x.items()}) / t[~even] - 1)
    err = np.abs(np.exp(off) - 1)
    spread = float(np.median(np.abs(off)) / 0.6745)
    return Fit(
        kind, key, of, values, len(t), float(np.median(err)), float(np.quantile(err, 0.9)), float(np.median(out)),
        spread,
    )  # fmt: skip


def _optimize() -> Any:
    try:
        return cast(Any, importlib.import_module("scipy.optimize"))
    except ImportError:
        raise UserError("curves are fitted by scipy, which is not here: pip install scipy") from None
