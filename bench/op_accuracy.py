"""How far operators are off the true value, in ulps, and where another torch or device differs or is wrong.

`--only`: a group of operators (pointwise, reductions, products, attention, casts, moves). `--device`: where they run
(cpu; an accelerator by torch's name for its kind). `--quick`: three cases for each operator and type. `--folder`: the
documentation's folder, whose page `op-accuracy.md` gets its tables (only what lies between its marks is replaced) and
its picture; all settings are measured then, each in a process of its own, and their sheets written to
`data/op-accuracy` there.

Without `--folder`, what is found is held against the sheets that the checkout holds. Nothing is timed, and a second run
gives the same bits on the same torch and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from bench._accuracy import page
from bench._accuracy.compare import compared
from bench._accuracy.judge import CLASSES
from bench._accuracy.settings import measured
from bench._accuracy.sheet import Sheet, read
from bench._accuracy.sweep import GROUPS, sheet
from bench._accuracy.tables import Found, rows_of
from bench._accuracy.usage import used
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row

STORED = Path(__file__).parents[1] / "docs" / page.DATA


def rows(
    quick: bool, only: tuple[str, ...] = (), folder: Path | None = None, device: str = "cpu", stored: Path = STORED
) -> Iterable[Row]:
    """The figures; with `folder` the page and the sheets, too."""
    if unknown := [name for name in only if name not in GROUPS]:
        raise UserError(f"there is no group {unknown[0]!r} of figures here; known are {', '.join(GROUPS)}")
    if folder is not None and (quick or only):
        raise UserError("--folder writes a page of all figures: leave --quick and --only out")
    if folder is not None and not (folder / page.NAME).is_file():
        raise UserError(f'"{folder}" holds no {page.NAME}: give the folder of the documentation')
    _there(device)
    if folder is not None:
        uses = used()
        sheets = measured(folder / page.DATA, device)
        yield from _figures(sheets[0], sheets[1:])
        page.write(folder, sheets, uses)
        return
    others = [read(path) for path in sorted(stored.glob("*.json"))]
    yield from _figures(sheet(only or GROUPS, device, quick=quick), others)


def _there(device: str) -> None:
    """UserError where torch has no such device."""
    kind = device.partition(":")[0]
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind != "cpu" and (here is None or here.type != kind):
        raise UserError(f"there is no device {device!r} here; known are cpu{f', {here.type}' if here else ''}")


def _figures(own: Sheet, others: Sequence[Sheet]) -> Iterable[Row]:
    peers = {other.name: rows_of(other) for other in others}
    for key, found in rows_of(own).items():
        yield _row(key, found, {name: table[key] for name, table in peers.items() if key in table})
    moved = [how for how in own.copies.values() if how == "wrong"]
    if own.copies:
        yield Row(f"operators that lose a value they should move, of {len(own.copies)}", "cases", len(moved), target=0)
    for verdict in CLASSES:
        number = sum(outcome.verdict == verdict for outcome in own.outcomes.values())
        yield Row(f"{verdict}, of {len(own.outcomes)}", "cases", number)
    for other in others:
        both = compared(other, own)
        for verdict, number in both.counts.items():
            what = f"{own.name} against {other.name}: {verdict}, of {len(both.verdicts)}"
            yield Row(what, "cases", number, target=0 if verdict == "is wrong" else None)


def _row(key: tuple[str, str], found: Found, peers: Mapping[str, Found]) -> Row:
    figure = f"{', '.join(key)}: {found.verdict}, {100 * found.right:.4g} % right, at worst {found.ulps} ulps; outside"
    return Row(figure, "cases", found.outside, {name: other.outside for name, other in peers.items()}, target=0)
