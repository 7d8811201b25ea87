"""The matrix as one page for people: HTML that needs no network and no script, and the same as Markdown.

A row is a strategy, a column a model. Green: the run is that of one process; amber: it is, but slower than before;
red: it is not; grey: the planner refuses it, and says why; white: not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from bench._matrix.models import BATCH, MODELS, SEQUENCE
from bench._matrix.results import SLOWER, Kept, Result
from bench._matrix.strategies import STRATEGIES, combined

WORDS = {"same": "same", "slower": "slower", "broken": "BROKEN", "refused": "refused", "": "not run"}
_ROOM = 24
GROUPS = {1: "One strategy", 2: "Two together", 3: "Three together", 4: "Four together"}
HOW = (
    f"Each cell trains a tiny model (2 to 4 layers, {BATCH} samples of {SEQUENCE} tokens a step) by a strategy, on as "
    "many processes as its axes have ranks, and compares every loss, and every parameter's gradient and value after "
    "steps 1 and 5, with one process that trains transformers' own model: at most 1e-5 apart, relative. Throughput is "
    "that of the median step; memory is what tensors take at the highest moment of a step on the rank that has most. "
    "Behind the slash: what the planner had predicted."
)
NOT = (
    "The processes share the cores of one machine and talk over gloo, so speeds say what changed from run to run and "
    f"nothing of accelerators. A cell is amber where it was more than {1 - SLOWER:.0%} slower than in the run before "
    "on the same machine, twice in a row."
)


def write_pages(folder: Path, kept: Kept) -> None:
    """Results and both pages."""
    folder.mkdir(parents=True, exist_ok=True)
    kept.write(folder / "matrix.json")
    (folder / "matrix.md").write_text(markdown(kept), encoding="utf-8")
    (folder / "matrix.html").write_text(html(kept), encoding="utf-8")


def figures(one: Result) -> tuple[str, str]:
    """Throughput and memory of a cell in words, with what was predicted."""

    def beside(measured: float, predicted: float, unit: str) -> str:
        return f"{measured:,.0f} / {predicted:,.0f} {unit}" if predicted else f"{measured:,.0f} {unit}"

    speed = beside(one.tokens_per_s, one.predicted_tokens_per_s, "tok/s")
    return speed, beside(one.memory / 1e3, one.predicted_memory / 1e3, "kB")


def counts(kept: Kept) -> dict[str, int]:
    """How many cells there are of each state."""
    known = [kept.results.get((model, line)) for model in MODELS for line in STRATEGIES]
    return {word: sum((one.state if one else "") == state for one in known) for state, word in WORDS.items()}


def groups() -> Iterator[tuple[str, list[str]]]:
    """The strategies by how many they put together."""
    for count, title in GROUPS.items():
        if lines := [line for line in STRATEGIES if combined(line) == count]:
            yield title, lines


def reasons(kept: Kept, *states: str) -> list[tuple[str, list[Result]]]:
    """Why cells are refused or broken, with the cells of each reason; the most frequent first."""
    found: dict[str, list[Result]] = {}
    for model in MODELS:
        for line in STRATEGIES:
            one = kept.results.get((model, line))
            if one is not None and one.state in states:
                found.setdefault(one.why, []).append(one)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _days(kept: Kept) -> str:
    days = sorted({one.day for one in kept.results.values()})
    commits = sorted({one.commit for one in kept.results.values()})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "never"
    return f"{kept.machine}; torch {kept.versions.get('torch')}; measured {when} at {', '.join(commits)}"


def _said(kept: Kept) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts(kept).items() if count)


# ------------------------------------------------------------ Markdown


def markdown(kept: Kept) -> str:
    """The page as Markdown."""
    lines = ["# The capability matrix", "", f"{_said(kept)}. {HOW} {NOT}", "", _days(kept) + ".", ""]
    lines += ["`tangram bench matrix` makes this page; [the same in colours](matrix.html), [as data](matrix.json).", ""]
    for title, some in groups():
        lines += [f"## {title}", "", f"| | {' | '.join(MODELS)} |", f"|---|{'---|' * len(MODELS)}"]
        lines += [f"| `{line}` | {' | '.join(_cell(kept.results.get((m, line))) for m in MODELS)} |" for line in some]
        lines.append("")
    for title, states in (("Broken", ("broken",)), ("Refused", ("refused",))):
        if some := reasons(kept, *states):
            lines += [f"## {title}", "", *(f"- {why}: {_of(own)}" for why, own in some), ""]
    return "\n".join(lines)


def _cell(one: Result | None) -> str:
    if one is None or one.state == "refused":
        return WORDS[one.state if one else ""]
    if one.state == "broken":
        return f"**{WORDS[one.state]}**"
    return "<br>".join(("**slower**" if one.state == "slower" else f"{one.apart:.0e}", *figures(one)))


def _of(some: Sequence[Result]) -> str:
    by_model = {model: [one.strategy for one in some if one.model == model] for model in MODELS}
    return "; ".join(f"{model} {', '.join(f'`{line}`' for line in own)}" for model, own in by_model.items() if own)


# ------------------------------------------------------------ HTML


def html(kept: Kept) -> str:
    """The page for a browser; all text goes through `escape`."""
    here = Path(__file__).parent
    body = [f"<h1>The capability matrix</h1><p class=lead>{escape(_said(kept))}</p>"]
    body.append(f'<p class="soft">{escape(HOW)} {escape(NOT)}</p><p class="soft">{escape(_days(kept))}</p>')
    body.append(f'<ul class="key">{"".join(_key())}</ul>')
    heads = "".join(f"<th scope=col>{escape(model)}</th>" for model in MODELS)
    body.append(f'<div class="scroll"><table><thead><tr><td></td>{heads}</tr></thead>')
    for title, some in groups():
        body.append(
            f'<tbody><tr><th colspan="{1 + len(MODELS)}" scope=colgroup class="group">{escape(title)}</th></tr>'
        )
        body += [_row(kept, line) for line in some]
        body.append("</tbody>")
    body.append("</table></div>")
    for title, states in (("Broken", ("broken",)), ("Refused", ("refused",))):
        body += _listed(title, reasons(kept, *states))
    css = (here / "page.css").read_text(encoding="utf-8")
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(css=css, body="\n".join(body))


def _key() -> Iterator[str]:
    says = {
        "same": "the run of one process",
        "slower": "the same, but slower than before",
        "broken": "not the run of one process",
        "refused": "refused, with the reason",
        "": "not run yet",
    }
    return (f'<li><i class="{state or "open"}"></i>{escape(text)}</li>' for state, text in says.items())


def _row(kept: Kept, line: str) -> str:
    cells = "".join(_box(kept.results.get((model, line))) for model in MODELS)
    return f"<tr><th scope=row><code>{escape(line)}</code></th>{cells}</tr>"


def _box(one: Result | None) -> str:
    if one is None:
        return '<td class="open"></td>'
    told = f' title="{escape(one.why, quote=True)}"' if one.why else ""
    if one.state == "refused":
        return f'<td class="refused"{told}>refused</td>'
    if one.state == "broken":
        return f'<td class="broken"{told}><b>broken</b><small>{escape(_short(one.why))}</small></td>'
    before = f"<small>before {one.before_tokens_per_s:,.0f} tok/s</small>" if one.before_tokens_per_s else ""
    small = "".join(f"<small>{escape(text)}</small>" for text in figures(one))
    return f'<td class="{one.state}"><b>{one.apart:.0e} apart</b>{small}{before}</td>'


def _short(why: str) -> str:
    """As much as a cell has room for; the whole stands below."""
    return why if len(why) <= _ROOM else f"{why[: _ROOM - 1]}…"


def _listed(title: str, some: Sequence[tuple[str, list[Result]]]) -> Iterator[str]:
    if not some:
        return
    yield f"<h2>{escape(title)}</h2><dl>"
    for why, own in some:
        by_model = {model: [one.strategy for one in own if one.model == model] for model in MODELS}
        of = "; ".join(f"{model}: {', '.join(lines)}" for model, lines in by_model.items() if lines)
        yield f"<dt>{escape(why)}</dt><dd>{escape(of)}</dd>"
    yield "</dl>"
