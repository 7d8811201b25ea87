"""The report of a run: what it says, and what a browser without a network makes of it."""

import json
import re
from collections.abc import Generator
from dataclasses import replace
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from tangram.errors import UserError
from tangram.planner.report.html_parts import script_json
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.schema.precision import PrecisionPlan
from tangram.tracing.finding import Finding
from tangram.tracing.show.report import TraceReport
from tangram.training.observe.events import Record, SaveFailed
from tangram.training.observe.summary import Summary
from tangram.training.run.charts import MOST_POINTS, charts, smoothed, thinned
from tangram.training.run.report import write_report
from tests.training.browser import Browser, browser, executable
from tests.training.made_up import ENTROPY, plan_of, record_of, summary_of

MACHINE = {"processor": "one with <b>", "memory": "25 GB"}
EVIL = "</script><script>document.title = 'stolen'</script><!-- &amp; \" ' $title ${body}"


@pytest.fixture(scope="module")
def window() -> Generator[Browser]:
    with browser() as one:
        yield one


def write(
    path: Path, record: Record, plan: Plan | None = None, sample: str | None = None, **changes: Any
) -> tuple[Plan, Summary]:
    plan = plan or plan_of(300)
    summary = summary_of(plan, record, **changes)
    write_report(path, plan=plan, record=record, summary=summary, machine=MACHINE, sample=sample)
    return plan, summary


def whole_run(path: Path) -> None:
    record = record_of(300, evaluate_every=100, save_every=100, flops=4e12, peak_flops=8e13)
    write(path, record, sample="def f(x):\n    return x")


