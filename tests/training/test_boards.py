"""What boards show of a run, read back by their own readers: TensorBoard's, W&B's, and a collector's messages."""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tangram.errors import UserError
from tangram.schema.files import dumps
from tangram.schema.plan import Plan
from tangram.training.observe.boards import Boards, need
from tangram.training.observe.events import CheckpointSaved, Evaluated, Note, StepDone
from tests.training.made_up import plan_of


def plan(*boards: str) -> Plan:
    made = plan_of(3)
    return made.model_copy(update={"run": made.run.model_copy(update={"boards": boards})})


def write(folder: Path, *events: object, to: str = "tensorboard", after: int = 0) -> None:
    board = Boards(folder, plan(to), after=after)
    try:
        for event in events:
            board(event)
    finally:
        board.close()


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def curve(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, pytest.approx(point.value, rel=1e-6)) for point in events.Scalars(name)]


def step(number: int, seconds: float, first: int = 1, rss_mb: float = 0.0) -> StepDone:
    return StepDone(number, 9, 5.0 - number / 10, 1.5, 1e-3, 100, seconds, first=first, rss_mb=rss_mb)


def test_every_figure_is_written(tmp_path: Path) -> None:
    write(
        tmp_path,
        Note("hello"),
        step(1, 4.0, rss_mb=300.0),
        step(2, 6.0, rss_mb=310.0),
        Evaluated(2, 4.75, 16.0),
        step(3, 16.5, rss_mb=320.0),
        CheckpointSaved(2, "somewhere", 0.25, 2.0, True),
    )
    events = read(tmp_path)
    assert curve(events, "train/loss") == [(1, 4.9), (2, 4.8), (3, 4.7)]
    assert curve(events, "train/gradient_norm") == [(1, 1.5), (2, 1.5), (3, 1.5)]
    assert curve(events, "train/lr") == [(1, 1e-3), (2, 1e-3), (3, 1e-3)]
    assert curve(events, "train/tokens_per_s") == [(1, 25.0), (2, 50.0), (3, 200.0)]  # without the evaluation
    assert curve(events, "memory/rss_mb") == [(1, 300.0), (2, 310.0), (3, 320.0)]
    assert curve(events, "eval/loss") == [(2, 4.75)]
    assert curve(events, "checkpoint/blocked_s") == [(2, 0.25)]
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/gradient_norm",
        "train/lr",
        "train/tokens_per_s",
        "memory/rss_mb",
        "eval/loss",
        "checkpoint/blocked_s",
    }


