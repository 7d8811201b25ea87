"""Pieces of a report's page as HTML: sections, tables, and the places of charts. All text is escaped here.

Pages for people: one HTML file each, with everything in it, that never ask the network for anything.

A page with charts carries plotly's script (the greater part of its 5 MB), so that it shows the same in ten years; its
own policy forbids the browser to load anything. Charts are data in the page (`script_json`) that a script of its own
draws. What a caller puts into the body has gone through `html.escape`: names of models and what they write may contain
markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from string import Template

from tangram.errors import UserError
from tangram.planner.report.charts import Picture
from tangram.text import packaged

OPEN = 20
"""Rows of a table beyond which it scrolls by itself."""


def section(title: str, *parts: str) -> str:
    """A title, and what is below it: parts of HTML."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", *, card: bool = True
) -> str:
    """A table that scrolls within its card where it is wide or long; numbers stand to the right.

    Columns without a word are left out.
    """
    columns: list[tuple[str, ...]] = list(zip(*rows, strict=True)) if rows else [()] * len(headers)
    kept = [i for i, cells in enumerate(columns) if not cells or any(cells)]
    columns, headers = [columns[i] for i in kept], [headers[i] for i in kept]
    rows = [[row[i] for i in kept] for row in rows]
    right = [i > 0 and any(cells) and all(_number(cell) for cell in cells if cell) for i, cells in enumerate(columns)]
    heads = "".join(
        f"<th scope=col{' class=number' if number else ''}>{escape(name)}</th>"
        for name, number in zip(headers, right, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(
            f'<td{" class=number" if number else _mono(name)}>{escape(cell)}</td>'
            for name, cell, number in zip(headers, row, right, strict=True)
        ) + "</tr>"
        for row in rows
    )  # fmt: skip
    tall = " tall" if len(rows) > OPEN else ""
    caption = f'<p class="caption">{escape(title)}</p>' if title else ""
    inner = f'{caption}<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="{"card " if card else ""}scroll{tall}">{inner}</div>'


def _mono(name: str) -> str:
    return " class=mono" if "mesh" in name else ""


def _number(cell: str) -> bool:
    """Whether a cell begins with a number and has but a unit beside it."""
    words = cell.split()
    first = words[0].lstrip("+-").rstrip("%").replace(",", "").replace(".", "", 1)
    return first.isdigit() and (len(words) == 1 or len(words) == 2 or words[1] == "to")


def figures(pictures: Sequence[Picture]) -> str:
    """Where charts are drawn, with what they show in words."""
    return f'<div class="charts">{"".join(map(_figure, pictures))}</div>' if pictures else ""


def _figure(one: Picture) -> str:
    keys = [
        f'<li><span class="key" style="background:var(--{trace.role})"></span>{escape(trace.name)}</li>'
        for trace in one.traces
    ]
    keys += [
        f'<li><span class="key level{" dash" if at else ""}"></span>{escape(level.name)}</li>'
        for at, level in enumerate(one.levels)
    ]
    legend = f'<ul class="legend">{"".join(keys)}</ul>' if len(keys) > 1 else ""
    height = f' style="height:{56 + max(one.rows, 2) * (24 if one.rows > 4 else 36)}px"' if one.across else ""
    return (
        f'<figure class="card chart{" wide" if one.wide else ""}"><figcaption><h3>{escape(one.title)}'
        f' <span class="soft">{escape(one.unit)}</span></h3><p class="soft">{escape(one.alt_text)}</p>{legend}'
        f'</figcaption><div class="plot" id="plot-{one.key}" role="img"{height} '
        f'aria-label="{escape(f"{one.title}. {one.alt_text}")}"></div></figure>'
    )


part = packaged
"""Of the files of a page: the name that its users have for it."""


def need_plotly() -> None:
    """Raise UserError, with what to install, unless plotly is there."""
    if find_spec("plotly") is None:
        raise UserError('a report needs plotly: install with pip install "tangram-train[report]"')


def page(title: str, css: str, body: str, charts: object, script: str, plotly: bool = True) -> str:
    """The whole file. `css`: after what all pages have; `charts`: values as JSON has them; `script`: draws them, with
    plotly's script or without."""
    return Template(packaged("tangram.planner.report", "page.html")).substitute(
        title=escape(title),
        css=packaged("tangram.planner.report", "page.css") + css,
        body=body,
        charts=script_json(charts),
        plotly=_plotly() if plotly else "",
        script=script,
    )


def _plotly() -> str:
    need_plotly()
    # Here, as it loads slowly and only who writes a page with charts needs it.
    import plotly.offline  # pyright: ignore[reportMissingTypeStubs]

    return str(plotly.offline.get_plotlyjs()).replace("</script", "<\\/script")  # no text ends the element


def script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in, nor begin a comment there."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
