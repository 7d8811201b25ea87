"""Curves of a cluster's own device, as a part of its file: read with every mistake named, and written.

[curves.product.bf16]          by type
[curves.attention.bf16]        forward, by type; `backward`: how much slower an operation of the backward is
[curves.moved.any]
[curves.collective.all-gather] by operation

Times are fitted in logarithms with a soft loss, so single bad rows do not count; values stay above 0, weakly drawn to
where they start, so that what the rows do not show stays there. Half of the rows, by their place, are held out to say
what the error is on others. Needs scipy, which is loaded only here.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tangram.errors import UserError
from tangram.hardware.catalogue.curves import ATTENTION, COLLECTIVE, MOVED, PRODUCT, SHARES

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


Curves = Mapping[str, Mapping[str, Mapping[str, float]]]
KNOWN: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "product": (("bf16", "fp16", "fp32", "fp8", "fp4"), (*PRODUCT, "spread"), ()),
    "attention": (("bf16", "fp32"), (*ATTENTION, "spread"), ("backward",)),
    "moved": (("any",), (*MOVED, "spread"), ()),
    "collective": (tuple(name for name in SHARES if name != "p2p"), (*COLLECTIVE, "spread"), ("crowd",)),
}
"""By kind: of what, the values that each has, and those that it may have."""


def curves_in(name: str, found: Any) -> Curves:
    """The curves of a file that is called so. Raises UserError for any mistake in them."""
    return {
        kind: {of: _values(f"{name}: curves.{kind}.{of}", kind, of, table) for of, table in _table(name, kind, tables)}
        for kind, tables in _table(name, "", found)
    }


def text_of(fits: Sequence[Fit]) -> str:
    """As tables of a file."""
    lines: list[str] = []
    for one in fits:
        lines += [f"[curves.{one.kind}.{one.of}]", *(f"{key} = {value:.4g}" for key, value in one.values.items())]
        lines += [f"spread = {max(one.spread, 1e-3):.3g}", ""]
    return "\n".join(lines)


def _table(name: str, kind: str, found: Any) -> list[tuple[str, Any]]:
    where = f"curves.{kind}" if kind else "curves"
    if not isinstance(found, dict):
        raise UserError(f"{name}: {where} is {found!r}; write it as a table")
    tables = cast("dict[str, Any]", found)
    allowed = KNOWN[kind][0] if kind else tuple(KNOWN)
    for key in tables:
        if key not in allowed:
            raise UserError(f'{name}: the key "{where}.{key}" is not known: there are {", ".join(allowed)}')
    return list(tables.items())


def _values(where: str, kind: str, of: str, found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        raise UserError(f"{where} is {found!r}; write it as a table")
    table = cast("dict[str, Any]", found)
    _, needed, more = KNOWN[kind]
    for key in needed:
        if key not in table:
            raise UserError(f'{where}: the key "{key}" is missing')
    for key, value in table.items():
        if key not in (*needed, *more):
            raise UserError(f'{where}: the key "{key}" is not known: there are {", ".join((*needed, *more))}')
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise UserError(f"{where}.{key} is {value!r}; write a number above 0")
    return {key: float(value) for key, value in table.items()}
