"""The page of a run while it trains, and what its curves are over: read, and looked at in a browser."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.training.observe.events import Record
from tangram.training.run.charts import axes, charts
from tangram.training.run.live_page import LivePage
from tests.training.browser import Browser
from tests.training.made_up import plan_of, record_of, summary_of
from tests.training.test_report import MACHINE, lines_of, read, whole_run
from tests.training.test_report import window as window


def test_perplexity_is_of_losses_by_token_alone() -> None:
    record = record_of(300, evaluate_every=100)
    found = lines_of(record)
    assert [line.role for line in found["perplexity"].lines] == ["smooth", "points"]
    for before, line in zip(found["loss"].lines[1:], found["perplexity"].lines, strict=True):
        assert line.x == before.x
        assert line.y == pytest.approx([math.exp(y) for y in before.y], rel=1e-6)
    others = charts(record, summary_of(plan_of(300), record), by_token=False)
    assert "perplexity" not in [chart.key for chart in others]
    wild = Record([replace(step, loss=1e4) for step in record_of(3).steps])
    assert all(math.isfinite(y) for line in lines_of(wild)["perplexity"].lines for y in line.y)


def test_tokens_and_time_stand_for_the_steps_of_all_charts() -> None:
    record = record_of(300, first=501, evaluate_every=100, save_every=150)
    drawn = charts(record, summary_of(plan_of(300), record))
    found = axes(record, drawn, 500)
    assert found["steps"] == [step.step for step in record.steps]
    assert found["tokens"] == {"title": "tokens since step 500", "at": [1000 * n for n in range(1, 301)]}
    assert found["time"]["title"] == "seconds of training since step 500"
    assert found["time"]["at"] == pytest.approx([step.seconds for step in record.steps])
    long = Record([replace(step, seconds=60 * step.seconds) for step in record.steps])
    assert axes(long, drawn, None)["time"]["title"] == "minutes of training"
    assert axes(long, drawn, None)["time"]["at"] == pytest.approx([step.seconds for step in record.steps])
    del long.steps[99]  # a step that was skipped, after which something was saved or measured
    assert axes(long, drawn, None)["tokens"]["at"][98:101] == [99_000, 99_000, 100_000]


def test_the_reader_chooses_what_it_is_over(tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "report.html"
    whole_run(page)
    window.open(page, width=1280)
    first = "document.getElementById('plot-loss').data[0].x.slice(0, 3)"
    titles = "[...document.querySelectorAll('.xtitle')].map((title) => title.textContent)"
    steps = window.value(first)
    assert steps == [1, 2, 3]
    window.value("document.querySelector('input[value=tokens]').click()")
    assert window.value(first) == [1000, 2000, 3000]
    assert set(window.value(titles)) == {"tokens"}
    assert window.value("document.getElementById('plot-loss').data.at(-1).x") == [100_000, 200_000, 300_000]
    window.value("document.querySelector('input[value=time]').click()")
    assert set(window.value(titles)) == {"seconds of training"}
    times = window.value("document.getElementById('plot-lr').data[0].x")
    assert times == sorted(times)
    assert window.value("location.hash") == "#time"
    window.value("document.querySelector('input[value=step]').click()")
    assert window.value(first) == steps
    assert window.complaints() == []


def test_a_page_is_written_while_a_run_goes_on_and_reads_itself_anew(tmp_path: Path, window: Browser) -> None:
    path, record, told = tmp_path / "report.html", record_of(40), list[object]()
    plan = plan_of(40)
    heard = Record()
    live = LivePage(path, plan, heard, MACHINE, {"model": "small", "parameters": 7}, told.append, every=0.2)
    pages: list[str] = []
    for part in (record.steps[:20], record.steps[20:30]):
        for step in part:
            heard(step)
        wanted = f"{part[-1].step} of 40 steps"
        end = time.monotonic() + 60
        while not (path.exists() and wanted in (page := path.read_text(encoding="utf-8"))):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert page.rstrip().endswith("</html>")
        pages.append(page)
        if len(pages) == 1:
            window.open(path, width=1280)
            assert "Training goes on" in window.value("document.querySelector('.note').textContent")
            assert window.value("document.querySelector('.verdicts')") is None
            window.value("document.querySelector('input[value=tokens]').click()")
    end = time.monotonic() + 60
    while window.value("document.getElementById('plot-loss')?.data?.[0].x.length") != 30:  # it was read anew
        assert time.monotonic() < end
        time.sleep(0.1)
    assert window.value("document.getElementById('plot-loss').data[0].x.at(-1)") == 30_000  # with what was chosen
    live.close("failure")
    assert "Training ended with an error, after step 30 of 40" in read(path).text
    assert "Training goes on" not in read(path).text
    assert told == []
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    told: list[object] = []
    heard, known = Record(), {"model": "x", "parameters": 7}
    live = LivePage(tmp_path / "no" / "report.html", plan_of(40), heard, MACHINE, known, told.append, 0.01)
    for step in record_of(40).steps:
        heard(step)
        time.sleep(0.01)
    end = time.monotonic() + 60
    while not told:
        assert time.monotonic() < end
        time.sleep(0.01)
    live.close()
    assert len(told) == 1
    assert "is not written while it trains" in str(told[0])
