"""The report of a plan: what it says, and what a browser without a network makes of it."""

import resource
from collections.abc import Generator
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli import main
from tangram.errors import UserError
from tangram.hardware.catalogue.cluster import builtin
from tangram.models.outlines.outline import Dims, decoder
from tangram.planner.cost.goodput import Goodput
from tangram.planner.cost.memory_timeline import footprints
from tangram.planner.cost.step_time import Seconds
from tangram.planner.cost.timeline import MOST, events_of
from tangram.planner.report import charts, html_parts
from tangram.planner.report.answer_tables import HELD, PARTS
from tangram.planner.report.bottlenecks import KINDS as KINDS_OF_PARTS
from tangram.planner.report.charts import Picture
from tangram.planner.report.report import Shown, as_html, pictures_of, step_as_html
from tangram.planner.search.by_device_count import best
from tangram.planner.search.explain import StrategyRequest, explain
from tangram.planner.search.objectives import Terms, aim_of
from tangram.planner.search.pareto import fronts
from tangram.planner.search.strategy import Ask
from tangram.text import write_file
from tests.planner.commands import refused
from tests.training.browser import Browser, browser

EVIL = "</script><script>document.title = 'stolen'</script><!-- &amp; \" ' $title ${body}"
CLUSTER = builtin("h100-8x8")
MODEL = decoder(Dims(12, 1024, 16, 32000, ffn=4096, kv_heads=4), "dense")
MIXED = decoder(
    Dims(6, 512, 8, 32000, ffn=2048, experts=16, per_token=2, expert_ffn=512, shared_ffn=512, dense_layers=1), "mixed"
)
ASK = Ask(64 * 2048, 2048, framework="megatron-core", devices=8)
STAGED = StrategyRequest("pp=4 dp=2", schedule="1F1B", micro=2)


@cache
def shown(kind: str) -> Shown:
    """A report's contents, small ones of each kind."""
    ask, terms = ASK, Terms(ASK.tokens)
    if kind == "ranking":
        answer = best(MODEL, CLUSTER, ask, aim_of("time", terms))
        return Shown(answer, CLUSTER, None, fronts(MODEL, CLUSTER, ask, terms))
    if kind in ("explained", "refused"):
        given_one = STAGED if kind == "explained" else replace(STAGED, micro=7)
        found = explain(MODEL, CLUSTER, ask, given_one)
        return Shown(found.best, CLUSTER, found, fronts(MODEL, CLUSTER, ask, terms))
    if kind == "long":
        ask = replace(ask, devices=32, most=60)
        priced = Terms(ask.tokens, 2.0, goodput=Goodput(1e-4, 60, 600))
        answer = best(MIXED, CLUSTER, ask, aim_of("cost", priced))
        return Shown(answer, CLUSTER, None, fronts(MIXED, CLUSTER, ask, priced))
    if kind == "late":
        late = Terms(ask.tokens, training=10**12, hours=0.1)
        return Shown(best(MODEL, CLUSTER, ask, aim_of("devices", late)), CLUSTER)
    ask = replace(ask, memory=1e9)
    return Shown(best(MODEL, CLUSTER, ask, aim_of("time", terms)), CLUSTER, None, fronts(MODEL, CLUSTER, ask, terms))


KINDS = ("ranking", "explained", "refused", "long", "late", "nothing")


@pytest.fixture(scope="module")
def window() -> Generator[Browser]:
    with browser() as one:
        yield one


def opened(window: Browser, path: Path, text: str, width: int = 1280, *, dark: bool = False) -> str:
    """The page's words, after it has been shown without a complaint and without asking the network for anything."""
    path.write_text(text, encoding="utf-8")
    window.open(path, width=width, dark=dark, touch=width < 500)
    assert window.complaints() == []
    assert window.requests() == [path.as_uri()]
    assert window.value("document.documentElement.scrollWidth") == width
    return str(window.value("document.querySelector('main').innerText"))


