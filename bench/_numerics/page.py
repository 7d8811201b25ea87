"""Writes the tables of the page `attention-numerics.md` between its marks, and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench._numerics import plots
from bench._numerics.cases import TENSORS
from bench._numerics.metrics import Measured
from bench._numerics.study import CRITERIA, HELD_OUT, OURS, Score
from bench._tables import between, table

NAME = "attention-numerics.md"
Found = Sequence[tuple[str, Measured]]


def write(folder: Path, found: Found, score: Score, each: int) -> None:
    """All of it; nothing where a mark is missing."""
    page = folder / NAME
    text = page.read_text()
    parts = {
        "errors": _errors(found),
        "diagnosis": _diagnosis(found),
        "mutants": _mutants(score, each),
        "survivors": _survivors(score),
    }
    for name, part in parts.items():
        text = between(text, name, part, page)
    pictures = folder / "images"
    pictures.mkdir(exist_ok=True)
    (pictures / "attention-errors.svg").write_text(_picture_of_errors(found))
    (pictures / "attention-criteria.svg").write_text(_picture_of_criteria(score))
    page.write_text(text)


def _laws(found: Found) -> list[str]:
    return list(dict.fromkeys(law for law, _ in found))


def _recipes(found: Found) -> list[str]:
    return list(dict.fromkeys(one.recipe for _, one in found))


def _errors(found: Found) -> str:
    """O, dQ, dK, dV in percent."""
    known = {(law, one.recipe): one for law, one in found}
    laws = _laws(found)

    def cell(one: Measured) -> str:
        return " ".join(f"{100 * one.against_inputs[name].relative:.3g}" for name in TENSORS)

    return table(["recipe", *laws], ([name, *(cell(known[law, name]) for law in laws)] for name in _recipes(found)))


def _diagnosis(found: Found) -> str:
    """Of two laws, what stands behind dQ's error."""
    rows: list[list[str]] = []
    for law, one in found:
        if law not in {"gaussian", "channels"}:
            continue
        dq, left = one.against_inputs["dQ"], one.against_operands["dQ"]
        percents = [100 * dq.row_high, 100 * dq.head_worst], [100 * left.relative, 100 * one.underflow]
        wide, deep = ([f"{x:.3g}" for x in part] for part in percents)
        rest = [f"{one.saturated}", f"{100 * one.row_sum:.2g}"]
        rows.append([law, one.recipe, f"{dq.cosine:.4f}", *wide, f"{dq.ulps:.0f}", *deep, *rest])
    headers = ["law", "recipe", "cosine of dQ", "row, 99 % of them below, %", "worst head, %", "ulps of bf16",
               "against the cast operands, %", "P made zero, %", "saturated", "row sum of dS, %"]  # fmt: skip
    return table(headers, rows)


def _mutants(score: Score, each: int) -> str:
    kinds = [[kind, str(own[""]), *(str(own[name]) for name in CRITERIA)] for kind, own in sorted(score.kinds.items())]
    last = [
        ["**mutants accepted**", str(score.wrong), *(f"**{score.passed[name]}**" for name in CRITERIA)],
        ["**right kernels refused**", str(score.right), *(f"**{score.refused[name]}**" for name in CRITERIA)],
    ]
    killed, pairs = sum(score.killed.values()), len(score.killed)
    words = (
        f"\n{each} of {len(HELD_OUT) + 1} inputs for each recipe. "
        f"Of {pairs} pairs of recipe and mutant, ours refuses {killed} on at least one of these inputs. "
        f"The furthest right kernel lies at {score.nearest:.2f} of its limit.\n"
    )
    return table(["kind of mutant", "how many", *CRITERIA], [*kinds, *last]) + words


def _survivors(score: Score) -> str:
    """A line for each mutant: how often, where, how near, and under which recipes no input gave it away."""
    if not score.survivors:
        return "None.\n"
    rows: list[list[str]] = []
    for mutant in sorted({one.mutant for one in score.survivors}):
        own = [one for one in score.survivors if one.mutant == mutant]
        inputs = sorted({one.input for one in own})
        never = sorted({one.recipe for one in own if not score.killed[one.recipe, mutant]})
        ratios = [one.worst for one in own]
        rows.append([
            mutant, f"{len(own)} ({len({one.recipe for one in own})} recipes)",
            "; ".join(inputs) if len(inputs) < 4 else f"{len(inputs)} inputs",
            f"{min(ratios):.2f} to {max(ratios):.2f}", "; ".join(never) or "none",
        ])  # fmt: skip
    return table(["mutant", "accepted", "on", "of its limit", "recipes under which no input gave it away"], rows)


def _picture_of_errors(found: Found) -> str:
    table: dict[str, dict[str, float]] = {name: {} for name in _recipes(found)}
    for law, one in found:
        table[one.recipe][law] = 100 * one.against_inputs["dQ"].relative
    return plots.points("Relative error of dQ against float64, by the law of the inputs", table, "%")


def _picture_of_criteria(score: Score) -> str:
    table = {
        name: (100 * score.passed[name] / score.wrong, 100 * score.refused[name] / score.right)
        for name in (OURS, *(name for name in CRITERIA if name != OURS))
    }
    return plots.bars(
        "What each criterion gets wrong", table, ("mutants that it accepts", "right kernels that it refuses"), "%"
    )
