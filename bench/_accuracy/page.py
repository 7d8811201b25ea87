"""Writes the tables of the page `op-accuracy.md` between its marks, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._accuracy import shown
from bench._accuracy.compare import VERDICTS, compared
from bench._accuracy.copies import KEPT, MOVES, ORDER
from bench._accuracy.judge import CLASSES, Outcome
from bench._accuracy.operator import DTYPES
from bench._accuracy.sheet import Sheet
from bench._accuracy.sweep import OPERATORS, kind_of
from bench._accuracy.tables import Found, reasons, rows_of
from bench._accuracy.usage import PLAIN, Use
from bench._numerics import plots
from bench._tables import between, table

NAME = "op-accuracy.md"
DATA = "data/op-accuracy"
PICTURE = "op-accuracy.svg"
KINDS = tuple(kind_of(dtype) for dtype in DTYPES)


def write(folder: Path, sheets: Sequence[Sheet], uses: Mapping[str, Use]) -> None:
    """All of it; nothing where a mark is missing. The first sheet is the one that the others are held against."""
    page = folder / NAME
    text, first = page.read_text(), sheets[0]
    parts = {
        "classes": _classes(first),
        "outside": _outside(first),
        "sheets": _sheets(sheets),
        "differences": _differences(sheets),
        "places": _places(first),
        "moves": _moves(first),
        "operators": _operators(first, uses),
        "unmeasured": _unmeasured(uses),
        "shown": table(["expression", "torch", "true"], ([f"`{text}`", *rest] for text, *rest in shown.table())),
    }
    for name, written in parts.items():
        text = between(text, name, written, page)
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / PICTURE).write_text(_picture(first))
    page.write_text(text)


def _classes(sheet: Sheet) -> str:
    """How many operators of each type are in each class, by their worst case."""
    found = rows_of(sheet)

    def number(kind: str, verdict: str) -> str:
        return str(sum(one.verdict == verdict for (_, other), one in found.items() if other == kind))

    rows = [[kind, *(number(kind, verdict) for verdict in CLASSES)] for kind in KINDS]
    what = f"{len(sheet.outcomes)} cases of {len({name for name, _ in found})} operators"
    words = f"\n{what}, on torch {sheet.about['torch']}, {sheet.about['device']}.\n"
    return table(["type", *CLASSES], rows) + words


def _outside(sheet: Sheet) -> str:
    rows: list[list[str]] = []
    for (name, kind), found in rows_of(sheet).items():
        if not found.wrong:
            continue
        worst = Found(tuple(found.wrong))
        laws = dict.fromkeys(case.partition(" ")[2] for case, _ in found.wrong)
        special = sum(one.special for _, one in found.wrong)
        rows.append([
            f"`{name}`", kind, f"{len(found.wrong)} of {len(found.cases)}", ", ".join(laws), worst.ulps,
            f"{worst.over:.3g}", str(special), reasons(found),
        ])  # fmt: skip
    headers = ["operator", "type", "cases", "laws", "ulps", "over its bound", "NaN or infinite", "how"]
    return table(headers, rows) if rows else "None.\n"


def _sheets(sheets: Sequence[Sheet]) -> str:
    rows: list[list[str]] = []
    for other in sheets[1:]:
        both = compared(sheets[0], other)
        rows.append([f"`{other.name}`", str(len(both.verdicts)), *(str(both.counts[verdict]) for verdict in VERDICTS)])
    return table([f"against `{sheets[0].name}`", "cases", *VERDICTS], rows)


def _differences(sheets: Sequence[Sheet]) -> str:
    """For each other sheet, the operators and types that better, worse and wrong cases belong to."""
    rows: list[list[str]] = []
    for other in sheets[1:]:
        verdicts = compared(sheets[0], other).verdicts
        for verdict in VERDICTS[1:]:
            own: dict[str, list[str]] = {}
            for (name, kind, _), found in verdicts.items():
                if found == verdict and kind not in own.setdefault(name, []):
                    own[name].append(kind)
            words = [f"`{name}` ({_short(kinds)})" for name, kinds in own.items() if kinds]
            if words:
                rows.append([f"`{other.name}`", verdict, "; ".join(words)])
    return table(["sheet", "verdict", "operators"], rows)


def _short(kinds: Sequence[str]) -> str:
    return "all" if len(kinds) == len(KINDS) else ", ".join(kinds)


def _places(sheet: Sheet) -> str:
    """Pointwise operators that give the same values other results where they do not lie side by side."""
    rows: list[list[str]] = []
    for (name, kind), found in rows_of(sheet).items():
        cases = dict(found.cases)
        for case, apart in cases.items():
            if case.endswith(" apart") and (beside := cases[case.removesuffix(" apart")]).digest != apart.digest:
                rows.append([f"`{name}`", kind, case.removesuffix(" apart"), _brief(beside), _brief(apart)])
    return table(["operator", "type", "inputs", "side by side", "apart"], rows) if rows else "None.\n"


def _brief(one: Outcome) -> str:
    wrong = f", {one.special} NaN or infinite" if one.special else ""
    return f"{one.verdict}, {100 * one.right:.4g} % right, {Found((('', one),)).ulps} ulps{wrong}"


def _moves(sheet: Sheet) -> str:
    by: dict[str, list[str]] = {how: [] for how in KEPT}
    for (name, kind), how in sheet.copies.items():
        by[how].append(f"`{name}` ({kind})")
    words = {"exact": "every bit", "but NaN": "every value, but other bits of NaN", "wrong": "not every value"}
    count = sum(len(names) for names in by.values())
    return table(
        [f"of {count} operators and types", "how many keep", "which"],
        ([words[how], str(len(names)), "all others" if how == "exact" else "; ".join(names) or "none"]
         for how, names in by.items()),
    )  # fmt: skip


def _operators(sheet: Sheet, uses: Mapping[str, Use]) -> str:
    found = rows_of(sheet)
    rows: list[list[str]] = []
    for one in {one.name: one for one in OPERATORS}.values():
        own = [uses[aten] for aten in one.aten if aten in uses]
        families = {family for use in own for family in use.families}
        calls = f"{sum(use.forward for use in own)} + {sum(use.backward for use in own)}"
        cells = [_cell(found.get((one.name, kind))) for kind in KINDS]
        rows.append([f"`{one.name}`", str(len(families)), calls, *cells])
    return table(["operator", "families", "calls", *KINDS], rows)


def _cell(found: Found | None) -> str:
    if found is None:
        return ""
    verdict = f"**{found.verdict}**" if found.wrong else found.verdict
    return f"{verdict} {100 * found.right:.3g} %, {found.ulps}"


def _unmeasured(uses: Mapping[str, Use]) -> str:
    known = {aten for one in (*OPERATORS, *MOVES) for aten in one.aten} | {x for names in ORDER.values() for x in names}
    left = [f"`{name}` ({len(use.families)})" for name, use in uses.items() if name not in known and name not in PLAIN]
    return f"Not measured: {', '.join(left) or 'none'}.\n"


def _picture(sheet: Sheet) -> str:
    table: dict[str, dict[str, float]] = {}
    found = rows_of(sheet)
    for (name, kind), one in found.items():
        if any(found[name, other].wrong for other in KINDS if (name, other) in found):
            table.setdefault(name, {})[kind] = one.over
    title = "Operators that are outside in some type: largest error over its bound (above 1 and an ulp is wrong)"
    return plots.points(title, table, "×")