# What a chart has drawn: marks of bars and points, and lines that go somewhere.
DRAWN = """(() => {
    const plot = document.getElementById('plot-KEY');
    const count = (one) => one.querySelectorAll('.point path').length;
    const bars = [...plot.querySelectorAll('.barlayer .trace')].map(count);
    const lines = [...plot.querySelectorAll('.scatterlayer .trace')].map((one) => [
        one.querySelectorAll('path.point').length,
        [...one.querySelectorAll('path.js-line')].some((line) => /[LHV]/.test(line.getAttribute('d')))]);
    return [bars, lines, plot.data.length, plot.data.map((one) => one.x.length)];
})()"""


def same(window: Browser, one: Picture) -> None:
    """A chart has as many traces, bars and points as the data."""
    bars, lines, traces, sizes = window.value(DRAWN.replace("KEY", one.key))
    assert traces == len(one.traces), one.key
    assert sizes == [len(trace.x) for trace in one.traces], one.key
    assert bars == [len(trace.x) for trace in one.traces if trace.kind == "bars"], one.key
    flat = [trace for trace in one.traces if trace.kind != "bars"]
    # Areas are drawn by layers, the lines above them.
    assert len(lines) == len(flat), one.key
    for trace, (points, goes) in zip(flat, lines, strict=True):
        if trace.kind in ("points", "line"):
            assert points == len(trace.x), (one.key, trace.name)
        if trace.kind == "steps":
            assert goes, (one.key, trace.name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_browser_without_a_network_draws_it_all(kind: str, tmp_path: Path, window: Browser) -> None:
    one = shown(kind)
    text = opened(window, tmp_path / "plan.html", as_html(one))
    assert "Bottlenecks" in text
    assert all(kind in text for kind in KINDS_OF_PARTS)
    assert one.chosen.mesh in text
    assert f"{one.chosen.memory / 1e9:.1f} GB" in text
    pictures = pictures_of(one)
    assert window.value("[...document.querySelectorAll('.plot')].map((plot) => plot.id)") == [
        f"plot-{picture.key}" for picture in pictures
    ]
    for picture in pictures:
        same(window, picture)
    overlap = """[...document.querySelectorAll('figure, .card.scroll, .verdict')].some((one, i, all) => {
        const a = one.getBoundingClientRect();
        return all.slice(i + 1).some((other) => {
            const b = other.getBoundingClientRect();
            return !one.contains(other) && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        });
    })"""
    assert window.value(overlap) is False
    told = {
        "ranking": ("Why the first wins", "Time against memory", "with half of the network", "What the others lose"),
        "explained": ("The strategy that is explained", "Beside the best", "pp=4 dp=2 cp=1 tp=1"),
        "refused": ("The strategy that was given cannot run", "2 DP ranks of micro-batches of 7 do not divide 64"),
        "long": ("Speed against cost", "cost of 1M tokens, with failures", "of the time is progress"),
        "late": ("no part of h100-8x8 trains 1,000,000,000,000 tokens in 0.1 hours", "The quickest"),
        "nothing": ("Nothing fits", "What needs least memory", "does not fit", "too much by"),
    }[kind]
    assert [words for words in told if words not in text] == []


@pytest.mark.parametrize("kind", ["ranking", "long"])
def test_it_is_read_on_a_phone_and_in_the_dark(kind: str, tmp_path: Path, window: Browser) -> None:
    opened(window, tmp_path / "plan.html", as_html(shown(kind)), 390, dark=True)
    assert window.value("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    wide = "[...document.querySelectorAll('.plot svg')].every((svg) => svg.getBoundingClientRect().right <= 390)"
    assert window.value(wide) is True


def test_wide_and_long_tables_scroll_by_themselves(tmp_path: Path, window: Browser) -> None:
    opened(window, tmp_path / "plan.html", as_html(shown("long")), 900)
    table = "document.querySelector('.card.tall')"
    assert window.value(f"{table}.querySelectorAll('tbody tr').length") == 60
    for way in ("Height", "Width"):
        assert window.value(f"{table}.scroll{way} > {table}.client{way}") is True


def test_markup_in_the_name_of_a_model_stays_text(tmp_path: Path, window: Browser) -> None:
    one = shown("ranking")
    evil = replace(one, answer=replace(one.answer, outline=replace(one.answer.outline, name=EVIL)))
    opened(window, tmp_path / "plan.html", as_html(evil))
    assert window.value("document.title") == f"{EVIL} on h100-8x8: plan"
    assert window.value("document.querySelector('h1').textContent") == f"{EVIL} on h100-8x8"
    assert window.value("document.querySelectorAll('script').length") == 3


def test_the_timeline_alone(tmp_path: Path, window: Browser) -> None:
    one = shown("explained")
    text = opened(window, tmp_path / "step.html", step_as_html(one))
    assert "A step of dense on h100-8x8" in text
    assert one.chosen.mesh in text
    (picture,) = [picture for picture in pictures_of(one) if picture.key == "step"]
    same(window, picture)


# -------------------------------------------------------------------------------------------------------- what is drawn
def test_every_part_has_its_colour() -> None:
    css = resources.files("tangram.planner.report").joinpath("report.css").read_text(encoding="utf-8")
    parts = [f"--part-{one.name}: var(--" for one in fields(Seconds)]
    assert not [one for one in [*parts, *(f"--held-{name}: var(--" for name in HELD)] if one not in css]


def test_bars_of_rows_add_up_to_their_steps_and_memory() -> None:
    choices = list(shown("long").answer.choices[:5])
    names = [f"row {i}" for i in range(5)]
    time = charts.time_of_rows(choices, names, ASK.tokens, sizes=False)
    memory = charts.memory_of_rows(choices, names, 80e9)
    for i, one in enumerate(choices):
        assert sum(trace.x[i] for trace in time.traces[:-1]) == pytest.approx(one.step, rel=0.03)
        sure = time.traces[-1]
        assert (sure.kind, sure.low[i], sure.x[i], sure.high[i]) == ("intervals", one.low, one.step, one.high)
        assert sum(trace.x[i] for trace in memory.traces) == pytest.approx(one.memory / 1e9, rel=0.03)
    sized = charts.time_of_rows(choices, names, ASK.tokens, sizes=True)
    assert sum(trace.x[0] for trace in sized.traces[:-1]) == pytest.approx(
        choices[0].step * choices[0].devices / ASK.tokens * 1e6, rel=0.03
    )


def test_the_largest_part_is_called_what_it_is() -> None:
    """A third of a step is not most of it."""
    one = shown("ranking").answer.choices[0]
    said = charts.time_of_rows([one], ["row 1"], ASK.tokens, sizes=False).alt_text
    name = max(one.parts, key=one.parts.__getitem__)
    assert said.endswith(f" in row 1, {one.parts[name] / one.step:.0%} of it {PARTS[name]}.")


def test_a_timeline_has_every_action_and_says_what_is_cut() -> None:
    one = shown("explained")
    (picture,) = [picture for picture in pictures_of(one) if picture.key == "step"]
    found = one.played()
    events = [event for event in events_of(found) if event.seconds > 0]
    assert sum(len(trace.x) for trace in picture.traces) == len(events)
    assert sum(sum(trace.x) for trace in picture.traces) == pytest.approx(
        sum(event.seconds for event in events), rel=1e-4
    )
    assert "are shown" not in picture.alt_text
    assert set(picture.names) == {f"stage {rank}" for rank in range(4)}
    many = explain(MODEL, CLUSTER, replace(ASK, tokens=4096 * 2048), STAGED)
    cut = Shown(many.best, CLUSTER, many)
    said = next(picture.alt_text for picture in pictures_of(cut) if picture.key == "step")
    assert f"The first {MOST} of 1,024 micro-batches are shown." in said


def test_memory_of_stages_has_their_peaks() -> None:
    one = shown("explained")
    found = footprints(MODEL, one.chosen.grid(), one.setting(), one.played())
    pictures = {picture.key: picture for picture in pictures_of(one)}
    for rank, foot in enumerate(found):
        bars = sum(trace.y[rank] for trace in pictures["ranks"].traces)
        assert bars == pytest.approx(foot.peak / 1e9, rel=0.02)
        assert max(pictures["over"].traces[rank].y) == pytest.approx(foot.peak / 1e9, rel=1e-5)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), min_size=2, max_size=5000))
