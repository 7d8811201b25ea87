"""Two static pictures, written as SVG: points on a logarithmic line, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_FONT = 'font-family="sans-serif" font-size="12"'


def points(title: str, table: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A line for each name, a point for each series, by the logarithm of its value."""
    series = list(dict.fromkeys(key for own in table.values() for key in own))
    numbers = [value for own in table.values() for value in own.values() if value > 0]
    low, high = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
    left, width, step = 330, 560, 20
    height = 60 + step * len(table)

    def across(value: float) -> float:
        return left + width * (math.log10(value) - low) / (high - low)

    lines = [_text(10, 18, title, bold=True)]
    for i, name in enumerate(series):
        lines += [
            f'<circle cx="{left + 110 * i}" cy="34" r="5" fill="{COLOURS[i]}"/>',
            _text(left + 110 * i + 9, 38, name),
        ]
    for power in range(low, high + 1):
        x = across(10.0**power)
        lines.append(f'<line x1="{x:.1f}" y1="46" x2="{x:.1f}" y2="{height - 6}" stroke="#dddddd"/>')
        lines.append(_text(x - 14, height + 10, f"{10.0**power:g} {unit}"))
    for row, (name, own) in enumerate(table.items()):
        y = 60 + step * row
        lines.append(_text(10, y + 4, name))
        lines.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#eeeeee"/>')
        lines += [
            f'<circle cx="{across(value):.1f}" cy="{y}" r="4.5" fill="{COLOURS[series.index(key)]}" opacity="0.85"/>'
            for key, value in own.items()
            if value > 0
        ]
    return _svg(left + width + 40, height + 20, lines)


def bars(title: str, table: Mapping[str, Sequence[float]], series: Sequence[str], unit: str) -> str:
    """For each name a bar for each series, from 0 to 100."""
    left, width, thick = 150, 480, 13
    lines = [_text(10, 18, title, bold=True)]
    for i, name in enumerate(series):
        lines += [
            f'<rect x="{left + 230 * i}" y="28" width="10" height="10" fill="{COLOURS[i]}"/>',
            _text(left + 230 * i + 15, 38, name),
        ]
    y = 52
    for name, own in table.items():
        lines.append(_text(10, y + thick, name))
        for i, value in enumerate(own):
            top = y + thick * i
            long = f"{width * value / 100:.1f}"
            lines.append(f'<rect x="{left}" y="{top}" width="{long}" height="{thick - 2}" fill="{COLOURS[i]}"/>')
            lines.append(_text(left + width * value / 100 + 5, top + 10, f"{value:.1f} {unit}"))
        y += thick * len(own) + 10
    return _svg(left + width + 90, y + 6, lines)


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {_FONT}{weight}>{escape(text)}</text>'


def _svg(width: int, height: int, lines: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *lines, "</svg>\n"])