class Words(HTMLParser):
    """The text of a page as it is read, without scripts and styles; and its table rows."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.rows: list[list[str]] = []
        self.pre: list[str] = []
        self._in: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "link", "img", "br", "input"}:
            self._in.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
        elif tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._in.pop() == tag, "the elements nest"
        self.text += " "

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._in):
            self.text += data
        if {"td", "th"} & set(self._in):
            self.rows[-1][-1] += data
        if "pre" in self._in:
            self.pre[-1] += data


def read(path: Path) -> Words:
    words = Words()
    page = path.read_text(encoding="utf-8")
    words.feed(page)
    words.close()
    words.text = re.sub(r"\s+", " ", words.text)
    return words


def test_what_matters_most_is_said_first(tmp_path: Path) -> None:
    whole_run(tmp_path / "report.html")
    text = read(tmp_path / "report.html").text
    said = [
        "qwen3-2m",
        "1.84 M parameters · 2 ranks, mesh dp=2 · 300 of 300 steps · 300 K tokens · 1 min 14 s",
        "✓ learnt",
        "2.3145",
        "unigram entropy 3.2000",
        "28% below",
        "Reload proof",
        "✓ holds",
        "8.6e-08",
        "2.314500",
        "2.1e-06",
        "Export proof",
        "✓ holds",
        "1.4e-06",
        "Curves",
        "Predicted and measured",
        "Checkpoints",
        "What the model writes",
        "Plan",
        "Machine",
    ]
    at = 0
    for words in said:
        assert words in text[at:], words
        at = text.index(words, at)


def test_predicted_stands_beside_measured(tmp_path: Path) -> None:
    plan, summary = write(tmp_path / "report.html", record_of(300), predicted={"step_seconds": 0.2, "memory_mb": None})
    rows = read(tmp_path / "report.html").rows
    assert summary.step_seconds is not None
    assert ["Step time", "200 ms", "100 ms", f"{summary.step_seconds / 0.2:.2f}"] in rows
    assert ["Throughput", "—", f"{summary.tokens_per_s:,.0f} tokens/s", "—"] in rows
    assert ["Memory of a rank", "—", "655 MB", "—"] in rows
    write(tmp_path / "report.html", record_of(300), plan, predicted=None)
    assert "Nothing was predicted" in read(tmp_path / "report.html").text


def test_checkpoints_and_those_that_failed_are_told(tmp_path: Path) -> None:
    record = record_of(300, save_every=150)
    record(SaveFailed(200, "No space left on <device>"))
    write(tmp_path / "report.html", record)
    rows = read(tmp_path / "report.html").rows
    at = rows.index(["after step", "stood still", "until committed", "written"])
    assert rows[at + 1 : at + 4] == [
        ["150", "50 ms", "400 ms", "while training went on"],
        ["200", "—", "—", "not written: No space left on <device>"],
        ["300", "50 ms", "400 ms", "while training went on"],
    ]


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({"eval_loss": ENTROPY}, "not yet", "learnt,"),
        ({"eval_loss": None}, "No held-out text was measured", "✓ learnt"),
        ({"unigram_entropy": None}, "Nothing to compare it with", "✓ learnt"),
        ({"eval_loss": nan}, "not yet", "✓ learnt"),
        ({"relayout_relative_difference": 1.1e-6}, "✗ does not hold", "in one process, gives"),
        ({"relayout_relative_difference": nan}, "✗ does not hold", "in one process, gives"),
        ({"relayout_relative_difference": None}, "The checkpoint was not loaded again", "in one process, gives"),
        ({"export_logits_max_diff": 2e-5}, "✗ does not hold", "is the same model."),
        ({"export_logits_max_diff": inf}, "✗ does not hold", "is the same model."),
        ({"export_logits_max_diff": None}, "No export was loaded again", "is the same model."),
        ({"stopped": "time"}, "its time limit (run.max_seconds) had passed, after step 300", ""),
        ({"stopped": "signal"}, "when it was asked to, after step 300", ""),
        ({"resumed_from": 500}, "Resumed from the checkpoint of step 500", ""),
    ],
)
def test_a_verdict_can_fail(tmp_path: Path, changes: dict[str, Any], said: str, unsaid: str) -> None:
    write(tmp_path / "report.html", record_of(300), **changes)
    text = read(tmp_path / "report.html").text
    assert said in text
    assert not unsaid or unsaid not in text


def test_low_precision_has_its_own_limit(tmp_path: Path) -> None:
    plan = plan_of(300).model_copy(update={"precision": PrecisionPlan(compute="bfloat16")})
    write(tmp_path / "report.html", record_of(300), plan, relayout_relative_difference=1e-3)
    assert "does not hold" not in read(tmp_path / "report.html").text


def test_what_ranks_did_is_there_and_what_was_wrong(tmp_path: Path) -> None:
    plan, record = plan_of(3), record_of(3)
    wrong = Finding("slow", (1,), f"rank 1 is slow: {EVIL}")
    trace = TraceReport(tmp_path, "ended", ("rank", "own ms"), (("0", "1.5"), ("1", "9.5")), (wrong,), (), "held so")
    for given, rows in ((trace, [["0", "1.5"], ["1", "9.5"]]), (None, [])):
        path = tmp_path / "report.html"
        summary = summary_of(plan, record)
        write_report(path, plan=plan, record=record, summary=summary, machine=MACHINE, sample=None, trace=given)
        words = Words()
        words.feed(path.read_text())
        assert [row for row in words.rows if row in (["0", "1.5"], ["1", "9.5"])] == rows
        assert (f"rank 1 is slow: {EVIL}" in words.text) == (given is not None)
        assert ("Held so." in words.text) == (given is not None)


def test_the_plan_is_there_as_a_table_and_as_a_file(tmp_path: Path) -> None:
    plan, _ = write(tmp_path / "report.html", record_of(300), sample="x = 1\n")
    words = read(tmp_path / "report.html")
    assert ["mesh", "dp=2"] in words.rows
    assert ["layout of *", "_/dp ..."] in words.rows
    assert ["samples", "32 tokens, 8 in a step, 2 at once on a rank"] in words.rows
    assert words.pre == ["x = 1\n", dumps(plan)]


def test_markup_in_a_plan_or_a_sample_stays_text(tmp_path: Path, window: Browser) -> None:
    sources = [{"path": f"/texts/{EVIL.replace('$', '')}"}]  # a variable of the environment would be put in its place
    plan = plan_of(300, data={"sources": sources}, layouts={"parameters": {f"*{EVIL}": "_/dp ...", "*": "_/dp ..."}})
    write(tmp_path / "report.html", record_of(300), plan, sample=EVIL, model=EVIL, checkpoint=EVIL)
    window.open(tmp_path / "report.html", width=1280)
    assert window.value("document.title") == f"{EVIL}: training run"
    assert window.value("document.querySelector('h1').textContent") == EVIL
    assert window.value("document.querySelector('pre').textContent") == EVIL
    assert window.value("document.querySelectorAll('script').length") == 3
    assert window.complaints() == []


def test_data_of_charts_cannot_end_their_script(tmp_path: Path) -> None:
    assert json.loads(script_json([EVIL])) == [EVIL]
    assert not {"<", ">", "&"} & set(script_json([EVIL]))
    record = record_of(3)
    write(tmp_path / "report.html", record)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="chart-data">(.*?)</script>', page)
    drawn = json.loads(data)
    assert drawn["charts"][0]["lines"][0]["y"] == pytest.approx([step.loss for step in record.steps])


def test_no_address_is_in_the_page_but_plotlys_own_words(tmp_path: Path) -> None:
    whole_run(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    ours = page[: page.index("</main>")] + page[page.rindex("<script>") :]
    assert not re.findall(r"https?:|//[a-z]|url\(|@import|<link|<img|src=|href=", ours.replace("// ", ""))
    assert len(page.encode()) < 6e6


# ------------------------------------------------------------------------------------------------------------- charts
def lines_of(record: Record, **changes: Any) -> dict[str, Any]:
    return {chart.key: chart for chart in charts(record, summary_of(plan_of(300), record, **changes))}


def test_each_chart_shows_what_the_record_has() -> None:
    record = record_of(300, evaluate_every=100, save_every=150, flops=4e12, peak_flops=8e13)
    found = lines_of(record)
    assert list(found) == ["loss", "perplexity", "throughput", "mfu", "memory", "gradients", "lr"]
    assert found["lr"].lines[0].y == pytest.approx([step.lr for step in record.steps])
    loss = found["loss"]
    assert [line.name for line in loss.lines] == ["training, each step", "training, mean of 11 steps", "held out"]
    assert loss.lines[0].x == list(range(1, 301))
    assert loss.lines[0].more == pytest.approx([step.lr for step in record.steps])
    assert loss.lines[2].x == [100, 200, 300]
    assert [(level.name, level.y) for level in loss.levels] == [("unigram entropy", ENTROPY)]
    assert [mark.x for mark in loss.marks] == [150, 300]
    assert [level.y for level in found["throughput"].levels] == [11_363.0]
    assert [level.y for level in found["memory"].levels] == [702.0]
    assert found["throughput"].lines[0].y[100] == pytest.approx(10_000, rel=0.3)  # after an evaluation of 2 s
    assert found["mfu"].lines[0].y[100] == pytest.approx(0.5, rel=0.3)


def test_what_is_not_known_has_no_chart() -> None:
    found = lines_of(record_of(300, rss_mb=0.0), unigram_entropy=None, eval_loss=None, predicted=None)
    assert list(found) == ["loss", "perplexity", "throughput", "gradients", "lr"]
    constant = Record([replace(step, lr=1e-3) for step in record_of(300).steps])
    assert "lr" not in lines_of(constant)  # it is among the keys of the plan
    assert found["loss"].levels == []
    assert found["throughput"].levels == []
    assert charts(Record(), summary_of(plan_of(300), Record())) == []


def test_the_loss_at_the_end_is_a_point_of_its_own() -> None:
    assert lines_of(record_of(40))["loss"].lines[1].x == [40]
    assert lines_of(record_of(40))["loss"].lines[1].y == [2.3145]


def test_what_is_no_number_is_a_gap() -> None:
    record = record_of(5)
    object.__setattr__(record.steps[2], "gradient_norm", inf)
    object.__setattr__(record.steps[3], "loss", nan)
    found = lines_of(record)
    assert found["gradients"].lines[0].x == [1, 2, 4, 5]
    assert found["loss"].lines[0].x == [1, 2, 3, 5]
    json.dumps([chart.as_json() for chart in found.values()], allow_nan=False)


def test_long_runs_are_thinned_and_no_spike_is_lost() -> None:
    values = [float(number % 7) for number in range(50_000)]
    values[31_234], values[8_765] = 99.0, -99.0
    kept = thinned(range(50_000), values)
    assert len(kept) <= MOST_POINTS
    assert len(kept) > MOST_POINTS // 2
    assert kept == sorted(set(kept))
    assert {0, 31_234, 8_765, 49_999} <= set(kept)
    assert thinned(range(MOST_POINTS), values[:MOST_POINTS]) == list(range(MOST_POINTS))
    assert all(len(line.x) <= MOST_POINTS for chart in lines_of(record_of(9000)).values() for line in chart.lines)


def test_smoothing_neither_shifts_nor_shrinks() -> None:
    assert smoothed([float(number) for number in range(20)], 5) == pytest.approx(list(range(20)))
    assert smoothed([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0], 5) == pytest.approx([0, 0, 1, 1.0, 1, 0, 0], abs=1.0)
    assert smoothed([3.0], 5) == [3.0]


# ---------------------------------------------------------------------------------------------------------- a browser
POINTS = """(() => {
    const paths = [...document.querySelectorAll('#plot-KEY .scatterlayer .trace')];
    return paths.map((trace) => [
        trace.querySelectorAll('path.js-line').length
            && (trace.querySelector('path.js-line').getAttribute('d').match(/[ML,]/g) || []).length > 1,
        trace.querySelectorAll('path.point').length,
    ]);
})()"""


# In every chart a point, or a line that goes somewhere.
SEEN = """[...document.querySelectorAll('.plot')].every((plot) =>
    [...plot.querySelectorAll('path.js-line')].some((line) => /[LHV]/.test(line.getAttribute('d')))
        || plot.querySelector('path.point') !== null)"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_without_a_network_draws_it_all(tmp_path: Path, window: Browser, width: int, dark: bool) -> None:
    page = tmp_path / "report.html"
    whole_run(page)
    window.open(page, width=width, dark=dark, touch=width < 500)
    assert window.complaints() == []
    assert window.requests() == [page.as_uri()]
    assert window.value("document.documentElement.scrollWidth") == width
    for key, lines, points in (("loss", 3, 6), ("throughput", 1, 0), ("memory", 1, 0), ("mfu", 1, 0)):
        drawn = window.value(POINTS.replace("KEY", key))
        assert sum(bool(line) for line, _ in drawn) == lines, key
        assert sum(count for _, count in drawn) == points, key
    assert window.value("document.getElementById('plot-loss').data.map((trace) => trace.x.length)") == [300, 300, 3, 3]
    widest = "Math.max(...[...document.querySelectorAll('.plot svg')].map((svg) => svg.getBoundingClientRect().right))"
    assert window.value(widest) <= width