def test_no_peak_is_lost_where_points_are_left_out(rows: list[tuple[int, float]]) -> None:
    at = np.cumsum([float(gap) for gap, _ in rows])
    values = np.array([value for _, value in rows])
    kept, (left,) = charts.thinned(at, [values])
    holds = np.append(np.diff(at) > 0, True)
    assert len(kept) <= charts.MOST_POINTS + 2
    assert left.max() == values[holds].max()
    assert (np.diff(kept) > 0).all()


# ---------------------------------------------------------------------------------------------------------- the command
SAID = ("llama-3-8b", "--cluster", "h100-8x8", "--gpus", "8", "--tokens-per-batch", "128K", "--seq", "4096")


def test_the_command_writes_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, step = tmp_path / "plan.html", tmp_path / "step.html"
    assert main(["plan", *SAID, "--report", str(report), "--timeline", str(step)]) == 0
    out = capsys.readouterr().out
    assert f"wrote {report}: open it in a browser" in out
    assert f"wrote {step}: open it in a browser" in out
    assert "Front" not in out  # printed with --pareto alone
    assert "llama-3-8b on h100-8x8" in report.read_text(encoding="utf-8")
    assert "Timeline of the stages" in step.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "step.html"]


def test_a_report_is_written_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, step = tmp_path / "plan.html", tmp_path / "step.html"
    assert main(["plan", *SAID, "--memory", "9", "--report", str(report), "--timeline", str(step)]) == 1
    assert f"wrote {report}" in capsys.readouterr().out
    assert "Nothing fits" in report.read_text(encoding="utf-8")
    assert not step.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--report", "TMP/none/plan.html"),
            "the report cannot be written to TMP/none/plan.html: give a file in a folder",
        ),
        (("--report", "TMP"), "the report cannot be written to TMP: give a file in a folder that is there"),
        (("--timeline", "TMP/none/step.html"), "the timeline cannot be written to TMP/none/step.html"),
        (("--report", "TMP/a", "--timeline", "TMP/../TMPNAME/a"), "are files of their own: name each"),
        (("--report", "TMP/a.html", "--objective", "cost"), "the objective cost needs --price"),
        (("--report", "TMP/a.html", "--train-tokens", "20B"), "--report is of a ranking: give --objective devices"),
    ],
)
def test_files_that_cannot_be_written_are_told_before_the_search(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def put(text: str) -> str:
        return text.replace("TMPNAME", tmp_path.name).replace("TMP", str(tmp_path))

    assert put(said) in refused(capsys, *SAID, *map(put, arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "old.html").write_text("old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        for name in ("plan.html", "old.html"):
            with pytest.raises(UserError, match=r"the report cannot be written to .*; make room or give another"):
                write_file(tmp_path / name, as_html(shown("ranking")), "the report")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


def test_a_link_is_written_through(tmp_path: Path) -> None:
    """As /dev/stdout is one."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for text in ("a", "b"):
        write_file(tmp_path / "link", text, "the report")
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()


def test_without_plotly_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr(html_parts, "find_spec", nothing)
    said = 'a report needs plotly: install with pip install "tangram-train[report]"'
    assert said in refused(capsys, *SAID, "--report", str(tmp_path / "plan.html"))


def test_a_report_is_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one with --cluster" in refused(capsys, "examples/quickstart/job.toml", "--report", "plan.html")