def test_the_plan_stands_beside_as_text(tmp_path: Path) -> None:
    write(tmp_path, step(1, 1.0))
    (text,) = read(tmp_path).Tensors("plan/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == dumps(plan_of(3)).splitlines()


def test_memory_that_nobody_measured_has_no_curve(tmp_path: Path) -> None:
    write(tmp_path, step(1, 1.0))
    assert "memory/rss_mb" not in read(tmp_path).Tags()["scalars"]


def test_a_board_that_cannot_be_written_stops_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On a full disk the run died of it, with a stack trace. Here the folder is gone, which the library's thread hears
    of in the same way."""
    told: list[object] = []
    board = Boards(tmp_path, plan("tensorboard"), told.append)
    board(step(1, 1.0))
    shutil.rmtree(tmp_path / "tensorboard")
    until = time.monotonic() + 30
    number = 2
    while not told and time.monotonic() < until:
        board(step(number, float(number)))
        number += 1
        time.sleep(0.02)
    board(step(number, float(number)))
    board.close()
    (note,) = told
    assert isinstance(note, Note)
    assert note.text.startswith(f'TensorBoard lacks what comes now, for it cannot be written: "{tmp_path}')
    assert "Traceback" not in capfd.readouterr().err


def test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, *(step(number, float(number)) for number in range(1, 6)))
    of_three = Evaluated(3, 4.75, 0.0)  # what is still to be measured comes before the next step
    write(tmp_path, of_three, *(step(number, float(number - 3), first=4) for number in (4, 5, 6)), after=3)
    assert [point.step for point in read(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    write(tmp_path, step(1, 1.0), step(2, 2.0))  # there was no checkpoint that is whole: it begins anew
    assert [point.step for point in read(tmp_path).Scalars("train/loss")] == [1, 2]


def test_nothing_is_written_for_a_run_without_events(tmp_path: Path) -> None:
    board = Boards(tmp_path, plan("tensorboard"))
    board.close()
    board.close()
    assert list((tmp_path / "tensorboard").iterdir()) == []


def test_a_missing_extra_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.util.find_spec
    monkeypatch.setattr(
        "tangram.training.observe.boards.find_spec", lambda name: None if name == "plotly" else whole(name)
    )
    with pytest.raises(UserError) as refused:
        Boards(tmp_path, plan("tensorboard"))
    assert str(refused.value) == (
        'a run\'s report and boards need plotly: install with pip install "tangram-train[report]"'
    )
    assert not (tmp_path / "tensorboard").exists()
    need(("tensorboard",), "report")
    with pytest.raises(UserError, match=r'need absent.inner: install with pip install "tangram-train\[boards\]"'):
        need(("absent.inner",), "boards")


def records(data: bytes) -> Iterator[bytes]:
    """Of a file of wandb's: after seven bytes a log as LevelDB's, whose blocks of 32 KiB a record may go over."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_a_run_of_wandb_goes_on_with_a_resumed_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path / "run", step(1, 4.0), step(2, 6.0), Evaluated(2, 4.75, 7.0), to="wandb")
    time.sleep(1.1)  # its folders are named by the second
    write(tmp_path / "run", step(2, 2.0, first=2), to="wandb")
    ids, rows = set[str](), list[dict[str, float]]()
    for file in sorted(tmp_path.rglob("*.wandb")):  # by the second of their names; under load one may be touched late
        for data in records(file.read_bytes()):
            one = record.FromString(data)
            if one.run.run_id:
                ids.add(one.run.run_id)
            if one.history.item:
                items = {item.key or "/".join(item.nested_key): item.value_json for item in one.history.item}
                rows.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    assert len(ids) == 1
    assert [(row["step"], row.get("train/loss"), row.get("eval/loss")) for row in rows] == [
        (1, 4.9, None),
        (2, 4.8, None),
        (2, None, 4.75),
        (2, 4.8, None),
    ]
    assert rows[1]["train/tokens_per_s"] == 50


def test_without_a_login_wandb_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """In a process of its own, as wandb keeps what it was told first."""
    pytest.importorskip("wandb")
    code = (
        "from pathlib import Path\nfrom tests.training.test_boards import Boards, plan\n"
        f"Boards(Path({str(tmp_path)!r}), plan('wandb'))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "UserError: wandb begins no run (" in ended.stderr.splitlines()[-1], ended.stderr
    assert ended.stderr.rstrip().endswith("): wandb login, or WANDB_MODE=offline")


def test_a_collector_gets_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(body)
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Into no test's output."""

    with pytest.raises(UserError, match="set OTEL_EXPORTER_OTLP_ENDPOINT to the address of a collector"):
        write(tmp_path, to="opentelemetry")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        write(tmp_path, step(1, 4.0), step(2, 6.0), Evaluated(2, 4.75, 7.0), to="opentelemetry")
        server.shutdown()
    (sent,) = message.ExportMetricsServiceRequest.FromString(got[-1]).resource_metrics
    about = {one.key: one.value.string_value for one in sent.resource.attributes}
    assert (about["service.name"], about["tangram.run"]) == ("tangram", str(tmp_path))
    (scope,) = sent.scope_metrics
    values = {m.name: m.gauge.data_points[0] for m in scope.metrics}
    values = {name: point.as_double or point.as_int for name, point in values.items()}
    assert (values["tangram.train.loss"], values["tangram.eval.loss"], values["tangram.step"]) == (4.8, 4.75, 2)
    assert values["tangram.train.tokens_per_s"] == 50
