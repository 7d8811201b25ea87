"""Writes the tables and pictures of `docs/attention-convergence.md`, between its marks, from results that are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench._convergence import curves
from bench._convergence.settings import PLAIN, Run, Size
from bench._convergence.table import Line, Results, lines
from bench._tables import between, table

NAME = "attention-convergence.md"


def write(folder: Path, size: Size, results: Results) -> None:
    """Of all settings of a size that have a result; nothing where a mark is missing."""
    page = folder / NAME
    text, known = page.read_text(), lines(results)
    for setting in dict.fromkeys(one.setting for one in known):
        text = between(text, f"{size.name} {setting}", _table([one for one in known if one.setting == setting]), page)
    text = between(text, f"{size.name} runs", _words(results), page)
    pictures = folder / "images"
    pictures.mkdir(exist_ok=True)
    for setting in dict.fromkeys(one.setting for one in known):
        own = {run: one for run, one in results.items() if run.setting == setting}
        (pictures / f"attention-convergence-{size.name}-{setting}.svg").write_text(curves.picture(setting, own))
    page.write_text(text)


def _table(known: Sequence[Line]) -> str:
    headers = ("tokens a step", "recipe", "seeds", "held-out loss", "gap to BF16, paired", "in seed bands", "verdict",
               "usual gradient norm", "largest gradient norm", "largest logit", "steps skipped")  # fmt: skip
    bands = {one.step_tokens: one.band for one in known if one.recipe == PLAIN and one.band is not None}
    words = "; ".join(f"{band:.4f} nats at {tokens} tokens a step" for tokens, band in bands.items())
    return table(headers, (_cells(one) for one in known)) + f"\nSeed band of BF16: {words}.\n"


def _cells(one: Line) -> tuple[str, ...]:
    gap = "" if one.gap is None else f"{one.gap:+.4f}" + ("" if one.within is None else f" ± {one.within:.4f}")
    return (
        f"{one.step_tokens}", one.recipe, f"{one.seeds}", "none" if one.loss is None else f"{one.loss:.4f}", gap,
        "" if one.bands is None else f"{one.bands:+.2f}", one.verdict, f"{one.usual_norm:.3g}",
        f"{one.largest_norm:.3g}", f"{one.largest_logit:.1f}", f"{one.skipped}",
    )  # fmt: skip


def _words(results: Results) -> str:
    seconds = [float(one["seconds"]) for one in results.values()]
    any_run: Run = next(iter(results))
    devices = ", ".join(sorted({str(one["device"]) for one in results.values()}))
    return (
        f"{len(results)} runs of {any_run.size.tokens:,} tokens each, on {devices}; a run took "
        f"{min(seconds):.0f} to {max(seconds):.0f} s, all of them {sum(seconds) / 60:.0f} minutes in sum.\n"
    )
