"""Fused operators: how far results and gradients are off, beside torch's own and transformers' modules.

`--folder`: the documentation's folder, whose page `fused.md` gets its table (only what lies between its marks is
replaced). Errors are the norm of the difference over the norm of the result in float64, on inputs of bfloat16: what
storing a result in bfloat16 costs is 0.17 % by itself. Kernels run under Triton's interpreter in a process of
TRITON_INTERPRET=1, else torch's operators compute, and the rows say so. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench._fused import study
from bench._tables import between, table
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row

NAME = "fused.md"


def rows(quick: bool, folder: Path | None = None) -> Iterable[Row]:
    """The figures; with `folder` the page, too."""
    if folder is not None and quick:
        raise UserError("--folder writes a page of all figures: leave --quick out")
    page = None if folder is None else folder / NAME
    if page is not None and not page.is_file():
        raise UserError(f'"{folder}" holds no {NAME}: give the folder of the documentation')
    found: list[study.Measured] = []
    for one in study.measured(study.SMALL if quick else study.LARGE):
        found.append(one)
        yield Row(f"{one.operator}: {one.tensor}", "% error", one.ours, one.peers)
    if page is not None:
        lines = ([one.operator, one.tensor, *(_cell(one, name) for name in study.NAMES)] for one in found)
        text = table(["operator", "tensor", *study.NAMES], lines)
        page.write_text(between(page.read_text(), "errors", text, page))


def _cell(one: study.Measured, name: str) -> str:
    value = one.all().get(name)
    return "" if value is None else f"{value:.3g}"
