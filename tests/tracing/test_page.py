"""What people see of a trace: the page in a real browser, Perfetto's file, two traces side by side, the live view."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench._tracing.synthetic import Cluster, Planted, write
from tangram.cli import main
from tangram.errors import UserError
from tangram.tracing.files.format import End, Phase
from tangram.tracing.show.compare import compare
from tangram.tracing.show.page import write_page
from tangram.tracing.show.perfetto import export
from tangram.tracing.show.report import report, top
from tests.tracing import test_files
from tests.training.browser import browser

EVIL = "</script><script>document.title = 'stolen'</script> & more"
MOVE = """(() => {
  const { x, y } = ranksElement.getBoundingClientRect();
  ranksElement.dispatchEvent(new PointerEvent("pointermove", { clientX: x + %f, clientY: y + %f }));
})()"""
PIXELS = """(() => {
  const canvas = document.getElementById("ranks");
  const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return %s.map(([x, y]) => [...image.data.slice((y * canvas.width + x) * 4, (y * canvas.width + x) * 4 + 3)]);
})()"""
TICKS = """[140, 200, 260, 320, 500, 1100].map((wide) => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = "12px sans-serif";
  const ends = ticks(context, wide).map(([text, x, align]) => {
    const long = context.measureText(text).width;
    const from = align === "right" ? x - long : align === "left" ? x : x - long / 2;
    return [from, from + long];
  });
  return Math.min(...ends.slice(1).map(([from], at) => from - ends[at][1]));
})"""
MANY = Cluster(4, 64, 4)
SLOW = Planted("slow", 517, "tp", 20, 1.5)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of 1,024 ranks, one of which is slow from step 21 on."""
    folder = tmp_path_factory.mktemp("many") / "run"
    write(folder / "trace", MANY, SLOW, 3)
    return folder


