"""Two static pictures, drawn by matplotlib as SVG: points on a logarithmic line, and bars."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
LINE = 0.24
"""Inches for each name."""
_SETTINGS: Any = matplotlib
_SAME: Any = {"svg.hashsalt": "tangram", "svg.fonttype": "none", "font.size": 9.0}
"""The same numbers give the same bytes, and words are words."""


def points(title: str, table: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A line for each name, a point for each series, by the logarithm of its value."""
    series = list(dict.fromkeys(key for own in table.values() for key in own))
    names = list(table)
    figure, axes = _empty(title, names, 1.2 + LINE * len(names))
    for key, colour in zip(series, COLOURS, strict=False):
        found = [(own[key], row) for row, own in enumerate(table.values()) if own.get(key, 0.0) > 0]
        axes.plot(*zip(*found, strict=True), "o", color=colour, label=key, alpha=0.85, markersize=5.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(f"{{x:g}} {unit}")
    axes.grid(visible=True, color="#e4e4e4")
    return _drawn(figure, axes, len(series))


def bars(title: str, table: Mapping[str, Sequence[float]], series: Sequence[str], unit: str) -> str:
    """For each name a bar for each series, from 0 to 100."""
    names, thick = list(table), 0.8 / len(series)
    figure, axes = _empty(title, names, 1.2 + 1.6 * LINE * len(names))
    for i, (key, colour) in enumerate(zip(series, COLOURS, strict=False)):
        places = [row + thick * (i - (len(series) - 1) / 2) for row in range(len(names))]
        made = axes.barh(places, [own[i] for own in table.values()], thick, color=colour, label=key)
        axes.bar_label(made, fmt=f"{{:.1f}} {unit}", padding=3, fontsize=8)
    axes.set_xlim(0, 110)
    axes.xaxis.set_visible(False)
    return _drawn(figure, axes, len(series))


def _empty(title: str, names: Sequence[str], height: float) -> tuple[Figure, Any]:
    with _SETTINGS.rc_context(_SAME):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        axes: Any = figure.subplots()
        axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure, axes


def _drawn(figure: Figure, axes: Any, columns: int) -> str:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    with _SETTINGS.rc_context(_SAME), io.StringIO() as out:
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()
