"""Pages for people: one HTML file each, with everything in it, that never ask the network for anything.

A page with charts carries plotly's script (the greater part of its 5 MB), so that it shows the same in ten years; its
own policy forbids the browser to load anything. Charts are data in the page (`script_json`) that a script of its own
draws. What a caller puts into the body has gone through `html.escape`: names of models and what they write may contain
markup.
"""

from __future__ import annotations

import json
from html import escape
from importlib.util import find_spec
from string import Template

from tangram.errors import UserError
from tangram.text import packaged

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