def test_a_browser_shows_a_thousand_ranks_and_the_slow_one(many: Path, tmp_path: Path) -> None:
    page = tmp_path / "trace.html"
    found = write_page(page, many)
    assert [(one.kind, one.ranks) for one in found.findings] == [("slow", (517,))]
    assert page.stat().st_size < 1e6
    with browser() as window:
        window.open(page, width=1200)
        assert window.value("document.querySelector('.finding p').textContent").startswith(
            "rank 517 is slow since step 21"
        )
        assert window.value("data.lanes.ranks.length") == 24
        wide, tall = (window.value(f"document.getElementById('ranks').{side}") for side in ("width", "height"))
        x, y = int(74 + (wide - 74) * 0.9), int(tall * 517.5 / 1024)
        points = [[x, y], [74 + (wide - 74) // 10, y], [x, tall // 4]]
        slow, early, usual = window.value(PIXELS % json.dumps(points))
        assert slow[0] > usual[0] + 50 or slow[2] < usual[2] - 50, "the slow rank stands out, though it has half a row"
        assert early != slow
        window.value("clampRanks(515, 6)")
        assert window.value("document.getElementById('range').textContent").startswith("ranks 515 to 520 of 1024")
        window.value(MOVE % (x, tall * 2.5 / 6))
        cell = window.value("document.getElementById('cell').textContent")
        assert cell.startswith("rank 517 (pp=2 dp=1 tp=1), step 4"), cell
        assert "own time at least" in cell or "own time" in cell
        assert window.value("document.body.scrollWidth") <= 1200
        assert window.complaints() == []
        assert len(window.requests()) == 1


def test_a_page_of_real_calls_draws_lanes_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "trace"
    for rank in range(2):
        recorder = test_files.write(folder, rank, 12)
        group = recorder.group("1", EVIL, [0, 1])
        recorder.phase(Phase.OPTIMISER)
        recorder.waited(recorder.enter(group, 0, 8, None, -1), group, 0, 0)
        recorder.step(13)
    page = tmp_path / "trace.html"
    write_page(page, folder)
    assert "<script>document.title" not in page.read_text()
    with browser() as window:
        window.open(page, width=900, dark=True)
        assert window.value("document.title") == f"Trace {folder}"
        assert window.value("data.lanes.ranks.map((lane) => lane.spans.length)") == [13, 13]
        words = [one for one in window.value("data.lanes.words") if one.startswith(f"all-reduce over {EVIL} (")]
        assert len(words) == 1
        assert [*window.value("[...document.querySelectorAll('#kinds li')].map((one) => one.textContent)")] == [
            "data", "forward", "backward", "optimiser", "wait",
        ]  # fmt: skip
        gaps = window.value(f"(times.to = 2568870, {TICKS})")
        assert all(gap > 0 for gap in gaps), gaps
        assert window.complaints() == []


def test_perfetto_gets_steps_phases_and_waits_of_the_ranks_that_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        recorder = test_files.write(tmp_path / "trace", rank, 6, world=3, start_calls=1)
        recorder.close(End.FINISHED)
    path = tmp_path / "out.json"
    count = export(tmp_path, path, "0,2")
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    assert {event["pid"] for event in events} == {0, 2}
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert [one["name"] for one in spans if one["cat"] == "step"] == [f"step {n}" for n in range(1, 7)]
    assert sum(one["cat"] == "wait" for one in spans) == 13
    assert min(event["ts"] for event in events if "ts" in event) >= 0, "what was called before the first step, too"
    memory = [event["args"]["memory MB"] for event in events if event["ph"] == "C" and event["pid"] == 2]
    assert f"{max(memory):,.0f}" == report(tmp_path).rows[2][-1]
    assert all(one["ts"] >= 0 and one["dur"] >= 0 for one in spans)
    assert any(one["name"].startswith("all-reduce over dp") for one in spans)
    for wrong, said in (("0,7", "rank 7 is not there"), ("x", "no rank")):
        with pytest.raises(UserError, match=said):
            export(tmp_path, path, wrong)
    with pytest.raises(UserError, match=r"the page cannot be written to .*: No such file"):
        write_page(tmp_path / "nowhere" / "out.html", tmp_path)
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        export(tmp_path, tmp_path / "nowhere" / "out.json")


def test_what_takes_longer_in_another_run_is_said_and_what_it_calls_more_often(tmp_path: Path) -> None:
    few, one, other = Cluster(2, 4, 2), tmp_path / "one", tmp_path / "other"
    write(one / "trace", few, Planted("", 0, "tp", 0, 1.0), 3)
    write(other / "trace", few, Planted("slow link", 4, "dp", 0, 2.0), 4)
    assert {row[4] for row in compare(one, one).rows} == {""}
    assert compare(one, one).calls == ()
    found = {row[0]: row for row in compare(one, other).rows}
    assert found["wait over pp dp tp"][4] == "longer", "all wait at the end for those of the link"
    assert found["own time in pipeline"][4] == ""
    for folder, calls in (("a", 1), ("b", 3)):
        recorder = test_files.write(tmp_path / folder, 0, 1, world=1)
        group = recorder.group("1", "tp", [0])
        for step in range(2, 6):
            recorder.step(step)
            recorder.phase(Phase.FORWARD)
            for _ in range(calls):
                recorder.enter(group, 1, 32, None, -1)
    assert (
        "+2 all-gather over tp of 32 bytes of None a step on all ranks" in compare(tmp_path / "a", tmp_path / "b").calls
    )


def test_top_shows_the_slowest_first(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = top(many, shown=3)
    assert found.rows[0][:2] == ("517", "pp=2 dp=1 tp=1")
    assert "1021 more not shown" in found.title
    assert not found.over
    own = [float(row[5].replace(",", "")) for row in found.rows]
    assert own == [*np.sort(own)[::-1]]
    assert main(["top", str(many), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["rank"] == "517"
    assert main(["top", str(many), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("1024 of 1024 ranks run, step 51, 984 more not shown")
