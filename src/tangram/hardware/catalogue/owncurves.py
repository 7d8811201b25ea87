"""Curves of a cluster's own device, as a part of its file: read with every mistake named, and written.

[curves.product.bf16]          by type
[curves.attention.bf16]        forward, by type; `backward`: how much slower an operation of the backward is
[curves.moved.any]
[curves.collective.all-gather] by operation
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tangram.errors import UserError
from tangram.hardware.catalogue.curves import ATTENTION, COLLECTIVE, MOVED, PRODUCT, SHARES
from tangram.hardware.catalogue.fit import Fit

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