def test_the_page_follows_the_readers_colours(tmp_path: Path, window: Browser) -> None:
    whole_run(tmp_path / "report.html")
    window.open(tmp_path / "report.html", width=1280)
    colours = """[
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('#plot-throughput path.js-line')).stroke,
    ]"""
    light = window.value(colours)
    window.dark(True)
    window.value("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 50))")
    dark = window.value(colours)
    assert light == ["rgb(247, 247, 245)", "rgb(31, 95, 168)"]
    assert dark == ["rgb(19, 20, 23)", "rgb(116, 177, 242)"]
    assert window.complaints() == []


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        pytest.param(record_of(1, rss_mb=0.0), {"eval_loss": None, "predicted": None}, id="one-step"),
        pytest.param(record_of(20, first=501, save_every=10), {"resumed_from": 500}, id="resumed"),
        pytest.param(Record(), {"stopped": "signal", "eval_loss": None}, id="no-step"),
        pytest.param(record_of(9000), {"model": "a-very-long-name-without-a-break" * 6}, id="long"),
    ],
)
def test_odd_runs_are_drawn_too(tmp_path: Path, window: Browser, record: Record, changes: dict[str, Any]) -> None:
    write(tmp_path / "report.html", record, **changes)
    window.open(tmp_path / "report.html", width=390)
    assert window.complaints() == []
    assert window.value("document.documentElement.scrollWidth") == 390
    expected = [chart.key for chart in charts(record, summary_of(plan_of(300), record, **changes))]
    assert window.value("[...document.querySelectorAll('.plot')].map((plot) => plot.id)") == [
        f"plot-{key}" for key in expected
    ]
    assert window.value(SEEN) is True
    if record.steps:
        steps = "document.getElementById('plot-loss').data[0].x"
        assert window.value(f"[{steps}[0], {steps}.at(-1)]") == [record.steps[0].step, record.steps[-1].step]


def test_a_missing_browser_fails_in_ci_and_is_skipped_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="none of chromium, "):
        executable()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="none of chromium, "):
        executable()


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the report cannot be written to"):
        write(tmp_path / "nowhere" / "report.html", record_of(3))
