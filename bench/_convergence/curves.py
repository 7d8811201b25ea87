"""The curves as SVG: what each recipe's training loss differs by from BF16's of the same seed, and gradient norms."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from bench._convergence.settings import PLAIN
from bench._convergence.table import Results

COLOURS = {
    "bf16": "#222222", "fp8-fwd": "#4477aa", "fp8": "#228833", "fp8-e5m2-emulated": "#66ccee",
    "nvfp4-emulated": "#ccbb44", "nvfp4-dropin-emulated": "#ee6677",
}  # fmt: skip
POINTS = 64
"""Of a curve: a picture of all steps is large and no clearer."""
_SETTINGS: Any = matplotlib
_SAME: Any = {"svg.hashsalt": "tangram", "svg.fonttype": "none", "font.size": 9.0}
"""The same numbers give the same bytes, and words are words."""
Curve = tuple[Any, Any]


def picture(title: str, results: Results) -> str:
    """A row for each number of tokens of a step: losses less BF16's, gradient norms. Thin lines are seeds."""
    tokens = sorted({run.step_tokens for run in results})
    recipes = list(dict.fromkeys(run.recipe for run in results))
    with _SETTINGS.rc_context(_SAME):
        figure = Figure(figsize=(10.0, 0.8 + 2.7 * len(tokens)), layout="constrained")
        panels: Any = figure.subplots(len(tokens), 2, squeeze=False)
    for axes, own in zip(panels, tokens, strict=True):
        group = {(run.recipe, run.seed): one for run, one in results.items() if run.step_tokens == own}
        for recipe in recipes:
            _lines(axes[0], _gaps(recipe, group), recipe, np.mean)
            _lines(axes[1], _norms(recipe, group), recipe, _geometric)
        axes[0].set_title(f"training loss less BF16's, nats ({own} tokens a step)", fontsize=9)
        axes[1].set_title(f"gradient norm ({own} tokens a step)", fontsize=9)
        axes[0].axhline(0.0, color=COLOURS[PLAIN], linewidth=0.8)
        axes[0].set_yscale("symlog", linthresh=0.02)
        axes[1].set_yscale("log")
        for one in axes:
            one.set_xlabel("million tokens" if max(tokens) > 10_000 else "thousand tokens")
            one.grid(visible=True, color="#e4e4e4")
            one.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    with _SETTINGS.rc_context(_SAME), io.StringIO() as out:
        figure.savefig(out, format="svg", metadata={"Date": None})
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _lines(axes: Any, found: Sequence[Curve], recipe: str, mean: Callable[..., Any]) -> None:
    colour = COLOURS[recipe]
    for x, y in found:
        axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.45)
    if found and len({len(y) for _, y in found}) == 1:
        axes.plot(found[0][0], mean([y for _, y in found], 0), color=colour, linewidth=1.6, label=recipe)


def _geometric(curves: Sequence[Any], dim: int) -> Any:
    return np.exp(np.log(np.asarray(curves)).mean(dim))


def _gaps(recipe: str, group: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[Curve]:
    """Of every seed that BF16 has, too."""
    if recipe == PLAIN:
        return []
    found: list[Curve] = []
    for (name, seed), one in group.items():
        if name == recipe and (PLAIN, seed) in group:
            other = dict(group[PLAIN, seed]["losses"])
            found.append(_curve(one, [(step, loss - other[step]) for step, loss in one["losses"] if step in other]))
    return found


def _norms(recipe: str, group: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[Curve]:
    return [_curve(one, one["gradient_norms"]) for (name, _), one in group.items() if name == recipe]


def _curve(result: Mapping[str, Any], pairs: Sequence[Sequence[float]]) -> Curve:
    """Means of as many stretches as there are points, over tokens."""
    step_tokens, total = result["settings"]["run"]["step_tokens"], result["settings"]["run"]["size"]["tokens"]
    unit = 1e6 if total > 1e7 else 1e3
    parts = np.array_split(np.asarray(pairs, np.float64), min(POINTS, len(pairs)))
    return (
        [float(part[:, 0].mean()) * step_tokens / unit for part in parts],
        [float(part[:, 1].mean()) for part in parts],
    )
